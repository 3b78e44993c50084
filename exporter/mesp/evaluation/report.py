"""What an evaluation found, as a table and as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mesp.errors import MespError, plain_os_errors
from mesp.evaluation.metrics import Estimate, Metric, compare
from mesp.files import partial_of, write_whole
from mesp.formatting import decimal

Row = dict[str, Any]  # task, metric, adapters, estimate, difference


def rows(adapters: Sequence[Path | None], metrics: Sequence[Sequence[Metric]]) -> list[Row]:
    """A row for each metric of each model, which are named by their adapters. Where the first has
    none, it is what the others are compared with."""
    found = []
    for same in zip(*metrics, strict=True):
        for folder, metric, (estimate, difference) in zip(
            adapters, same, compare(same), strict=True
        ):
            found.append(
                {
                    "task": metric.task,
                    "metric": metric.name,
                    "higher_is_better": metric.higher_is_better,
                    "adapters": None if folder is None else str(folder),
                    "estimate": estimate,
                    "difference": difference if adapters[0] is None else None,
                }
            )
    return found


def show(found: Sequence[Row]) -> None:
    """Prints the rows as a table."""
    has_tasks = any(row["task"] for row in found)
    titles = ["metric", "model", "value", "95%"]
    if any(row["difference"] for row in found):
        titles += ["- base", "95%"]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ["task"] * has_tasks + titles:
        table.add_column(title, justify="left" if title in ("task", "metric", "model") else "right")
    before = None
    for row in found:
        name = (row["task"] or "", f"{row['metric']} {'↑' if row['higher_is_better'] else '↓'}")
        cells = [*_estimate(row["estimate"]), *_estimate(row["difference"], "+")]
        label = name if name != before else ("", "")
        before = name
        model = "base" if row["adapters"] is None else row["adapters"]
        table.add_row(*[*label[not has_tasks :], model, *cells][: len(table.columns)])
    console = Console(highlight=False, markup=False)
    # Without a terminal there is no width to keep to, and cut-off figures help nobody.
    console.width = console.width if console.is_terminal else 200
    console.print(table)


def _estimate(estimate: Estimate | None, sign: str = "") -> list[str]:
    if estimate is None:
        return ["", ""]
    if estimate.low is None:
        return [f"{estimate.value:{sign},.3f}", decimal(None)]
    return [
        f"{estimate.value:{sign},.3f}",
        f"{estimate.low:{sign},.3f} … {estimate.high:{sign},.3f}",
    ]


def check_writable(path: Path) -> None:
    """Raises MespError where `path` cannot be written: better now than after hours."""
    with plain_os_errors(f"Cannot write {path}"):
        folder = next(parent for parent in path.resolve().parents if parent.exists())
        is_other = path.exists() and not path.is_file()  # a folder, a device
        if is_other or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise MespError(f"{path} cannot be written; name another --out.")
        partial_of(path).exists()  # raises where that name is too long


def write(path: Path, what: dict[str, Any], found: Sequence[Row], samples: Any) -> None:
    """Writes `path`: `what` was evaluated, ``results``, and what became of each record."""
    results = [
        {**row, **_numbers(row["estimate"]), "difference": _numbers(row["difference"]) or None}
        for row in found
    ]
    for each in results:
        del each["estimate"]
    text = json.dumps({**what, "results": results, "samples": samples}, indent=1, default=str)
    with plain_os_errors(f"Cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text}\n".encode())


def _numbers(estimate: Estimate | None) -> dict[str, float | None]:
    """For JSON, which has no infinity."""
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in ({} if estimate is None else asdict(estimate)).items()
    }
