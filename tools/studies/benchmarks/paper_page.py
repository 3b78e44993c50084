import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click

import mesp
from mesp.errors import plain_os_errors
from studies.benchmarks import paper
from studies.benchmarks.cells import Row
from studies.benchmarks.columns import texts
from studies.benchmarks.machine import host
from studies.benchmarks.plot import check_plot, draw
from studies.benchmarks.processes import Bench, engine_program
from studies.benchmarks.show import drawn, markdown
from studies.benchmarks.tables import KINDS, RUNS, TABLES, largest_difference

LENGTH = 256  # the sequence length at which the paper compares methods
PAGE = "paper.md"


class Exhibit(NamedTuple):
    title: str
    table: str
    given: tuple[str, ...]
    options: dict[str, Any]
    columns: tuple[str, ...]
    panels: tuple[str, ...]  # headings to draw; no picture if empty


EXHIBITS = (
    Exhibit(
        "Peak memory and time by method and length", "length", ("models", "seq_lens", "steps"), {},
        ("model", "seq", "method", "peak MB", "paper MB", "of paper", "peak of MeBP", "s/step",
         "time of MeBP"),
        ("peak MB", "s/step"),
    ),
    Exhibit(
        "Peak memory by rank", "rank", ("models", "ranks", "steps"), {"seq_lens": (LENGTH,)},
        ("model", "rank", "peak MB", "of first rank", "s/step"), ("peak MB",),
    ),
    Exhibit(
        "Storing or recomputing h = xA", "h", ("models",), {"seq_lens": (LENGTH,), "steps": 3},
        ("model", "h of a block MB", "h of all MB", "recomputing s", "gradient s", "share"), (),
    ),
    Exhibit(
        "MeZO's estimate of the gradient", "mezo-quality", (), {"steps": 3},
        ("model", "layer", "draws", "cosine", "equal signs", "relative error"), ("cosine",),
    ),
    Exhibit(
        "Losses of exact gradients and of estimates", "convergence", (), {"steps": 100},
        ("model", "method", "step", "training loss", "held-out loss"), ("held-out loss",),
    ),
)  # fmt: skip


def measure_paper(options: dict[str, Any], work: Path, command: str) -> list[Row]:
    folder = work / "paper"
    check_plot(folder / "plot.png")
    engine_program()
    with plain_os_errors(f"Cannot make {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {}
    for exhibit in EXHIBITS:
        given = {name: options[name] for name in exhibit.given}
        bench = Bench(exhibit.table, TABLES[exhibit.table] | exhibit.options | given, work)
        kind = KINDS.get(exhibit.table, RUNS)
        with bench.status:
            rows[exhibit.table] = list(kind.rows(bench))
        if exhibit.panels:
            picture = folder / f"{exhibit.table}.png"
            draw(picture, rows[exhibit.table], kind._replace(ys=exhibit.panels))
        click.echo(f"{exhibit.title}: measured.")
    with plain_os_errors(f"Cannot write {folder / PAGE}"):
        (folder / PAGE).write_text(page(rows, command), encoding="utf-8")
    click.echo(f"Wrote {folder / PAGE}.")
    return [row for each in rows.values() for row in each if row.get("error")]


def page(rows: dict[str, list[Row]], command: str) -> str:
    machine = host()
    parts = [
        "# The paper's exhibits, in short",
        f"`{command}` measured this with MeSP {mesp.__version__} and MLX {machine['mlx_version']}, "
        f"on {machine['cores']} cores of {machine['cpu']}. The paper's figures are of another "
        f"machine ({paper.TABLE['name']}): compare ratios.",
        markdown(list(compared(rows))),
    ]
    for exhibit in EXHIBITS:
        lines = [texts(point) for point in drawn(rows[exhibit.table])]
        table = [{n: line[n] for n in exhibit.columns if n in line} for line in lines]
        parts += [
            f"## {exhibit.title}",
            f"The long form is `python tools/bench.py --table {exhibit.table}`.",
        ]
        if exhibit.panels:
            parts.append(f"![{exhibit.title}]({exhibit.table}.png)")
        parts.append(markdown(table))
    return "\n\n".join(parts) + "\n"


def compared(rows: dict[str, list[Row]]) -> Iterator[dict[str, str]]:
    for row in rows["length"]:
        model, tokens = row["model"], row["seq_len"]
        if row["footprint_peak_bytes"] is None:
            continue
        peak, at = row["footprint_peak_bytes"] / 1e6, f"{model}, {tokens:,} tokens"
        if row["method"] == "mesp":
            theirs = row["paper_bytes"] and row["paper_bytes"] / 1e6
            yield line(f"peak MB of MeSP, {at}", theirs, f"{peak:,.1f}")
        if tokens != LENGTH:
            continue
        if row["method"] == "mebp":
            theirs = paper.TABLE["mebp_peak_mb"].get(model, {}).get(str(tokens))
            yield line(f"peak MB of MeBP, {at}", theirs, f"{peak:,.1f}")
        if row["method"] == "mesp" and row["peak_to_mebp"] is not None:
            theirs = paper.TABLE["reduction_percent"].get(model)
            here = f"{100 * (1 - row['peak_to_mebp']):.0f}"
            yield line(f"MeSP's reduction of MeBP's peak, %, {at}", theirs, here)
            theirs = paper.TIME_OF_MEBP if model in paper.PEAK_MB else None
            here = f"{row['time_to_mebp']:.2f}"
            yield line(f"time of a step, MeSP's of MeBP's, {at}", theirs, here)
    for model, group in itertools.groupby(rows["rank"], lambda row: row["model"]):
        ranks = list(group)
        first, last = ranks[0], ranks[-1]
        if last["peak_to_first_rank"] is not None:
            known = model in paper.PEAK_MB and (first["rank"], last["rank"]) == (4, 32)
            what = f"peak at rank {last['rank']}, of rank {first['rank']}'s, {model}"
            here = f"{last['peak_to_first_rank']:.2f}"
            yield line(what, paper.RANK_32_OF_RANK_4 if known else None, here)
    for row in rows["h"]:
        here = f"{row['h_bytes'] / 1e6:,.2f}"
        yield line(f"MB that storing h takes, {row['model']}", paper.TABLE["storing_h_mb"], here)
    cosine = f"{mean(row['cosine'] for row in rows['mezo-quality']):.4f}"
    yield line("cosine of MeZO's estimate and the gradient", paper.TABLE["mezo_cosine"], cosine)
    difference = f"{largest_difference(rows['convergence']):.1e}"
    yield line("largest relative difference of MeSP's and MeBP's losses", "equal", difference)


def line(figure: str, theirs: float | str | None, here: str) -> dict[str, str]:
    return {"figure": figure, "paper": "-" if theirs is None else f"{theirs}", "here": here}
