"""Whether MeSP's fine-tuning is as good as that of other trainers.

    python tools/parity.py            the study
    python tools/parity.py --quick    MeSP against mlx-lm's trainer, in half a minute

All train the same 4-bit weights from the same adapters on the same sequences in the same order,
with the same update. Two results are called equivalent where the 95% interval of their paired
difference, by bootstrap over held-out sequences, lies within the margins below; the table says so.
Ends with exit code 1 where two that compute the same gradients in float32 are not equivalent.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx
import numpy as np

from mesp.bundle.reader import Bundle
from mesp.engine.prompts import load_tokenizer
from mesp.formatting import decimal, perplexity
from studies.scores import Difference, Scores, loss_of_text, paired, score
from studies.tasks import EXTRACTION, TASKS, Task, export
from studies.trainers import Trained, multiply_dequantized, with_mesp, with_mlx_lm, with_peft

# Declared before any run: nats a token of held-out loss, and the share answered to the letter. Less
# than that is nothing to choose a trainer for.
LOSS_MARGIN = 0.01
EXACT_MARGIN = 0.02

QUICK = dataclasses.replace(EXTRACTION, steps=8, held_out=20)
TEXT_WINDOWS = 40  # of the text whose perplexity tells what is forgotten
OPTIMIZERS = ("adamw", "sgd")


class Trainer(NamedTuple):
    """How it trains, the optimizers that it is compared under, whether it takes the same gradients,
    and whether with every seed or the first alone."""

    train: Callable[[Path, Task, str, int, Path], Trained]
    optimizers: tuple[str, ...] = ("adamw",)
    is_exact: bool = True
    every_seed: bool = False


BASELINE = "mlx-lm"
QUICK_TRAINERS = {
    BASELINE: Trainer(with_mlx_lm, OPTIMIZERS, every_seed=True),
    "MeSP": Trainer(with_mesp, OPTIMIZERS, every_seed=True),
}
TRAINERS = QUICK_TRAINERS | {
    "MeSP, all on disk": Trainer(partial(with_mesp, options=("--offload", "all"))),
    "MeSP, adapters in bfloat16": Trainer(
        partial(with_mesp, options=("--lora-dtype", "bfloat16")), is_exact=False
    ),
    "MeZO": Trainer(
        partial(with_mesp, options=("--method", "mezo")), optimizers=("sgd",), is_exact=False
    ),
}


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="One task, one seed, few steps, mlx-lm only.")
@click.option("--model", default="demo", help="As mesp-export takes it.")
@click.option(
    "--task",
    "names",
    multiple=True,
    type=click.Choice([task.name for task in TASKS]),
    help="Only this task; may be repeated.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Of each run.  [default: by task]")
@click.option("--seeds", type=click.IntRange(min=1), default=3, help="Of MeSP and mlx-lm.")
@click.option(
    "--peft",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A Python with torch, peft and transformers: PEFT is compared too.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What the model was pretrained on: the perplexity of its end, before and after.",
)
@click.option("--out", type=click.Path(path_type=Path), default="build/parity", help="Replaced.")
def main(
    quick: bool,
    model: str,
    names: tuple[str, ...],
    steps: int | None,
    seeds: int,
    peft: Path | None,
    text: Path | None,
    out: Path,
) -> None:
    """Train with MeSP and with others, and say whether the results are equivalent."""
    mx.set_default_device(mx.cpu)
    multiply_dequantized()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tasks = [QUICK] if quick else [task for task in TASKS if not names or task.name in names]
    if steps is not None:
        tasks = [dataclasses.replace(task, steps=steps) for task in tasks]
    trainers = QUICK_TRAINERS if quick else TRAINERS
    for dtype in ("float32", "bfloat16") if peft else ():
        train = partial(with_peft, peft, dtype)
        trainers = trainers | {f"PEFT, {dtype}": Trainer(train, is_exact=dtype == "float32")}
    if quick:
        seeds = 1
    equivalent = True
    for task in tasks:
        bundle = export(task, model, out)
        for optimizer in OPTIMIZERS:
            found = {
                name: [
                    each.train(
                        bundle, task, optimizer, seed, folder(out, task, optimizer, name, seed)
                    )
                    for seed in range(seeds if each.every_seed else 1)
                ]
                for name, each in trainers.items()
                if optimizer in each.optimizers
            }
            same = report(Bundle(bundle), task, optimizer, found, text)
            equivalent &= all(same[name] for name in same if trainers[name].is_exact)
    if not equivalent:
        raise click.ClickException("Two trainers are not equivalent that should be: see above.")


def folder(out: Path, task: Task, optimizer: str, name: str, seed: int) -> Path:
    """Where a run goes; says so, as it takes a while."""
    path = out / f"{task.name}-{optimizer}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    click.echo(f"{task.name}, {optimizer}, {name}, seed {seed} …", err=True)
    return path


def report(
    bundle: Bundle, task: Task, optimizer: str, found: dict[str, list[Trained]], text: Path | None
) -> dict[str, bool]:
    """Prints a table of a task's trainers; which are equivalent to the baseline."""
    scores = {
        name: [score(bundle, task, each.adapters) for each in runs] for name, runs in found.items()
    }
    ids = None if text is None else end_of(text, bundle, task.seq_len)

    def cells(runs: list[Path | None], of: list[Scores]) -> list[str]:
        """Held-out loss, what is answered to the letter, perplexity of the old text."""
        row = [decimal(mean(each.loss for each in of), 4)]
        row += [f"{mean(each.exact.mean() for each in of):.1%}"] * task.answers
        if ids is not None:
            old = mean(loss_of_text(bundle, each, ids, task.seq_len) for each in runs)
            row.append(decimal(perplexity(old), 1))
        return row

    columns = ["trainer", "seeds", "held-out loss", *["to the letter"] * task.answers]
    columns += ["old text"] * (ids is not None)
    columns += ["losses apart", "loss, 95%", *["letter, 95%"] * task.answers, "equivalent"]
    rows = [["none", "", *cells([None], [score(bundle, task, None)])]]
    verdicts = {}
    for name, runs in found.items():
        row = [name, str(len(runs)), *cells([each.adapters for each in runs], scores[name])]
        if name != BASELINE:
            baseline = scores[BASELINE][: len(runs)]
            loss = paired(scores[name], baseline, what="loss")
            exact = paired(scores[name], baseline, what="exact")
            same = loss.is_within(LOSS_MARGIN)
            same &= not task.answers or exact.is_within(EXACT_MARGIN)
            verdicts[name] = same
            curves = zip(runs, found[BASELINE], strict=False)
            apart = max(np.abs(np.subtract(a.losses, b.losses)).max() for a, b in curves)
            row += [f"{apart:.0e}", interval(loss, 4), *[interval(exact, 3)] * task.answers]
            row.append("yes" if same else "no")
        rows.append(row)
    click.echo(f"\n{task.name}, {optimizer}, {task.steps} steps of {task.batch_size} sequences\n")
    for row in [columns, ["---"] * len(columns), *rows]:
        click.echo(f"| {' | '.join(row + [''] * (len(columns) - len(row)))} |")
    if len(scores[BASELINE]) > 1:
        spread = np.ptp([each.loss for each in scores[BASELINE]])
        click.echo(f"\n{BASELINE}'s held-out losses of several seeds differ by up to {spread:.4f}.")
    return verdicts


def end_of(text: Path, bundle: Bundle, seq_len: int) -> np.ndarray:
    """The ids of a text's last windows, int32 [n]."""
    count = TEXT_WINDOWS * seq_len + 1
    characters = text.read_text(encoding="utf-8")[-10 * count :]  # a token has some 3
    return np.array(load_tokenizer(bundle.path).encode(characters)[-count:], np.int32)


def mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def interval(difference: Difference, digits: int) -> str:
    return f"{difference.low:+.{digits}f} … {difference.high:+.{digits}f}"


if __name__ == "__main__":
    main()
