"""Runs for bench.py: a bundle, one training in a process of its own, and what it took.

Sizes are bytes, times seconds.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx

import mesp.block
import mesp.bundle
import mesp.export
from mesp.bundle import read_manifest
from mesp.engine import find_engine
from mesp.errors import MespError
from mesp.models import KNOWN

# The setting of the paper ("MeSP", 2026): SGD at 1e-4 on seven projections, batch 1, rank 8.
PAPER_RANK = 8
SETTING = {"alpha": 16.0, "learning_rate": 1e-4, "seed": 0, "mezo_epsilon": 1e-3}
# Peak memory of MeSP that the paper reports for an iPhone 17 Pro with 4-bit weights: MB by length.
PAPER_PEAK_MB = {
    "Qwen2.5-0.5B": {128: 110.7, 256: 136.2, 512: 245.8, 1024: 513.6},
    "Qwen2.5-1.5B": {128: 165.2, 256: 262.6, 512: 432.8, 1024: 798.5},
    "Qwen2.5-3B": {128: 245.6, 256: 368.4, 512: 505.3, 1024: 925.8},
}
# The goal for MeSP's peak is this share of the paper's; at the first of these lengths, which the
# paper does not report, it is the paper's own at the second, its longest.
BAR_SHARE = 0.5
BAR_LENGTH, PAPER_LONGEST = 4096, 1024

ENGINE_METHODS = ("mesp", "mebp", "mezo")
# What bench_python.py is asked for, and whether OpenBLAS is preloaded.
PYTHON_METHODS: dict[str, tuple[dict[str, Any], bool]] = {
    "mesp-paper": ({"kind": "paper"}, True),
    "mlx-lm": ({"kind": "mlx-lm", "checkpoint": False, "fast": False}, False),
    "mlx-lm-checkpoint": ({"kind": "mlx-lm", "checkpoint": True, "fast": False}, False),
    "mlx-lm-fast": ({"kind": "mlx-lm", "checkpoint": False, "fast": True}, True),
    "mlx-lm-checkpoint-fast": ({"kind": "mlx-lm", "checkpoint": True, "fast": True}, True),
}
LIMITS = ("auto", "least", "bar", "mebp", "all")
EVERYTHING_MB = 1e6  # more than keeping every intermediate takes
DEVICE, DTYPE = "cpu", "float32"  # of the bundles that are exported

CODE = (mesp.block, mesp.bundle, mesp.export)  # what a bundle is made by
PYTHON_RUNS = Path(__file__).with_name("bench_python.py")
SAMPLED_EVERY = 0.002  # seconds between two looks at another process's memory
# glibc's allocator much as the engine sets it: it gives memory back instead of keeping it.
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
# Steps before memory is compared with the last step's, to see whether it grows.
SETTLED_AFTER = 10

Progress = Callable[[int], None]  # gets the number of steps done
engine_program = cache(find_engine)


@dataclass(frozen=True)
class Cell:
    """What is trained."""

    model: str
    bundle: Path
    blocks: int
    seq_len: int
    rank: int
    device: str = DEVICE
    dtype: str = DTYPE

    def paper_bytes(self, seq_len: int | None = None) -> float | None:
        """The peak that the paper reports for MeSP; it used whole models and rank 8."""
        name = self.model.removesuffix("-Instruct")
        if name not in PAPER_PEAK_MB or self.rank != PAPER_RANK:
            return None
        if self.blocks != KNOWN[name][1]["num_hidden_layers"]:
            return None
        size = PAPER_PEAK_MB[name].get(seq_len or self.seq_len)
        return size and size * 1e6

    def bar_bytes(self) -> float | None:
        """The goal for MeSP's peak."""
        if self.seq_len == BAR_LENGTH:
            return self.paper_bytes(PAPER_LONGEST)
        size = self.paper_bytes()
        return size and size * BAR_SHARE


