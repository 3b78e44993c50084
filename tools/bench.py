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
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import click
from bench_runs import (
    DEVICE,
    DTYPE,
    ENGINE_METHODS,
    EVERYTHING_MB,
    LIMITS,
    PAPER_PEAK_MB,
    PAPER_RANK,
    PYTHON_METHODS,
    SETTING,
    Cell,
    Row,
    Variant,
    compare,
    cpu,
    engine_program,
    extrapolate,
    find_cells,
    find_openblas,
    host,
    measure,
    run_engine,
    run_python,
)
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mesp.errors import MespError, plain_os_errors
from mesp.export import ListOptions
from mesp.log import decimal, megabytes
from mesp.models import KNOWN, Architecture

WORK = Path(__file__).resolve().parents[1] / "build" / "bench"
SIZES = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B")
METHODS = (*ENGINE_METHODS, *PYTHON_METHODS)
OFFLOADS: dict[str, list[str | None]] = {
    "auto": [None],
    "none": ["none"],
    "inputs": ["inputs"],
    "all": ["all"],
    "each": ["none", "inputs", "all"],
}
PAPER_TIME_TO_MEBP = 1.28
LOG_FROM = 10  # ratio of peaks above which a plot is logarithmic
TABLE_WIDTH = 250  # columns, where there is no terminal

# MeZO's estimate is so noisy that it diverges at the exact methods' learning rate.
CONVERGENCE_RATES = {"mesp": 0.1, "mebp": 0.1, "mezo": 1e-4}
CONVERGENCE_REPORTS = 10
VAL_BATCHES = 25
AGREEMENT = 1e-4  # relative: losses of MeSP and MeBP

NO_OPENBLAS = (
    "No OpenBLAS with cblas_sgemm was found to preload (Debian has it in libopenblas0): "
    "mesp-paper and mlx-lm's fast rows ran on MLX's reference BLAS, some 50 times slower."
)

_SIZE = {"models": SIZES[:1], "seq_lens": (256,), "ranks": (PAPER_RANK,), "steps": 3}
_RUNS = {**_SIZE, "methods": ("mesp",), "layers": (), "offload": "auto", "limits": ("auto",)}
# The options that apply to a table, with their defaults.
TABLES: dict[str, dict[str, Any]] = {
    "memory": {**_RUNS, "methods": ENGINE_METHODS},
    "length": {**_RUNS, "models": SIZES, "seq_lens": tuple(PAPER_PEAK_MB[SIZES[0]])},
    "rank": {**_RUNS, "models": SIZES, "ranks": (4, 8, 16, 32)},
    "time": {**_RUNS, "methods": ("mebp", "mesp"), "limits": ("auto", "bar", "mebp", "all")},
    "h": {**_SIZE, "models": SIZES, "steps": 10},
    "mezo-quality": {**_SIZE, "models": ("demo",), "layers": (), "steps": 10},
    "convergence": {
        **_SIZE,
        "models": ("demo",),
        "steps": 1000,
        "data": "python-docs",
        "learning_rate": None,
    },
}


class Bench:
    """Where runs work, how many steps they take, and how far they are, shown on a terminal."""

    def __init__(self, work: Path, steps: int, save: Callable[[list[dict]], None]) -> None:
        self.work, self.steps, self.save = work, steps, save
        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=None)

    def say(self, what: str, total: int | None = None) -> None:
        self.progress.update(self.task, description=what, total=total, completed=0)

    def step(self, number: int) -> None:
        self.progress.update(self.task, completed=number)

    def cells(
        self, options: dict[str, Any], layers: int | None, data: str | None = None
    ) -> list[Cell]:
        self.say("Exporting")
        size = (options["seq_lens"], options["ranks"])
        return find_cells(options["models"], layers, *size, self.work, data)


# Tables of runs


