"""Measures memory and time of training: MeSP, its baselines and mlx-lm's trainer, side by side.

Models get their true geometry and random weights. Every row is a process of its own; its memory is
the process's anonymous memory (phys_footprint on a Mac), the highest during any step. An MB is
1,000,000 bytes.

\b
  python tools/bench.py --model Qwen2.5-0.5B --seq-len 128 256 --methods mesp,mebp,mezo
  python tools/bench.py --table length --json length.json --plot length.png

\b
Tables, each with its own defaults for the options that apply to it:
  memory        peak and time by method and size
  length        MeSP by sequence length, all three sizes
  rank          MeSP by LoRA rank, all three sizes
  time          MeSP's time against MeBP's, by memory limit
  h             what storing h = xA would take, and what recomputing it costs
  mezo-quality  MeZO's estimate of each block's gradient against the exact gradient
  convergence   losses of the three methods on the demo model

\b
Methods:
  mesp, mebp, mezo        the trainer's
  mesp-paper              the paper's way: attention weights, logits, dequantized weights whole
  mlx-lm                  mlx-lm's LoRA trainer as shipped
  mlx-lm-checkpoint       the same with gradient checkpointing
  mlx-lm-fast, mlx-lm-checkpoint-fast
                          the same, but its quantized layers dequantize and multiply with
                          OpenBLAS, as the trainer does on a CPU: faster, and more memory

\b
Memory limits, for MeSP:
  auto    none: the trainer's default      bar     half of the paper's peak
  least   the least that is possible       mebp    MeBP's measured peak
  all     enough to keep everything        MB      that many
"""

from __future__ import annotations

import io
import itertools
import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import click
from bench_runs import (
    ENGINE_METHODS,
    EVERYTHING_MB,
    LIMITS,
    OFFLOADS,
    PAPER_PEAK_MB,
    PAPER_RANK,
    PYTHON_METHODS,
    SETTING,
    Cell,
    Row,
    Tell,
    Variant,
    compare,
    cpu,
    engine_program,
    engine_settings,
    extrapolate,
    find_cells,
    host,
    measure,
    run_program,
    run_python,
)
from rich import box
from rich.console import Console
from rich.table import Table

from mesp.errors import MespError, plain_os_errors
from mesp.export import ListOptions
from mesp.log import decimal, megabytes

WORK = Path(__file__).resolve().parents[1] / "build" / "bench"
SIZES = tuple(PAPER_PEAK_MB)
METHODS = (*ENGINE_METHODS, *PYTHON_METHODS)
LOG_FROM = 10  # ratio of largest to smallest above which a plot is logarithmic
TABLE_WIDTH = 250  # columns, where there is no terminal

# MeZO's estimate is so noisy that it diverges at the exact methods' learning rate.
CONVERGENCE_RATES = {"mesp": 0.1, "mebp": 0.1, "mezo": 1e-4}
CONVERGENCE_REPORTS = 10
VAL_BATCHES = 25
AGREEMENT = 1e-4  # relative: losses of MeSP and MeBP

_SIZE = {"models": SIZES[:1], "seq_lens": (256,), "ranks": (PAPER_RANK,), "steps": 3}
_RUNS = {**_SIZE, "methods": ("mesp",), "layers": (), "offload": "auto", "limits": ("auto",)}
_DEMO = {**_SIZE, "models": ("demo",)}
# The options that apply to a table, with their defaults.
TABLES: dict[str, dict[str, Any]] = {
    "memory": {**_RUNS, "methods": ENGINE_METHODS},
    "length": {**_RUNS, "models": SIZES, "seq_lens": tuple(PAPER_PEAK_MB[SIZES[0]])},
    "rank": {**_RUNS, "models": SIZES, "ranks": (4, 8, 16, 32)},
    "time": {**_RUNS, "methods": ("mebp", "mesp"), "limits": ("auto", "bar", "mebp", "all")},
    "h": {**_SIZE, "models": SIZES, "steps": 10},
    "mezo-quality": {**_DEMO, "layers": (), "steps": 10},
    "convergence": {**_DEMO, "steps": 1000, "data": "python-docs", "learning_rate": None},
}


