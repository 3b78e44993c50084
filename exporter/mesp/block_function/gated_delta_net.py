"""The gated delta net in chunks of tokens; docs/method.md derives the formulas."""

from __future__ import annotations

import mlx.core as mx

from mesp.block_function import tiles
from mesp.block_function.chunks import by_chunk, decays, forgetting
from mesp.block_function.convolution import convolution
from mesp.block_function.mlp import silu
from mesp.block_function.parts import Parts
from mesp.models.mixers import GatedDeltaNet

UNIT_EPS = 1e-6  # added to the sum of squares in the norms of q and k


def mix_by_gated_delta_net(
    mixer: GatedDeltaNet, parts: Parts, x: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Returns [qkv, z, ba, o] of x [1, T, hidden], and the output projection's input.

    `ba` is b and a, concatenated.
    """
    dtype = parts.dtype
    qkv = parts.project("qkv", x).astype(dtype)
    z = parts.project("z", x, qkv).astype(dtype)
    b = parts.project("b", x, z)
    ba = mx.concatenate([b, parts.project("a", x, b)], axis=-1).astype(dtype)

    outputs: list[mx.array] = []
    for heads in _tiles(mixer, x.shape[1], parts.plain):
        tile = (qkv, ba) if parts.plain else mx.depends([qkv, ba], outputs[-1:])
        outputs.append(_recurrence(mixer, parts, *tile, heads).astype(dtype))
    o = mx.concatenate(outputs, axis=-1)
    return [qkv, z, ba, o], _gated_norm(mixer, parts, o, z)


def _tiles(mixer: GatedDeltaNet, length: int, plain: bool) -> list[slice]:
    if plain:
        return [slice(0, mixer.num_key_heads)]
    value_heads = max(tiles.HEADS_BY_TOKENS // length, tiles.FEWEST_HEADS)
    by_key_head = mixer.num_value_heads // mixer.num_key_heads
    return list(tiles.cut(mixer.num_key_heads, max(value_heads // by_key_head, 1)))


def _recurrence(
    mixer: GatedDeltaNet, parts: Parts, qkv: mx.array, ba: mx.array, heads: slice
) -> mx.array:
    """Returns the outputs o of the value heads that belong to the key heads `heads`, concatenated:
    float32 [1, T, n·value_dim] for n value heads.
    """
    Hk, Hv = mixer.num_key_heads, mixer.num_value_heads
    key_dim, value_dim = mixer.key_head_dim, mixer.value_head_dim
    values = slice(heads.start * Hv // Hk, heads.stop * Hv // Hk)
    w = parts.vector("linear_attn.conv1d.weight")

    def convolved(of: slice, first: int, size: int) -> mx.array:
        channels = slice(first + of.start * size, first + of.stop * size)
        y = silu(convolution(qkv[..., channels], w[channels], parts.starts))
        return y.reshape(y.shape[1], -1, size).swapaxes(0, 1)

    q = _unit(convolved(heads, 0, key_dim)) / key_dim
    k = _unit(convolved(heads, Hk * key_dim, key_dim)) * key_dim**-0.5
    v = convolved(values, 2 * Hk * key_dim, value_dim)
    b, a = (
        ba[0, :, first + values.start : first + values.stop].T.astype(mx.float32)
        for first in (0, Hv)
    )
    A_log, dt_bias = (
        parts.vector(f"linear_attn.{name}")[values, None] for name in ("A_log", "dt_bias")
    )
    # The logarithm of the decay, computed without the decay, which may underflow to 0 in float32.
    log_g = -mx.exp(A_log) * mx.logaddexp(a + dt_bias, mx.array(0.0))
    o = delta_rule(q, k, v, forgetting(log_g, parts.starts), mx.sigmoid(b))
    return o.swapaxes(0, 1).reshape(1, o.shape[1], -1)


def _unit(x: mx.array) -> mx.array:
    return x * mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + UNIT_EPS / x.shape[-1])


def _gated_norm(mixer: GatedDeltaNet, parts: Parts, o: mx.array, z: mx.array) -> mx.array:
    """Returns RMSNorm(o) ∘ silu(z), normalized for each head: float32 [1, T, Hv·value_dim]."""
    by_head = o.astype(mx.float32).reshape(1, o.shape[1], -1, mixer.value_head_dim)
    return parts.norm("linear_attn.norm", by_head).reshape(o.shape) * silu(z.astype(mx.float32))


def delta_rule(q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array) -> mx.array:
    """Returns O, of v's shape, for q, k [Hk, T, key_dim], v [Hv, T, value_dim], log g and β [Hv,
    T].

    All arrays are float32. `decays` returns Γ, γ and δ of a chunk, and γ_C is the chunk's last γ.
    The terms that do not depend on the state are computed for all chunks at once:

        A = Γ ∘ K Kᵀ below the diagonal        P = Γ ∘ Q Kᵀ        M = (I + β A)⁻¹
        U = M β V        W = M β γ K

    Then the chunks are computed in order, from a state S = 0:

        D = U - W S        O = γ Q S + P D        S ← γ_C S + (δ K)ᵀ D
    """
    Hk, length, _ = q.shape
    q, k = (by_chunk(each)[:, None] for each in (q, k))
    v, log_g, beta = (
        by_chunk(each.reshape(Hk, -1, length, last))
        for each, last in ((v, v.shape[-1]), (log_g, 1), (beta, 1))
    )  # [Hk, Hv / Hk, chunks, C, …]
    Gamma, gamma, delta = decays(log_g)
    below = mx.arange(k.shape[-2])[:, None] > mx.arange(k.shape[-2])

    k_t = k.swapaxes(-1, -2)
    M = unit_inverse(beta * mx.where(below, Gamma * (k @ k_t), 0.0))
    P = Gamma * (q @ k_t)
    U, W = M @ (beta * v), M @ (beta * gamma * k)
    q, k_t, last = gamma * q, (delta * k).swapaxes(-1, -2), gamma[..., -1:, :]

    outputs, S = [], mx.zeros((*v.shape[:2], q.shape[-1], v.shape[-1]))
    for i in range(v.shape[2]):
        D = U[:, :, i] - W[:, :, i] @ S
        outputs.append(q[:, :, i] @ S + P[:, :, i] @ D)
        S = last[:, :, i] * S + k_t[:, :, i] @ D
    o = mx.concatenate(outputs, axis=-2)
    return o.flatten(0, 1)[:, :length]


def unit_inverse(E: mx.array) -> mx.array:
    """Returns (I + E)⁻¹ of a strictly lower triangular E [..., n, n], for n a power of two.

    [[I + E₁, 0], [E₂₁, I + E₂]]⁻¹ = [[M₁, 0], [-M₂ E₂₁ M₁, M₂]], with M₁ = (I + E₁)⁻¹ and M₂ = (I +
    E₂)⁻¹. The Neumann series, computed by repeated squaring, would overflow for near-equal keys.
    """
    half = E.shape[-1] // 2
    if half == 0:
        return mx.ones_like(E)
    first, second = unit_inverse(mx.stack([E[..., :half, :half], E[..., half:, half:]]))
    below = mx.concatenate([-(second @ E[..., half:, :half] @ first), second], axis=-1)
    above = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([above, below], axis=-2)
