"""Runs for bench.py: a bundle, one training in a process of its own, and what it took.

Sizes are bytes, times seconds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx

import mesp
from mesp.bundle.manifest import read_manifest
from mesp.commands import train
from mesp.engine.build import find_engine
from mesp.engine.plan import find_plan
from mesp.errors import MespError
from mesp.models.short_names import KNOWN
from mesp.runs.log import Run

# What is not set is as the paper has it, by default of the engine and of mesp-train alike: SGD at
# 1e-4 on seven projections, batch 1. Runs in Python are told.
SETTING = {
    option.name: option.default
    for option in train.main.params
    if option.name in ("alpha", "learning_rate", "seed", "mezo_epsilon")
}
PAPER_RANK = 8
# Peak memory of MeSP that the paper reports for an iPhone 17 Pro with 4-bit weights: MB by length.
PAPER_PEAK_MB = {
    "Qwen2.5-0.5B": {128: 110.7, 256: 136.2, 512: 245.8, 1024: 513.6},
    "Qwen2.5-1.5B": {128: 165.2, 256: 262.6, 512: 432.8, 1024: 798.5},
    "Qwen2.5-3B": {128: 245.6, 256: 368.4, 512: 505.3, 1024: 925.8},
}
# The goal for MeSP's peak is half of the paper's; at the first of these lengths, which the paper
# does not report, it is the paper's own at the second, its longest.
BAR_LENGTH, PAPER_LONGEST = 4096, 1024

# By method, what can be on disk: MeZO keeps no block inputs.
OFFLOADS = {
    "mesp": ("none", "inputs", "all"),
    "mebp": ("none", "inputs", "all"),
    "mezo": ("none", "all"),
}
ENGINE_METHODS = tuple(OFFLOADS)
# What bench_python.py is asked for; OpenBLAS is preloaded but where mlx-lm is as shipped.
MLX_LM = {"kind": "mlx-lm", "checkpoint": False, "fast": False}
PYTHON_METHODS: dict[str, dict[str, Any]] = {
    "mesp-paper": {"kind": "paper"},
    "mlx-lm": MLX_LM,
    "mlx-lm-checkpoint": {**MLX_LM, "checkpoint": True},
    "mlx-lm-fast": {**MLX_LM, "fast": True},
    "mlx-lm-checkpoint-fast": {**MLX_LM, "checkpoint": True, "fast": True},
}
LIMITS = ("auto", "least", "bar", "mebp", "all")
EVERYTHING_MB = 1e6  # more than keeping every intermediate takes
DEVICE, DTYPE = "cpu", "float32"  # of the bundles that are exported
SETTLED_AFTER = 10  # steps before memory is compared with the last step's, to see whether it grows

# glibc's allocator and OpenBLAS much as the engine sets them: memory is given back instead of
# kept, and half of the cores are used.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "OPENBLAS_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
}

Row = dict[str, Any]
Tell = Callable[[int], None]  # gets the number of steps done
engine_program = cache(find_engine)


class Cell(NamedTuple):
    """What is trained."""

    model: str
    bundle: Path
    blocks: int
    seq_len: int
    rank: int
    device: str
    dtype: str

    def row(self) -> Row:
        """What every row begins with: its cell, and what it was measured on."""
        row = self._asdict() | {"cpu": cpu(), "os": platform.platform()}
        del row["bundle"]
        return row

    def paper_bytes(self) -> tuple[float | None, float | None]:
        """The paper's peak of MeSP and the goal for ours; it used whole models and rank 8."""
        name = self.model.removesuffix("-Instruct")
        peaks = {t: mb * 1e6 for t, mb in PAPER_PEAK_MB.get(name, {}).items()}
        if not peaks:
            return None, None
        *_, config = KNOWN[name]
        if (self.blocks, self.rank) != (config["num_hidden_layers"], PAPER_RANK):
            return None, None
        peak = peaks.get(self.seq_len)
        return peak, peaks[PAPER_LONGEST] if self.seq_len == BAR_LENGTH else peak and peak / 2