class Bench:
    """The table's options, where its runs work, and how far they are, shown on a terminal."""

    def __init__(self, options: dict[str, Any], work: Path) -> None:
        self.options, self.steps, self.work = options, options["steps"], work
        self.status = Console(stderr=True).status("Exporting")

    def cells(self, layers: int | None = None) -> list[Cell]:
        lengths, ranks = self.options["seq_lens"], self.options["ranks"]
        data = self.options.get("data")
        return find_cells(self.options["models"], layers, lengths, ranks, self.work, data)

    def doing(self, cell: Cell, what: object) -> Tell:
        """Says what begins; what is returned says at which step it is."""
        text = f"{cell.model} {cell.seq_len} {what}"
        self.status.update(text)
        return lambda step: self.status.update(f"{text}: step {step} of {self.steps}")


def size_of(row: Row) -> dict[str, str]:
    """The columns that every table begins with."""
    blocks = f"{row['blocks']}{'*' if row.get('extrapolated_from') else ''}"
    size = {"model": row["model"], "blocks": blocks, "seq": f"{row['seq_len']:,}"}
    return size | {"rank": str(row["rank"])}


def average(rows: list[Row], names: tuple[str, ...]) -> Row:
    """The first of these rows with the averages of these figures, where there are any."""
    values = {name: [row[name] for row in rows if row[name] is not None] for name in names}
    return rows[0] | {name: mean(each) if each else None for name, each in values.items()}


# Runs

AVERAGES = ("seconds", "footprint_peak_bytes", "peak_to_paper", "peak_to_mesp", "time_to_mebp")
RUN_NOTES = """
The paper's figures are of an iPhone 17 Pro, where its MeSP takes 1.28 times as long as MeBP.
net: the peak without Python and MLX as they are before anything is loaded. OpenBLAS is what the
trainer uses; MLX's own BLAS is some 50 times slower. *: extrapolated from the numbers of blocks
that were run; the plan is its own."""


def run_rows(bench: Bench) -> Iterator[Row]:
    options, rows = bench.options, []
    variants = find_variants(options["methods"], options["limits"], options["offload"])
    layers = sorted(set(options["layers"]))
    cells = [cell for count in layers or [None] for cell in bench.cells(count)]
    for cell, variant in itertools.product(cells, variants):
        tell = bench.doing(cell, variant)
        rows.append(measure(cell, variant, rows, bench.steps, bench.work, tell))
        compare(rows)
        yield rows[-1]
    whole = bench.cells() if len(layers) > 1 else []
    for cell, variant in itertools.product(whole, variants):
        if row := extrapolate(cell, variant, rows):
            rows.append(row)
            compare(rows)
            yield row


def find_variants(methods: tuple, limits: tuple, offload: str) -> list[Variant]:
    """In the order of the methods; MeBP first where its peak is a limit."""
    if "mebp" in limits:
        if "mebp" not in methods:
            raise MespError("--memory-limit mebp needs mebp among the --methods.")
        methods = sorted(methods, key=lambda method: method != "mebp")
    variants = []
    for method in methods:
        offloads = [each for each in OFFLOADS.get(method, ()) if offload in (each, "each")]
        choices = itertools.product(limits if method == "mesp" else ["auto"], offloads or [None])
        variants += [Variant(method, *choice) for choice in choices]
    return list(dict.fromkeys(variants))


def run_line(row: Row) -> dict[str, str]:
    peak, predicted = row["footprint_peak_bytes"], row["predicted_peak_bytes"]
    return {
        **size_of(row),
        "method": row["variant"],
        "steps": str(row["steps"] or "-"),
        "BLAS": row["blas"] or "-",
        "offload": row["offload"] or "-",
        "kept": decimal(row["kept_blocks"], 0),
        "s/step": decimal(row["seconds"]),
        "peak MB": megabytes(peak),
        "growth MB": megabytes(row["growth_bytes"]),
        "net MB": megabytes(peak - row["baseline_bytes"] if row["baseline_bytes"] else None),
        "MLX MB": megabytes(row["mlx_peak_bytes"]),
        "predicted MB": megabytes(predicted),
        "error": f"{predicted / peak - 1:+.0%}" if predicted and peak else "-",
        "mapped MB": megabytes(row["mapped_bytes"]),
        "written MB": megabytes(row["written_bytes"]),
        "paper MB": megabytes(row["paper_bytes"]),
        "of paper": decimal(row["peak_to_paper"]),
        "of MeSP": decimal(row["peak_to_mesp"]),
        "time of MeBP": decimal(row["time_to_mebp"]),
    }


