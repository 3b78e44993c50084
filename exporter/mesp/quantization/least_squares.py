"""Scales and biases with the least loss: a search over grids, each refitted by least squares."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce

import mlx.core as mx

from mesp.block_function.dequantize import pack
from mesp.models.quantization_formats import Quantization

# The grids that are searched, one for each number a. There are n steps from the first code to the
# last. A grid has n + a steps from a group's smallest weight to its largest. If a < 0, the last
# codes stay unused; if a > 0, the largest weights are clipped. Twice as many grids would reduce the
# error by 1%.
GRIDS = (-4, -3, -2, -1, -0.5, 0, 0.5, 1, 2)
# How often the best grid is fitted again, each time with the codes that the last scale and bias
# give
REFITS = 2
# A share of the mean moment. It is added to each moment, so that an unseen channel counts a little.
DAMPING = 1e-3
ROUNDER = 1.5 * 2**23  # float32: adding and subtracting it rounds to whole numbers


def quantize(
    matrix: mx.array, quantization: Quantization, moments: mx.array | None, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the packed codes, scales and biases of W [out, in], where scales and biases have the
    dtype `dtype`. In each group, codes, scale and bias minimize the sum over its weights of m (W -
    scale · code - bias)². m are the `moments` [in], the mean squares of W's inputs; None: all are
    equal. This sum is at most as large as with MLX's scales and biases.
    """
    size, levels = quantization.group_size, 2**quantization.bits - 1
    x = matrix.astype(mx.float32).reshape(len(matrix), -1, size)
    # On a CPU, sums over the first axis are twice as fast as sums over the last.
    x = mx.contiguous(mx.moveaxis(x, -1, 0))  # [size, out, groups]
    m = damp(moments, matrix.shape[1]).reshape(-1, size).T[:, None]
    m = m / m.sum(axis=0)

    mean = (m * x).sum(axis=0)
    x = x - mean  # makes the weighted mean 0, so that a fit needs fewer sums
    mx_ = m * x
    low, high = x.min(axis=0), x.max(axis=0)
    per_range = _reciprocal(high - low)

    def fit(start: mx.array, inverse: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Returns the scale and bias that best fit a grid's codes, and the variance that scale and
        bias explain.
        """
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
        """Returns scale and bias as stored, their codes, and the remaining variance, negated."""
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
    """Returns the weights [columns] of a row's errors: 1 on average, and more than 0."""
    if moments is None:
        return mx.ones(columns)
    return moments / mx.maximum(moments.mean(), 1e-30) + DAMPING


def _reciprocal(x: mx.array) -> mx.array:
    """Returns 1 / x, and 0 for x that is 0 or too small."""
    small = mx.abs(x) < 1e-30
    return mx.where(small, 0.0, 1 / mx.where(small, 1.0, x))


def _codes(x: mx.array, start: mx.array, inverse: mx.array, levels: int) -> mx.array:
    """Returns the nearest codes, as float32. (The CPU's `mx.round` takes four times as long.)"""
    return mx.clip((x - start) * inverse + ROUNDER - ROUNDER, 0, levels)
