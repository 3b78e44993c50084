"""What bench.py measures in Python: the paper's own way, mlx-lm's trainer, h, and MeZO's estimates.

    python tools/bench_python.py SETTINGS.json

Prints a record a line, as the engine does: `start`, `step`, and `event` for other results.
Everything is float32 on the CPU; sizes are bytes, times seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers

from mesp import reference
from mesp.bundle.layout import Layout
from mesp.bundle.reader import Bundle

# A run ends early, with the steps it has, once it has taken this long: mlx-lm as shipped needs
# minutes a step on a CPU.
PATIENCE = 120.0
SAMPLED_EVERY = 0.002  # seconds between two looks at this process's memory
COMPILED_WITH = 8  # tokens of a first step, which is not measured
HEAD_ROWS = 8192  # of the vocabulary, dequantized at a time

# MeZO's estimate is compared after some exact steps: with B = 0, as at first, A has no gradient.
WARM_UP_STEPS = 3
WARM_UP_LEARNING_RATE = 0.1
QUALITIES = ("cosine", "sign_agreement", "relative_error")


def report(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}), file=sys.__stdout__, flush=True)


def footprint() -> int:
    """This process's memory: RssAnon + VmSwap on Linux, phys_footprint on a Mac."""
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v0: a UUID, then 64-bit counters
        ctypes.CDLL("libproc.dylib").proc_pid_rusage(os.getpid(), 0, usage)
        return usage[9]
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    counted = (line for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
    return sum(int(line.split()[1]) * 1024 for line in counted)


class Steps:
    """Reports steps, with the highest footprint since the first began.

    A thread looks at it: while MLX computes, Python is free.
    """

    def __init__(self) -> None:
        self.count, self.peak = 0, 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, footprint())
            time.sleep(SAMPLED_EVERY)

    def report(self, loss: float, seconds: float) -> None:
        self.count += 1
        memory = {"footprint_peak_bytes": self.peak, "mlx_peak_bytes": mx.get_peak_memory()}
        report("step", step=self.count, loss=loss, seconds=seconds, **memory)


def report_baseline() -> None:
    """What Python, MLX and its BLAS take before anything is loaded."""
    mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
    report("start", baseline_bytes=footprint())


def windows(bundle: Bundle, seq_len: int, seed: int, steps: int) -> Iterator[mx.array]:
    """The windows [T + 1] that the engine trains on, until the patience ends."""
    tokens = bundle.tokens("train")
    count = (len(tokens) - 1) // seq_len
    began = time.monotonic()
    for step in range(steps):
        if time.monotonic() - began > PATIENCE:
            return
        start = reference.step_window(step, seed, count) * seq_len
        mx.reset_peak_memory()
        yield mx.array(tokens[start : start + seq_len + 1].astype(np.int32))


# The paper's own way


def paper(bundle: Bundle, settings: dict[str, Any]) -> None:
    """Trains as the paper does, with the formulas of `mesp.reference`.

    A block's weights are read into memory and dequantized whole, attention has its [heads, T, T]
    weights and the loss its [T, V] logits whole, and all eight intermediates are there before the
    backward pass begins. The output matrix is read and dequantized by rows, and the gradient by
    the logits takes their place: whole, these would take several times as much.
    """
    report_baseline()
    lora = reference.init_lora(bundle.architecture, settings["rank"], settings["seed"])
    mx.eval(lora)
    steps = Steps()
    for window in windows(bundle, settings["seq_len"], settings["seed"], settings["steps"]):
        began = time.perf_counter()
        loss = paper_step(bundle, lora, window, settings["scale"], settings["learning_rate"])
        steps.report(loss, time.perf_counter() - began)