def show_runs(rows: list[Row]) -> None:
    """The rows, and averages by method over those that were measured."""
    show([run_line(row) for row in rows])
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows if row["steps"]):
        mine = [row for row in rows if row["variant"] == variant and row["steps"]]
        line = run_line(average(mine, AVERAGES))
        figures = ("s/step", "peak MB", "of paper", "of MeSP", "time of MeBP")
        lines.append({"method": variant, "rows": str(len(mine)), **{c: line[c] for c in figures}})
    show(lines, title="Averages")
    kinds = " and ".join(dict.fromkeys(f"{row['device']} in {row['dtype']}" for row in rows))
    click.echo(f"\nMeasured on the {kinds}: {cpu()}, {platform.platform()}.{RUN_NOTES}")
    failed = [row for row in rows if row["error"]]
    for row in failed:
        what = f"{row['model']} {row['seq_len']} {row['variant']}"
        click.echo(f"{what} failed: {row['error']}", err=True)
    if failed:
        raise SystemExit(1)


# Storing h


def h_rows(bench: Bench) -> Iterator[Row]:
    for cell in bench.cells():
        settings = {"kind": "h", "steps": bench.steps}
        run = run_python(cell, settings, bench.work, bench.doing(cell, "h"))
        (figures,) = run.events
        del figures["type"]
        share = figures["h_seconds_of_block"] / figures["gradient_seconds_of_block"]
        h_bytes = {"h_bytes": cell.blocks * figures["h_bytes_of_block"]}
        yield {**cell.row(), "steps": bench.steps, **figures, **h_bytes, "share_of_time": share}


def show_h(rows: list[Row]) -> None:
    show(
        [
            {
                **size_of(row),
                "h of a block MB": decimal(row["h_bytes_of_block"] / 1e6, 3),
                "h of all MB": decimal(row["h_bytes"] / 1e6),
                "recomputing ms": decimal(row["h_seconds_of_block"] * 1e3),
                "gradient ms": decimal(row["gradient_seconds_of_block"] * 1e3, 1),
                "share": f"{row['share_of_time']:.2%}",
            }
            for row in rows
        ]
    )
    click.echo(
        "\nMB that storing h = xA of the seven projections would add, in float32, computed from "
        f"the shapes. Times are of one block, medians of {rows[0]['steps']}, measured with "
        f"mesp.reference on {cpu()}; the gradient's includes recomputing the block's forward pass."
    )


# MeZO's estimate

QUALITIES = ("cosine", "sign_agreement", "relative_error")


def mezo_rows(bench: Bench) -> Iterator[Row]:
    cells = [cell for count in bench.options["layers"] or [None] for cell in bench.cells(count)]
    draws = {"draws": bench.steps, "mezo_epsilon": SETTING["mezo_epsilon"]}
    for cell in cells:
        settings = {"kind": "mezo-quality", "steps": bench.steps}
        run = run_python(cell, settings, bench.work, bench.doing(cell, "mezo"))
        for event in run.events:
            del event["type"]
            yield {**cell.row(), **draws, **event}


def show_mezo(rows: list[Row]) -> None:
    cells = [list(members) for _, members in itertools.groupby(rows, size_of)]
    with_means = [[*cell, average(cell, QUALITIES) | {"layer": "mean"}] for cell in cells]
    show(
        [
            {
                **size_of(row),
                "layer": str(row["layer"]),
                "cosine": decimal(row["cosine"], 4),
                "equal signs": f"{row['sign_agreement']:.1%}",
                "relative error": decimal(row["relative_error"], 1),
            }
            for row in itertools.chain(*with_means)
        ]
    )
    click.echo(
        f"\nMeans over {rows[0]['draws']} draws of z, ε = {rows[0]['mezo_epsilon']:g}, with "
        f"mesp.reference in float32 on {cpu()}, after some exact steps (as B is zero at first, so "
        "is A's gradient)."
    )


# Convergence


