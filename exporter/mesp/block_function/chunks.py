from __future__ import annotations

import mlx.core as mx

CHUNK = 64  # tokens, a power of two
FORGET = -1e4  # the logarithm of a decay to zero; Metal has no infinite constant


def by_chunk(x: mx.array) -> mx.array:
    """Returns […, T, n] as […, chunks, C, n]. Tokens of zeros fill the last chunk.

    C is `CHUNK` or, for a short sequence, the smallest power of two that is at least T.
    """
    length, chunk = x.shape[-2], CHUNK
    while chunk >= 2 * length:
        chunk //= 2
    missing = -length % chunk
    if missing:
        zeros = mx.zeros((*x.shape[:-2], missing, x.shape[-1]))
        x = mx.concatenate([x, zeros], axis=-2)
    return x.reshape(*x.shape[:-2], -1, chunk, x.shape[-1])


def decays(log_decay: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns Γ [..., C, C], γ [..., C, 1] and δ [..., C, 1] for the log decays κ [..., C, 1]:

    Γ_ij = exp(κ_{j+1} + … + κ_i) for i ≥ j, else 0
    γ_i = exp(κ_1 + … + κ_i)
    δ_j = Γ_Cj
    """
    row, column = mx.arange(log_decay.shape[-2])[:, None], mx.arange(log_decay.shape[-2])
    # Column j is summed from j + 1. A difference of sums from 1 would lose digits.
    between = mx.cumsum(mx.where(row > column, log_decay, 0.0), axis=-2)
    Gamma = mx.where(row >= column, mx.exp(between), 0.0)
    return Gamma, mx.exp(mx.cumsum(log_decay, axis=-2)), Gamma[..., -1, :, None]


def forgetting(log_decay: mx.array, starts: mx.array | None) -> mx.array:
    """Returns the log decays [..., T], changed so that they reset the state at the first token of
    each record.
    """
    if starts is None:
        return log_decay
    follows = mx.arange(starts.size) > starts
    return mx.where(follows, log_decay, mx.array(FORGET))
