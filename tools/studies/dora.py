"""Compares what a model learns with DoRA and with LoRA.

    python tools/studies/dora.py                 the demo model and SmolLM2-135M-Instruct

DoRA trains A, B and one magnitude for each output of a linear layer. DoRA of rank 8 has more
parameters than LoRA of rank 8, and fewer than LoRA of rank 9 in these models. All runs use the
default optimizer and learning rate. Runs of one model, task and seed train on the same sequences.
If they also have the same rank, they begin with the same A.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.models.architecture import Architecture
from studies import real_models
from studies.held_out_loss import learn
from studies.tasks import bundles
from studies.tasks.bundles import CLASSIFICATION, EXTRACTION, TEXT

RANK, SCALE = 8, 2.0
KINDS = {"LoRA, rank 8": (RANK, False), "DoRA, rank 8": (RANK, True), "LoRA, rank 9": (9, False)}
OUT = Path("build/dora")
TASKS = {task.name: task for task in (EXTRACTION, CLASSIFICATION, TEXT)}


@click.command(cls=Command)
@click.option(
    "--model", "models", multiple=True,
    help="A folder as mesp-export takes it, or demo. Repeatable.  [default: demo and SmolLM2]",
)  # fmt: skip
@click.option(
    "--task", "names", multiple=True, type=click.Choice(tuple(TASKS)),
    default=("extraction", "text"), show_default=True, help="Repeatable.",
)  # fmt: skip
@click.option("--steps", default=120, show_default=True, help="Of one sequence.")
@click.option("--seeds", default=3, show_default=True)
def main(models: tuple[str, ...], names: tuple[str, ...], steps: int, seeds: int) -> None:
    """Compare the held-out losses of DoRA and LoRA."""
    print("| model, task | trained | parameters | held-out loss | of each seed |")
    print("|---|---|---|---|---|")
    for model in models or ("demo", str(real_models.hugging_face_folder(real_models.SMOLLM2))):
        for name in names:
            folder = OUT / f"{Path(model).name}-{name}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            path = bundles.export(TASKS[name], model, folder, more_ranks=(RANK, 9))
            bundle = Bundle(path)
            for kind, (rank, dora) in KINDS.items():
                runs = folder / f"{'dora' if dora else 'lora'}-{rank}"
                settings = {"rank": rank, "alpha": SCALE * rank, "dora": dora}
                found = [
                    learn(bundle, runs / f"{seed}", steps, seed, **settings)
                    for seed in range(seeds)
                ]
                befores, afters = zip(*found, strict=True)
                losses = ", ".join(f"{loss:.4f}" for loss in afters)
                row = (
                    f"{Path(model).name}, {name}",
                    kind,
                    f"{parameters(bundle.architecture, rank, dora):,}",
                )
                row += (f"{befores[0]:.3f} → {np.mean(afters):.4f}", losses)
                print(f"| {' | '.join(row)} |", flush=True)


def parameters(arch: Architecture, rank: int, dora: bool) -> int:
    outputs = sum(out for block in arch.blocks for out, _ in block.sizes().values())
    return sum(block.lora_size(rank) for block in arch.blocks) + dora * outputs


if __name__ == "__main__":
    main()