def run_rows(bench: Bench, options: dict[str, Any]) -> list[dict[str, Any]]:
    variants = find_variants(options["methods"], options["limits"], options["offload"])
    layers = sorted(set(options["layers"]))
    cells = [cell for count in layers or [None] for cell in bench.cells(options, count)]
    rows: list[Row] = []

    def add(row: Row | None) -> None:
        if row:
            rows.append(row)
            compare(rows)
            bench.save([asdict(row) for row in rows])

    for cell, variant in itertools.product(cells, variants):
        bench.say(f"{cell.model} {cell.seq_len} {variant}", bench.steps)
        add(measure(cell, variant, rows, bench.steps, bench.work, bench.step))
    if len(layers) > 1:
        for cell, variant in itertools.product(bench.cells(options, None), variants):
            bench.say(f"{cell.model} {cell.seq_len} {variant}, whole")
            add(extrapolate(cell, variant, rows, bench.work))
    return [asdict(row) for row in rows]


def find_variants(methods: Iterable[str], limits: Iterable[str], offload: str) -> list[Variant]:
    """In the order of the methods; MeBP first where its peak is a limit."""
    methods = list(dict.fromkeys(methods))
    if "mebp" in limits:
        if "mebp" not in methods:
            raise MespError("--memory-limit mebp needs mebp among the --methods.")
        methods.sort(key=lambda method: method != "mebp")
    variants = []
    for method in methods:
        if method == "mesp":
            choices = itertools.product(dict.fromkeys(limits), OFFLOADS[offload])
            variants += [Variant(method, *choice) for choice in choices]
        else:
            variants.append(Variant(method))
    return variants


COLUMNS: dict[str, Callable[[Row], str]] = {
    "model": lambda row: row.model,
    "blocks": lambda row: f"{row.blocks}*" if row.extrapolated_from else str(row.blocks),
    "seq": lambda row: f"{row.seq_len:,}",
    "rank": lambda row: str(row.rank),
    "method": lambda row: row.variant,
    "offload": lambda row: row.offload or "-",
    "kept": lambda row: decimal(row.kept_blocks, 0),
    "s/step": lambda row: decimal(row.seconds),
    "peak MB": lambda row: megabytes(row.footprint_peak_bytes),
    "growth MB": lambda row: megabytes(row.growth_bytes),
    "net MB": lambda row: megabytes(row.net_bytes),
    "MLX MB": lambda row: megabytes(row.mlx_peak_bytes),
    "predicted MB": lambda row: megabytes(row.predicted_peak_bytes),
    "error": lambda row: percent(row.prediction_error),
    "mapped MB": lambda row: megabytes(row.mapped_bytes),
    "written MB": lambda row: megabytes(row.written_bytes),
    "paper MB": lambda row: megabytes(row.paper_bytes),
    "of paper": lambda row: decimal(row.peak_to_paper),
    "of MeSP": lambda row: decimal(row.peak_to_mesp),
    "time of MeBP": lambda row: decimal(row.time_to_mebp),
}
AVERAGES: dict[str, tuple[str, Callable[[float | None], str]]] = {
    "s/step": ("seconds", decimal),
    "peak MB": ("footprint_peak_bytes", megabytes),
    "of paper": ("peak_to_paper", decimal),
    "of MeSP": ("peak_to_mesp", decimal),
    "time of MeBP": ("time_to_mebp", decimal),
}


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.0%}"


