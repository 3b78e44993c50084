"""AdamW with 8-bit moments, as in bitsandbytes (Dettmers et al., arXiv:2110.02861)."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

MOMENT_BLOCK = 256  # numbers that share a scale


class Quantized(NamedTuple):
    """P numbers in 8 bits. Each number is the value of its code times the scale of its block."""

    codes: mx.array  # uint8 [P]
    scales: mx.array  # float32 [⌈P / MOMENT_BLOCK⌉]


def dynamic_map(signed: bool) -> mx.array:
    """Returns the value of each of 256 codes, in ascending order, float32 [256].

    The values include 0 and 1. For each power of ten p from 10⁻⁶ to 1, the interval from 0.1 p to p
    is divided into equal parts. The middle of each part is a value. The number of parts doubles
    from one power to the next: from 1 to 64 if `signed`, else from 2 to 128. If `signed`, the
    negated middles are values too.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        parts = (1 if signed else 2) * 2**power
        for part in range(parts):
            number = 10.0 ** (power - 6) * (0.1 + 0.9 * (part + 0.5) / parts)
            numbers += [number, -number] if signed else [number]
    return mx.array(sorted(numbers))


def quantize(x: mx.array, signed: bool) -> Quantized:
    """Quantizes x [P].

    Each number is divided by the largest absolute value of its block, and gets the code of the
    nearest value. The lower of two equally near values is taken.
    """
    numbers = dynamic_map(signed)
    middles = (numbers[:-1] + numbers[1:]) / 2
    blocks = mx.pad(x, (0, -x.size % MOMENT_BLOCK)).reshape(-1, MOMENT_BLOCK)
    scales = mx.abs(blocks).max(axis=1)
    fractions = blocks / mx.where(scales > 0, scales, 1)[:, None]
    codes = (fractions[..., None] > middles).sum(axis=-1)
    return Quantized(codes.reshape(-1)[: x.size].astype(mx.uint8), scales)


def dequantize_moment(moment: Quantized, signed: bool) -> mx.array:
    scales = mx.repeat(moment.scales, MOMENT_BLOCK)[: moment.codes.size]
    return dynamic_map(signed)[moment.codes] * scales


def adamw8bit(
    w: mx.array,
    g: mx.array,
    m: Quantized,
    v: Quantized,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[mx.array, Quantized, Quantized]:
    """Returns w [P], m and v after a step of `mlx.optimizers.AdamW` with the gradient g [P].

    The update of w uses the new m and v before they are rounded to 8 bits.
    """
    new_m = betas[0] * dequantize_moment(m, signed=True) + (1 - betas[0]) * g
    new_v = betas[1] * dequantize_moment(v, signed=False) + (1 - betas[1]) * mx.square(g)
    step = learning_rate * new_m / (mx.sqrt(new_v) + epsilon)
    new_w = w * (1 - learning_rate * weight_decay) - step
    return new_w, quantize(new_m, signed=True), quantize(new_v, signed=False)
