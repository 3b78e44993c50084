"""What bench.py measures in Python: the paper's own way, mlx-lm's trainer, h, and MeZO's estimates.

    python tools/bench_python.py SETTINGS.json

Each runs in a process of its own, whose memory bench.py samples from outside. A result is a line
of JSON on standard output. Everything is float32 on the CPU; sizes are bytes, times seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers

from mesp import reference
from mesp.bundle import Bundle, Layout
from mesp.models import KNOWN, PROJECTIONS, Architecture

QUANTIZATION = {"group_size": 64, "bits": 4}
# A run ends early, with the steps it has, once it has taken this long: mlx-lm as shipped needs
# minutes a step on a CPU.
PATIENCE = 120.0
COMPILED_WITH = 8  # tokens of a first step, which is not measured
HEAD_ROWS = 8192  # of the vocabulary, dequantized at a time

# MeZO's estimate is compared after some exact steps: with B = 0, as at first, A has no gradient.
WARM_UP_STEPS = 3
WARM_UP_LEARNING_RATE = 0.1

NUMPY_DTYPES = {"uint32": "<u4", "float32": "<f4"}


def report(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), file=sys.__stdout__, flush=True)


def report_and_wait(event: str) -> None:
    """For the reader to look at this process's memory; it answers with a line."""
    report(event)
    sys.stdin.readline()


def warm_up() -> None:
    """Brings up MLX and its BLAS, so that what they take counts as the baseline."""
    mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
    report_and_wait("baseline")


def windows(bundle: Bundle, seq_len: int, seed: int, steps: int) -> Iterator[mx.array]:
    """The windows [T + 1] that the engine trains on, until the patience ends."""
    tokens = bundle.tokens("train")
    count = (len(tokens) - 1) // seq_len
    began = time.monotonic()
    for step in range(steps):
        if time.monotonic() - began > PATIENCE:
            return
        start = reference.step_window(step, seed, count) * seq_len
        yield mx.array(tokens[start : start + seq_len + 1].astype(np.int32))


# The paper's own way


def paper(settings: dict[str, Any]) -> None:
    """Trains as the paper does, with the formulas of `mesp.reference`.

    A block's weights are read into memory and dequantized whole, attention has its [heads, T, T]
    weights and the loss its [T, V] logits whole, and all eight intermediates are there before the
    backward pass begins. The output matrix is read and dequantized by rows, and the gradient by
    the logits takes their place: whole, these would take several times as much.
    """
    warm_up()
    bundle = Bundle(settings["bundle"])
    scale, rate = settings["alpha"] / settings["rank"], settings["learning_rate"]
    lora = reference.init_lora(bundle.architecture, settings["rank"], settings["seed"])
    mx.eval(lora)
    report_and_wait("begin")
    for window in windows(bundle, settings["seq_len"], settings["seed"], settings["steps"]):
        mx.reset_peak_memory()
        began = time.perf_counter()
        loss = paper_step(bundle, lora, window, scale, rate)
        report(
            "step",
            loss=loss,
            seconds=time.perf_counter() - began,
            mlx_peak_bytes=mx.get_peak_memory(),
        )


def paper_step(
    bundle: Bundle, lora: list[mx.array], window: mx.array, scale: float, learning_rate: float
) -> float:
    """One step; updates `lora` and returns the loss before."""
    arch = bundle.architecture
    rows = table_rows(bundle, "embedding", np.array(window[:-1]))
    inputs = [reference.dequantize(rows, "", arch.hidden_size)[None]]
    for index, block_lora in enumerate(lora):
        x, weights = inputs[-1], read_block(bundle, index)
        inputs.append(reference.block_forward(x, block_lora, scale, weights, arch)[0])
        mx.eval(inputs[-1])
        del x, weights
    loss, dy = whole_loss(bundle, inputs.pop(), window[1:])
    for index in reversed(range(len(lora))):
        x, weights = inputs.pop(), read_block(bundle, index)
        intermediates = reference.block_forward(x, lora[index], scale, weights, arch)[1:]
        mx.eval(intermediates)
        dy, gradient = reference.block_backward(
            x, intermediates, dy, lora[index], scale, weights, arch
        )
        lora[index] = lora[index] - learning_rate * gradient
        mx.eval(dy, lora[index])
        del x, weights, intermediates, gradient
        mx.clear_cache()
    return loss


def read_block(bundle: Bundle, index: int) -> reference.Weights:
    words = np.fromfile(bundle.path / f"blocks/{index:02d}.bin", dtype="<u4")
    return bundle.layout.unpack(mx.array(words))


