"""Mamba-2 (Dao & Gu, arXiv:2405.21060), a mixer with a recurrent state, as in Granite 4.0-H.

Each head has a state S [P, N], and shares B and C with the other heads of its group. For each
token, with the time step Δ, κ = a Δ and a = -exp(A_log):

    S ← exp(κ) S + (Δ x) Bᵀ        y = S C + D x

A chunk of tokens is computed at once. For one head, Γ, γ and δ are the result of `decays`, S is the
state before the chunk, and U = Δ ∘ X:

    Π = Γ ∘ C Bᵀ        Y = γ ∘ (C Sᵀ) + Π U + D X        S₊ = γ_last S + (δ ∘ U)ᵀ B
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mesp.models.mixers import Mamba2Mixer
from mesp.reference.gated_delta_net import CHUNK, decays
from mesp.reference.model import Matrices, Parts, Stored
from mesp.reference.pieces import (
    linear,
    linears_backward,
    rms_norm,
    rms_norm_backward,
    silu,
    silu_derivative,
)
from mesp.reference.short_convolution import convolution, convolution_backward


class StateSpaceChunk(NamedTuple):
    """The tokens of a chunk: u = Δ ∘ x [H, n, P], κ [H, n, 1], and B and C [H, n, N] of each head's
    group.
    """

    u: mx.array
    log_decay: mx.array
    B: mx.array
    C: mx.array


def state_space_chunk(c: StateSpaceChunk, S: mx.array) -> tuple[mx.array, mx.array]:
    """Returns Y - D X [H, n, P] and the state after the chunk.

    S [H, P, N] is the state before the chunk.
    """
    Gamma, gamma, delta = decays(c.log_decay)
    Pi = Gamma * (c.C @ c.B.swapaxes(-1, -2))
    out = gamma * (c.C @ S.swapaxes(-1, -2)) + Pi @ c.u
    return out, gamma[:, -1:] * S + (delta * c.u).swapaxes(-1, -2) @ c.B


def state_space_chunk_backward(
    c: StateSpaceChunk, S: mx.array, dY: mx.array, dS_after: mx.array
) -> tuple[StateSpaceChunk, mx.array]:
    """Returns the gradients of the chunk's arrays and of S. Each head has its own gradients of B
    and C.

        dΠ = dY Uᵀ        dU = Πᵀ dY + δ ∘ (B dS₊ᵀ)        dS = γ_last dS₊ + (γ ∘ dY)ᵀ C
        dC = γ ∘ (dY S) + (Γ ∘ dΠ) B        dB = (Γ ∘ dΠ)ᵀ C + δ ∘ (U dS₊)

    With u = rowsum(dY ∘ γ C Sᵀ) and w = rowsum(U ∘ δ B dS₊ᵀ),

        dκ_m = Σ_{j<m≤i} (Π ∘ dΠ)_ij + Σ_{i≥m} u_i + Σ_{j<m} w_j + γ_last ⟨S, dS₊⟩

    The four terms come from Γ, γ, δ and γ_last, which contain κ_m.
    """
    Gamma, gamma, delta = decays(c.log_decay)
    Pi = Gamma * (c.C @ c.B.swapaxes(-1, -2))
    from_state = delta * (c.B @ dS_after.swapaxes(-1, -2))

    dPi = dY @ c.u.swapaxes(-1, -2)
    dU = Pi.swapaxes(-1, -2) @ dY + from_state
    dC = gamma * (dY @ S) + (Gamma * dPi) @ c.B
    dB = (Gamma * dPi).swapaxes(-1, -2) @ c.C + delta * (c.u @ dS_after)
    dS = gamma[:, -1:] * dS_after + (gamma * dY).swapaxes(-1, -2) @ c.C

    u = (dY * gamma * (c.C @ S.swapaxes(-1, -2))).sum(axis=-1, keepdims=True)
    w = (c.u * from_state).sum(axis=-1, keepdims=True)
    below = mx.tri(Gamma.shape[-1], k=-1)
    within = (below * mx.cumsum(Pi * dPi, axis=-2, reverse=True)).sum(axis=-1, keepdims=True)
    d_log_decay = within + mx.cumsum(u, axis=-2, reverse=True)
    d_log_decay = d_log_decay + mx.cumsum(w, axis=-2, inclusive=False)
    d_log_decay = d_log_decay + gamma[:, -1:] * (S * dS_after).sum(axis=(-2, -1), keepdims=True)
    return StateSpaceChunk(dU, d_log_decay, dB, dC), dS


def _chunks(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, a: mx.array
) -> list[StateSpaceChunk]:
    """Cuts T tokens into chunks. The last chunk is padded with zeros, which do not change the
    state."""
    heads, T = dt.shape
    step = dt[..., None]
    B, C = (mx.repeat(each, heads // each.shape[0], axis=0) for each in (B, C))
    whole = StateSpaceChunk(step * x, a[:, None, None] * step, B, C)
    padded = [mx.pad(each, ((0, 0), (0, -T % CHUNK), (0, 0))) for each in whole]
    return [
        StateSpaceChunk(*(each[:, start : start + CHUNK] for each in padded))
        for start in range(0, T, CHUNK)
    ]


def _states(chunks: list[StateSpaceChunk]) -> tuple[list[mx.array], list[mx.array]]:
    heads, _, size = chunks[0].u.shape
    S, states, outputs = mx.zeros((heads, size, chunks[0].B.shape[-1])), [], []
    for chunk in chunks:
        states.append(S)
        out, S = state_space_chunk(chunk, S)
        outputs.append(out)
    return states, outputs


def state_space(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, a: mx.array, D: mx.array
) -> mx.array:
    """Returns y [H, T, P] for an initial state of zero.

    x [H, T, P], Δ [H, T], B and C [groups, T, N], a = -exp(A_log) and D [H]
    """
    _, outputs = _states(_chunks(x, dt, B, C, a))
    return mx.concatenate(outputs, axis=1)[:, : x.shape[1]] + D[:, None, None] * x


def state_space_backward(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, a: mx.array, D: mx.array, dy: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Returns dx, dΔ, dB, dC. Shapes as in `state_space`.

        dx = Δ ∘ dU + D dy        dΔ = rowsum(dU ∘ x) + a dκ

    dB and dC are sums over the heads of a group. a and D are frozen.
    """
    T = x.shape[1]
    chunks = _chunks(x, dt, B, C, a)
    states, _ = _states(chunks)
    dY = mx.pad(dy, ((0, 0), (0, -T % CHUNK), (0, 0)))
    dS, found = mx.zeros_like(states[0]), []
    for i in reversed(range(len(chunks))):
        rows = slice(i * CHUNK, (i + 1) * CHUNK)
        gradients, dS = state_space_chunk_backward(chunks[i], states[i], dY[:, rows], dS)
        found.insert(0, gradients)
    dU, d_log_decay, dB, dC = (
        mx.concatenate(each, axis=1)[:, :T] for each in zip(*found, strict=True)
    )
    dx = dt[..., None] * dU + D[:, None, None] * dy
    d_dt = (dU * x).sum(axis=-1) + a[:, None] * d_log_decay[..., 0]
    dB, dC = (each.reshape(B.shape[0], -1, *each.shape[1:]).sum(axis=1) for each in (dB, dC))
    return dx, d_dt, dB, dC


