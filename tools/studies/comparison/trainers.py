"""The compared trainers. All begin with the same adapters and train on the same batches."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx_lm.tuner import trainer
from mlx_lm.tuner.callbacks import TrainingCallback
from mlx_lm.tuner.utils import build_schedule, linear_to_lora_layers

from mesp.bundle.reader import Bundle
from mesp.runs.log import RunLog
from studies.benchmarks.in_python.mlx_lm_trainer import dequantized_linear, whole_matrix
from studies.benchmarks.processes import blas_threads, run_peft
from studies.in_peft.inputs import first_adapters, write_inputs
from studies.tasks.bundles import ALPHA, RANK, SCALE, Task, batches, command

BETA2 = 0.98
SGD_RATE = 0.1
MEZO_RATE = 1e-4


@dataclass(frozen=True)
class Trained:
    """A run: its loss at each step, and the folder of its adapters in mlx-lm's format.

    `base` is the adapters' Hugging Face model, or None for the bundle's model.
    """

    losses: list[float]
    adapters: Path
    base: Path | None = None


def rate_of(task: Task, optimizer: str) -> float:
    """Returns the initial learning rate, which decays linearly to 0."""
    return SGD_RATE if optimizer == "sgd" else task.rate


def multiply_dequantized() -> None:
    """Makes mlx-lm's models in this process multiply with whole dequantized matrices.

    Products with packed matrices are slow on a CPU.
    """
    nn.QuantizedLinear.__call__ = dequantized_linear
    nn.QuantizedEmbedding.as_linear = lambda self, x: x @ whole_matrix(self).T


def with_mesp(
    bundle: Path,
    task: Task,
    optimizer: str,
    seed: int,
    folder: Path,
    options: tuple[object, ...] = (),
) -> Trained:
    rate = MEZO_RATE if "mezo" in options else rate_of(task, optimizer)
    beta2 = ("--beta2", BETA2) if optimizer != "sgd" else ()
    command(
        "mesp.commands.train",
        *(bundle, "--out", folder, "--steps", task.steps, "--batch-size", task.batch_size),
        *("--rank", RANK, "--alpha", ALPHA, "--seed", seed, "--val-batches", 0),
        *("--optimizer", optimizer, "--learning-rate", rate, "--schedule", "linear"),
        *(*beta2, *options),
    )
    return Trained([step["loss"] for step in RunLog.load(folder).steps], folder / "adapters")


def with_mlx_lm(bundle: Path, task: Task, optimizer: str, seed: int, folder: Path) -> Trained:
    opened = Bundle(bundle)
    model = opened.to_mlx_lm()
    model.set_dtype(mx.float32)
    model.freeze()
    arch = opened.architecture
    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": arch.modules}
    linear_to_lora_layers(model, arch.num_hidden_layers, lora)
    model.load_weights([*first_adapters(opened, RANK, seed).items()], strict=False)
    losses = []

    class Report(TrainingCallback):
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            losses.append(info["train_loss"])

    def iterate_batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
        for ids, counted in batches(opened, task, seed):
            # mlx-lm's loss takes the range of targets of a sequence, counted from 1.
            spans = [(row.argmax() + 1, row.size - row[::-1].argmax()) for row in counted]
            yield mx.array(ids), mx.array(np.array(spans))

    schedule = build_schedule(
        {"name": "linear_schedule", "arguments": [rate_of(task, optimizer), 0.0, task.steps]}
    )
    made = {
        "adamw": lambda: optimizers.AdamW(schedule, betas=[0.9, BETA2], weight_decay=0.0),
        "sgd": lambda: optimizers.SGD(schedule),
    }
    folder.mkdir(parents=True)
    arguments = trainer.TrainingArgs(
        batch_size=task.batch_size,
        iters=task.steps,
        steps_per_report=1,
        adapter_file=str(folder / "adapters.safetensors"),
    )
    (folder / "adapter_config.json").write_text(
        json.dumps({"fine_tune_type": "lora", "lora_parameters": lora})
    )
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(
            *(model, made[optimizer](), None, None, arguments, trainer.default_loss),
            iterate_batches,
            Report(),
        )
    return Trained(losses, folder)


def with_peft(
    python: Path,
    dtype: str,
    bundle: Path,
    task: Task,
    optimizer: str,
    seed: int,
    folder: Path,
    nf4: Path | None = None,
) -> Trained:
    """Trains with PEFT on PyTorch, in another environment, on the bundle's dequantized weights.

    With `nf4`, trains with QLoRA on this Hugging Face model instead, which bitsandbytes quantizes
    to NF4.
    """
    opened = Bundle(bundle)
    folder.mkdir(parents=True)
    ids, counted = map(np.stack, zip(*batches(opened, task, seed), strict=True))
    write_inputs(folder, opened, first_adapters(opened, RANK, seed), ids, counted)
    first = rate_of(task, optimizer)
    rates = [first * (1 - step / task.steps) for step in range(task.steps)]
    settings = {"optimizer": optimizer, "rates": rates, "beta2": BETA2, "dtype": dtype}
    settings |= {"rank": RANK, "alpha": ALPHA}
    settings |= {} if nf4 is None else {"nf4": str(nf4.resolve())}
    run = run_peft(python, settings, folder, blas_threads(), lambda step: None)
    lora = {"fine_tune_type": "lora", "lora_parameters": {"rank": RANK, "scale": SCALE}}
    (folder / "adapter_config.json").write_text(json.dumps(lora))
    return Trained(run.losses, folder, None if nf4 is None else folder / "base")


def has_bitsandbytes(python: Path) -> bool:
    line = [python.absolute(), "-c", "import bitsandbytes"]
    return subprocess.run(line, capture_output=True).returncode == 0
