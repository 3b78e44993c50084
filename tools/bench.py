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
  length        MeSP by sequence length, the paper's sizes and other families
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
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click
from bench_runs import (
    ENGINE_METHODS,
    EVERYTHING_MB,
    LIMITS,
    OFFLOADS,
    PAPER_PEAK_MB,
    PAPER_RANK,
    PYTHON_METHODS,
    Cell,
    Row,
    Tell,
    Variant,
    compare,
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

from mesp.commands.shared_options import ListOptions
from mesp.errors import MespError, plain_os_errors

WORK = Path(__file__).resolve().parents[1] / "build" / "bench"
SIZES = tuple(PAPER_PEAK_MB)
MODELS = (*SIZES, "Llama-3.2-1B", "Llama-3.2-3B", "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B",
          "SmolLM2-135M", "SmolLM2-360M", "SmolLM2-1.7B", "Gemma-3-1B")  # fmt: skip
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
    "length": {**_RUNS, "models": MODELS, "seq_lens": tuple(PAPER_PEAK_MB[SIZES[0]])},
    "rank": {**_RUNS, "models": SIZES, "ranks": (4, 8, 16, 32)},
    "time": {**_RUNS, "methods": ("mebp", "mesp"), "limits": ("auto", "bar", "mebp", "all")},
    "h": {**_SIZE, "models": SIZES, "steps": 10},
    "mezo-quality": {**_DEMO, "layers": (), "steps": 10},
    "convergence": {**_DEMO, "steps": 1000, "data": "python-docs", "learning_rate": None},
}


# What is shown of a row, where it has it: heading, key and form. Bytes are shown in MB.
COLUMNS = {
    "model": ("model", "{}"),
    "blocks": ("blocks", "{}"),
    "from blocks": ("extrapolated_from", "{}"),
    "seq": ("seq_len", "{:,}"),
    "rank": ("rank", "{}"),
    "method": ("variant", "{}"),
    "steps": ("steps", "{}"),
    "BLAS": ("blas", "{}"),
    "offload": ("offload", "{}"),
    "kept": ("kept_blocks", "{}"),
    "s/step": ("seconds", "{:,.2f}"),
    "peak MB": ("footprint_peak_bytes", "{:,.1f}"),
    "growth MB": ("growth_bytes", "{:,.1f}"),
    "net MB": ("net_bytes", "{:,.1f}"),
    "MLX MB": ("mlx_peak_bytes", "{:,.1f}"),
    "predicted MB": ("predicted_peak_bytes", "{:,.1f}"),
    "error": ("prediction_error", "{:+.0%}"),
    "mapped MB": ("mapped_bytes", "{:,.1f}"),
    "written MB": ("written_bytes", "{:,.1f}"),
    "paper MB": ("paper_bytes", "{:,.1f}"),
    "of paper": ("peak_to_paper", "{:.2f}"),
    "of MeSP": ("peak_to_mesp", "{:.2f}"),
    "time of MeBP": ("time_to_mebp", "{:.2f}"),
    "h of a block MB": ("h_bytes_of_block", "{:,.3f}"),
    "h of all MB": ("h_bytes", "{:,.2f}"),
    "recomputing s": ("h_seconds_of_block", "{:.5f}"),
    "gradient s": ("gradient_seconds_of_block", "{:.4f}"),
    "share": ("share_of_time", "{:.2%}"),
    "layer": ("layer", "{}"),
    "draws": ("draws", "{}"),
    "cosine": ("cosine", "{:.4f}"),
    "equal signs": ("sign_agreement", "{:.1%}"),
    "relative error": ("relative_error", "{:,.1f}"),
    "learning rate": ("learning_rate", "{:g}"),
    "step": ("step", "{:,}"),
    "training loss": ("training_loss", "{:.4f}"),
    "held-out loss": ("held_out_loss", "{:.4f}"),
}
SIZE = ("model", "blocks", "seq", "rank")
AVERAGED = ("s/step", "peak MB", "of paper", "of MeSP", "time of MeBP", "cosine", "equal signs",
            "relative error")  # fmt: skip


