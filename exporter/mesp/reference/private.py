"""DP-SGD (Abadi et al., arXiv:1607.00133): gradients are clipped per example, and noise is
added."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np


def clip_factor(gradient: Sequence[mx.array], clip: float) -> float:
    """Returns min(1, C / (‖g‖ + 10⁻⁶))."""
    # In float32, the squares of large numbers would overflow, and the factor would be 0.
    norm = math.hypot(*(np.linalg.norm(np.array(part, np.float64)) for part in gradient))
    return min(1.0, clip / (norm + 1e-6))


def private_gradient(
    gradients: Sequence[Sequence[mx.array]],
    noise: Sequence[mx.array],
    clip: float,
    multiplier: float,
    expected: float,
) -> list[mx.array]:
    """Returns (Σ clip_factor(gᵢ) gᵢ + Z C n) / B.

    gᵢ are the `gradients` of the examples. n is `noise`, from a standard normal distribution. Z is
    the noise `multiplier`, C is `clip`, and B is the `expected` number of examples.
    """
    sums = [multiplier * clip * n for n in noise]
    for gradient in gradients:
        factor = clip_factor(gradient, clip)
        sums = [total + factor * g for total, g in zip(sums, gradient, strict=True)]
    return [total / expected for total in sums]


def _numbers(key: bytes, purpose: bytes, step: int, index: int) -> list[int]:
    """Returns the SHA-256 of the key, a purpose, a step and an index, as four integers of 64
    bits."""
    counters = step.to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.sha256(key + purpose + counters).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8)]


def poisson_sample(key: bytes, step: int, expected: int, count: int) -> list[int]:
    """Returns the examples that a step (from 0) draws.

    Each of `count` examples is drawn with the probability `expected` / `count`, independently of
    the others.
    """
    limit = expected * 2**64 // count
    return [i for i in range(count) if _numbers(key, b"draw", step, i // 4)[i % 4] < limit]


def private_noise(key: bytes, step: int, sizes: Sequence[int]) -> list[mx.array]:
    """Returns a standard normal vector of each block's size."""
    seeds = (_numbers(key, b"noise", step, block)[0] for block in range(len(sizes)))
    return [
        mx.random.normal((size,), key=mx.random.key(seed))
        for seed, size in zip(seeds, sizes, strict=True)
    ]
