import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn, optimizers

from mesp.bundle.reader import Bundle
from studies.benchmarks.in_python.steps import Steps, report_baseline, windows

COMPILED_WITH = 8  # tokens of a first step that is not measured


def mlx_lm(bundle: Bundle, settings: dict[str, Any]) -> None:
    # These imports take tens of MB, which the other measurements do not need.
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers

    report_baseline()
    model = bundle.to_mlx_lm()
    model.set_dtype(mx.float32)
    model.freeze()
    lora = {"rank": settings["rank"], "scale": settings["scale"], "dropout": 0.0}
    arch = bundle.architecture
    linear_to_lora_layers(model, arch.num_hidden_layers, {**lora, "keys": arch.modules})
    if settings["fast"]:
        multiply_dequantized()
    if settings["checkpoint"]:
        trainer.grad_checkpoint(model.layers[0])
    mx.eval(model.parameters())

    class Report(TrainingCallback):
        def __init__(self) -> None:
            self.steps = Steps()

        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            self.steps.report(info["train_loss"], 1 / info["iterations_per_second"])

    def train(tokens: int, steps: int, rate: float, callback: TrainingCallback | None) -> None:
        def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
            for window in windows(bundle, settings["seq_len"], settings["seed"], steps):
                yield window[None, : tokens + 1], mx.array([[0, tokens + 1]])

        adapters = str(Path(settings["output"], "adapters.safetensors"))
        args = trainer.TrainingArgs(
            batch_size=1, iters=steps, steps_per_report=1, adapter_file=adapters
        )
        sgd = optimizers.SGD(rate)
        trainer.train(model, sgd, None, None, args, trainer.default_loss, batches, callback)

    with contextlib.redirect_stdout(sys.stderr):
        # On a CPU, MLX compiles kernels in the first step, so a short unmeasured step comes first.
        train(min(settings["seq_len"], COMPILED_WITH), 1, 0.0, None)
        train(settings["seq_len"], settings["steps"], settings["learning_rate"], Report())


def multiply_dequantized() -> None:
    """Makes mlx-lm's models in this process multiply with whole dequantized matrices.

    Products with packed matrices are slow on a CPU.
    """
    nn.QuantizedLinear.__call__ = dequantized_linear
    nn.QuantizedEmbedding.as_linear = lambda self, x: x @ whole_matrix(self).T


def dequantized_linear(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
    y = x @ whole_matrix(self).T
    return y + self.bias if "bias" in self else y


def whole_matrix(layer: nn.Module) -> mx.array:
    """Returns a layer's dequantized W [out, in]."""
    how = {name: getattr(layer, name) for name in ("group_size", "bits", "mode")}
    return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)
