from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mesp.errors import MespError, plain_os_errors
from mesp.evaluation.metrics import Estimate, Metric, compare
from mesp.files import partial_of, write_whole
from mesp.formatting import decimal


@dataclass(frozen=True)
class Row:
    """`adapters` describes the model's adapters."""

    task: str | None
    metric: str
    higher_is_better: bool
    adapters: str | None
    estimate: Estimate
    difference: Estimate | None


def make_rows(
    adapters: Sequence[str | None], metrics: Sequence[Sequence[Metric]]
) -> tuple[Row, ...]:
    return tuple(
        Row(
            metric.task,
            metric.name,
            metric.higher_is_better,
            name,
            estimate,
            difference if adapters[0] is None else None,
        )
        for same in zip(*metrics, strict=True)
        for name, metric, (estimate, difference) in zip(adapters, same, compare(same), strict=True)
    )


def format_table(found: Sequence[Row], width: int = 200) -> str:
    from rich.console import Console
    from rich.table import Table

    has_tasks = any(row.task for row in found)
    titles = ["metric", "model", "value", "95%"]
    if any(row.difference for row in found):
        titles += ["- base", "95%"]
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for title in ["task"] * has_tasks + titles:
        grid.add_column(title, justify="left" if title in ("task", "metric", "model") else "right")
    before = None
    for row in found:
        name = (row.task or "", f"{row.metric} {'↑' if row.higher_is_better else '↓'}")
        cells = [*_estimate(row.estimate), *_estimate(row.difference, "+")]
        label = name if name != before else ("", "")
        before = name
        model = row.adapters or "base"
        grid.add_row(*[*label[not has_tasks :], model, *cells][: len(grid.columns)])
    text = io.StringIO()
    Console(file=text, highlight=False, markup=False, width=width).print(grid)
    return text.getvalue().rstrip("\n")


def _estimate(estimate: Estimate | None, sign: str = "") -> list[str]:
    if estimate is None:
        return ["", ""]
    value = f"{estimate.value:{sign},.3f}"
    if estimate.low is None:
        return [value, decimal(None)]
    return [value, f"{estimate.low:{sign},.3f} … {estimate.high:{sign},.3f}"]


def check_writable(path: Path) -> None:
    """Raises MespError if `path` cannot be written. The check comes before hours of work."""
    with plain_os_errors(f"Cannot write {path}"):
        folder = next(parent for parent in path.resolve().parents if parent.exists())
        is_other = path.exists() and not path.is_file()  # a folder or a device
        if is_other or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise MespError(f"{path} cannot be written; name another --out.")
        partial_of(path).exists()


def write_results(path: Path, what: dict[str, Any], found: Sequence[Row], samples: Any) -> None:
    results = [
        {
            "task": row.task,
            "metric": row.metric,
            "higher_is_better": row.higher_is_better,
            "adapters": row.adapters,
            **_numbers(row.estimate),
            "difference": _numbers(row.difference) or None,
        }
        for row in found
    ]
    text = json.dumps({**what, "results": results, "samples": samples}, indent=1, default=str)
    with plain_os_errors(f"Cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text}\n".encode())


def _numbers(estimate: Estimate | None) -> dict[str, float | None]:
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in ({} if estimate is None else asdict(estimate)).items()
    }
