import sys
from statistics import mean

import click
from rich import box
from rich.console import Console
from rich.table import Table

from studies.benchmarks.cells import Row
from studies.benchmarks.columns import AVERAGED, COLUMNS, SIZE, averages, grouped, texts
from studies.benchmarks.tables import Kind

TABLE_WIDTH = 250  # columns, if the output is not a terminal


def present(rows: list[Row], kind: Kind) -> None:
    show([texts(point) for point in drawn(rows)])
    averaged = [heading for heading in AVERAGED if COLUMNS[heading][0] in rows[0]]
    if averaged:
        click.echo("\nAverages")
        by = ("method",) if "variant" in rows[0] else SIZE
        groups = grouped([row for row in rows if row.get("steps", 1)], by)
        show([averages(each, by, averaged) for each in groups])
    click.echo()
    measured = [row for row in rows if "os" in row]
    on = dict.fromkeys(f"{r['device']} in {r['dtype']}, {r['cpu']}, {r['os']}" for r in measured)
    if on:
        click.echo(f"Measured on the {' and the '.join(on)}.")
    click.echo(kind.note)


def drawn(rows: list[Row]) -> list[Row]:
    """Returns the rows sorted by step. A row of a run with held-out losses is replaced by one row
    for each of these losses.
    """
    points = [row for row in rows if "held_out" not in row]
    for row in rows:
        since = 0
        for step, loss in row.get("held_out", ()):
            training = mean(row["losses"][since:step]) if step else None
            now = {"step": step, "training_loss": training, "held_out_loss": loss}
            points.append(row | now)
            since = step
    return sorted(points, key=lambda point: point.get("step", 0))


def show(lines: list[dict[str, str]]) -> None:
    if lines:
        click.echo("\n" + markdown(lines, None if sys.stdout.isatty() else TABLE_WIDTH))


def markdown(lines: list[dict[str, str]], width: int | None = TABLE_WIDTH) -> str:
    """Returns a Markdown table of at most `width` characters a line, or of the terminal's width for
    None.
    """
    table = Table(box=box.MARKDOWN)
    columns = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    for name in columns:
        table.add_column(name, justify="left" if lines[0][name][:1].isalpha() else "right")
    for line in lines:
        table.add_row(*(line[name] for name in columns))
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().strip().splitlines())
