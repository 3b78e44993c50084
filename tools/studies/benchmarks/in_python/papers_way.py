import math
import time
from typing import Any

import mlx.core as mx
import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.models.architecture import Block
from mesp.models.layout import DTYPES
from mesp.reference.block import MIXERS
from mesp.reference.model import Parts, Weights
from mesp.reference.pieces import gated
from studies.benchmarks.in_python.steps import Steps, report_baseline, windows

HEAD_ROWS = 8192  # rows of the head's matrix that are dequantized at a time

# NumPy's dtypes for the dtypes in a bundle. NumPy has no bfloat16.
STORED = {"uint32": "<u4", "uint8": "u1", "float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def paper(bundle: Bundle, settings: dict[str, Any]) -> None:
    """Trains as in the paper, with the formulas of `mesp.reference`.

    A block's weights are dequantized as a whole. The [heads, T, T] attention weights and the [T, V]
    logits are also kept whole. With `store_h`, the forward pass stores h = x A of all modules for
    the backward pass.
    """
    report_baseline()
    lora = reference.init_lora(bundle.architecture, settings["rank"], settings["seed"])
    mx.eval(lora)
    steps = Steps()
    for window in windows(bundle, settings["seq_len"], settings["seed"], settings["steps"]):
        began = time.perf_counter()
        rates = (settings["scale"], settings["learning_rate"])
        loss = paper_step(bundle, lora, window, *rates, settings["store_h"])
        steps.report(loss, time.perf_counter() - began)


def paper_step(
    bundle: Bundle,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    learning_rate: float,
    store_h: bool,
) -> float:
    arch = bundle.architecture
    inputs = [arch.embedding_scale * Table(bundle, "embedding")[np.array(window[:-1])][None]]
    kept: list[dict[str, mx.array]] = []
    for index, block_lora in enumerate(lora):
        x, weights, block = inputs[-1], bundle.block(index), arch.blocks[index]
        y, *intermediates = reference.block_forward(x, block_lora, scale, weights, block)
        kept.append(h_of(intermediates, block_lora, weights, block) if store_h else {})
        mx.eval(y, kept[-1])
        inputs.append(y)
        del x, y, weights, intermediates
    loss, dy = whole_loss(bundle, inputs.pop(), window[1:])
    for index in reversed(range(len(lora))):
        x, weights = inputs.pop(), bundle.block(index) | kept.pop()
        block = (lora[index], scale, weights, arch.blocks[index])
        intermediates = reference.block_forward(x, *block)[1:]
        mx.eval(intermediates)
        dy, gradient, _ = reference.block_backward(x, intermediates, dy, *block)
        lora[index] = lora[index] - learning_rate * gradient
        mx.eval(dy, lora[index])
        del x, weights, block, intermediates, gradient
        mx.clear_cache()
    return loss


def h_of(
    intermediates: list[mx.array], lora: mx.array, weights: Weights, block: Block
) -> dict[str, mx.array]:
    parts, (_, _, output, _) = Parts.of(weights, lora, block), MIXERS[type(block.mixer)]
    mixer_in, *of_mixer, x_mid, gate, up = intermediates[:8]
    norm = parts.vector[f"{block.arch.mlp_norm}.weight"]
    mlp_in = reference.rms_norm(x_mid, norm, parts.eps)
    inputs = {
        block.mixer.out: output(of_mixer, parts),
        "gate": mlp_in,
        "up": mlp_in,
        "down": gated(gate, up, block.arch.hidden_act),
    }
    return {f"{name}.h": inputs.get(name, mixer_in) @ p.A for name, p in parts.p.items()}


class Table:
    def __init__(self, bundle: Bundle, which: str) -> None:
        table = getattr(bundle.manifest, which)
        words = np.memmap(bundle.path / table.file, dtype="<u4", mode="r")
        self.arrays = {
            spec: words[spec.offset : spec.offset + spec.words]
            .view(STORED[spec.dtype])[: math.prod(spec.shape)]
            .reshape(spec.shape)
            for spec in table.layout.arrays
        }
        self.columns = bundle.architecture.hidden_size

    @property
    def norm(self) -> mx.array:
        return next(
            mx.array(array).view(DTYPES[spec.dtype])
            for spec, array in self.arrays.items()
            if spec.name == "norm"
        )

    def __getitem__(self, rows: np.ndarray | slice) -> mx.array:
        packed = {
            spec.name: mx.array(array[rows]).view(DTYPES[spec.dtype])
            for spec, array in self.arrays.items()
            if spec.name != "norm"
        }
        return reference.dequantize(packed, "", self.columns)


def whole_loss(bundle: Bundle, x: mx.array, targets: mx.array) -> tuple[float, mx.array]:
    arch, head = bundle.architecture, Table(bundle, "head")
    cap = arch.final_logit_softcapping
    tiles = [slice(i, i + HEAD_ROWS) for i in range(0, arch.vocab_size, HEAD_ROWS)]
    normed = reference.rms_norm(x, head.norm, arch.rms_norm_eps)
    z = mx.zeros((1, targets.size, arch.vocab_size))
    for rows in tiles:
        z[..., rows] = reference.soft_cap(normed @ head[rows].T, cap)
        mx.eval(z)
    target = mx.take_along_axis(z, targets[None, :, None], axis=-1)[..., 0]
    loss = mx.mean(mx.logsumexp(z, axis=-1) - target)
    mx.eval(loss)
    del target
    capped = None if cap is None else z
    # dz = (softmax(z) - onehot(target)) / T
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
    dx = reference.rms_norm_backward(x, d_normed, head.norm, arch.rms_norm_eps)
    mx.eval(dx)
    return loss.item(), dx