def paper_step(
    bundle: Bundle, lora: list[mx.array], window: mx.array, scale: float, learning_rate: float
) -> float:
    """One step; updates `lora` and returns the loss before."""
    arch = bundle.architecture
    inputs = [arch.embedding_scale * Table(bundle, "embedding")[np.array(window[:-1])][None]]
    for index, block_lora in enumerate(lora):
        x, weights, kind = inputs[-1], bundle.block(index), arch.kind(index)
        inputs.append(reference.block_forward(x, block_lora, scale, weights, arch, kind)[0])
        mx.eval(inputs[-1])
        del x, weights
    loss, dy = whole_loss(bundle, inputs.pop(), window[1:])
    for index in reversed(range(len(lora))):
        x, weights, kind = inputs.pop(), bundle.block(index), arch.kind(index)
        block = (lora[index], scale, weights, arch, kind)
        intermediates = reference.block_forward(x, *block)[1:]
        mx.eval(intermediates)
        dy, gradient = reference.block_backward(x, intermediates, dy, *block)
        lora[index] = lora[index] - learning_rate * gradient
        mx.eval(dy, lora[index])
        del x, weights, block, intermediates, gradient
        mx.clear_cache()
    return loss


# NumPy's types of the arrays in a bundle.
STORED = {"uint32": "<u4", "uint8": "u1", "float32": "<f4"}


class Table:
    """The embedding or the head, of which only the rows that are asked for are read."""

    def __init__(self, bundle: Bundle, which: str) -> None:
        entry = bundle.manifest[which]
        words = np.memmap(bundle.path / entry["file"], dtype="<u4", mode="r")
        self.arrays = {
            spec.name: words[spec.offset : spec.offset + spec.words]
            .view(STORED[spec.dtype])[: math.prod(spec.shape)]
            .reshape(spec.shape)
            for spec in Layout.from_manifest(entry).arrays
        }
        self.columns = bundle.architecture.hidden_size

    def __getitem__(self, rows: np.ndarray | slice) -> mx.array:
        """These rows, dequantized: float32 [rows, hidden]."""
        packed = {
            part: mx.array(array[rows]) for part, array in self.arrays.items() if part != "norm"
        }
        return reference.dequantize(packed, "", self.columns)


def whole_loss(bundle: Bundle, x: mx.array, targets: mx.array) -> tuple[float, mx.array]:
    """The loss and its gradient by x, as in `reference.cross_entropy`: logits whole."""
    arch, head = bundle.architecture, Table(bundle, "head")
    cap = arch.final_logit_softcapping
    tiles = [slice(i, i + HEAD_ROWS) for i in range(0, arch.vocab_size, HEAD_ROWS)]
    norm = mx.array(head.arrays["norm"])
    normed = reference.rms_norm(x, norm, arch.rms_norm_eps)
    z = mx.zeros((1, targets.size, arch.vocab_size))
    for rows in tiles:
        z[..., rows] = reference.soft_cap(normed @ head[rows].T, cap)
        mx.eval(z)
    target = mx.take_along_axis(z, targets[None, :, None], axis=-1)[..., 0]
    loss = mx.mean(mx.logsumexp(z, axis=-1) - target)
    mx.eval(loss)
    del target
    capped = None if cap is None else z
    # dz = (softmax(z) - onehot(target)) / T, in the place of z
    z = mx.softmax(z, axis=-1) / targets.size
    mx.eval(z)
    dz = z.at[0, mx.arange(targets.size), targets].add(-1 / targets.size)
    dz = reference.soft_cap_backward(capped, dz, cap)
    del z, capped
    mx.eval(dz)
    d_normed = mx.zeros(x.shape)
    for rows in tiles:
        d_normed = d_normed + dz[..., rows] @ head[rows]
        mx.eval(d_normed)
    del dz
    dx = reference.rms_norm_backward(x, d_normed, norm, arch.rms_norm_eps)
    mx.eval(dx)
    return loss.item(), dx


# mlx-lm's trainer


def mlx_lm(bundle: Bundle, settings: dict[str, Any]) -> None:
    """Trains with mlx-lm's own trainer, on the same weights and windows."""
    # Here, as they take tens of MB that the other measurements have no use for.
    from mlx_lm.tuner import trainer
    from mlx_lm.tuner.callbacks import TrainingCallback
    from mlx_lm.tuner.utils import linear_to_lora_layers

    report_baseline()
    model = bundle.to_mlx_lm()
    model.freeze()
    lora = {"rank": settings["rank"], "scale": settings["scale"], "dropout": 0.0}
    arch = bundle.architecture
    linear_to_lora_layers(model, arch.num_hidden_layers, {**lora, "keys": [*arch.modules]})
    if settings["fast"]:
        nn.QuantizedLinear.__call__ = dequantized_linear
        nn.QuantizedEmbedding.as_linear = lambda self, x: x @ whole_matrix(self).T
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
        # On a CPU, MLX has a C++ compiler make the kernels that mlx-lm's step needs.
        train(min(settings["seq_len"], COMPILED_WITH), 1, 0.0, None)
        train(settings["seq_len"], settings["steps"], settings["learning_rate"], Report())


