"""Measures the rows of a table of training runs. Sizes are in bytes unless a name ends in `_mb`,
and times are in seconds.
"""

import math
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mesp.bundle.reader import Bundle
from mesp.engine.process import find_plan
from mesp.errors import MespError
from mesp.runs.log import RunLog
from studies.benchmarks import paper
from studies.benchmarks.cells import Cell, Row
from studies.benchmarks.in_python.steps import windows
from studies.benchmarks.processes import (
    SETTING,
    Bench,
    blas_threads,
    engine_program,
    engine_settings,
    environment,
    find_openblas,
    run_program,
    run_python,
)
from studies.benchmarks.variants import (
    ENGINE_METHODS,
    EVERYTHING_MB,
    PEFT_METHODS,
    PYTHON_METHODS,
    Variant,
)
from studies.in_peft.inputs import first_adapters, write_inputs

SETTLED_AFTER = 10
ROUNDS = 3

PLANNED = ("offload", "kept_blocks", "tile_bytes", "mapped_bytes", "predicted_peak_bytes",
           "least_peak_bytes")  # fmt: skip

# For each ratio: the figure that is divided, and the divisor's source. The source is the paper or a
# method's first row with the same cell and threads.
RATIOS = {
    "peak_to_paper": ("footprint_peak_bytes", "paper"),
    "peak_to_mesp": ("footprint_peak_bytes", "mesp"),
    "peak_to_mebp": ("footprint_peak_bytes", "mebp"),
    "time_to_mebp": ("seconds", "mebp"),
}


def new_row(cell: Cell, variant: Variant) -> Row:
    peak, goal = paper.peak_and_goal(cell)
    return {
        **cell.row(),
        "method": variant.method,
        "variant": str(variant),
        "threads": variant.threads or blas_threads(),  # BLAS threads
        "blas": None,  # only for runs in Python
        "memory_limit_mb": None,
        **dict.fromkeys(PLANNED),
        "steps": 0,
        "seconds": None,  # median time of a step; excludes the first if there are several
        "tflop": None,  # only for measurements of products
        "losses": [],
        "footprint_peak_bytes": None,
        # The growth of a step's peak after SETTLED_AFTER steps.
        "growth_bytes": None,
        "baseline_bytes": None,  # before a model is loaded; included in the peak
        "mlx_peak_bytes": None,
        "written_bytes": None,  # per step
        "paper_bytes": peak if variant.method in ("mesp", "mesp-paper") else None,
        "bar_bytes": goal if variant.method == "mesp" else None,
        "net_bytes": None,  # the peak without the baseline
        "prediction_error": None,  # relative
        **dict.fromkeys(RATIOS),
        "peak_to_first_rank": None,
        "extrapolated_from": None,  # numbers of blocks that were measured
        "error": None,
    }


def measure(bench: Bench, cell: Cell, variant: Variant, before: list[Row]) -> Row:
    """Measures some steps in a separate process and returns a row. A failed run's row has the
    error.

    `before` has the previous rows, which must include the same cell's MeBP row if the limit is
    MeBP's peak.
    """
    row = new_row(cell, variant)
    threads = row["threads"]
    try:
        if variant.method in ENGINE_METHODS:
            settings = planned(row, cell, variant, before) | {"steps": bench.steps}
            tell = bench.doing(cell, variant)
            command = [engine_program()]
            run = run_program(command, settings, bench.work, tell, environment(threads))
            row |= {name: run.plan[name] for name in PLANNED}
            row["written_bytes"] = median(step["written_bytes"] for step in run.steps)
        elif variant.method in PEFT_METHODS:
            run = train_with_peft(bench, cell, variant, threads)
            row |= {"blas": "PyTorch's", "baseline_bytes": run.start["baseline_bytes"]}
        else:
            settings = PYTHON_METHODS[variant.method]
            preload = settings.get("fast", True)
            run = run_python(bench, cell, variant, settings, threads, preload)
            row["blas"] = "OpenBLAS" if preload and find_openblas() else "MLX's"
            row |= {name: value for name, value in run.start.items() if name in row}
    except MespError as error:
        return row | {"error": error.message}
    seconds, peaks, mlx_peaks, losses = (
        [step[name] for step in run.steps if name in step]
        for name in ("seconds", "footprint_peak_bytes", "mlx_peak_bytes", "loss")
    )
    if len(peaks) > SETTLED_AFTER:
        row["growth_bytes"] = peaks[-1] - peaks[SETTLED_AFTER - 1]
    return row | {
        "steps": len(seconds),
        "seconds": median(seconds[1:] or seconds),
        "losses": losses,
        "footprint_peak_bytes": max(peaks, default=None),
        "mlx_peak_bytes": max(mlx_peaks, default=None),
    }


def train_with_peft(bench: Bench, cell: Cell, variant: Variant, threads: int) -> RunLog:
    bundle, (seed, rank) = Bundle(cell.bundle), (SETTING["seed"], cell.rank)
    ids = np.stack([np.array(w) for w in windows(bundle, cell.seq_len, seed, bench.steps)])
    settings = SETTING | {"rank": rank, "dtype": cell.dtype} | PEFT_METHODS[variant.method]
    # absolute() keeps symbolic links, by which Python finds its virtual environment.
    command = [bench.options["peft"].absolute(), "-m", "studies.in_peft.train"]
    with tempfile.TemporaryDirectory(prefix="peft-", dir=bench.work.resolve()) as folder:
        write_inputs(Path(folder), bundle, first_adapters(bundle, rank, seed), ids)
        settings |= {"output": folder}
        tell = bench.doing(cell, variant)
        return run_program(command, settings, Path(folder), tell, environment(threads))


def extrapolate(full: Cell, variant: Variant, rows: list[Row]) -> Row | None:
    """Extrapolates the whole model's row linearly from the rows with the fewest and the most
    blocks.

    Returns None if fewer than two rows succeeded.
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
        limit = (math.ceil(size) + 1) / 1e6  # rounded up, because the engine truncates to bytes
    else:
        limit = EVERYTHING_MB if variant.limit == "all" else float(variant.limit)
    row["memory_limit_mb"] = limit
    return settings | {"memory_limit_mb": limit}


def peaks(measured: float, plan: dict[str, Any]) -> Row:
    predicted = plan["predicted_peak_bytes"]
    return {
        "footprint_peak_bytes": measured,
        "predicted_peak_bytes": predicted,
        "prediction_error": predicted / measured - 1,
    }


def first(row: Row, rows: list[Row], method: str) -> Row:
    same = {name: row[name] for name in ("model", "blocks", "seq_len", "rank", "threads")}
    same["method"] = method
    return next((r for r in rows if all(r[n] == value for n, value in same.items())), {})


def compare(rows: list[Row]) -> None:
    for row in rows:
        peak = row["footprint_peak_bytes"]
        if peak and row["baseline_bytes"]:
            row["net_bytes"] = peak - row["baseline_bytes"]
        if peak and row["predicted_peak_bytes"]:
            row["prediction_error"] = row["predicted_peak_bytes"] / peak - 1
        for name, (figure, whose) in RATIOS.items():
            other = row["paper_bytes"] if whose == "paper" else first(row, rows, whose).get(figure)
            row[name] = row[figure] / other if row[figure] is not None and other else None
        same = ("model", "blocks", "seq_len", "variant", "threads")
        ranks = [r for r in rows if all(r[name] == row[name] for name in same)]
        if ranks[0] is not row and peak and ranks[0]["footprint_peak_bytes"]:
            row["peak_to_first_rank"] = peak / ranks[0]["footprint_peak_bytes"]