class Bench:
    """The table's options, where its runs work, and how far they are, shown on a terminal."""

    def __init__(self, table: str, options: dict[str, Any], work: Path) -> None:
        self.table, self.options, self.work = table, options, work
        self.steps = options["steps"]
        self.layers = sorted(set(options.get("layers", ())))
        self.status = Console(stderr=True).status("Exporting")

    def cells(self, whole: bool = False) -> list[Cell]:
        counts = self.layers if self.layers and not whole else [None]
        return [cell for count in counts for cell in find_cells(self.options, count, self.work)]

    def doing(self, cell: Cell, what: object) -> Tell:
        """Says what begins; what is returned says at which step it is."""
        text = f"{cell.model}, {cell.seq_len} tokens, {what}"
        self.status.update(text)
        return lambda step: self.status.update(f"{text}: step {step} of {self.steps}")


# Runs


def run_rows(bench: Bench) -> Iterator[Row]:
    options, rows = bench.options, []
    variants = find_variants(options["methods"], options["limits"], options["offload"])
    for cell, variant in itertools.product(bench.cells(), variants):
        tell = bench.doing(cell, variant)
        rows.append(measure(cell, variant, rows, bench.steps, bench.work, tell))
        compare(rows)
        yield rows[-1]
    whole = bench.cells(whole=True) if len(bench.layers) > 1 else []
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


# The other tables


def python_rows(bench: Bench) -> Iterator[Row]:
    """A row for each result of bench_python.py, which has a kind of run named like the table."""
    for cell in bench.cells():
        settings = {"kind": bench.table, "steps": bench.steps}
        run = run_python(cell, settings, bench.work, bench.doing(cell, bench.table))
        for event in run.events:
            del event["type"]
            yield {**cell.row(), **event}


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
        yield cell.row() | {
            "method": method,
            "variant": method,
            "data": bench.options["data"],
            "learning_rate": rate,
            "steps": len(run.steps),
            "losses": run.losses,
            "held_out": [[record["step"], record["loss"]] for record in run.evals],
        }


def check_agreement(rows: list[Row]) -> None:
    """Says how far MeSP's and MeBP's losses are from each other; MespError where too far."""
    differences = []
    for cell in grouped(rows, SIZE):
        mesp, mebp = (r["losses"] + [loss for _, loss in r["held_out"]] for r in cell[:2])
        differences += [abs(a - b) / abs(b) for a, b in zip(mesp, mebp, strict=True)]
    click.echo(f"MeSP and MeBP: largest relative difference of a loss {max(differences):.1e}.")
    if not all(difference <= AGREEMENT for difference in differences):
        raise MespError(f"MeSP and MeBP differ by more than {AGREEMENT:g}: one of them is wrong.")


# Output


class Kind(NamedTuple):
    """How rows of a table are made, drawn by headings of COLUMNS, and explained."""

    rows: Callable[[Bench], Iterator[Row]]
    x: str | None  # None: the length, or the rank where only that varies
    ys: tuple[str, ...]
    note: str


RUNS = Kind(
    run_rows,
    None,
    ("peak MB", "s/step"),
    """The paper's figures are of an iPhone 17 Pro, where its MeSP takes 1.28 times as long as MeBP.
Net is the peak without Python and MLX as they are before anything is loaded. The trainer uses
OpenBLAS; MLX's own BLAS is some 50 times slower. A row with "from blocks" has not been run, but is
extrapolated from those numbers of blocks, beside the plan for all.""",
)
KINDS = {
    "h": Kind(
        python_rows,
        None,
        ("h of all MB", "share"),
        """MB are what storing h = xA of a block's modules would add, in float32. Times are of
one block, medians with mesp.reference; the gradient's includes recomputing its forward pass.""",
    ),
    "mezo-quality": Kind(
        python_rows,
        "layer",
        ("cosine", "equal signs", "relative error"),
        """Means over draws of z, with mesp.reference in float32, after some exact steps (as B is
zero at first, so is A's gradient).""",
    ),
    "convergence": Kind(
        convergence_rows,
        "step",
        ("held-out loss",),
        "Nats a token, with SGD. Training: the mean since the line before of the same method.",
    ),
}


