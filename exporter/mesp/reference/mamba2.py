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

from mesp.reference.chunks import (
    by_head,
    by_token,
    cut,
    decays,
    repeat_heads,
    scan,
    scan_backward,
    sum_heads,
)
from mesp.reference.model import Matrices, Parts
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
) -> tuple[list[StateSpaceChunk], mx.array]:
    heads, step = x.shape[0], dt[..., None]
    B, C = repeat_heads(B, heads), repeat_heads(C, heads)
    chunks = [StateSpaceChunk(*each) for each in cut([step * x, a[:, None, None] * step, B, C])]
    return chunks, mx.zeros((heads, x.shape[-1], B.shape[-1]))


def state_space(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, a: mx.array, D: mx.array
) -> mx.array:
    """Returns y [H, T, P] for an initial state of zero.

    x [H, T, P], Δ [H, T], B and C [groups, T, N], a = -exp(A_log) and D [H]
    """
    outputs, _ = scan(state_space_chunk, *_chunks(x, dt, B, C, a))
    return outputs[:, : x.shape[1]] + D[:, None, None] * x


def state_space_backward(
    x: mx.array, dt: mx.array, B: mx.array, C: mx.array, a: mx.array, D: mx.array, dy: mx.array
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Returns dx, dΔ, dB, dC. Shapes as in `state_space`.

        dx = Δ ∘ dU + D dy        dΔ = rowsum(dU ∘ x) + a dκ

    dB and dC are sums over the heads of a group. a and D are frozen.
    """
    chunks, start = _chunks(x, dt, B, C, a)
    _, states = scan(state_space_chunk, chunks, start)
    dU, d_log_decay, dB, dC = scan_backward(state_space_chunk_backward, chunks, states, dy)
    dx = dt[..., None] * dU + D[:, None, None] * dy
    d_dt = (dU * x).sum(axis=-1) + a[:, None] * d_log_decay[..., 0]
    return dx, d_dt, sum_heads(dB, B.shape[0]), sum_heads(dC, B.shape[0])


def _inputs(xBC: mx.array, dt: mx.array, parts: Parts) -> tuple[mx.array, tuple[mx.array, ...]]:
    """Returns the convolution's output conv(xBC) + bias, and the inputs of `state_space`.

    x, B, C = silu(conv(xBC) + bias)        Δ = softplus(dt + dt_bias)
    """
    mixer = parts.mixer
    weight, bias, dt_bias, A_log, D = (
        parts.vector[f"mamba.{name}"]
        for name in ("conv1d.weight", "conv1d.bias", "dt_bias", "A_log", "D")
    )
    conv = convolution(xBC, weight) + bias
    ends = [mixer.values, mixer.values + mixer.num_groups * mixer.state_size]
    x, B, C = mx.split(silu(conv), ends, axis=-1)
    step = mx.logaddexp(dt + dt_bias, 0)[0].T
    B, C = by_head(B, mixer.num_groups), by_head(C, mixer.num_groups)
    return conv, (by_head(x, mixer.num_heads), step, B, C, -mx.exp(A_log), D)


def mix_by_mamba2(x: mx.array, parts: Parts) -> list[mx.array]:
    """Returns [z, xBC, dt, o] for x [1, T, hidden]. z, xBC and dt are the parts of in(x).

    o concatenates the heads' outputs of `state_space`.
    """
    values = parts.mixer.values
    ends = [values, values + parts.mixer.conv_dim]
    z, xBC, dt = mx.split(parts.stored(linear(x, parts.p["in"])), ends, axis=-1)
    _, taken = _inputs(xBC, dt, parts)
    return [z, xBC, dt, parts.stored(by_token(state_space(*taken)))]


def output_of_mamba2(intermediates: list[mx.array], parts: Parts) -> mx.array:
    """Returns RMSNorm(o ∘ silu(z)) [1, T, heads·P], the input of the output projection. The norm is
    over all heads together.
    """
    z, _, _, o = intermediates
    return rms_norm(o * silu(z), parts.vector["mamba.norm.weight"], parts.mixer.norm_eps)


def mix_by_mamba2_backward(
    x: mx.array, intermediates: list[mx.array], dy: mx.array, parts: Parts
) -> tuple[mx.array, Matrices]:
    """Returns dx, and the gradients of the LoRA parameters of the input projection.

    dy [1, T, heads·P] is the gradient of the output projection's input. The inputs of `state_space`
    are recomputed.

    M = o ∘ silu(z)        dM = rms_norm_backward(M, dy)
    do = dM ∘ silu(z)        dz = dM ∘ o ∘ silu'(z)        d_dt = dΔ ∘ sigmoid(dt + dt_bias)
    """
    vector, mixer = parts.vector, parts.mixer
    z, xBC, dt, o = intermediates
    d_gated = rms_norm_backward(o * silu(z), dy, vector["mamba.norm.weight"], mixer.norm_eps)
    dz = d_gated * o * silu_derivative(z)

    conv, taken = _inputs(xBC, dt, parts)
    do = by_head(d_gated * silu(z), mixer.num_heads)
    dx, d_step, dB, dC = state_space_backward(*taken, do)
    d_conv = mx.concatenate([by_token(each) for each in (dx, dB, dC)], axis=-1)
    d_conv = d_conv * silu_derivative(conv)
    d_xBC = convolution_backward(d_conv, vector["mamba.conv1d.weight"])
    d_dt = d_step.T[None] * mx.sigmoid(dt + vector["mamba.dt_bias"])
    return linears_backward(x, {"in": mx.concatenate([dz, d_xBC, d_dt], axis=-1)}, parts.p)