@dataclass(frozen=True)
class Variant:
    """How it is trained; limit (one of LIMITS, or MB) and offload are of MeSP only."""

    method: str
    limit: str = "auto"
    offload: str | None = None

    def __str__(self) -> str:
        limit = self.limit if self.limit in LIMITS else f"≤ {self.limit} MB"
        offload = {
            "none": "in memory",
            "inputs": "inputs on disk",
            "all": "state on disk",
        }.get(self.offload or "")
        parts = (self.method, None if limit == "auto" else limit, offload)
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


@dataclass
class Row:
    """One measurement; None where there is no such figure."""

    model: str
    blocks: int
    seq_len: int
    rank: int
    method: str
    variant: str
    device: str
    dtype: str
    cpu: str = field(default_factory=cpu)
    os: str = field(default_factory=platform.platform)
    blas: str | None = None  # of a row that ran in Python
    memory_limit_mb: float | None = None
    offload: str | None = None
    kept_blocks: int | None = None
    tile_bytes: int | None = None
    steps: int = 0
    seconds: float | None = None  # a step: the median, without the first where there are several
    losses: list[float] = field(default_factory=list)
    footprint_peak_bytes: float | None = None
    growth_bytes: int | None = None  # of a step's peak, once settled, in a long run
    baseline_bytes: int | None = None  # Python and MLX before anything is loaded; in the peak
    mlx_peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    least_peak_bytes: int | None = None
    mapped_bytes: int | None = None
    written_bytes: float | None = None  # a step
    paper_bytes: float | None = None  # the paper's MeSP on an iPhone 17 Pro
    bar_bytes: float | None = None  # the goal for MeSP
    peak_to_paper: float | None = None
    peak_to_mesp: float | None = None  # of the cell's first MeSP row
    time_to_mebp: float | None = None  # of the cell's MeBP row
    extrapolated_from: list[int] | None = None  # block counts that were measured
    error: str | None = None

    @classmethod
    def of(cls, cell: Cell, variant: Variant) -> Row:
        return cls(
            model=cell.model,
            blocks=cell.blocks,
            seq_len=cell.seq_len,
            rank=cell.rank,
            method=variant.method,
            variant=str(variant),
            device=cell.device,
            dtype=cell.dtype,
            paper_bytes=cell.paper_bytes() if variant.method in ("mesp", "mesp-paper") else None,
            bar_bytes=cell.bar_bytes() if variant.method == "mesp" else None,
        )

    @property
    def cell(self) -> tuple[str, int, int, int]:
        return self.model, self.blocks, self.seq_len, self.rank

    @property
    def prediction_error(self) -> float | None:
        """Predicted against measured peak, relative."""
        predicted = ratio(self.predicted_peak_bytes, self.footprint_peak_bytes)
        return None if predicted is None else predicted - 1

    @property
    def net_bytes(self) -> float | None:
        """The peak without the baseline."""
        if self.baseline_bytes is None or self.footprint_peak_bytes is None:
            return None
        return self.footprint_peak_bytes - self.baseline_bytes

    def take_steps(self, steps: list[dict[str, Any]]) -> None:
        """What the `step` records of the engine and of bench_python.py have in common."""
        seconds = [step["seconds"] for step in steps]
        self.steps = len(steps)
        self.seconds = median(seconds[1:] or seconds)
        self.losses = [step["loss"] for step in steps]
        self.mlx_peak_bytes = max(step["mlx_peak_bytes"] for step in steps)

    def take_plan(self, plan: dict[str, Any]) -> None:
        for name in ("offload", "kept_blocks", "tile_bytes", "mapped_bytes"):
            setattr(self, name, plan[name])
        self.predicted_peak_bytes = plan["predicted_peak_bytes"]
        self.least_peak_bytes = plan["least_peak_bytes"]


def ratio(value: float | None, of: float | None) -> float | None:
    return value / of if value is not None and of else None


# A row


def measure(cell: Cell, variant: Variant, before: list[Row], steps: int, work: Path,
            progress: Progress) -> Row:  # fmt: skip
    """Trains some steps in a process of its own. A run that fails gives a row with its error.

    `before` has the rows so far, MeBP's of the same cell among them where it is the limit.
    """
    row = Row.of(cell, variant)
    try:
        if variant.method in ENGINE_METHODS:
            measure_engine(row, cell, variant, before, steps, work, progress)
        else:
            measure_python(row, cell, steps, work, progress)
    except MespError as error:
        row.error = error.message
    return row


