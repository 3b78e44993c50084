"""Draws loss and memory of one or several runs.

    python tools/report.py RUN... --out report.html
    python tools/report.py RUN... --out report.png

RUN is a run's folder, or a folder of runs such as tools/collect.py writes.
"""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path

import click

from mesp.errors import MespError, plain_os_errors
from mesp.log import COLUMNS, Run, find_runs, read_run, table_row

SMOOTHED_TO = 40  # points that a loss curve keeps: each step's loss is one sequence's, and noisy


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="*.html or *.png.")
def main(folders: tuple[Path, ...], out: Path) -> None:
    """Draw training and held-out loss and memory of the runs in FOLDERS."""
    if out.suffix not in (".html", ".png"):
        raise MespError(f"--out {out} must end in .html or .png.")
    runs = {}
    for folder in folders:
        found = find_runs(folder)
        if not found:
            raise MespError(f"There is no run in {folder}.")
        for path in found:
            runs[unique(path.name, runs)] = read_run(path)
    png = draw(runs)
    with plain_os_errors(f"Cannot write {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(page(runs, png).encode() if out.suffix == ".html" else png)
    click.echo(out)


def unique(name: str, taken: dict[str, Run]) -> str:
    number, free = 2, name
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    return free


def draw(runs: dict[str, Run]) -> bytes:
    """A PNG of two plots above one another: loss, and footprint, both over steps."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MespError("Drawing needs matplotlib: `pip install 'mesp[report]'`.") from error
    figure = Figure(figsize=(8, 7), layout="constrained")
    loss, memory = figure.subplots(2, sharex=True)
    for number, (name, run) in enumerate(runs.items()):
        color = f"C{number % 10}"
        steps = [step["step"] for step in run.steps]
        if len(runs) == 1:
            loss.plot(steps, run.losses, color=color, alpha=0.25, linewidth=0.8)
        window = max(1, len(steps) // SMOOTHED_TO)
        loss.plot(*averages(steps, run.losses, window), color=color, label=f"{name}, training")
        if run.evals:
            evals = [(record["step"], record["loss"]) for record in run.evals]
            loss.plot(*zip(*evals, strict=True), "o--", color=color, label=f"{name}, held out")
        peaks = [step["footprint_peak_bytes"] / 1e6 for step in run.steps]
        memory.plot(steps, peaks, color=color, label=name)
    loss.set(
        ylabel="loss, nats a token", title=" · ".join(dict.fromkeys(map(title, runs.values())))
    )
    memory.set(xlabel="step", ylabel="peak footprint of a step, MB")
    memory.set_ylim(bottom=0)
    for axes in (loss, memory):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    return image.getvalue()


def averages(xs: list[int], ys: list[float], window: int) -> tuple[list[float], list[float]]:
    """Means over as many values as `window` says, one after another."""
    groups = range(0, len(xs) - window + 1, window)
    return tuple([sum(v[i : i + window]) / window for i in groups] for v in (xs, ys))


def title(run: Run) -> str:
    return f"{run.model}, {run.settings.get('seq_len', '?')} tokens, {run.start.get('host', '?')}"


def page(runs: dict[str, Run], png: bytes) -> str:
    """One HTML page with the table and the figure in it."""

    def cells(tag: str, texts: list[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(t)}</{tag}>" for t in texts) + "</tr>"

    rows = [cells("td", [name, *table_row(run)]) for name, run in runs.items()]
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>MeSP runs</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto }}
table {{ border-collapse: collapse }}
th, td {{ text-align: left; padding: .3rem .8rem .3rem 0 }}
img {{ max-width: 100%; margin-top: 1.5rem }}
</style>
<h1>MeSP runs</h1>
<table>
{cells("th", ["run", *COLUMNS])}
{chr(10).join(rows)}
</table>
<img alt="Loss and memory over steps" src="data:image/png;base64,{base64.b64encode(png).decode()}">
</html>
"""


if __name__ == "__main__":
    main()
