import json
from pathlib import Path
from typing import Any

from mesp.errors import plain_os_errors
from studies.benchmarks.cells import Row
from studies.benchmarks.machine import host
from studies.benchmarks.plot import check_plot, draw
from studies.benchmarks.processes import Bench, engine_program
from studies.benchmarks.show import present
from studies.benchmarks.tables import KINDS, RUNS, check_agreement


def measure_table(
    table: str, options: dict[str, Any], work: Path, command: str, *, json_file: Path | None,
    plot: Path | None,
) -> list[Row]:  # fmt: skip
    """Measures and prints the rows, and returns those that failed.

    After each row, `json_file` is written with all rows so far and the typed `command`.
    """
    if plot:
        check_plot(plot)
    engine_program()
    for folder in (work, *(file.parent for file in (json_file, plot) if file)):
        with plain_os_errors(f"Cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def save(rows: list[Row]) -> None:
        if json_file:
            content = {"table": table, "command": command, "rows": rows, "host": host()}
            with plain_os_errors(f"Cannot write {json_file}"):
                json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    kind = KINDS.get(table, RUNS)
    rows: list[Row] = []
    save(rows)
    bench = Bench(table, options, work)
    with bench.status:
        for row in kind.rows(bench):
            rows.append(row)
            save(rows)
    if plot:
        draw(plot, rows, kind)
    present(rows, kind)
    if table == "convergence":
        check_agreement(rows)
    return [row for row in rows if row.get("error")]