def measure_engine(row: Row, cell: Cell, variant: Variant, before: list[Row], steps: int,
                   work: Path, progress: Progress) -> None:  # fmt: skip
    row.memory_limit_mb = memory_limit(cell, variant, before, work)
    settings = {"memory_limit_mb": row.memory_limit_mb, "offload": variant.offload}
    records = run_engine(cell, work, progress, method=variant.method, steps=steps, **settings)
    done = [record for record in records if record["type"] == "step"]
    row.take_plan(next(record for record in records if record["type"] == "plan"))
    row.take_steps(done)
    peaks = [step["footprint_peak_bytes"] for step in done]
    row.footprint_peak_bytes = max(peaks)
    if len(peaks) > SETTLED_AFTER:
        row.growth_bytes = peaks[-1] - peaks[SETTLED_AFTER - 1]
    row.written_bytes = median(step["written_bytes"] for step in done)


def measure_python(row: Row, cell: Cell, steps: int, work: Path, progress: Progress) -> None:
    settings, preload = PYTHON_METHODS[row.method]
    size = {"bundle": str(cell.bundle), "seq_len": cell.seq_len, "rank": cell.rank}
    events, baseline, peak = run_python(
        {**settings, **size, "steps": steps}, preload, work, progress
    )
    row.take_steps(events)
    row.footprint_peak_bytes, row.baseline_bytes = peak, baseline
    row.blas = "OpenBLAS" if preload and find_openblas() else "MLX's"


def memory_limit(cell: Cell, variant: Variant, before: list[Row], work: Path) -> float | None:
    """The variant's memory limit in MB; None for the engine's default."""
    row = Row.of(cell, variant)
    if variant.limit == "auto":
        return None
    if variant.limit == "all":
        return EVERYTHING_MB
    if variant.limit == "least":
        plan = find_plan(cell, work, method=variant.method, offload=variant.offload)
        size = plan["least_peak_bytes"]
    elif variant.limit == "mebp":
        mebp = first(row, before, "mebp")
        size = mebp and mebp.footprint_peak_bytes
    elif variant.limit == "bar":
        size = row.bar_bytes
    else:
        return float(variant.limit)
    if size is None:
        raise MespError(f"There is no figure here for the memory limit {variant.limit}.")
    return (math.ceil(size) + 1) / 1e6  # the engine cuts fractions of a byte off


def first(row: Row, rows: list[Row], method: str) -> Row | None:
    """The first row of this method in the row's cell."""
    return next((r for r in rows if r.method == method and r.cell == row.cell), None)


def extrapolate(full: Cell, variant: Variant, rows: list[Row], work: Path) -> Row | None:
    """The whole model's row: straight through the fewest and the most blocks that were run.

    The plan and the predicted peak beside it are the engine's for the whole model.
    """
    row = Row.of(full, variant)
    same = [
        r
        for r in rows
        if r.error is None
        and (r.model, r.seq_len, r.rank, r.variant)
        == (row.model, row.seq_len, row.rank, row.variant)
    ]
    if len(same) < 2:
        return None
    same.sort(key=lambda r: r.blocks)
    small, large = same[0], same[-1]
    share = (row.blocks - small.blocks) / (large.blocks - small.blocks)
    for name in ("seconds", "footprint_peak_bytes", "written_bytes"):
        low, high = getattr(small, name), getattr(large, name)
        setattr(row, name, None if low is None else low + share * (high - low))
    row.extrapolated_from = [r.blocks for r in same]
    if variant.method in ENGINE_METHODS:
        try:
            row.memory_limit_mb = memory_limit(full, variant, rows, work)
            settings = {"memory_limit_mb": row.memory_limit_mb, "offload": variant.offload}
            row.take_plan(find_plan(full, work, method=variant.method, **settings))
        except MespError as error:
            row.error = error.message
    return row