def dequantized_linear(self: nn.QuantizedLinear, x: mx.array) -> mx.array:
    y = x @ whole_matrix(self).T
    return y + self.bias if "bias" in self else y


def whole_matrix(layer: nn.Module) -> mx.array:
    how = {name: getattr(layer, name) for name in ("group_size", "bits", "mode")}
    return mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how)


# Recomputing h


def h(bundle: Bundle, settings: dict[str, Any]) -> None:
    """How long h = xA takes for a block's modules, and the block's whole gradient."""
    arch, weights = bundle.architecture, bundle.block(0)
    lora = mx.random.normal((arch.lora_size(settings["rank"]),)) * 0.01
    x, dy = mx.random.normal((2, 1, settings["seq_len"], arch.hidden_size))
    sizes = {size for _, size in arch.sizes().values()}
    inputs = {size: mx.random.normal((settings["seq_len"], size)) for size in sizes}
    mx.eval(weights, lora, x, dy, inputs)

    def recompute_h() -> list[mx.array]:
        matrices = reference.unpack_lora(lora, arch, settings["rank"])
        return [inputs[a.shape[0]] @ a for a, _ in matrices.values()]

    def gradient() -> tuple[mx.array, mx.array]:
        block = (lora, settings["scale"], weights, arch, arch.kind(0))
        return reference.mesp_block_gradient(x, dy, *block)

    h_bytes = sum(array.nbytes for array in recompute_h())
    h_seconds, gradient_seconds = (
        measured(compute, settings["steps"]) for compute in (recompute_h, gradient)
    )
    report(
        "event",
        steps=settings["steps"],
        h_bytes_of_block=h_bytes,
        h_bytes=h_bytes * arch.num_hidden_layers,
        h_seconds_of_block=h_seconds,
        gradient_seconds_of_block=gradient_seconds,
        share_of_time=h_seconds / gradient_seconds,
    )


def measured(compute: Callable[[], Any], times: int) -> float:
    """The median time, after one that is not counted."""
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        mx.eval(compute())
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


# MeZO's estimate


def mezo_quality(bundle: Bundle, settings: dict[str, Any]) -> None:
    """MeZO's estimate of each block's gradient against the exact one, averaged over draws of z."""
    model, seed = reference.Model.of(bundle), settings["seed"]
    scale, epsilon = settings["scale"], settings["mezo_epsilon"]
    lora = reference.init_lora(bundle.architecture, settings["rank"], seed)
    *training, window = windows(bundle, settings["seq_len"], seed, WARM_UP_STEPS + 1)
    for each in training:
        reference.mesp_step(model, lora, each, scale, WARM_UP_LEARNING_RATE)
    exact = reference.gradients(model, lora, window, scale).lora
    mx.eval(exact)

    def loss_at(move: float, z: list[mx.array]) -> float:
        moved = [w + move * noise for w, noise in zip(lora, z, strict=True)]
        return reference.loss(model, moved, window, scale).item()

    draws = []
    for draw in range(settings["steps"]):
        z = reference.mezo_noise(lora, seed, draw)
        slope = (loss_at(epsilon, z) - loss_at(-epsilon, z)) / (2 * epsilon)
        draws.append([quality(slope * n, g) for n, g in zip(z, exact, strict=True)])
    for layer, of_layer in enumerate(zip(*draws, strict=True)):
        means = zip(QUALITIES, np.mean(of_layer, axis=0).tolist(), strict=True)
        how = {"draws": len(draws), "mezo_epsilon": epsilon}
        report("event", **how, layer=layer, **dict(means))


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
    bundle = Bundle(settings["bundle"])
    if bundle.manifest["dtype"] != "float32":
        sys.exit(f"{bundle.path} is not in float32, which is all that is measured in Python.")
    settings["scale"] = settings["alpha"] / settings["rank"]
    KINDS[settings["kind"]](bundle, settings)


if __name__ == "__main__":
    main()
