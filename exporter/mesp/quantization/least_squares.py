from __future__ import annotations

from dataclasses import asdict
from functools import reduce

import mlx.core as mx

from mesp.block_function.dequantize import pack
from mesp.models.quantization_formats import Quantization

# The grids that are tried. For each number a, a grid has n + a steps between a group's smallest and
# largest weight, where n is the highest code. If a > 0, the largest weights are clipped.
GRIDS = (-4, -3, -2, -1, -0.5, 0, 0.5, 1, 2)
REFITS = 2
# This fraction of the mean moment is added to each moment, so that no channel has weight 0.
DAMPING = 1e-3
ROUNDER = 1.5 * 2**23  # adding and subtracting it rounds a float32 to an integer


def quantize(
    matrix: mx.array, quantization: Quantization, moments: mx.array | None, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the packed codes of W [out, in], and its scales and biases of the dtype `dtype`.

    In each group, the scale s and bias b are fitted to reduce

        Σ m (W - s · code - b)²

    The weights m are `damp(moments)`.
    """
    size, levels = quantization.group_size, 2**quantization.bits - 1
    x = matrix.astype(mx.float32).reshape(len(matrix), -1, size)
    # On a CPU, sums over the first axis are twice as fast as sums over the last.
    x = mx.contiguous(mx.moveaxis(x, -1, 0))  # [size, out, groups]
    m = damp(moments, matrix.shape[1]).reshape(-1, size).T[:, None]
    m = m / m.sum(axis=0)

    mean = (m * x).sum(axis=0)
    x = x - mean  # makes the weighted mean 0, which shortens the formulas of the fit
    mx_ = m * x
    low, high = x.min(axis=0), x.max(axis=0)
    per_range = _reciprocal(high - low)

    def fit(start: mx.array, inverse: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Returns the scale and bias that best fit a grid's codes, and the variance that they
        explain."""
        q = _codes(x, start, inverse, levels)
        mean_q, with_x = (m * q).sum(axis=0), (mx_ * q).sum(axis=0)
        variance = (m * mx.square(q)).sum(axis=0) - mx.square(mean_q)
        scale = with_x * _reciprocal(variance)
        return scale, -scale * mean_q, scale * with_x

    def better(first: tuple[mx.array, ...], second: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
        wins = second[-1] > first[-1]
        return tuple(mx.where(wins, b, a) for a, b in zip(first, second, strict=True))

    fits = [fit(low, (levels + grid) * per_range) for grid in GRIDS if levels + grid > 0]
    best = reduce(better, fits)
    for _ in range(REFITS):
        scale, bias, _ = best
        best = better(best, fit(bias, _reciprocal(scale)))

    def stored(scale: mx.array, bias: mx.array) -> tuple[mx.array, ...]:
        """Returns the scale and bias in the stored dtype, their codes, and the negated remaining
        variance.
        """
        scale, bias = scale.astype(dtype), (bias + mean).astype(dtype)
        s, b = scale.astype(mx.float32), bias.astype(mx.float32) - mean
        q = _codes(x, b, _reciprocal(s), levels)
        return scale, bias, q, -(m * mx.square(x - s * q - b)).sum(axis=0)

    scale, bias, _ = best
    _, scales, biases = mx.quantize(matrix.astype(mx.float32), **asdict(quantization))
    scale, bias, q, _ = better(stored(scale, bias), stored(scales, biases - mean))
    codes = mx.moveaxis(q, 0, -1).flatten(1).astype(mx.uint32)
    return pack(codes, quantization.bits), scale, bias


def damp(moments: mx.array | None, columns: int) -> mx.array:
    """Returns positive weights [columns] of the errors of a row, about 1 on average."""
    if moments is None:
        return mx.ones(columns)
    return moments / mx.maximum(moments.mean(), 1e-30) + DAMPING


def _reciprocal(x: mx.array) -> mx.array:
    small = mx.abs(x) < 1e-30
    return mx.where(small, 0.0, 1 / mx.where(small, 1.0, x))


def _codes(x: mx.array, start: mx.array, inverse: mx.array, levels: int) -> mx.array:
    """Returns the nearest codes, as float32. `mx.round` takes four times as long on a CPU."""
    return mx.clip((x - start) * inverse + ROUNDER - ROUNDER, 0, levels)
