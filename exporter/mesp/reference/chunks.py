"""A recurrence over tokens, computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import mlx.core as mx

CHUNK = 64


def decays(log_g: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns the decays Γ [Hv, C, C], γ [Hv, C, 1] and δ [Hv, C, 1] of a chunk.

    Γ are the decays between tokens, 0 above the diagonal. γ are the decays since the chunk's start,
    and δ the decays until its end. Each sum of κ is computed separately, because differences of
    cumulative sums would lose digits.
    """
    C = log_g.shape[-2]
    row, column = mx.arange(C)[:, None], mx.arange(C)
    since = mx.cumsum(mx.where(row > column, log_g, 0), axis=-2)  # κ_{j+1} + … + κ_i
    Gamma = mx.where(row >= column, mx.exp(since), 0)
    return Gamma, mx.exp(mx.cumsum(log_g, axis=-2)), Gamma[:, -1, :, None]


def cut(arrays: Iterable[mx.array]) -> list[tuple[mx.array, ...]]:
    """Cuts arrays [n, T, size] into chunks of tokens. Zeros pad the last, and change no state."""
    padded = [mx.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK), (0, 0))) for x in arrays]
    return list(zip(*(mx.split(x, x.shape[1] // CHUNK, axis=1) for x in padded), strict=True))


def scan(step: Callable, chunks: Sequence[Any], S: mx.array) -> tuple[mx.array, list[mx.array]]:
    """Returns the outputs of all chunks, and the state before each. S is the first state."""
    states, outputs = [], []
    for chunk in chunks:
        states.append(S)
        out, S = step(chunk, S)
        outputs.append(out)
    return mx.concatenate(outputs, axis=1), states


def scan_backward(
    step_backward: Callable, chunks: Sequence[Any], states: list[mx.array], dy: mx.array
) -> list[mx.array]:
    """Returns the gradients of the arrays that were cut, for dy [n, T, size]."""
    dS, found = mx.zeros_like(states[0]), []
    for chunk, S, (dO,) in reversed(list(zip(chunks, states, cut([dy]), strict=True))):
        gradients, dS = step_backward(chunk, S, dO, dS)
        found.insert(0, gradients)
    return [mx.concatenate(each, axis=1)[:, : dy.shape[1]] for each in zip(*found, strict=True)]


def repeat_heads(x: mx.array, heads: int) -> mx.array:
    """Repeats x [n, T, size] for the heads that share it: [heads, T, size]."""
    return mx.repeat(x, heads // x.shape[0], axis=0)


def sum_heads(dx: mx.array, count: int) -> mx.array:
    """Adds what `repeat_heads` repeated: [heads, T, size] -> [count, T, size]."""
    return dx.reshape(count, -1, *dx.shape[1:]).sum(axis=1)


def by_head(x: mx.array, count: int) -> mx.array:
    """Reshapes [1, T, count·size] to [count, T, size]."""
    return x.reshape(x.shape[1], count, -1).swapaxes(0, 1)


def by_token(x: mx.array) -> mx.array:
    """Reshapes [count, T, size] to [1, T, count·size], the inverse of `by_head`."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1)