class Variant(NamedTuple):
    """How it is trained. `limit`: one of LIMITS, or MB."""

    method: str
    limit: str = "auto"
    offload: str | None = None

    def __str__(self) -> str:
        limit = self.limit if self.limit in LIMITS else f"≤ {self.limit} MB"
        where = {"none": "in memory", "inputs": "inputs on disk", "all": "state on disk"}
        parts = (self.method, limit != "auto" and limit, where.get(self.offload or ""))
        return " ".join(part for part in parts if part)


@cache
def cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    return platform.machine()


def host() -> dict[str, Any]:
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "mlx_version": mx.__version__,
    }


# A row

# What the engine's plan says of a run.
PLANNED = ("offload", "kept_blocks", "tile_bytes", "mapped_bytes", "predicted_peak_bytes",
           "least_peak_bytes")  # fmt: skip
# Ratios: the value, and of what, the paper's or that of the cell's first row of a method.
RATIOS = {
    "peak_to_paper": ("footprint_peak_bytes", "paper"),
    "peak_to_mesp": ("footprint_peak_bytes", "mesp"),
    "time_to_mebp": ("seconds", "mebp"),
}


def new_row(cell: Cell, variant: Variant) -> Row:
    """A row without a measurement; None where there is no such figure."""
    paper, bar = cell.paper_bytes()
    return {
        **cell.row(),
        "method": variant.method,
        "variant": str(variant),
        "blas": None,  # of a row that ran in Python
        "memory_limit_mb": None,
        **dict.fromkeys(PLANNED),
        "steps": 0,
        "seconds": None,  # a step: the median, without the first where there are several
        "losses": [],
        "footprint_peak_bytes": None,
        "growth_bytes": None,  # of a step's peak, once settled, in a long run
        "baseline_bytes": None,  # Python and MLX before anything is loaded; in the peak
        "mlx_peak_bytes": None,
        "written_bytes": None,  # a step
        "paper_bytes": paper if variant.method in ("mesp", "mesp-paper") else None,
        "bar_bytes": bar if variant.method == "mesp" else None,
        "net_bytes": None,  # the peak without the baseline
        "prediction_error": None,  # relative
        **dict.fromkeys(RATIOS),
        "extrapolated_from": None,  # block counts that were measured
        "error": None,
    }


def measure(
    cell: Cell, variant: Variant, before: list[Row], steps: int, work: Path, tell: Tell
) -> Row:
    """Trains some steps in a process of its own. A run that fails gives a row with its error.

    `before` has the rows so far, MeBP's of the same cell among them where it is the limit.
    """
    row = new_row(cell, variant)
    try:
        if variant.method in ENGINE_METHODS:
            settings = planned(row, cell, variant, before) | {"steps": steps}
            run = run_program([engine_program()], settings, work, tell)
            row |= {name: run.plan[name] for name in PLANNED}
            row["written_bytes"] = median(step["written_bytes"] for step in run.steps)
        else:
            settings = PYTHON_METHODS[variant.method] | {"steps": steps}
            preload = settings.get("fast", True)
            row["blas"] = "OpenBLAS" if preload and find_openblas() else "MLX's"
            run = run_python(cell, settings, work, tell, preload)
            row["baseline_bytes"] = run.start["baseline_bytes"]
    except MespError as error:
        return row | {"error": error.message}
    seconds, peaks, mlx_peaks = (
        [step[name] for step in run.steps]
        for name in ("seconds", "footprint_peak_bytes", "mlx_peak_bytes")
    )
    if len(peaks) > SETTLED_AFTER:
        row["growth_bytes"] = peaks[-1] - peaks[SETTLED_AFTER - 1]
    return row | {
        "steps": len(seconds),
        "seconds": median(seconds[1:] or seconds),
        "losses": run.losses,
        "footprint_peak_bytes": max(peaks),
        "mlx_peak_bytes": max(mlx_peaks),
    }