def compare(rows: list[Row]) -> None:
    """Fills in the ratios between the rows of a cell, and to the paper."""
    for row in rows:
        mesp_row, mebp_row = first(row, rows, "mesp"), first(row, rows, "mebp")
        row.peak_to_paper = ratio(row.footprint_peak_bytes, row.paper_bytes)
        row.peak_to_mesp = mesp_row and ratio(
            row.footprint_peak_bytes, mesp_row.footprint_peak_bytes
        )
        row.time_to_mebp = mebp_row and ratio(row.seconds, mebp_row.seconds)


# Processes


def listen(
    command: Iterable[object],
    hear: Callable[[dict[str, Any], subprocess.Popen], None],
    environment: dict[str, str] | None = None,
) -> None:
    """Runs a program, handing over each JSON object it prints; MespError where it fails."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env={**os.environ, **(environment or {})},
        ) as process:
            try:
                for line in process.stdout:
                    if line.startswith("{"):  # a library may have something to say, too
                        hear(json.loads(line), process)
            except BaseException:
                process.kill()
                raise
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if process.returncode < 0:
        raise MespError(f"The run was ended by signal {-process.returncode}.")
    if process.returncode > 0:
        raise MespError(said[-1] if said else f"The run failed ({process.returncode}).")


def run_engine(cell: Cell, work: Path, progress: Progress, **settings: Any) -> list[dict]:
    """The records of an engine's run with these settings."""
    records = []

    def hear(record: dict[str, Any], _: subprocess.Popen) -> None:
        records.append(record)
        if record["type"] == "step":
            progress(record["step"])

    with tempfile.TemporaryDirectory(prefix="run-", dir=work) as folder:
        path = Path(folder) / "settings.json"
        everything = {
            "bundle": str(cell.bundle.resolve()),
            "output": str(Path(folder).resolve() / "output"),
            "steps": 1,
            "seq_len": cell.seq_len,
            "rank": cell.rank,
            "val_batches": 0,
            "save_every": 0,
            **SETTING,
            **settings,
        }
        path.write_text(json.dumps(everything), encoding="utf-8")
        listen([engine_program(), path], hear)
    return records


def find_plan(cell: Cell, work: Path, **settings: Any) -> dict[str, Any]:
    """The engine's plan for these settings, without a run."""
    records = run_engine(cell, work, lambda _: None, dry_run=True, **settings)
    return next(record for record in records if record["type"] == "plan")


def run_python(
    settings: dict[str, Any], preload: bool, work: Path, progress: Progress
) -> tuple[list[dict[str, Any]], int | None, int]:
    """What bench_python.py reports, its baseline, and its peak from `begin` on.

    `preload`: with OpenBLAS, where there is one.
    """
    events: list[dict[str, Any]] = []
    baseline, sampler = None, None

    def hear(event: dict[str, Any], process: subprocess.Popen) -> None:
        nonlocal baseline, sampler
        if event["event"] not in ("baseline", "begin"):
            events.append(event)
            progress(len(events))
            return
        if event["event"] == "baseline":
            baseline = footprint(process.pid)
        else:
            sampler = FootprintSampler(process.pid)
        process.stdin.write("\n")  # it waits for this
        process.stdin.flush()

    environment = {**ALLOCATOR, "LD_PRELOAD": (preload and find_openblas()) or ""}
    with tempfile.TemporaryDirectory(prefix="run-", dir=work) as folder:
        path = Path(folder) / "settings.json"
        path.write_text(json.dumps({**SETTING, "output": folder, **settings}), encoding="utf-8")
        try:
            listen([sys.executable, PYTHON_RUNS, path], hear, environment)
        finally:
            peak = sampler.stop() if sampler else 0
    return events, baseline, peak


@cache
def find_openblas() -> str | None:
    """An OpenBLAS to preload, on Linux: MLX calls what the executable brings before its wheel's."""
    name = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    with suppress(OSError):
        if name and hasattr(ctypes.CDLL(name), "cblas_sgemm"):
            return name
    return None