def show_rows(rows: list[dict[str, Any]]) -> None:
    """The rows, averages by method over those that were measured, and what there is to note."""
    rows = [Row(**row) for row in rows]
    show(list(COLUMNS), [[text(row) for text in COLUMNS.values()] for row in rows])
    measured = [row for row in rows if row.error is None and row.extrapolated_from is None]
    lines = []
    for variant in dict.fromkeys(row.variant for row in measured):
        mine = [row for row in measured if row.variant == variant]
        line = [variant, str(len(mine))]
        for name, text in AVERAGES.values():
            values = [value for row in mine if (value := getattr(row, name)) is not None]
            line.append(text(mean(values) if values else None))
        lines.append(line)
    if lines:
        show(["method", "rows", *AVERAGES], lines, title="Averages")

    kinds = " and ".join(dict.fromkeys(f"{row.device} in {row.dtype}" for row in rows))
    click.echo(f"\nMeasured on the {kinds}: {cpu()}, {platform.platform()}.")
    if any(row.paper_bytes for row in rows):
        click.echo(
            "The paper's figures are of an iPhone 17 Pro; there, MeSP takes "
            f"{PAPER_TIME_TO_MEBP} times as long as MeBP."
        )
    if any(row.baseline_bytes for row in rows):
        click.echo("net: the peak without Python and MLX as they are before anything is loaded.")
    if any(row.extrapolated_from for row in rows):
        click.echo("*: extrapolated from the numbers of blocks that were run; the plan is its own.")
    if sys.platform == "linux" and find_openblas() is None and any(row.blas for row in rows):
        click.echo(NO_OPENBLAS)
    for row in rows:
        if row.error:
            click.echo(f"{row.model} {row.seq_len} {row.variant} failed: {row.error}", err=True)
    if any(row.error for row in rows):
        raise SystemExit(1)


def show(columns: list[str], lines: list[list[str]], title: str = "") -> None:
    """A table that can be pasted into Markdown, without the columns that hold nothing."""
    table = Table(box=box.MARKDOWN)
    kept = [i for i in range(len(columns)) if any(line[i] != "-" for line in lines)]
    for i in kept:
        table.add_column(columns[i], justify="left" if lines[0][i][:1].isalpha() else "right")
    for line in lines:
        table.add_row(*(line[i] for i in kept))
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(table)
    click.echo(f"\n{title}\n" if title else "")
    click.echo("\n".join(line.rstrip() for line in capture.get().strip().splitlines()))


# Storing h