def table_rows(bundle: Bundle, which: str, rows: np.ndarray | slice) -> reference.Weights:
    """Some rows of the embedding or the head, read from the file."""
    entry = bundle.manifest[which]
    words = np.memmap(bundle.path / entry["file"], dtype="<u4", mode="r")
    table = {}
    for spec in Layout.from_manifest(entry).arrays:
        array = words[spec.offset : spec.offset + spec.words].view(NUMPY_DTYPES[spec.dtype])
        table[spec.name] = mx.array(
            array if spec.name == "norm" else array.reshape(spec.shape)[rows]
        )
    return table


def whole_loss(bundle: Bundle, x: mx.array, targets: mx.array) -> tuple[float, mx.array]:
    """The loss and its gradient by x, as in `reference.cross_entropy`: logits whole."""
    arch = bundle.architecture
    tiles = [slice(i, i + HEAD_ROWS) for i in range(0, arch.vocab_size, HEAD_ROWS)]

    def matrix(rows: slice) -> mx.array:
        return reference.dequantize(table_rows(bundle, "head", rows), "", arch.hidden_size)

    norm = table_rows(bundle, "head", slice(0))["norm"]
    normed = reference.rms_norm(x, norm, arch.rms_norm_eps)
    z = mx.zeros((1, targets.size, arch.vocab_size))
    for rows in tiles:
        z[..., rows] = normed @ matrix(rows).T
        mx.eval(z)
    target = mx.take_along_axis(z, targets[None, :, None], axis=-1)[..., 0]
    loss = mx.mean(mx.logsumexp(z, axis=-1) - target)
    mx.eval(loss)
    del target
    # dz = (softmax(z) - onehot(target)) / T, in the place of z
    z = mx.softmax(z, axis=-1) / targets.size
    mx.eval(z)
    dz = z.at[0, mx.arange(targets.size), targets].add(-1 / targets.size)
    del z
    mx.eval(dz)
    d_normed = mx.zeros(x.shape)
    for rows in tiles:
        d_normed = d_normed + dz[..., rows] @ matrix(rows)
        mx.eval(d_normed)
    del dz
    dx = reference.rms_norm_backward(x, d_normed, norm, arch.rms_norm_eps)
    mx.eval(dx)
    return loss.item(), dx


# mlx-lm's trainer


def mlx_lm(settings: dict[str, Any]) -> None:
    """Trains with mlx-lm's own trainer, on the same weights and windows."""
    # Here, as they take tens of MB that the other measurements have no use for.
    from demo import load_model
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers

    warm_up()
    bundle = Bundle(settings["bundle"])
    model = load_model(bundle)
    model.freeze()
    rank = settings["rank"]
    lora = {"rank": rank, "scale": settings["alpha"] / rank, "dropout": 0.0, "keys": PROJECTIONS}
    linear_to_lora_layers(model, bundle.architecture.num_hidden_layers, lora)
    if settings["fast"]:
        nn.QuantizedLinear.__call__ = dequantized_linear
        nn.QuantizedEmbedding.as_linear = dequantized_as_linear
    if settings["checkpoint"]:
        trainer.grad_checkpoint(model.layers[0])
    mx.eval(model.parameters())

    seq_len, seed = settings["seq_len"], settings["seed"]

    class Report(TrainingCallback):
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            report(
                "step",
                loss=train_info["train_loss"],
                seconds=1 / train_info["iterations_per_second"],
                mlx_peak_bytes=mx.get_peak_memory(),
            )

    def train(
        tokens: int, steps: int, learning_rate: float, callback: TrainingCallback | None
    ) -> None:
        def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
            for window in windows(bundle, seq_len, seed, steps):
                mx.reset_peak_memory()
                yield window[None, : tokens + 1], mx.array([[0, tokens + 1]])

        trainer.train(
            model,
            optimizers.SGD(learning_rate),
            train_dataset=None,
            args=trainer.TrainingArgs(
                batch_size=1,
                iters=steps,
                steps_per_report=1,
                adapter_file=os.path.join(settings["output"], "adapters.safetensors"),
            ),
            iterate_batches=batches,
            training_callback=callback,
        )

    with contextlib.redirect_stdout(sys.stderr):
        # On a CPU, MLX has a C++ compiler make the kernels that mlx-lm's step needs.
        train(min(seq_len, COMPILED_WITH), 1, 0.0, None)
        report_and_wait("begin")
        train(seq_len, settings["steps"], settings["learning_rate"], Report())