def convergence_rows(bench: Bench) -> Iterator[Row]:
    for cell, method in itertools.product(bench.cells(), ENGINE_METHODS):
        rate = bench.options["learning_rate"] or CONVERGENCE_RATES[method]
        settings = engine_settings(cell, Variant(method)) | {
            "steps": bench.steps,
            "learning_rate": rate,
            "val_batches": VAL_BATCHES,
            "eval_every": max(1, bench.steps // CONVERGENCE_REPORTS),
        }
        run = run_program([engine_program()], settings, bench.work, bench.doing(cell, method))
        run_of = {"method": method, "data": bench.options["data"], "learning_rate": rate}
        losses = {"steps": len(run.steps), "losses": run.losses}
        held_out = [[record["step"], record["loss"]] for record in run.evals]
        yield {**cell.row(), **run_of, **losses, "held_out": held_out}


def show_convergence(rows: list[Row]) -> None:
    """Losses; MespError where MeSP and MeBP differ."""
    lines, differences = [], []
    for cell, members in itertools.groupby(rows, size_of):
        runs, since = list(members), 0
        for number, (step, _) in enumerate(runs[0]["held_out"]):
            training = [mean(run["losses"][since:step]) if step else None for run in runs]
            held_out = [run["held_out"][number][1] for run in runs]
            names = [f"{run['method']} {what}" for what in ("training", "held out") for run in runs]
            losses = [decimal(loss, 4) for loss in training + held_out]
            lines.append({**cell, "step": f"{step:,}", **dict(zip(names, losses, strict=True))})
            since = step
        mesp, mebp = (r["losses"] + [loss for _, loss in r["held_out"]] for r in runs[:2])
        differences += [abs(a - b) / abs(b) for a, b in zip(mesp, mebp, strict=True)]
    show(lines)
    rates = ", ".join(dict.fromkeys(f"{row['method']} {row['learning_rate']:g}" for row in rows))
    click.echo(
        f"\nNats a token, on {rows[0]['data']}; training: the mean since the line before. SGD, "
        f"learning rates: {rates}. Measured on {cpu()}.\n"
        f"MeSP and MeBP: largest relative difference of a loss {max(differences):.1e}."
    )
    if not all(difference <= AGREEMENT for difference in differences):
        raise MespError(f"MeSP and MeBP differ by more than {AGREEMENT:g}: one of them is wrong.")


# Output

RUN_PLOT = (None, {"peak, MB": "footprint_peak_bytes", "seconds a step": "seconds"})
H_PLOT = (None, {"h of all blocks, MB": "h_bytes", "recomputing h, of the time": "share_of_time"})
# By table: its rows, how they are shown, and of their plot x (None: the length or the rank) and y.
KINDS: dict[str, tuple[Callable, Callable, tuple[str | None, dict[str, str]]]] = {
    "h": (h_rows, show_h, H_PLOT),
    "mezo-quality": (mezo_rows, show_mezo, ("layer", {name: name for name in QUALITIES})),
    "convergence": (convergence_rows, show_convergence, ("step", {"held-out loss": "loss"})),
}


def show(lines: list[dict[str, str]], title: str = "") -> None:
    """A table that can be pasted into Markdown, without the columns that hold nothing."""
    if not lines:
        return
    table = Table(box=box.MARKDOWN)
    columns = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    for name in columns:
        table.add_column(name, justify="left" if lines[0][name][:1].isalpha() else "right")
    for line in lines:
        table.add_row(*(line[name] for name in columns))
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(table)
    click.echo(f"\n{title}\n" if title else "")
    click.echo("\n".join(line.rstrip() for line in capture.get().strip().splitlines()))


def points(row: Row) -> Iterator[Row]:
    """What is drawn of a row: itself and the paper's figure, or each of its held-out losses."""
    if "held_out" in row:
        yield from (row | {"step": step, "loss": loss} for step, loss in row["held_out"])
        return
    yield row
    if row.get("paper_bytes"):
        paper = {"variant": "paper's MeSP, iPhone", "footprint_peak_bytes": row["paper_bytes"]}
        yield row | paper | {"seconds": None}


def draw(path: Path, rows: list[Row], x: str | None, ys: dict[str, str]) -> None:
    """A panel for each y, with a line for each combination of the things that rows differ in."""
    from matplotlib.figure import Figure

    lengths, ranks = ({row[name] for row in rows} for name in ("seq_len", "rank"))
    x = x or ("rank" if len(ranks) > len(lengths) == 1 else "seq_len")
    drawn = [point for row in rows for point in points(row)]
    names = ("model", "variant" if "variant" in rows[0] else "method", "blocks", "seq_len", "rank")
    names = [n for n in names if n != x and len({row.get(n) for row in drawn}) > 1]
    figure = Figure(figsize=(9, 4 * len(ys)), layout="constrained")
    panels = figure.subplots(len(ys), squeeze=False).flat
    for axes, (label, y) in zip(panels, ys.items(), strict=True):
        shown = [row for row in drawn if row[y] is not None]
        lines: dict[str, set[tuple[float, float]]] = {}
        for row in shown:
            said = (f"{row[n]} {n}" if isinstance(row[n], int) else row[n] for n in names)
            scale = 1e6 if label.endswith("MB") else 1
            lines.setdefault(", ".join(said), set()).add((row[x], row[y] / scale))
        for number, (name, line) in enumerate(lines.items()):
            dashes = "o--" if number % 2 else "o-"  # for lines that lie on each other
            axes.plot(*zip(*sorted(line), strict=True), dashes, label=name or None)
        lowest, highest = (pick((row[y] for row in shown), default=1) for pick in (min, max))
        if 0 < LOG_FROM * lowest < highest:
            axes.set_yscale("log")
        axes.set(xlabel=x.replace("seq_len", "tokens"), ylabel=label.replace("_", " "))
        axes.grid(alpha=0.3)
        if names:
            axes.legend(fontsize="x-small")
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=150)
    with plain_os_errors(f"Cannot write {path}"):
        path.write_bytes(image.getvalue())


