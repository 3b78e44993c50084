"""Compares MeSP's fine-tuning with that of other trainers.

    python tools/studies/parity.py            the study
    python tools/studies/parity.py --quick    MeSP against mlx-lm's trainer, in half a minute
    python tools/studies/parity.py --plans    MeSP's plans against each other
    python tools/studies/parity.py --packed   packed records against one record per step

For each seed, all trainers begin with the same adapters and, except for QLoRA, the same 4-bit
weights, up to rounding to bfloat16. Except with --packed, all train on the same sequences, and all
but MeZO have the same optimizer and learning rate. A trainer is equivalent to the first one if the
95% bootstrap intervals of their paired differences lie within LOSS_MARGIN for the loss and within
EXACT_MARGIN for right answers. Exits with 1 if two trainers that compute the same gradients in
float32 are not equivalent.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests"))
from helpers import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx
import numpy as np

from mesp import reference
from mesp.adapters.load import WEIGHTS
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.errors import MespError
from mesp.formatting import decimal, perplexity
from mesp.source_model.find import find_source
from studies.comparison.plans import plans
from studies.comparison.scores import (
    Difference,
    Scores,
    loss_of_text,
    model_with,
    other_text,
    paired,
    score,
)
from studies.comparison.trainers import (
    Trained,
    has_bitsandbytes,
    multiply_dequantized,
    with_mesp,
    with_mlx_lm,
    with_peft,
)
from studies.tasks.bundles import EXTRACTION, GSM8K, GSM8K_DATA, TASKS, TEXT, Task, command, export

# Margins of equivalence, fixed before any run: held-out loss in nats per token, and share of right
# answers.
LOSS_MARGIN = 0.01
EXACT_MARGIN = 0.02
# The maximum difference between a training step's losses with two plans, in float32.
PLAN_MARGIN = 1e-5

PACKED = 4  # the length of packed sequences, as a multiple of the task's sequence length

QUICK = dataclasses.replace(EXTRACTION, steps=8, held_out=20)
OPTIMIZERS = ("adamw", "sgd")


class Trainer(NamedTuple):
    """A trainer in the comparison.

    - `is_exact`: whether the trainer should be equivalent to the first one.
    - `every_seed`: whether the trainer runs with all seeds or only with the first.
    - `apart`: the maximum difference of a step's loss from the first trainer's, if `is_exact`.
    """

    train: Callable[[Path, Task, str, int, Path], Trained]
    optimizers: tuple[str, ...] = ("adamw",)
    is_exact: bool = True
    every_seed: bool = False
    apart: float = float("inf")


# The others are compared with the first one.
QUICK_TRAINERS = {
    "mlx-lm": Trainer(with_mlx_lm, OPTIMIZERS, every_seed=True),
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


@click.command(cls=Command)
@click.option("--quick", is_flag=True, help="One task, one seed, few steps, mlx-lm only.")
@click.option(
    "--plans", "of_plans", is_flag=True, help="Compare MeSP's plans, in float32 and bfloat16."
)
@click.option(
    "--packed",
    is_flag=True,
    help=f"Compare MeSP on the same records: one a step, packed into sequences of {PACKED} times "
    "the task's length, and as many a step as then share one.",
)
@click.option("--model", default="demo", help="As mesp-export takes it.")
@click.option(
    "--task",
    "names",
    multiple=True,
    type=click.Choice([task.name for task in (*TASKS, GSM8K)]),
    help="Only this task; may be repeated.  [default: all but gsm8k]",
)
@click.option(
    "--gsm8k", default=GSM8K_DATA, help="Data of that task: a dataset on the Hub, or a folder."
)
@click.option(
    "--trainer",
    "only",
    multiple=True,
    metavar="NAME",
    help="Only this one, by its name in the table, and the first; may be repeated.",
)
@click.option(
    "--optimizer",
    "optimizers",
    multiple=True,
    type=click.Choice(OPTIMIZERS),
    default=OPTIMIZERS,
    help="Only this one; may be repeated.",
)
@click.option("--steps", type=click.IntRange(min=1), help="Of each run.  [default: by task]")
@click.option(
    "--held-out", type=click.IntRange(min=1), help="Sequences that judge a run.  [default: by task]"
)
@click.option(
    "--learning-rate",
    type=click.FloatRange(min=0, min_open=True),
    help="AdamW's, which falls to 0.  [default: by task]",
)
@click.option("--seeds", type=click.IntRange(min=1), default=3, help="Of MeSP and mlx-lm.")
@click.option(
    "--peft",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A Python with torch, peft and transformers: PEFT is compared too, and with bitsandbytes "
    "QLoRA.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A text that the tasks are not about: its perplexity before and after says what is "
    "forgotten.  [default: python-docs, of which the task text has none]",
)
@click.option("--out", type=click.Path(path_type=Path), default="build/parity", help="Replaced.")
def main(
    quick: bool,
    of_plans: bool,
    packed: bool,
    model: str,
    names: tuple[str, ...],
    gsm8k: str,
    only: tuple[str, ...],
    optimizers: tuple[str, ...],
    steps: int | None,
    held_out: int | None,
    learning_rate: float | None,
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
    every = [*TASKS, GSM8K] if names else TASKS
    tasks = [QUICK] if quick else [task for task in every if not names or task.name in names]
    given = {"steps": steps, "held_out": held_out, "rate": learning_rate}
    given = {name: value for name, value in given.items() if value is not None}
    tasks = [dataclasses.replace(task, **given) for task in tasks]
    trainers = QUICK_TRAINERS if quick else TRAINERS
    if peft and not of_plans:
        trainers = trainers | with_pytorch(peft, model)
    if quick:
        seeds = 1
    equivalent = True
    for task in tasks:
        longer = [PACKED * task.seq_len] if packed else []
        bundle = export(task, model, out, gsm8k=gsm8k, more_lengths=longer)
        if of_plans:
            trainers = by_plan(bundle, task)
        if packed:
            trainers = by_packing(bundle, task)
        for optimizer in optimizers:
            chosen = choose(trainers, optimizer, only)
            if len(chosen) > 1:
                equivalent &= compare(bundle, task, optimizer, chosen, seeds, text)
    if not equivalent:
        raise click.ClickException("Two trainers that should be equivalent are not: see above.")


def choose(
    trainers: dict[str, Trainer], optimizer: str, only: tuple[str, ...]
) -> dict[str, Trainer]:
    """Raises MespError if a trainer in `only` does not exist."""
    first, *others = trainers
    for name in only:
        if name not in others:
            raise MespError(f"There is no trainer {name} here; name one of {'; '.join(others)}.")
    return {
        name: each
        for name, each in trainers.items()
        if optimizer in each.optimizers and (name == first or not only or name in only)
    }


def compare(
    bundle: Path,
    task: Task,
    optimizer: str,
    trainers: dict[str, Trainer],
    seeds: int,
    text: Path | None,
) -> bool:
    """Returns whether all trainers that should be equivalent are equivalent."""

    def train(name: str, seed: int) -> Trained:
        click.echo(f"{task.name}, {optimizer}, {name}, seed {seed} …", err=True)
        run = f"{task.name}-{optimizer}-{name.replace(', ', '-').replace(' ', '-')}-{seed}"
        return trainers[name].train(bundle, task, optimizer, seed, bundle.parent / run)

    found = {
        name: [train(name, seed) for seed in range(seeds if each.every_seed else 1)]
        for name, each in trainers.items()
    }
    same = report(Bundle(bundle), task, optimizer, trainers, found, text)
    return all(same[name] for name in same if trainers[name].is_exact)


def with_pytorch(peft: Path, model: str) -> dict[str, Trainer]:
    """Prints a note and leaves QLoRA out if `peft` has no bitsandbytes."""
    found = {
        f"PEFT, {dtype}": Trainer(partial(with_peft, peft, dtype), is_exact=dtype == "float32")
        for dtype in ("float32", "bfloat16")
    }
    if not has_bitsandbytes(peft):
        click.echo(f"QLoRA is left out: {peft} has no bitsandbytes.", err=True)
        return found
    source = find_source(model, random_weights=False).folder
    train = partial(with_peft, peft, "float32", nf4=source)
    return found | {"QLoRA, NF4": Trainer(train, is_exact=False, every_seed=True)}


def by_plan(bundle: Path, task: Task) -> dict[str, Trainer]:
    found = {
        f"MeSP, {name}": Trainer(
            partial(with_mesp, options=options),
            every_seed=True,
            apart=PLAN_MARGIN,
        )
        for name, options in plans(bundle, task, "adamw").items()
    }
    return found | {"mlx-lm": Trainer(with_mlx_lm, every_seed=True)}


def by_packing(bundle: Path, task: Task) -> dict[str, Trainer]:
    """Returns MeSP's trainers on the same records: one record per step, packed, and several in a
    batch.

    There are two trainers on packed records: with the task's learning rate, and with √n times that
    rate for n records per step. Raises MespError for the task text, which is always packed.
    """
    if task.name == TEXT.name:
        raise MespError("Text is always packed: name another --task.")
    packed, longest = bundle.with_name(f"{task.name}-packed.mesp"), PACKED * task.seq_len
    shutil.copytree(bundle, packed)
    command("mesp.commands.data", packed, "--data", bundle.parent / task.name, "--pack")
    sizes = Bundle(bundle).examples("train")[:, 1]
    steps = len(reference.pack(sizes.tolist(), longest))
    together = round(len(sizes) / steps)

    def trainer(
        of: Path, steps: int, batch_size: int, seq_len: int, rate: float = task.rate
    ) -> Trainer:
        its = dataclasses.replace(task, steps=steps, batch_size=batch_size, rate=rate)

        def train(_: Path, __: Task, optimizer: str, seed: int, folder: Path) -> Trained:
            return with_mesp(of, its, optimizer, seed, folder, ("--seq-len", seq_len))

        optimizers = OPTIMIZERS if rate == task.rate else OPTIMIZERS[:1]
        return Trainer(train, optimizers, is_exact=False, every_seed=True)

    higher = math.sqrt(together)
    return {
        "MeSP, one record a step": trainer(bundle, len(sizes), 1, task.seq_len),
        "MeSP, packed": trainer(packed, steps, 1, longest),
        f"MeSP, packed, {higher:.2f} times the rate": trainer(
            packed, steps, 1, longest, higher * task.rate
        ),
        f"MeSP, {together} records a step": trainer(bundle, steps, together, task.seq_len),
    }


class Measured(NamedTuple):
    scores: Scores
    other: float | None


def report(
    bundle: Bundle,
    task: Task,
    optimizer: str,
    trainers: dict[str, Trainer],
    found: dict[str, list[Trained]],
    text: Path | None,
) -> dict[str, bool]:
    """Returns for each trainer but the first whether it is equivalent to the first."""
    ids = other_text(bundle, task, text)
    asks = task.answers is not None

    seen: dict[tuple[bytes, bool], Measured] = {}

    def measure(adapters: Path | None, base: Path | None = None) -> Measured:
        """Returns the scores of adapters. Identical adapters are measured once."""
        file = adapters and adapters / WEIGHTS
        key = (hashlib.sha256(file.read_bytes() if file else b"").digest(), base is None)
        if key not in seen:
            model = model_with(bundle, adapters, base)
            other = None if ids is None else loss_of_text(model, ids, task.seq_len)
            seen[key] = Measured(score(model, bundle, task), other)
        return seen[key]

    def cells(runs: list[Measured]) -> list[str]:
        row = [decimal(mean(each.scores.loss for each in runs), 4)]
        row += [f"{mean(each.scores.exact.mean() for each in runs):.1%}"] * asks
        if ids is not None:
            row.append(decimal(perplexity(mean(each.other for each in runs)), 1))
        return row

    right = {"letter": "to the letter", "number": "right number"}.get(task.answers or "", "")
    columns = ["trainer", "seeds", "held-out loss", *[right] * asks]
    columns += ["other text"] * (ids is not None)
    columns += ["losses apart", "loss, 95%", *[f"{task.answers}, 95%"] * asks, "equivalent"]
    rows = [["none", "", *cells([measure(None)])]]
    for name, runs in found.items():
        if runs[0].base is not None:
            rows.append([f"none, of {name}", "", *cells([measure(None, runs[0].base)])])
    measured = {
        name: [measure(each.adapters, each.base) for each in runs] for name, runs in found.items()
    }
    scores = {name: [each.scores for each in runs] for name, runs in measured.items()}
    first, *_ = found
    verdicts = {}
    for name, runs in found.items():
        row = [name, str(len(runs)), *cells(measured[name])]
        if name != first:
            baseline = scores[first][: len(runs)]
            loss = paired(scores[name], baseline, what="loss")
            exact = paired(scores[name], baseline, what="exact")
            curves = [(a.losses, b.losses) for a, b in zip(runs, found[first], strict=False)]
            step_by_step = all(len(a) == len(b) for a, b in curves)
            differences = [np.abs(np.subtract(*each)).max() for each in curves if step_by_step]
            apart = max(differences, default=float("nan"))
            same = loss.is_within(LOSS_MARGIN)
            same &= not asks or exact.is_within(EXACT_MARGIN)
            same &= not trainers[name].is_exact or bool(apart <= trainers[name].apart)
            verdicts[name] = same
            row += [
                f"{apart:.0e}" if step_by_step else "",
                interval(loss, 4),
                *[interval(exact, 3)] * asks,
            ]
            row.append("yes" if same else "no")
        rows.append(row)
    steps = f"{task.steps} steps of {task.batch_size} sequences"
    click.echo(f"\n{task.name}, {optimizer}, {steps}\n")
    for row in [columns, ["---"] * len(columns), *rows]:
        click.echo(f"| {' | '.join(row + [''] * (len(columns) - len(row)))} |")
    if len(scores[first]) > 1:
        spread = np.ptp([each.loss for each in scores[first]])
        click.echo(f"\nThe held-out losses of {first}'s seeds differ by up to {spread:.4f}.")
    return verdicts


def mean(values: Iterable[float]) -> float:
    return float(np.mean([*values]))


def interval(difference: Difference, digits: int) -> str:
    low, high = (round(end, digits) + 0.0 for end in (difference.low, difference.high))
    if low == high:
        return f"{low:+.{digits}f}" if low else f"{0:.{digits}f}"
    return f"{low:+.{digits}f} … {high:+.{digits}f}"


if __name__ == "__main__":
    main()