def dequantized_linear(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
    y = x @ whole_matrix(self).T
    return y + self.bias if "bias" in self else y


def dequantized_as_linear(self: nn.QuantizedEmbedding, x: mx.array) -> mx.array:
    return x @ whole_matrix(self).T


def whole_matrix(layer: nn.Module) -> mx.array:
    return mx.dequantize(
        layer.weight, layer.scales, layer.biases, group_size=layer.group_size, bits=layer.bits
    )


# Recomputing h


def h(settings: dict[str, Any]) -> None:
    """How long h = xA takes for a block's seven projections, and the block's whole gradient."""
    _, config = KNOWN[settings["model"]]
    arch = Architecture.from_config(config)
    rank, seq_len = settings["rank"], settings["seq_len"]
    weights = random_block(arch)
    lora = mx.random.normal((arch.lora_size(rank),)) * 0.01
    x, dy = mx.random.normal((2, 1, seq_len, arch.hidden_size))
    inputs = {
        n: mx.random.normal((seq_len, n)) for n in {n for _, n in arch.projections().values()}
    }
    mx.eval(weights, lora, x, dy, inputs)

    def recompute_h() -> list[mx.array]:
        matrices = reference.unpack_lora(lora, arch, rank)
        return [inputs[a.shape[0]] @ a for a, _ in matrices.values()]

    def gradient() -> tuple[mx.array, mx.array]:
        scale = settings["alpha"] / rank
        return reference.mesp_block_gradient(x, dy, lora, scale, weights, arch)

    report(
        "h",
        h_seconds=measured(recompute_h, settings["steps"]),
        gradient_seconds=measured(gradient, settings["steps"]),
    )


def random_block(arch: Architecture) -> reference.Weights:
    weights = {}
    for name, (out_size, in_size) in arch.projections().items():
        matrix = 0.02 * mx.random.normal((out_size, in_size))
        parts = mx.quantize(matrix, **QUANTIZATION)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            weights[f"{name}.{part}"] = array
    for name in ("input_layernorm", "post_attention_layernorm"):
        weights[f"{name}.weight"] = mx.ones(arch.hidden_size)
    return weights


def measured(compute: Callable[[], Any], times: int) -> float:
    """The median time, after one that is not counted."""
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        mx.eval(compute())
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


# MeZO's estimate


def mezo_quality(settings: dict[str, Any]) -> None:
    """MeZO's estimate of each block's gradient against the exact one, averaged over draws of z."""
    bundle = Bundle(settings["bundle"])
    model, seed = reference.Model.of(bundle), settings["seed"]
    scale, epsilon = settings["alpha"] / settings["rank"], settings["mezo_epsilon"]
    lora = reference.init_lora(bundle.architecture, settings["rank"], seed)
    *training, window = windows(bundle, settings["seq_len"], seed, WARM_UP_STEPS + 1)
    for each in training:
        reference.mesp_step(model, lora, each, scale, WARM_UP_LEARNING_RATE)
    exact = reference.gradients(model, lora, window, scale).lora
    mx.eval(exact)

    draws = []
    for draw in range(settings["steps"]):
        z = reference.mezo_noise(lora, seed, draw)
        plus, minus = (
            reference.loss(
                model, [w + move * n for w, n in zip(lora, z, strict=True)], window, scale
            ).item()
            for move in (epsilon, -epsilon)
        )
        slope = (plus - minus) / (2 * epsilon)
        draws.append([quality(slope * n, g) for n, g in zip(z, exact, strict=True)])
        report("draw")
    for layer, of_layer in enumerate(zip(*draws, strict=True)):
        cosine, signs, error = np.mean(of_layer, axis=0).tolist()
        report("layer", layer=layer, cosine=cosine, sign_agreement=signs, relative_error=error)


def quality(estimate: mx.array, exact: mx.array) -> tuple[float, float, float]:
    """Cosine, share of equal signs, and ‖estimate - exact‖₂ / ‖exact‖₂."""
    norm = mx.linalg.norm
    cosine = (estimate * exact).sum() / (norm(estimate) * norm(exact))
    signs = mx.mean(mx.sign(estimate) == mx.sign(exact))
    return cosine.item(), signs.item(), (norm(estimate - exact) / norm(exact)).item()


KINDS = {"paper": paper, "mlx-lm": mlx_lm, "h": h, "mezo-quality": mezo_quality}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    mx.set_default_device(mx.cpu)
    KINDS[settings["kind"]](settings)


if __name__ == "__main__":
    main()
