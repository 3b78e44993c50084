"""The demo behind `make demo`: fine-tunes the demo model on Python's language reference.

Exports the model, trains it with MeSP, collects the run's log and draws it, and shows what the
model writes before and after.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesp.commands.generate import load_tokenizer
from mesp.engine.generate import generate
from mesp.formatting import decimal, megabytes
from mesp.runs.log import read_run

STEPS = 400
SEQ_LEN = 256
RANK = 8
VAL_BATCHES = 40

PROMPT = "A class definition"
SAMPLE_TOKENS = 80

TOOLS = Path(__file__).resolve().parent
OUT = TOOLS.parent / "build" / "demo"
WIDTH = 100  # columns of what is printed


def main() -> None:
    began = time.monotonic()
    bundle = OUT / "demo.mesp"
    OUT.mkdir(parents=True, exist_ok=True)
    call(
        *(program("mesp-export"), "--model", "demo", "--out", bundle, "--overwrite"),
        *("--seq-len", SEQ_LEN, "--rank", RANK),
    )
    before = sample(bundle)

    run = OUT / "runs" / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
    call(
        *(program("mesp-train"), bundle, "--steps", STEPS, "--seq-len", SEQ_LEN, "--rank", RANK),
        *("--val-batches", VAL_BATCHES, "--output", run),
    )
    after = sample(bundle, run / "adapters")
    samples = [{"prompt": PROMPT, "before": before, "after": after}]
    (run / "samples.json").write_text(json.dumps(samples, indent=2) + "\n", encoding="utf-8")

    collected = OUT / "collected"
    call(sys.executable, TOOLS / "collect.py", "--from", run.parent, "--out", collected)
    report = OUT / "report.html"
    call(sys.executable, TOOLS / "report.py", collected / run.name, "--out", report)

    console = Console(width=WIDTH, highlight=False)
    console.print(side_by_side(before, after))
    result = read_run(run)
    loss_before, loss_after = result.held_out
    console.print(
        f"Held-out loss {decimal(loss_before)} before, {decimal(loss_after)} after, nats a token.\n"
        f"Peak footprint of the trainer {megabytes(result.peak_footprint)} MB, "
        f"{result.end['seconds']:.0f} s for {result.last_step} steps of {SEQ_LEN} tokens; "
        f"{time.monotonic() - began:.0f} s in all.\n"
        f"Loss, memory and time by step: {report}",
        soft_wrap=True,
    )


def program(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def call(*command: object) -> None:
    """Runs one of the project's own commands, showing it as a user would type it."""
    arguments = [str(argument) for argument in command]
    shown = [Path(part).name if Path(part).is_absolute() else part for part in arguments]
    click.echo(f"\n$ {shlex.join(shown)}")
    status = subprocess.run(arguments).returncode
    if status != 0:
        raise SystemExit(status)


def sample(bundle: Path, adapters: Path | None = None) -> str:
    """What the bundle's model writes after the prompt, always its likeliest token."""
    tokenizer = load_tokenizer(bundle)
    *tokens, _ = generate(
        bundle,
        tokenizer.encode(PROMPT),
        adapters=adapters,
        max_tokens=SAMPLE_TOKENS,
        stop=sorted(tokenizer.eos_token_ids),
    )
    return tokenizer.decode([record["token"] for record in tokens])


def side_by_side(before: str, after: str) -> Table:
    table = Table(title=f"After “{PROMPT}” the model writes", width=WIDTH, title_justify="left")
    table.add_column("before fine-tuning", ratio=1)
    table.add_column("after fine-tuning", ratio=1)
    table.add_row(Text(before.strip()), Text(after.strip()))
    return table


if __name__ == "__main__":
    main()
