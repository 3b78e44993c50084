"""Mamba-2 in chunks of tokens; docs/method.md derives the formulas."""

from __future__ import annotations

import mlx.core as mx

from mesp.block_function import tiles
from mesp.block_function.chunks import by_chunk, decays, forgetting
from mesp.block_function.convolution import convolution
from mesp.block_function.mlp import silu
from mesp.block_function.parts import Parts
from mesp.models.mixers import Mamba2Mixer


def mix_by_mamba2(mixer: Mamba2Mixer, parts: Parts, x: mx.array) -> tuple[list[mx.array], mx.array]:
    """Returns [z, xBC, dt, o] of x [1, T, hidden], and RMSNorm(o ∘ silu(z)), the output
    projection's input.
    """
    values, dtype = mixer.values, parts.dtype
    projected = parts.project("in", x).astype(dtype)
    z, xBC, dt = mx.split(projected, [values, values + mixer.conv_dim], axis=-1)
    of_groups = _convolved(mixer, parts, xBC, slice(values, mixer.conv_dim), mixer.state_size)
    B, C = mx.split(of_groups, 2)

    outputs: list[mx.array] = []
    for heads in _tiles(mixer, x.shape[1], parts.plain):
        tile = (xBC, dt) if parts.plain else mx.depends([xBC, dt], outputs[-1:])
        groups = slice(
            heads.start * mixer.num_groups // mixer.num_heads,
            -(-heads.stop * mixer.num_groups // mixer.num_heads),
        )
        outputs.append(_heads_output(mixer, parts, *tile, B[groups], C[groups], heads))
    o = mx.concatenate(outputs, axis=-1)
    gated = o.astype(mx.float32) * silu(z.astype(mx.float32))
    return [z, xBC, dt, o], parts.norm("mamba.norm", gated, mixer.norm_eps)


def _tiles(mixer: Mamba2Mixer, length: int, plain: bool) -> list[slice]:
    if plain:
        return [slice(0, mixer.num_heads)]
    of_group = mixer.num_heads // mixer.num_groups
    most = max(tiles.STATE_SPACE_HEADS_BY_TOKENS // length, tiles.FEWEST_HEADS)
    return [
        slice(first + heads.start, first + heads.stop)
        for first in range(0, mixer.num_heads, of_group)
        for heads in tiles.cut(of_group, most)
    ]


def _convolved(
    mixer: Mamba2Mixer, parts: Parts, xBC: mx.array, channels: slice, size: int
) -> mx.array:
    """Returns silu(conv(xBC) + bias) of `channels`, in heads of `size` channels: float32 [n, T,
    size]."""
    w, bias = (parts.vector(f"mamba.conv1d.{name}")[channels] for name in ("weight", "bias"))
    y = silu(convolution(xBC[..., channels], w, parts.starts) + bias)
    return y.reshape(y.shape[1], -1, size).swapaxes(0, 1)


def _heads_output(
    mixer: Mamba2Mixer, parts: Parts, xBC: mx.array, dt: mx.array, B: mx.array, C: mx.array,
    heads: slice,
) -> mx.array:  # fmt: skip
    """Returns o of `heads`, concatenated: [1, T, heads·head_dim]."""
    size = mixer.head_dim
    x = _convolved(mixer, parts, xBC, slice(heads.start * size, heads.stop * size), size)
    A_log, dt_bias, D = (
        parts.vector(f"mamba.{name}")[heads, None] for name in ("A_log", "dt_bias", "D")
    )
    step = mx.logaddexp(dt[0, :, heads].T.astype(mx.float32) + dt_bias, mx.array(0.0))
    log_decay = forgetting(-mx.exp(A_log) * step, parts.starts)
    o = state_space(step[..., None] * x, log_decay, B, C) + D[..., None] * x
    return o.swapaxes(0, 1).reshape(1, o.shape[1], -1).astype(parts.dtype)


def state_space(u: mx.array, log_decay: mx.array, B: mx.array, C: mx.array) -> mx.array:
    """Returns Y, of u's shape, for u = Δ ∘ x [heads, T, P], the log decays [heads, T], B and C
    [groups, T, N].

    `decays` returns Γ, γ and δ of a chunk, and γ' is the chunk's last γ. U is the chunk's u, S the
    state before the chunk, and S₊ the state after it:

        Y = γ ∘ (C Sᵀ) + (Γ ∘ C Bᵀ) U        S₊ = γ' S + (δ ∘ U)ᵀ B
    """
    groups, length, _ = B.shape
    B, C = (by_chunk(each)[:, None] for each in (B, C))
    u, log_decay = (
        by_chunk(each.reshape(groups, -1, length, last))
        for each, last in ((u, u.shape[-1]), (log_decay, 1))
    )  # [groups, heads per group, chunks, tokens of a chunk, …]
    Gamma, gamma, delta = decays(log_decay)
    written, last = (delta * u).swapaxes(-1, -2) @ B, gamma[..., -1:, :]

    states = [mx.zeros(written[:, :, 0].shape)]
    for i in range(written.shape[2] - 1):
        states.append(last[:, :, i] * states[-1] + written[:, :, i])
    S = mx.stack(states, axis=2)
    y = gamma * (C @ S.swapaxes(-1, -2)) + (Gamma * (C @ B.swapaxes(-1, -2))) @ u
    return y.reshape(-1, y.shape[2] * y.shape[3], y.shape[4])[:, :length]