class Mamba2(NamedTuple):
    """The frozen weights of a Mamba-2 mixer, except those of its projections.

    P is the size of a head, N the size of the state, and K the width of the convolution.
    """

    conv_weight: mx.array  # [heads·P + 2 groups·N, K]
    conv_bias: mx.array  # [heads·P + 2 groups·N]
    dt_bias: mx.array  # [heads]
    A_log: mx.array  # [heads]
    D: mx.array  # [heads]
    norm: mx.array  # [heads·P]
    groups: int
    eps: float

    @classmethod
    def of(cls, parts: Parts, mixer: Mamba2Mixer) -> Mamba2:
        names = ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D", "norm.weight")
        arrays = (parts.vector[f"mamba.{name}"] for name in names)
        return cls(*arrays, mixer.num_groups, mixer.norm_eps)

    def split(self, projected: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        values, channels = self.norm.size, self.conv_bias.size
        z, xBC, dt = mx.split(projected, [values, values + channels], axis=-1)
        return z, xBC, dt

    def inputs(self, conv: mx.array, dt: mx.array) -> tuple[mx.array, ...]:
        """Returns x and Δ = softplus(dt + dt_bias) by heads, and B and C by groups, from the
        convolution's output and dt.
        """
        values = self.norm.size
        size = (self.conv_bias.size - values) // 2
        x, B, C = mx.split(silu(conv), [values, values + size], axis=-1)
        step = mx.logaddexp(dt + self.dt_bias, 0)[0].T
        counts = (self.D.size, self.groups, self.groups)
        x, B, C = (_heads(each, n) for each, n in zip((x, B, C), counts, strict=True))
        return x, step, B, C


def _heads(x: mx.array, count: int) -> mx.array:
    """Reshapes [1, T, count·size] to [count, T, size]."""
    return x.reshape(x.shape[1], count, -1).swapaxes(0, 1)


def _merged(x: mx.array) -> mx.array:
    """Reshapes [count, T, size] to [1, T, count·size], the inverse of `_heads`."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1)


def mamba2(projected: mx.array, weights: Mamba2) -> tuple[mx.array, mx.array]:
    """Returns o, the concatenated outputs of the heads, and y, the input of the output projection.

        o = state_space(silu(conv(xBC) + bias), Δ)        y = RMSNorm(o ∘ silu(z))

    projected [1, T, 2 heads·P + 2 groups·N + heads] -> o, y [1, T, heads·P]. The norm is over all
    heads together.
    """
    z, xBC, dt = weights.split(projected)
    conv = convolution(xBC, weights.conv_weight) + weights.conv_bias
    o = _merged(state_space(*weights.inputs(conv, dt), -mx.exp(weights.A_log), weights.D))
    return o, rms_norm(o * silu(z), weights.norm, weights.eps)


def mamba2_backward(projected: mx.array, o: mx.array, dy: mx.array, weights: Mamba2) -> mx.array:
    """Returns d_projected. The inputs of `state_space` are recomputed.

    M = o ∘ silu(z)        dM = rms_norm_backward(M, dy)
    do = dM ∘ silu(z)        dz = dM ∘ o ∘ silu'(z)        d_dt = dΔ ∘ sigmoid(dt + dt_bias)
    """
    z, xBC, dt = weights.split(projected)
    d_gated = rms_norm_backward(o * silu(z), dy, weights.norm, weights.eps)
    dz = d_gated * o * silu_derivative(z)

    conv = convolution(xBC, weights.conv_weight) + weights.conv_bias
    do = _heads(d_gated * silu(z), weights.D.size)
    dx, d_step, dB, dC = state_space_backward(
        *weights.inputs(conv, dt), -mx.exp(weights.A_log), weights.D, do
    )
    d_conv = mx.concatenate([_merged(each) for each in (dx, dB, dC)], axis=-1)
    d_xBC = convolution_backward(d_conv * silu_derivative(conv), weights.conv_weight)
    d_dt = d_step.T[None] * mx.sigmoid(dt + weights.dt_bias)
    return mx.concatenate([dz, d_xBC, d_dt], axis=-1)


def mix_by_mamba2(
    x: mx.array, scale: float, parts: Parts, mixer: Mamba2Mixer, stored: Stored
) -> list[mx.array]:
    """Returns [z, xBC, dt, o] for x [1, T, hidden]. z, xBC and dt are the parts of in(x)."""
    weights, projected = Mamba2.of(parts, mixer), stored(linear(x, parts.p["in"], scale))
    o, _ = mamba2(projected, weights)
    return [*weights.split(projected), stored(o)]


def output_of_mamba2(intermediates: list[mx.array], parts: Parts, mixer: Mamba2Mixer) -> mx.array:
    """Returns RMSNorm(o ∘ silu(z)) [1, T, heads·P], the input of the output projection."""
    z, _, _, o = intermediates
    return rms_norm(o * silu(z), parts.vector["mamba.norm.weight"], mixer.norm_eps)


def mix_by_mamba2_backward(
    x: mx.array,
    intermediates: list[mx.array],
    dy: mx.array,
    scale: float,
    parts: Parts,
    mixer: Mamba2Mixer,
) -> tuple[mx.array, Matrices]:
    """Returns dx, and the gradients of the LoRA parameters of the input projection.

    dy [1, T, heads·P] is the gradient of the output projection's input.
    """
    *split, o = intermediates
    weights, projected = Mamba2.of(parts, mixer), mx.concatenate(split, axis=-1)
    d_projected = mamba2_backward(projected, o, dy, weights)
    return linears_backward(x, {"in": d_projected}, parts.p, scale)