def extrapolate(full: Cell, variant: Variant, rows: list[Row]) -> Row | None:
    """The whole model's row: straight through the fewest and the most blocks that were run.

    The plan and the predicted peak beside it are the engine's for the whole model.
    """
    row = new_row(full, variant)
    names = ("model", "seq_len", "rank", "variant")
    same = [r for r in rows if all(r[n] == row[n] for n in names) and r["error"] is None]
    if len(same) < 2:
        return None
    same.sort(key=lambda r: r["blocks"])
    small, large = same[0], same[-1]
    share = (row["blocks"] - small["blocks"]) / (large["blocks"] - small["blocks"])
    for name in ("seconds", "footprint_peak_bytes", "written_bytes"):
        if small[name] is not None:
            row[name] = small[name] + share * (large[name] - small[name])
    row["extrapolated_from"] = [r["blocks"] for r in same]
    if variant.method in ENGINE_METHODS:
        try:
            plan = find_plan(engine_program(), planned(row, full, variant, rows))
            row |= {name: plan[name] for name in PLANNED}
        except MespError as error:
            row["error"] = error.message
    return row


def planned(row: Row, cell: Cell, variant: Variant, before: list[Row]) -> dict[str, Any]:
    """The engine's settings for the variant; its memory limit is noted in the row."""
    settings = engine_settings(cell, variant)
    if variant.limit == "auto":
        return settings
    if variant.limit in ("least", "mebp", "bar"):
        if variant.limit == "least":
            size = find_plan(engine_program(), settings)["least_peak_bytes"]
        elif variant.limit == "mebp":
            size = first(row, before, "mebp").get("footprint_peak_bytes")
        else:
            size = row["bar_bytes"]
        if size is None:
            raise MespError(f"There is no figure here for the memory limit {variant.limit}.")
        limit = (math.ceil(size) + 1) / 1e6  # the engine cuts fractions of a byte off
    else:
        limit = EVERYTHING_MB if variant.limit == "all" else float(variant.limit)
    row["memory_limit_mb"] = limit
    return settings | {"memory_limit_mb": limit}


def engine_settings(cell: Cell, variant: Variant) -> dict[str, Any]:
    """What differs from the engine's defaults."""
    what = {"bundle": str(cell.bundle.resolve()), "seq_len": cell.seq_len, "rank": cell.rank}
    how = {"method": variant.method, "offload": variant.offload}
    return {**what, **how, "val_batches": 0, "save_every": 0}


def first(row: Row, rows: list[Row], method: str) -> Row:
    """The first row of this method in the row's cell; empty where there is none."""
    same = {name: row[name] for name in ("model", "blocks", "seq_len", "rank")}
    same["method"] = method
    return next((r for r in rows if all(r[n] == value for n, value in same.items())), {})


def compare(rows: list[Row]) -> None:
    """Fills in what follows from figures of a row and of others in its cell."""
    for row in rows:
        peak = row["footprint_peak_bytes"]
        if peak and row["baseline_bytes"]:
            row["net_bytes"] = peak - row["baseline_bytes"]
        if peak and row["predicted_peak_bytes"]:
            row["prediction_error"] = row["predicted_peak_bytes"] / peak - 1
        for name, (figure, whose) in RATIOS.items():
            other = row["paper_bytes"] if whose == "paper" else first(row, rows, whose).get(figure)
            row[name] = row[figure] / other if row[figure] is not None and other else None


# Processes


def run_python(
    cell: Cell, settings: dict[str, Any], work: Path, tell: Tell, preload: bool = True
) -> Run:
    """What bench_python.py reports; `preload`: with OpenBLAS, where there is one."""
    size = {"bundle": str(cell.bundle), "seq_len": cell.seq_len, "rank": cell.rank}
    environment = {**ENVIRONMENT, **os.environ, "LD_PRELOAD": (preload and find_openblas()) or ""}
    command = [sys.executable, Path(__file__).with_name("bench_python.py")]
    return run_program(command, SETTING | size | settings, work, tell, environment)