class FootprintSampler:
    """The highest footprint of another process, by a thread."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak, self.running = pid, 0, True
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()

    def sample(self) -> None:
        while self.running:
            self.peak = max(self.peak, footprint(self.pid))
            time.sleep(SAMPLED_EVERY)

    def stop(self) -> int:
        self.running = False
        self.thread.join()
        return self.peak


def footprint(pid: int) -> int:
    """RssAnon + VmSwap on Linux, phys_footprint on a Mac; 0 once the process has ended."""
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v0: a UUID, then 64-bit counters
        failed = ctypes.CDLL("libproc.dylib").proc_pid_rusage(pid, 0, usage)
        return 0 if failed else usage[9]
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    counted = (line for line in lines.splitlines() if line.startswith(("RssAnon:", "VmSwap:")))
    return sum(int(line.split()[1]) * 1024 for line in counted)


# Bundles


def find_cells(
    models: Iterable[str],
    layers: int | None,
    seq_lens: Iterable[int],
    ranks: Iterable[int],
    work: Path,
    data: str | None = None,
) -> list[Cell]:
    """Every model with every length and rank, its bundle ready."""
    cells = []
    for model in models:
        bundle = find_bundle(model, layers, set(seq_lens), set(ranks), work, data)
        manifest = read_manifest(bundle)
        name = manifest["name"].removesuffix("-random")
        blocks = manifest["architecture"]["num_hidden_layers"]
        kind = (manifest["device"], manifest["dtype"])
        cells += [Cell(name, bundle, blocks, t, r, *kind) for t in seq_lens for r in ranks]
    return cells


def find_bundle(
    model: str, layers: int | None, seq_lens: set[int], ranks: set[int], work: Path,
    data: str | None,
) -> Path:  # fmt: skip
    """The model's bundle in `work`, exported where need be; or `model`, where it is a bundle."""
    if (Path(model) / "manifest.json").is_file():
        if layers or data:
            raise MespError(f"{model} is a bundle: --layers and --data are of its export.")
        manifest = read_manifest(Path(model))
        for what, wanted, there in (
            ("sequence length", seq_lens, manifest["seq_lens"]),
            ("rank", ranks, manifest["ranks"]),
        ):
            if lacking := wanted.difference(there):
                raise MespError(f"The bundle {model} has no {what} {min(lacking)}.")
        return Path(model)
    # Folders and models on the Hub can share their last name with others.
    which = "/" in model and f"{zlib.crc32(str(Path(model).resolve()).encode()):08x}"
    parts = (Path(model).name, which, layers and f"{layers}-blocks", data and "data")
    path = work / ("-".join(part for part in parts if part) + ".mesp")
    with suppress(MespError):
        manifest = read_manifest(path)
        seq_lens, ranks = seq_lens.union(manifest["seq_lens"]), ranks.union(manifest["ranks"])
        covered = (sorted(seq_lens), sorted(ranks)) == (manifest["seq_lens"], manifest["ranks"])
        random = model != "demo" and not data  # others are made quickly, and may have changed
        if covered and random and not is_older_than_its_code(path):
            return path
    export(model, path, layers, seq_lens, ranks, data)
    return path


def is_older_than_its_code(bundle: Path) -> bool:
    """Whether the block function or the format may have changed since it was written."""
    written = (bundle / "manifest.json").stat().st_mtime
    return any(Path(m.__file__).stat().st_mtime > written for m in CODE)


def export(
    model: str, path: Path, layers: int | None, seq_lens: set[int], ranks: set[int],
    data: str | None,
) -> None:  # fmt: skip
    """mesp-export, in a process of its own; random weights for all but the demo model."""
    command = ["--model", model, "--out", path, "--overwrite", "--device", DEVICE]
    command += ["--dtype", DTYPE, "--seq-len", *sorted(seq_lens), "--rank", *sorted(ranks)]
    command += ["--layers", layers] if layers else []
    command += ["--data", data] if data else []
    command += [] if model == "demo" else ["--random-weights"]
    done = subprocess.run(
        [sys.executable, "-c", "from mesp.export import main; main()", *map(str, command)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["mesp-export failed."]
        raise MespError(said[-1].removeprefix("Error: "))
