import ctypes
import ctypes.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.runs.log import RunLog
from mesp.settings.optimizer_defaults import PAPER
from mesp.settings.train_settings import TrainSettings
from studies.benchmarks.cells import Cell, find_cells
from studies.benchmarks.variants import Variant

SETTING = {"learning_rate": PAPER["learning_rate"]} | {
    each.name: each.default
    for each in fields(TrainSettings)
    if each.name in ("alpha", "seed", "mezo_epsilon")
}

# Settings of glibc's allocator that return freed memory to the system, as the engine's do.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
# The variables that set the number of threads of OpenBLAS and PyTorch's BLAS.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
TOOLS = Path(__file__).resolve().parents[2]

Tell = Callable[[int], None]
engine_program = cache(find_engine)


def blas_threads() -> int:
    """Returns the number of BLAS threads that the engine uses by default: OPENBLAS_NUM_THREADS if
    it is set, or else one per core, but at most 8.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return int(os.environ.get(THREADS[0]) or min(8, cores))


def environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))
    return os.environ | dict.fromkeys(THREADS, str(threads)) | {"PYTHONPATH": path}


class Bench:
    def __init__(self, table: str, options: dict[str, Any], work: Path) -> None:
        self.table, self.options, self.work = table, options, work
        self.steps = options.get("steps")
        self.layers = sorted(set(options.get("layers", ())))
        self.status = Console(stderr=True).status("Exporting")

    def cells(self, whole: bool = False) -> list[Cell]:
        counts = self.layers if self.layers and not whole else [None]
        return [cell for count in counts for cell in find_cells(self.options, count, self.work)]

    def doing(self, cell: Cell, what: object) -> Tell:
        text = f"{cell.model}, {cell.seq_len} tokens, {what}"
        self.status.update(text)
        return lambda step: self.status.update(f"{text}: step {step} of {self.steps}")

    def run(self, cell: Cell, what: str, method: str = "mesp", **settings: Any) -> RunLog:
        settings = engine_settings(cell, Variant(method)) | settings
        return run_program([engine_program()], settings, self.work, self.doing(cell, what))


def engine_settings(cell: Cell, variant: Variant) -> dict[str, Any]:
    size = {"seq_len": cell.seq_len, "rank": cell.rank}
    how = {"device": cell.device, "method": variant.method, "offload": variant.offload}
    return {"bundle": str(cell.bundle.resolve()), **size, **how, "val_batches": 0, "save_every": 0}


def run_python(
    bench: Bench, cell: Cell, what: object, settings: dict[str, Any], threads: int,
    preload: bool = True,
) -> RunLog:  # fmt: skip
    """Runs `benchmarks.in_python` and returns its log. With `preload`, MLX uses the OpenBLAS that
    `find_openblas` finds, if any.
    """
    size = {"bundle": str(cell.bundle), "seq_len": cell.seq_len, "rank": cell.rank}
    settings = SETTING | size | {"steps": bench.steps} | settings
    variables = ENVIRONMENT | environment(threads)
    variables["LD_PRELOAD"] = (preload and find_openblas()) or ""
    command = [sys.executable, "-m", "studies.benchmarks.in_python"]
    return run_program(command, settings, bench.work, bench.doing(cell, what), variables)


def run_program(
    command: list[str | Path], settings: dict[str, Any], work: Path, tell: Tell,
    environment: dict[str, str] | None = None,
) -> RunLog:  # fmt: skip
    records: list[dict[str, Any]] = []
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
                if line.startswith("{"):  # Libraries may print other lines.
                    records.append(json.loads(line))
                    if records[-1]["type"] == "step":
                        tell(records[-1]["step"])
        said = errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if process.returncode < 0:
        raise MespError(f"The run was ended by signal {-process.returncode}.")
    if process.returncode > 0:
        raise MespError(said[-1] if said else f"The run failed ({process.returncode}).")
    return RunLog.of(records)


@cache
def find_openblas() -> str | None:
    """Returns the name of an OpenBLAS to preload on Linux, or None if there is none.

    MLX uses a preloaded BLAS instead of its own.
    """
    name = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    with suppress(OSError):
        if name and hasattr(ctypes.CDLL(name), "cblas_sgemm"):
            return name
    return None