def run_program(
    command: list[str | Path], settings: dict[str, Any], work: Path, tell: Tell,
    environment: dict[str, str] | None = None,
) -> Run:  # fmt: skip
    """Runs a program with a file of settings, and sorts the records that it prints.

    Raises MespError with the last line it said where it fails.
    """
    run = Run()
    with tempfile.TemporaryDirectory(prefix="run-", dir=work.resolve()) as folder:
        path, errors = Path(folder, "settings.json"), Path(folder, "errors")
        path.write_text(json.dumps({"output": folder, **settings}), encoding="utf-8")
        with (
            open(errors, "wb") as file,
            subprocess.Popen(
                [*command, path], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file,
                encoding="utf-8", env=environment,
            ) as process,
        ):  # fmt: skip
            for line in process.stdout:
                if line.startswith("{"):  # a library may have something to say, too
                    run.add(json.loads(line))
                    tell(run.last_step)
        said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if process.returncode < 0:
        raise MespError(f"The run was ended by signal {-process.returncode}.")
    if process.returncode > 0:
        raise MespError(said[-1] if said else f"The run failed ({process.returncode}).")
    return run


@cache
def find_openblas() -> str | None:
    """An OpenBLAS to preload, on Linux: MLX calls what the executable brings before its wheel's."""
    name = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    with suppress(OSError):
        if name and hasattr(ctypes.CDLL(name), "cblas_sgemm"):
            return name
    return None


# Bundles


def find_cells(options: dict[str, Any], layers: int | None, work: Path) -> list[Cell]:
    """Every model with every length and rank of a table's options, its bundle ready."""
    cells = []
    for model in options["models"]:
        bundle = Path(model)
        if not (bundle / "manifest.json").is_file():
            bundle = export(model, options, layers, work)
        elif layers or "data" in options:
            raise MespError(f"{model} is a bundle: --layers and --data are of its export.")
        manifest = read_manifest(bundle)
        name = manifest["name"].removesuffix("-random")
        blocks = len(manifest["architecture"]["layers"])
        kind = (manifest["device"], manifest["dtype"])
        sizes = itertools.product(options["seq_lens"], options["ranks"])
        cells += [Cell(name, bundle, blocks, *size, *kind) for size in sizes]
    return cells


def export(model: str, options: dict[str, Any], layers: int | None, work: Path) -> Path:
    """The model's bundle in `work`, with random weights but for the demo model.

    Of a known geometry, one that is there serves again, and keeps the lengths and ranks it has.
    """
    data, seq_lens, ranks = options.get("data"), {*options["seq_lens"]}, {*options["ranks"]}
    parts = (model.strip("/").replace("/", "-"), layers and f"{layers}-blocks", data and "data")
    path = work / ("-".join(part for part in parts if part) + ".mesp")
    if model in KNOWN:
        with suppress(MespError):
            manifest = read_manifest(path)
            seq_lens, ranks = seq_lens | {*manifest["seq_lens"]}, ranks | {*manifest["ranks"]}
            written = (path / "manifest.json").stat().st_mtime
            code = Path(mesp.__file__).parent.rglob("*.py")
            current = all(file.stat().st_mtime < written for file in code)
            covered = (sorted(seq_lens), sorted(ranks)) == (manifest["seq_lens"], manifest["ranks"])
            if current and covered:
                return path
    command = ["--model", model, "--out", path, "--overwrite", "--device", DEVICE]
    command += ["--dtype", DTYPE, "--seq-len", *sorted(seq_lens), "--rank", *sorted(ranks)]
    command += ["--layers", layers] if layers else []
    command += ["--data", data] if data else []
    command += [] if model == "demo" else ["--random-weights"]
    program = [sys.executable, "-c", "from mesp.commands.export import main; main()"]
    done = subprocess.run(
        [*program, *map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["mesp-export failed."]
        raise MespError(said[-1].removeprefix("Error: "))
    return path