# The command


def method_list(value: str) -> tuple[str, ...]:
    for method in value.split(","):
        if method not in METHODS:
            raise click.BadParameter(f"there is no method {method!r}, only {', '.join(METHODS)}.")
    return tuple(value.split(","))


def memory_limit(value: str) -> str:
    if value in LIMITS:
        return value
    try:
        if 0 < float(value) < EVERYTHING_MB:
            return f"{float(value):g}"
    except ValueError:
        pass
    raise click.BadParameter(f"{value} is neither a number of MB nor one of {', '.join(LIMITS)}.")


@click.command(cls=ListOptions, help=__doc__)
@click.option("--table", type=click.Choice(list(TABLES)), default="memory", show_default=True)
@click.option(
    "--model", "models", multiple=True, metavar="NAME ...",
    help="Models as mesp-export takes them, or bundles.",
)  # fmt: skip
@click.option(
    "--seq-len", "seq_lens", multiple=True, type=click.IntRange(min=1), metavar="T ...",
    help="Tokens in a sequence.",
)  # fmt: skip
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(min=1), metavar="R ...", help="LoRA rank."
)
@click.option("--methods", type=method_list, metavar="METHOD,...", help="See above.")
@click.option(
    "--layers", multiple=True, type=click.IntRange(min=1), metavar="N ...",
    help="Only the first N blocks; with several N, the whole model is extrapolated from them.",
)  # fmt: skip
@click.option(
    "--offload", type=click.Choice(["auto", "none", "inputs", "all", "each"]),
    help="What is in a file on disk, where the method has it; auto: as the trainer sees fit.",
)  # fmt: skip
@click.option(
    "--memory-limit", "limits", multiple=True, type=memory_limit, metavar="MB ...",
    help="MeSP: see above.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), help="Steps of a run; of mezo-quality, draws of z."
)
@click.option("--data", metavar="FILE|DIR|NAME", help="Text for convergence.")
@click.option(
    "--learning-rate", type=click.FloatRange(min=0, min_open=True), metavar="RATE",
    help="For convergence, of all methods.",
)  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw them: *.png, *.svg or *.pdf.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=WORK, show_default="build/bench",
    help="Folder of the exported bundles and the offload files, on a disk (not tmpfs).",
)  # fmt: skip
def main(table: str, json_file: Path | None, plot: Path | None, work: Path, **given: Any) -> None:
    options = find_options(table, given)
    if plot:
        check_plot(plot)
    engine_program()
    for folder in (work, *(file.parent for file in (json_file, plot) if file)):
        with plain_os_errors(f"Cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)

    def save(rows: list[Row]) -> None:
        if json_file:
            command = shlex.join(["tools/bench.py", *sys.argv[1:]])
            content = {"table": table, "command": command, "rows": rows, "host": host()}
            with plain_os_errors(f"Cannot write {json_file}"):
                json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    make, show_table, axes = KINDS.get(table, (run_rows, show_runs, RUN_PLOT))
    rows: list[Row] = []
    save(rows)
    bench = Bench(options, work)
    with bench.status:
        for row in make(bench):
            rows.append(row)
            save(rows)
    if plot:
        draw(plot, rows, *axes)
    show_table(rows)


def find_options(table: str, given: dict[str, Any]) -> dict[str, Any]:
    """The table's defaults with what was given in their place; MespError for what has no use."""
    options = dict(TABLES[table])
    spelled = {param.name: param.opts[0] for param in main.params}
    for name, value in given.items():
        if value not in (None, ()):
            if name not in options:
                raise MespError(f"{spelled[name]} has no use in the table {table}.")
            options[name] = value
    return options


def check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise MespError(f"--plot {path} must end in .png, .svg or .pdf.")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MespError("Drawing needs matplotlib: `pip install 'mesp[report]'`.") from error


if __name__ == "__main__":
    main()