def present(rows: list[Row], kind: Kind) -> None:
    """The rows, averages over those that were measured, and what there is to note."""
    show([texts(point) for point in drawn(rows)])
    averaged = [heading for heading in AVERAGED if COLUMNS[heading][0] in rows[0]]
    if averaged:
        click.echo("\nAverages")
        by = ("method",) if "variant" in rows[0] else SIZE
        groups = grouped([row for row in rows if row.get("steps", 1)], by)
        show([averages(each, by, averaged) for each in groups])
    on = dict.fromkeys(f"{r['device']} in {r['dtype']}, {r['cpu']}, {r['os']}" for r in rows)
    click.echo(f"\nMeasured on the {' and the '.join(on)}.\n{kind.note}")


def drawn(rows: list[Row]) -> list[Row]:
    """The rows; in the place of one with several held-out losses, one for each, by step."""
    points = [row for row in rows if "held_out" not in row]
    for row in rows:
        since = 0
        for step, loss in row.get("held_out", ()):
            training = mean(row["losses"][since:step]) if step else None
            now = {"step": step, "training_loss": training, "held_out_loss": loss}
            points.append(row | now)
            since = step
    return sorted(points, key=lambda point: point.get("step", 0))


def texts(row: Row) -> dict[str, str]:
    """A row's line in a table: text by heading."""
    return {
        heading: "-" if row[key] is None else form.format(in_unit(heading, row[key]))
        for heading, (key, form) in COLUMNS.items()
        if key in row
    }


def in_unit(heading: str, value: Any) -> Any:
    return value / 1e6 if heading.endswith("MB") else value


def averages(rows: list[Row], by: tuple[str, ...], headings: list[str]) -> dict[str, str]:
    """A line for rows that have the same under the headings `by`: how many, and their means."""
    line = {name: texts(rows[0])[name] for name in by} | {"rows": str(len(rows))}
    for key, _ in map(COLUMNS.get, headings):
        values = [row[key] for row in rows if row[key] is not None]
        line |= texts({key: mean(values) if values else None})
    return line


def grouped(rows: list[Row], headings: tuple[str, ...]) -> list[list[Row]]:
    """The rows that have the same under these headings, together."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[COLUMNS[name][0]] for name in headings), []).append(row)
    return list(groups.values())


def show(lines: list[dict[str, str]]) -> None:
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
    click.echo()
    click.echo("\n".join(line.rstrip() for line in capture.get().strip().splitlines()))


def draw(path: Path, rows: list[Row], kind: Kind) -> None:
    """A panel for each y, with a line for each combination of the things that rows differ in."""
    from matplotlib.figure import Figure

    lengths, ranks = ({row[name] for row in rows} for name in ("seq_len", "rank"))
    x = kind.x or ("rank" if len(ranks) > len(lengths) == 1 else "seq_len")
    points = drawn(rows)
    for row in rows:
        if row.get("paper_bytes"):
            paper = {"variant": "paper's MeSP, iPhone", "footprint_peak_bytes": row["paper_bytes"]}
            points.append(row | paper | {"seconds": None})
    names = ("model", "variant", "blocks", "seq_len", "rank")
    names = [n for n in names if n != x and len({row.get(n) for row in points}) > 1]
    figure = Figure(figsize=(9, 4 * len(kind.ys)), layout="constrained")
    panels = figure.subplots(len(kind.ys), squeeze=False).flat
    for axes, heading in zip(panels, kind.ys, strict=True):
        key, lines = COLUMNS[heading][0], {}
        for row in points:
            if row[key] is not None:
                label = ", ".join(
                    f"{row[n]} {n}" if isinstance(row[n], int) else row[n] for n in names
                )
                lines.setdefault(label, set()).add((row[x], in_unit(heading, row[key])))
        for number, (label, line) in enumerate(lines.items()):
            dashes = "o--" if number % 2 else "o-"  # for lines that lie on each other
            axes.plot(*zip(*sorted(line), strict=True), dashes, label=label or heading)
        heights = [height for line in lines.values() for _, height in line] or [1]
        if 0 < LOG_FROM * min(heights) < max(heights):
            axes.set_yscale("log")
        axes.set(xlabel=x.replace("seq_len", "tokens"), ylabel=heading)
        if kind.x is None:
            axes.set_xticks(sorted({row[x] for row in points}))
        axes.grid(alpha=0.3)
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
    failed = [row for row in rows if row.get("error")]
    for row in failed:
        what = f"{row['model']} {row['seq_len']} {row['variant']}"
        click.echo(f"{what} failed: {row['error']}", err=True)
    raise SystemExit(1 if failed else 0)


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
