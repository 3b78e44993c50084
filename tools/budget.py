"""What a budget of memory buys: one task, learned by the ways that a run can be made smaller.

    python tools/budget.py --plot budget.png

Each variant is one run from the same weights over the same examples, with the study's update
(tools/parity.py), and changes one thing. All adapters are judged by mlx-lm's model.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx
import numpy as np

from benchmarks.machine import host
from benchmarks.plot import check_plot, write
from benchmarks.show import show
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.engine.build import find_engine
from mesp.errors import plain_os_errors
from mesp.formatting import decimal, megabytes, perplexity
from mesp.runs.log import Run
from studies.scores import loss_of_text, model_with, other_text, score
from studies.tasks import CLASSIFICATION, SCALE, TASKS, Task, export
from studies.trainers import multiply_dequantized, with_mesp

STEPS = 120  # enough to tell the variants apart: 200 teach the first of them all of it
RANKS = (8, 4, 2)
LENGTHS = 8  # the shortest length is a multiple of so many tokens


class Variant(NamedTuple):
    """What it changes of the default, as the plot groups it, and how."""

    changes: str
    options: tuple[object, ...] = ()
    optimizer: str = "adamw8bit"
    layers: float = 1  # the share of the blocks that is trained, the last ones
    is_short: bool = False  # of the fewest tokens that hold every example
    is_single: bool = False  # one sequence a step, and as many more steps


VARIANTS = {
    "MeSP": Variant("default"),
    "AdamW": Variant("optimizer", optimizer="adamw"),
    "SGD": Variant("optimizer", optimizer="sgd"),
    "all on disk": Variant("place", ("--offload", "all")),
    "MeBP": Variant("method", ("--method", "mebp")),
    "MeZO": Variant("method", ("--method", "mezo"), optimizer="sgd"),
    **{f"rank {r}": Variant("rank", ("--rank", r, "--alpha", r * SCALE)) for r in RANKS},
    "half of the layers": Variant("part", layers=1 / 2),
    "a quarter of the layers": Variant("part", layers=1 / 4),
    "q,v": Variant("part", ("--projections", "q,v")),
    "q,k,v,o": Variant("part", ("--projections", "q,k,v,o")),
    "gate,up,down": Variant("part", ("--projections", "gate,up,down")),
    "shorter": Variant("sequences", is_short=True),
    "one a step": Variant("sequences", is_single=True),
}
# Okabe and Ito's colours, which those who see fewer of them tell apart too, and a shape for each.
STYLES = {
    "default": ("#000000", "*"),
    "optimizer": ("#e69f00", "o"),
    "place": ("#56b4e9", "s"),
    "method": ("#d55e00", "X"),
    "rank": ("#009e73", "^"),
    "part": ("#0072b2", "D"),
    "sequences": ("#cc79a7", "P"),
}
PANELS = [("peak MB", "peak_bytes", 1e6), ("seconds in all", "seconds", 1)]
RISES = (0, 14, -14, 28, -28, 42, -42)  # pixels that a name may stand above its point


@click.command(cls=Command)
@click.option("--model", default="demo", help="As mesp-export takes it.")
@click.option(
    "--task",
    "name",
    type=click.Choice([task.name for task in TASKS if task.answers]),
    default=CLASSIFICATION.name,
)
@click.option(
    "--variant",
    "names",
    multiple=True,
    type=click.Choice([*VARIANTS]),
    help="Only this one; may be repeated.  [default: all]",
)
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, help="Of each run.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw them: *.png, *.svg or *.pdf.")
@click.option("--out", type=click.Path(path_type=Path), default="build/budget", help="Replaced.")
def main(
    model: str,
    name: str,
    names: tuple[str, ...],
    steps: int,
    json_file: Path | None,
    plot: Path | None,
    out: Path,
) -> None:
    """Train a task in many ways, and say what each takes and what it comes to."""
    if plot:
        check_plot(plot)
    find_engine()
    mx.set_default_device(mx.cpu)
    multiply_dequantized()
    shutil.rmtree(out, ignore_errors=True)
    for folder in (out, *(file.parent for file in (json_file, plot) if file)):
        with plain_os_errors(f"Cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
    task = dataclasses.replace(next(task for task in TASKS if task.name == name), steps=steps)
    bundle = export(task, model, out, RANKS)
    chosen = [each for each in VARIANTS if not names or each in names]
    if any(VARIANTS[each].is_short for each in chosen):
        short = dataclasses.replace(task, seq_len=shortest(Bundle(bundle)))
        short_bundle = export(short, model, out / "short")
    rows: list[dict[str, Any]] = [{"variant": "untrained", **judge(Bundle(bundle), task, None)}]
    for number, each in enumerate(chosen):
        click.echo(f"{each} …", err=True)
        variant = VARIANTS[each]
        given = (short_bundle, short) if variant.is_short else (bundle, task)
        rows.append({"variant": each, **run(variant, *given, out / f"run-{number}")})
    if json_file:
        command = shlex.join(["tools/budget.py", *sys.argv[1:]])
        content = {"task": name, "model": model, "command": command, "rows": rows, "host": host()}
        with plain_os_errors(f"Cannot write {json_file}"):
            json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if plot:
        draw(plot, rows[1:])
    click.echo(f"{name}, {steps} steps of {task.batch_size} sequences of {task.seq_len} tokens")
    show([cells(row) for row in rows])


def shortest(bundle: Bundle) -> int:
    """The least length, a multiple of `LENGTHS`, at which no example is cut."""
    longest = max(int(bundle.examples(split)[:, 1].max()) for split in ("train", "valid"))
    return -(-(longest - 1) // LENGTHS) * LENGTHS  # the first token of an example is context


def judge(bundle: Bundle, task: Task, adapters: Path | None) -> dict[str, Any]:
    """The scores of adapters at the task, and their loss on another text."""
    model = model_with(bundle, adapters)
    found = score(model, bundle, task)
    other = loss_of_text(model, other_text(bundle, task, None), task.seq_len)
    return {"held_out_loss": found.loss, "exact": found.exact.mean(), "other_loss": other}


def run(variant: Variant, bundle: Path, task: Task, folder: Path) -> dict[str, Any]:
    """Trains, and says what it took and came to."""
    options, opened = variant.options, Bundle(bundle)
    if variant.layers < 1:
        layers = opened.architecture.num_hidden_layers
        options += ("--num-layers", max(1, round(variant.layers * layers)))
    if variant.is_single:
        task = dataclasses.replace(task, steps=task.steps * task.batch_size, batch_size=1)
    adapters = with_mesp(bundle, task, variant.optimizer, 0, folder, options).adapters
    log = Run.load(folder)
    return judge(opened, task, adapters) | {
        "peak_bytes": log.peak_bytes,
        "step_seconds": mean(step["seconds"] for step in log.steps),
        "seconds": log.end["seconds"],
        "seq_len": task.seq_len,
        "batch_size": task.batch_size,
        "settings": log.settings,
    }


def cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "variant": row["variant"],
        "held-out loss": decimal(row["held_out_loss"], 3),
        "to the letter": f"{row['exact']:.1%}",
        "other text": decimal(perplexity(row["other_loss"]), 1),
        "peak MB": megabytes(row.get("peak_bytes")),
        "s/step": decimal(row.get("step_seconds")),
        "s in all": decimal(row.get("seconds"), 0),
    }


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """What is answered to the letter, against memory and against time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    panels = figure.subplots(len(PANELS))
    for axes, (label, key, unit) in zip(panels, PANELS, strict=True):
        for row in rows:
            changes = VARIANTS[row["variant"]].changes
            color, marker = STYLES[changes]
            at = row[key] / unit, 100 * row["exact"]
            axes.scatter(*at, color=color, marker=marker, s=60, label=changes, zorder=2)
        axes.set(xlabel=label, ylabel="answered to the letter, %", ylim=(-8, 108))
        axes.margins(x=0.2)
        axes.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    figure.legend(once.values(), once, loc="outside upper center", ncols=len(once))
    figure.draw_without_rendering()  # places the panels, and so the points,
    figure.set_layout_engine("none")  # which names must not move again
    for axes, (_, key, unit) in zip(panels, PANELS, strict=True):
        at = np.array([(row[key] / unit, 100 * row["exact"]) for row in rows])
        write_names(axes, [row["variant"] for row in rows], axes.transData.transform(at))
    write(figure, path, dpi=100)


def write_names(axes: Any, names: list[str], points: np.ndarray) -> None:
    """A name beside each point, in pixels [n, 2], where it covers the least of names and points."""
    taken = np.hstack([points, np.full_like(points, 6)])  # middles, and half of the sizes
    for name, point in zip(names, points, strict=True):
        size = np.array([3 * len(name) + 2, 7])
        sides = [(sign * (size[0] + 9), rise) for rise in RISES for sign in (1, -1)]
        spots = np.add(point, [*sides, *((0, rise) for rise in RISES if rise)])
        apart = np.abs(spots[:, None] - taken[:, :2])
        spot = spots[(apart < size + taken[:, 2:]).all(-1).sum(-1).argmin()]
        taken = np.vstack([taken, [*spot, *size]])
        middle = {"ha": "center", "va": "center"}
        axes.annotate(name, spot, xycoords="figure pixels", fontsize="x-small", **middle)


if __name__ == "__main__":
    main()
