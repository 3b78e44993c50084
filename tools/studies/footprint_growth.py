"""Trains the demo model for 2,000 steps and fits a line to the trainer's footprint.

    python tools/studies/footprint_growth.py [--steps 2000] [--out FOLDER]

Fails if the line rises by more than 1 MB over the run, which indicates a memory leak.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import click
import numpy as np

from mesp.commands.command import Command
from mesp.errors import MespError
from mesp.runs.log import RunLog

MOST = 1.0  # MB over the whole run
START = 0.05


@click.command(cls=Command)
@click.option("--steps", type=click.IntRange(min=100), default=2000)
@click.option("--out", type=click.Path(path_type=Path), help="Keep the bundle and the run here.")
def main(steps: int, out: Path | None) -> None:
    """Train the demo model for long, and fail where its memory grows."""
    with tempfile.TemporaryDirectory() if out is None else nullcontext(out) as folder:
        bundle, run = Path(folder, "demo.mesp"), Path(folder, "run")
        call("export", "--model", "demo", "--seq-len", 64, "--out", bundle, "--overwrite")
        call("train", bundle, "--steps", steps, "--eval-every", 200, "--out", run)
        records = RunLog.load(run).steps
    records = records[int(START * len(records)) :]
    step = np.array([record["step"] for record in records])
    footprint = np.array([record["footprint_bytes"] for record in records]) / 1e6
    growth = float(np.polyfit(step, footprint, 1)[0]) * steps
    click.echo(
        f"Footprint after a step {footprint.mean():.2f} MB (lowest {footprint.min():.2f}, highest "
        f"{footprint.max():.2f}); growth over {steps:,} steps {growth:+.3f} MB."
    )
    if growth > MOST:
        raise MespError(f"The footprint grows by more than {MOST} MB over {steps:,} steps.")


def call(command: str, *arguments: object) -> None:
    program = f"from mesp.commands.{command} import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)])
    if done.returncode != 0:
        raise MespError(f"mesp-{command} failed.")


if __name__ == "__main__":
    main()