def h_rows(bench: Bench, options: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for model in options["models"]:
        if model not in KNOWN:
            raise MespError(f"The table h takes the models {', '.join(KNOWN)}, not {model}.")
    for model, *size in itertools.product(*map(options.get, ("models", "seq_lens", "ranks"))):
        bench.say(f"{model} {size[0]} h")
        settings = {"kind": "h", "model": model, "steps": bench.steps}
        settings |= dict(zip(("seq_len", "rank"), size, strict=True))
        (event,), _, _ = run_python(settings, True, bench.work, bench.step)
        arch = Architecture.from_config(KNOWN[model][1])
        block = len(arch.projections()) * size[0] * size[1] * 4
        rows.append(
            {
                **{name: settings[name] for name in ("model", "seq_len", "rank")},
                "blocks": arch.num_hidden_layers,
                "h_bytes_of_block": block,
                "h_bytes": block * arch.num_hidden_layers,
                "h_seconds_of_block": event["h_seconds"],
                "gradient_seconds_of_block": event["gradient_seconds"],
                "share_of_time": event["h_seconds"] / event["gradient_seconds"],
                **measured_on(),
            }
        )
        bench.save(rows)
    return rows


def measured_on() -> dict[str, str]:
    return {"device": DEVICE, "dtype": DTYPE, "cpu": cpu(), "os": platform.platform()}


def show_h(rows: list[dict[str, Any]]) -> None:
    columns = {
        "model": lambda row: row["model"],
        "blocks": lambda row: str(row["blocks"]),
        "seq": lambda row: f"{row['seq_len']:,}",
        "rank": lambda row: str(row["rank"]),
        "h of a block MB": lambda row: decimal(row["h_bytes_of_block"] / 1e6, 3),
        "h of all MB": lambda row: decimal(row["h_bytes"] / 1e6),
        "recomputing ms": lambda row: decimal(row["h_seconds_of_block"] * 1e3),
        "gradient ms": lambda row: decimal(row["gradient_seconds_of_block"] * 1e3, 1),
        "share": lambda row: f"{row['share_of_time']:.2%}",
    }
    show(list(columns), [[text(row) for text in columns.values()] for row in rows])
    click.echo(
        "\nMB that storing h = xA of the seven projections would add, in float32, computed from "
        f"the shapes. Times are of one block, measured with mesp.reference on {cpu()}; the "
        "gradient's includes recomputing the block's forward pass."
    )


# MeZO's estimate

QUALITIES = ("cosine", "sign_agreement", "relative_error")


def mezo_rows(bench: Bench, options: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for layers in options["layers"] or [None]:
        for cell in bench.cells(options, layers):
            bench.say(f"{cell.model} {cell.seq_len} mezo", bench.steps)
            size = {"seq_len": cell.seq_len, "rank": cell.rank}
            settings = {"kind": "mezo-quality", "bundle": str(cell.bundle), **size}
            events, _, _ = run_python(
                {**settings, "steps": bench.steps}, True, bench.work, bench.step
            )
            which = {"model": cell.model, "blocks": cell.blocks, **size}
            draws = {"draws": bench.steps, "mezo_epsilon": SETTING["mezo_epsilon"]}
            for event in events:
                if event.pop("event") == "layer":
                    rows.append({**which, **draws, **event, **measured_on()})
            bench.save(rows)
    return rows


def by_cell(rows: list[dict[str, Any]]) -> list[tuple[list[str], list[dict[str, Any]]]]:
    """Rows of one model, number of blocks, length and rank, with these as text."""
    names = ("model", "blocks", "seq_len", "rank")
    groups = itertools.groupby(rows, lambda row: [str(row[name]) for name in names])
    return [(cell, list(members)) for cell, members in groups]


def show_mezo(rows: list[dict[str, Any]]) -> None:
    lines = []
    for cell, members in by_cell(rows):
        means = {name: mean(row[name] for row in members) for name in QUALITIES}
        for row in (*members, {"layer": "mean", **means}):
            cosine, signs, error = (row[name] for name in QUALITIES)
            line = [str(row["layer"]), decimal(cosine, 4), f"{signs:.1%}", decimal(error, 1)]
            lines.append(cell + line)
    columns = ["model", "blocks", "seq", "rank", "layer", "cosine", "equal signs"]
    show([*columns, "relative error"], lines)
    click.echo(
        f"\nMeans over {rows[0]['draws']} draws of z, ε = {rows[0]['mezo_epsilon']:g}, with "
        "mesp.reference in float32, after some exact steps (as B is zero at first, so is A's "
        "gradient)."
    )


# Convergence


def convergence_rows(bench: Bench, options: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    cells = bench.cells(options, None, options["data"])
    for cell, method in itertools.product(cells, ENGINE_METHODS):
        bench.say(f"{cell.model} {cell.seq_len} {method}", bench.steps)
        settings = {
            "method": method,
            "steps": bench.steps,
            "learning_rate": options["learning_rate"] or CONVERGENCE_RATES[method],
            "val_batches": VAL_BATCHES,
            "eval_every": max(1, bench.steps // CONVERGENCE_REPORTS),
        }
        records = run_engine(cell, bench.work, bench.step, **settings)
        rows.append(
            {
                "model": cell.model,
                "blocks": cell.blocks,
                "seq_len": cell.seq_len,
                "rank": cell.rank,
                "method": method,
                "data": options["data"],
                "learning_rate": settings["learning_rate"],
                "losses": [r["loss"] for r in records if r["type"] == "step"],
                "held_out": [[r["step"], r["loss"]] for r in records if r["type"] == "eval"],
                **measured_on(),
            }
        )
        bench.save(rows)
    return rows


def show_convergence(rows: list[dict[str, Any]]) -> None:
    """Losses; MespError where MeSP and MeBP differ."""
    differences = []
    for cell, members in by_cell(rows):
        steps = [step for step, _ in members[0]["held_out"]]
        lines = []
        for number, step in enumerate(steps):
            since = slice(steps[number - 1] if number else 0, step)
            training = [row["losses"][since] for row in members]
            held_out = [row["held_out"][number][1] for row in members]
            means = [decimal(mean(losses) if losses else None, 4) for losses in training]
            lines.append([f"{step:,}", *means, *(decimal(loss, 4) for loss in held_out)])
        columns = [f"{r['method']} {what}" for what in ("training", "held out") for r in members]
        show(["step", *columns], lines, title=f"{cell[0]}, {cell[2]} tokens, rank {cell[3]}")
        rates = ", ".join(f"{row['method']} {row['learning_rate']:g}" for row in members)
        differences.append(difference(*members[:2]))
        click.echo(
            f"\nNats a token, on {members[0]['data']}; training: the mean since the line before. "
            f"SGD, learning rates: {rates}.\n"
            f"MeSP and MeBP: largest relative difference of a loss {differences[-1]:.1e}."
        )
    if not max(differences) <= AGREEMENT:
        raise MespError(f"MeSP and MeBP differ by more than {AGREEMENT:g}: one of them is wrong.")


def difference(row: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest relative difference of two runs' losses, training and held out."""
    mine, its = (r["losses"] + [loss for _, loss in r["held_out"]] for r in (row, other))
    return max(abs(a - b) / abs(b) for a, b in zip(mine, its, strict=True))


# Plots


def plot_rows(figure: Any, rows: list[dict[str, Any]]) -> None:
    """Peak above time, a column a model, by length (by rank, where only that varies)."""
    rows = [row for row in rows if row["footprint_peak_bytes"] is not None]
    if not rows:
        return
    from matplotlib import colormaps

    models, lengths, ranks = (
        sorted({row[name] for row in rows}) for name in ("model", "seq_len", "rank")
    )
    x = "rank" if len(ranks) > len(lengths) == 1 else "seq_len"
    several_ranks = x == "seq_len" and len(ranks) > 1
    several_blocks = len({(row["model"], row["blocks"]) for row in rows}) > len(models)

    def name(row: dict[str, Any]) -> str:
        blocks = f", {row['blocks']} blocks" if several_blocks else ""
        return row["variant"] + blocks + (f", rank {row['rank']}" if several_ranks else "")

    names = list(dict.fromkeys(map(name, rows)))
    all_peaks = [row["footprint_peak_bytes"] for row in rows]
    scale = "log" if max(all_peaks) > LOG_FROM * min(all_peaks) else "linear"
    for axes, model in zip(figure.subplots(2, len(models), squeeze=False).T, models, strict=True):
        mine = sorted((row for row in rows if row["model"] == model), key=lambda row: row[x])
        for number, line in enumerate(names):
            points = [row for row in mine if name(row) == line]
            xs = [row[x] for row in points]
            peaks = [row["footprint_peak_bytes"] / 1e6 for row in points]
            for each, ys in zip(axes, (peaks, [row["seconds"] for row in points]), strict=True):
                color = colormaps["tab20"](number % 20)
                each.plot(xs, ys, "o-", color=color, label=line)
        paper = {row[x]: row["paper_bytes"] / 1e6 for row in mine if row["paper_bytes"]}
        if paper:
            axes[0].plot(*zip(*paper.items(), strict=True), "ks--", label="paper's MeSP, iPhone")
        axes[0].set(title=model, ylabel="peak, MB")
        axes[1].set(ylabel="seconds a step", xlabel="rank" if x == "rank" else "tokens")
        axes[0].set_yscale(scale)
        axes[1].set_ylim(bottom=0)
        for each in axes:
            each.set(xticks=ranks if x == "rank" else lengths)
        axes[0].legend(fontsize="x-small")


def plot_h(figure: Any, rows: list[dict[str, Any]]) -> None:
    stored, share = figure.subplots(2, 1, sharex=True)
    names = [f"{row['model']}\n{row['seq_len']} tokens, rank {row['rank']}" for row in rows]
    stored.bar(names, [row["h_bytes"] / 1e6 for row in rows])
    stored.set(ylabel="h of all blocks, MB")
    share.bar(names, [100 * row["share_of_time"] for row in rows])
    share.set(ylabel="recomputing h, % of the gradient's time")
    share.tick_params("x", labelsize="x-small", rotation=30)


def plot_mezo(figure: Any, rows: list[dict[str, Any]]) -> None:
    for axes, name in zip(figure.subplots(len(QUALITIES), 1, sharex=True), QUALITIES, strict=True):
        for cell, members in by_cell(rows):
            label = f"{cell[0]}, {cell[1]} blocks, {cell[2]} tokens, rank {cell[3]}"
            axes.plot([r["layer"] for r in members], [r[name] for r in members], "o-", label=label)
        axes.set(ylabel=name.replace("_", " "), xlabel="layer")
        axes.legend(fontsize="x-small")


def plot_convergence(figure: Any, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for cell, members in by_cell(rows):
        for row in members:
            line = "o--" if row["method"] == "mebp" else "o-"  # MeBP's lies on MeSP's
            label = f"{cell[0]}, {row['method']}, learning rate {row['learning_rate']:g}"
            axes.plot(*zip(*row["held_out"], strict=True), line, label=label)
    axes.set(xlabel="step", ylabel="held-out loss, nats a token")
    axes.legend()


def draw(path: Path, plot: Callable[[Any, list[dict[str, Any]]], None], rows: list[dict]) -> None:
    from matplotlib.figure import Figure

    models = len({row["model"] for row in rows})
    figure = Figure(figsize=(4.5 * max(2, models), 7), layout="constrained")
    plot(figure, rows)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix[1:], dpi=150)
    with plain_os_errors(f"Cannot write {path}"):
        path.write_bytes(image.getvalue())


# The command


class MethodList(click.ParamType):
    name = "methods"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        methods = tuple(value.split(",")) if isinstance(value, str) else value
        for method in methods:
            if method not in METHODS:
                self.fail(f"there is no method {method!r}, only {', '.join(METHODS)}.", param, ctx)
        return methods


class MemoryLimit(click.ParamType):
    name = "limit"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value in LIMITS:
            return value
        try:
            if 0 < float(value) < EVERYTHING_MB:
                return f"{float(value):g}"
        except ValueError:
            pass
        self.fail(f"{value} is neither a number of MB nor one of {', '.join(LIMITS)}.", param, ctx)


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
@click.option("--methods", type=MethodList(), metavar="METHOD,...", help="See above.")
@click.option(
    "--layers", multiple=True, type=click.IntRange(min=1), metavar="N ...",
    help="Only the first N blocks; with several N, the whole model is extrapolated from them.",
)  # fmt: skip
@click.option(
    "--offload", type=click.Choice(list(OFFLOADS)),
    help="MeSP: what is in a file on disk; auto: as the trainer sees fit.",
)  # fmt: skip
@click.option(
    "--memory-limit", "limits", multiple=True, type=MemoryLimit(), metavar="MB ...",
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

    def save(rows: list[dict[str, Any]]) -> None:
        if json_file:
            command = shlex.join(["tools/bench.py", *sys.argv[1:]])
            content = {"table": table, "command": command, "rows": rows, "host": host()}
            with plain_os_errors(f"Cannot write {json_file}"):
                json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    make, show_table, plot_table = {
        "h": (h_rows, show_h, plot_h),
        "mezo-quality": (mezo_rows, show_mezo, plot_mezo),
        "convergence": (convergence_rows, show_convergence, plot_convergence),
    }.get(table, (run_rows, show_rows, plot_rows))
    save([])
    bench = Bench(work, options["steps"], save)
    with bench.progress:
        rows = make(bench, options)
    if plot:
        draw(plot, plot_table, rows)
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
