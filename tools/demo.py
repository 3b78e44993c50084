"""The program of `make demo`: teaches the demo model to turn requests into JSON."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.text import Text

from mesp.commands.command import Command
from mesp.formatting import decimal, megabytes
from mesp.runs.log import RunLog
from studies.tasks.house_requests import SOON, cases

STEPS = 600
BATCH_SIZE = 2
SEQ_LEN = 96  # The longest request fits with its answer.
RANK = 16
# The learning rate is higher than the default, because the small model has much to learn in few
# steps. The lower β₂ makes AdamW's second moment follow the gradients faster.
UPDATE = (
    *("--alpha", 2 * RANK, "--learning-rate", 2e-3, "--beta2", 0.98, "--max-grad-norm", 1),
    *("--warmup", 20, "--schedule", "linear"),
)
TRAINING_CASES = STEPS * BATCH_SIZE
HELD_OUT_CASES = 50
MAX_TOKENS = 64  # the longest answer has 50 tokens
SHOWN = 10

TOOLS = Path(__file__).resolve().parent
OUT = TOOLS.parent / "build" / "demo"
WIDTH = 100  # columns of the output


class Answer(NamedTuple):
    text: str
    is_right: bool


@click.command(cls=Command)
@click.option(
    "--seed", type=int, default=0, help="Seed of the initial adapters and the order of the data."
)
def main(seed: int) -> None:
    """Teach the demo model to turn requests into JSON, and show what it has learned."""
    began = time.monotonic()
    bundle, data = OUT / "demo.mesp", OUT / "requests"
    held_out = cases(HELD_OUT_CASES, seed=1, held_out=True, whens=SOON)
    train = cases(TRAINING_CASES, seed=0, held_out=False, whens=SOON)
    write_data(data, train=train, valid=held_out)
    call(
        *(program("mesp-export"), "--model", "demo", "--data", data, "--out", bundle),
        *("--overwrite", "--seq-len", SEQ_LEN, "--rank", RANK),
    )
    run = new_run(OUT)
    call(
        *(program("mesp-train"), bundle, "--steps", STEPS, "--batch-size", BATCH_SIZE, *UPDATE),
        *("--seed", seed, "--val-batches", HELD_OUT_CASES, "--out", run),
    )
    before, after = evaluate(bundle, data, [run], "--max-tokens", MAX_TOKENS)
    write_samples(run, held_out[:SHOWN], before, after)

    collected = OUT / "collected"
    call(sys.executable, TOOLS / "collect.py", "--from", run.parent, "--out", collected)
    report = OUT / "report.html"
    call(program("mesp"), "report", collected / run.name, "--out", report)

    click.echo("\nHeld-out requests, whose words and commands are not in the training data:\n")
    result = RunLog.load(run)
    spent = f"{result.end['seconds']:.0f} s for {result.last_step} steps of {BATCH_SIZE} requests; "
    spent += f"{time.monotonic() - began:.0f} s in all"
    print_result(result, held_out[:SHOWN], before, after, "Right to the letter", spent, report)


def new_run(out: Path) -> Path:
    return out / "runs" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def write_data(folder: Path, **files: Iterable[Any]) -> None:
    """Writes named tuples or dictionaries as JSONL files, which get the names of the arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in files.items():
        entries = (each if isinstance(each, dict) else each._asdict() for each in records)
        lines = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def evaluate(
    bundle: Path, data: Path, runs: Iterable[Path], *options: object
) -> list[list[Answer]]:
    """Returns the answers to the held-out records, without adapters and with those of each run."""
    figures = bundle.with_name("evaluation.json")
    adapters = (option for run in runs for option in ("--adapters", run / "adapters"))
    call(
        *(program("mesp"), "evaluate", bundle, data / "valid.jsonl", *adapters),
        *(*options, "--out", figures),
    )
    return [
        [Answer(each["answer"] or each["written"], each["exact_match"]) for each in samples]
        for samples in json.loads(figures.read_text("utf-8"))["samples"]
    ]


def write_samples(run: Path, shown: list[Any], before: list[Answer], after: list[Answer]) -> None:
    samples = [
        {"prompt": case.prompt, "before": old.text, "after": new.text}
        for case, old, new in zip(shown, before, after, strict=False)
    ]
    (run / "samples.json").write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")


def program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def call(*command: object) -> None:
    arguments = [str(argument) for argument in command]
    shown = [Path(part).name if Path(part).is_absolute() else part for part in arguments]
    click.echo(f"\n$ {shlex.join(shown)}")
    status = subprocess.run(arguments).returncode
    if status != 0:
        raise SystemExit(status)


def right(found: list[Answer]) -> int:
    return sum(answer.is_right for answer in found)


def print_result(
    run: RunLog, cases: list[Any], before: list[Answer], after: list[Answer], what: str, spent: str,
    report: Path,
) -> None:  # fmt: skip
    console = Console(width=WIDTH, highlight=False)
    for case, old, new in zip(cases, before, after, strict=False):
        console.print(shown(case.prompt, old, new))
    loss_before, loss_after = run.held_out
    console.print(
        f"\n{what}: {right(before)} of {len(before)} before fine-tuning, "
        f"{right(after)} of {len(after)} after.\n"
        f"Held-out loss {decimal(loss_before)} before, {decimal(loss_after)} after, nats a token.\n"
        f"Peak footprint of the trainer {megabytes(run.peak_bytes)} MB, {spent}.\n"
        f"Loss, memory and time by step: {report}",
        soft_wrap=True,
    )


def shown(prompt: str, before: Answer, after: Answer) -> Text:
    text = Text(f"{prompt}\n", style="bold", no_wrap=True, overflow="ellipsis")
    for when, answer in (("before", before), ("after", after)):
        mark = Text("✓", "green") if answer.is_right else Text("✗", "red")
        line = " ".join(answer.text.split())[: WIDTH - 13]
        text.append_text(Text.assemble(f"  {when:<6} ", mark, f" {line}\n", style="not bold"))
    text.right_crop(1)
    return text


if __name__ == "__main__":
    main()
