"""Compares the planner's predictions on the CPU with measured peaks, and fits a machine's margin.

Each row is a run of a model's first blocks, with its true widths and random weights, on one thread:
on a busy machine others may never run, and then take no memory. *Measured* over *predicted* should
stay between 0.91 and 1.08. The last columns have the error of the prediction in MB, and in arrays
[T, hidden] or [T, intermediate]. A wrong count in Core/Memory shows as a column with one number of
arrays, and a wrong constant in Core/Machine/MachineMemory.swift as a column with one number of MB.
*Arrays* is MLX's peak, which depends only on the counts.

\b
  python tools/studies/predicted_peaks.py --model SmolLM2-135M,Qwen2.5-0.5B --seq-len 128,256,512
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click

import mesp
from mesp.commands.command import Command, several

KINDS: dict[str, dict[str, Any]] = {
    "in memory": {"offload": "none"},
    "on disk": {"offload": "all"},
    "q and v": {"projections": ["q", "v"]},
    "B alone": {"freeze_a": True},
}
"""The settings of a run, by their description."""

MOST, LEAST = 1.08, 1 / 1.1
"""The bounds of measured over predicted peaks."""


class Row(NamedTuple):
    name: str
    predicted: int
    measured: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted

    def __str__(self) -> str:
        return f"{self.ratio:.3f}, {self.name}"


@click.command(cls=Command, help=__doc__)
@several(
    "--model", "models", metavar="NAME,...", help="As mesp export takes them.",
    default=("SmolLM2-135M", "Gemma-3-270m", "Qwen2.5-0.5B"), show_default=True,
)  # fmt: skip
@several(
    "--seq-len", "seq_lens", kind=click.IntRange(min=1), metavar="T,...",
    default=(256,), show_default=True,
)  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True)
def main(models: tuple[str, ...], seq_lens: tuple[int, ...], layers: int) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    click.echo(f"{'model':14} {'tokens':>6} {'settings':10} {'predicted':>9} {'measured':>8} "
               f"{'ratio':>6} {'arrays':>8} {'off':>7} {'hidden':>7} {'interm.':>7}")  # fmt: skip
    rows = []
    for model in models:
        for seq_len in seq_lens:
            with tempfile.TemporaryDirectory() as folder:
                bundle = mesp.export(
                    model, out=Path(folder) / "bundle.mesp", random_weights=True, layers=layers,
                    seq_len=seq_len,
                )  # fmt: skip
                architecture = bundle.manifest.architecture
                kinds = dict(KINDS)
                if architecture.has_experts:
                    kinds["experts"] = {"projections": architecture.trainable}
                for name, settings in kinds.items():
                    out = Path(folder) / name
                    run = mesp.train(bundle, out=out, steps=3, val_batches=0, **settings)
                    rows.append(show(model, seq_len, name, bundle, run))
    rows.sort(key=lambda row: row.ratio)
    click.echo(f"least {rows[0]}\nmost  {rows[-1]}\n{margin(rows)}")


def show(model: str, seq_len: int, name: str, bundle: mesp.Bundle, run: mesp.RunLog) -> Row:
    predicted, measured = run.plan["predicted_peak_bytes"], run.peak_bytes or 0
    arrays = max(step["mlx_peak_bytes"] for step in run.steps)
    architecture = bundle.manifest.architecture
    off = predicted - measured
    mlp = architecture.mlps[0]
    width = mlp.intermediate_size or mlp.experts.intermediate_size
    hidden, intermediate = (
        off / (4 * seq_len * size) for size in (architecture.hidden_size, width)
    )
    row = Row(f"{model} at {seq_len} tokens, {name}", predicted, measured)
    click.echo(f"{model:14} {seq_len:6} {name:10} {predicted / 1e6:9.2f} {measured / 1e6:8.2f} "
               f"{row.ratio:6.3f} {arrays / 1e6:8.2f} {off / 1e6:+7.2f} {hidden:+7.1f} "
               f"{intermediate:+7.1f}")  # fmt: skip
    return row


def margin(rows: list[Row]) -> str:
    """Returns a sentence with the range of MB that can be added to the machine's margin so that the
    ratio of each row stays within LEAST and MOST, or with the reason why no margin fits.
    """
    least = max(row.measured / MOST - row.predicted for row in rows) / 1e6
    most = min(row.measured / LEAST - row.predicted for row in rows) / 1e6
    if least > most:
        return f"No margin fits: some row needs {least:+.2f} MB, and another takes {most:+.2f}."
    return f"The margin may change by {least:+.2f} to {most:+.2f} MB."


if __name__ == "__main__":
    main()
