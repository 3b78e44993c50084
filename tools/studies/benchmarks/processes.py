from __future__ import annotations

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

from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.runs.log import RunLog
from mesp.settings.optimizer_defaults import PAPER
from mesp.settings.train_settings import TrainSettings
from studies.benchmarks.cells import Cell

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


def with_threads(threads: int) -> dict[str, str]:
    return os.environ | dict.fromkeys(THREADS, str(threads))


def run_python(
    cell: Cell, settings: dict[str, Any], work: Path, tell: Tell, preload: bool = True,
    threads: int | None = None,
) -> RunLog:  # fmt: skip
    """Runs `benchmarks.in_python` and returns its log. With `preload`, MLX uses the OpenBLAS that
    `find_openblas` finds, if any.
    """
    size = {"bundle": str(cell.bundle), "seq_len": cell.seq_len, "rank": cell.rank}
    environment = ENVIRONMENT | with_threads(threads or blas_threads())
    environment["LD_PRELOAD"] = (preload and find_openblas()) or ""
    path = (str(TOOLS), os.environ.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-m", "studies.benchmarks.in_python"]
    return run_program(command, SETTING | size | settings, work, tell, environment)


def run_peft(
    python: Path, settings: dict[str, Any], folder: Path, threads: int, tell: Tell
) -> RunLog:
    """Runs `in_peft.train` on the inputs in `folder`, and returns its log.

    `python` is a Python with torch and peft.
    """
    environment = with_threads(threads) | {"PYTHONPATH": str(TOOLS)}
    settings = settings | {"output": str(folder.resolve())}
    # absolute() keeps symbolic links, by which Python finds its virtual environment.
    command = [python.absolute(), "-m", "studies.in_peft.train"]
    return run_program(command, settings, folder, tell, environment)


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
