"""Gated DeltaNet (Yang et al., arXiv:2412.06464), a mixer with a recurrent state.

Each value head h has a state S [key_dim, value_dim]. It uses q and k of the key head h // (value
heads / key heads). For each token, with the decay g = exp(κ), κ ≤ 0:

    S ← g S        S ← S + k (β (v - Sᵀ k))ᵀ        o = Sᵀ q

A chunk of C tokens is computed at once. In a chunk that begins with the state S, the outputs o_i
are computed from vectors d_i:

    d_i = β_i (v_i - γ_i Sᵀ k_i - Σ_{j<i} Γ_ij (k_j · k_i) d_j)
    o_i = γ_i Sᵀ q_i + Σ_{j≤i} Γ_ij (k_j · q_i) d_j

Γ_ij = exp(κ_{j+1} + … + κ_i) is the decay from token j to token i. γ_i = exp(κ_1 + … + κ_i) is the
decay since the chunk began. The d_i are the rows of D. docs/method.md derives the matrix form.
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

UNIT_EPS = 1e-6  # added to the sum of squares in the norms of q and k


class Chunk(NamedTuple):
    """The tokens of a chunk: q, k [Hv, C, key_dim], v [Hv, C, value_dim], κ = log_g and β [Hv,
    C, 1]."""

    q: mx.array
    k: mx.array
    v: mx.array
    log_g: mx.array
    beta: mx.array


def unit_inverse(E: mx.array) -> mx.array:
    """Returns M = (I + E)⁻¹ for a strictly lower triangular E [..., n, n]. n must be a power of
    two.

        [[I + E₁, 0], [E₂₁, I + E₂]]⁻¹ = [[M₁, 0], [-M₂ E₂₁ M₁, M₂]]
    """
    half = E.shape[-1] // 2
    if half == 0:
        return mx.ones_like(E)
    halves = mx.stack([E[..., :half, :half], E[..., half:, half:]])
    first, second = unit_inverse(halves)
    below = -second @ E[..., half:, :half] @ first
    above = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([above, mx.concatenate([below, second], axis=-1)], axis=-2)


def _products(c: Chunk, Gamma: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns A = Γ ∘ K Kᵀ strictly below the diagonal, P = Γ ∘ Q Kᵀ, and M = (I + β A)⁻¹."""
    below = mx.tri(Gamma.shape[-1], k=-1)
    A = below * Gamma * (c.k @ c.k.swapaxes(-1, -2))
    P = Gamma * (c.q @ c.k.swapaxes(-1, -2))
    return A, P, unit_inverse(c.beta * A)


def chunk_forward(c: Chunk, S: mx.array) -> tuple[mx.array, mx.array]:
    """Returns O [Hv, C, value_dim] and the state after a chunk.

    S [Hv, key_dim, value_dim] is the state before the chunk.

    D = M β (V - γ K S)        O = γ Q S + P D        S₊ = γ_C S + (δ K)ᵀ D
    """
    Gamma, gamma, delta = decays(c.log_g)
    _, P, M = _products(c, Gamma)
    D = M @ (c.beta * (c.v - gamma * (c.k @ S)))
    out = gamma * (c.q @ S) + P @ D
    return out, gamma[:, -1:] * S + (delta * c.k).swapaxes(-1, -2) @ D


def chunk_backward(
    c: Chunk, S: mx.array, dO: mx.array, dS_after: mx.array
) -> tuple[Chunk, mx.array]:
    """Returns the gradients of the chunk's arrays and of S. D is recomputed.

        dD = Pᵀ dO + δ K dS₊        Z = Mᵀ dD        dV = β Z
        dβ = rowsum(Z ∘ (V - γ K S - A D))
        dP = dO Dᵀ        dA = -dV Dᵀ strictly below the diagonal, else 0
        dQ = γ dO Sᵀ + (Γ ∘ dP) K
        dK = (Γ ∘ dA + (Γ ∘ dA)ᵀ) K + (Γ ∘ dP)ᵀ Q - γ dV Sᵀ + δ D dS₊ᵀ
        dS = γ_C dS₊ + (γ Q)ᵀ dO - (γ K)ᵀ dV

    With X = P ∘ dP + A ∘ dA, u = rowsum(dO ∘ γ Q S - dV ∘ γ K S) and w = rowsum(δ K dS₊ ∘ D),

        dκ_m = Σ_{j<m≤i} X_ij + Σ_{i≥m} u_i + Σ_{j<m} w_j + γ_C ⟨S, dS₊⟩

    The four terms come from Γ, γ, δ and γ_C, which contain κ_m.
    """
    Gamma, gamma, delta = decays(c.log_g)
    A, P, M = _products(c, Gamma)
    KS, QS = gamma * (c.k @ S), gamma * (c.q @ S)
    D = M @ (c.beta * (c.v - KS))
    from_state = delta * (c.k @ dS_after)

    dD = P.swapaxes(-1, -2) @ dO + from_state
    Z = M.swapaxes(-1, -2) @ dD
    dV = c.beta * Z
    d_beta = (Z * (c.v - KS - A @ D)).sum(axis=-1, keepdims=True)

    below = mx.tri(Gamma.shape[-1], k=-1)
    dP = dO @ D.swapaxes(-1, -2)
    dA = -(dV @ D.swapaxes(-1, -2))
    G_P, G_A = Gamma * dP, below * Gamma * dA
    S_T = S.swapaxes(-1, -2)
    dQ = gamma * (dO @ S_T) + G_P @ c.k
    dK = (G_A + G_A.swapaxes(-1, -2)) @ c.k + G_P.swapaxes(-1, -2) @ c.q
    dK = dK - gamma * (dV @ S_T) + delta * (D @ dS_after.swapaxes(-1, -2))
    dS = gamma[:, -1:] * dS_after + (gamma * c.q).swapaxes(-1, -2) @ dO
    dS = dS - (gamma * c.k).swapaxes(-1, -2) @ dV

    X = P * dP + A * dA
    u = (dO * QS - dV * KS).sum(axis=-1, keepdims=True)
    w = (from_state * D).sum(axis=-1, keepdims=True)
    within = (below * mx.cumsum(X, axis=-2, reverse=True)).sum(axis=-1, keepdims=True)
    d_log_g = within + mx.cumsum(u, axis=-2, reverse=True)
    d_log_g = d_log_g + mx.cumsum(w, axis=-2, inclusive=False)
    d_log_g = d_log_g + gamma[:, -1:] * (S * dS_after).sum(axis=(-2, -1), keepdims=True)
    return Chunk(dQ, dK, dV, d_log_g, d_beta), dS


def _chunks(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array
) -> tuple[list[Chunk], mx.array]:
    Hv, _, value_dim = v.shape
    q, k = repeat_heads(q, Hv), repeat_heads(k, Hv)
    chunks = [Chunk(*each) for each in cut([q, k, v, log_g[..., None], beta[..., None]])]
    return chunks, mx.zeros((Hv, k.shape[-1], value_dim))


def gated_delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array
) -> mx.array:
    """Returns O [Hv, T, value_dim] for an initial state of zero.

    q, k [Hk, T, key_dim], v [Hv, T, value_dim], κ = log g and β [Hv, T]
    """
    outputs, _ = scan(chunk_forward, *_chunks(q, k, v, log_g, beta))
    return outputs[:, : v.shape[1]]


def gated_delta_rule_backward(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, dO: mx.array
) -> tuple[mx.array, ...]:
    """Returns dq, dk, dv, dκ, dβ. Shapes as in `gated_delta_rule`.

    dq and dk are sums over the value heads of a key head.
    """
    chunks, start = _chunks(q, k, v, log_g, beta)
    _, states = scan(chunk_forward, chunks, start)
    dq, dk, dv, d_log_g, d_beta = scan_backward(chunk_backward, chunks, states, dO)
    dq, dk = sum_heads(dq, q.shape[0]), sum_heads(dk, q.shape[0])
    return dq, dk, dv, d_log_g[..., 0], d_beta[..., 0]


def log_decay(a: mx.array, A_log: mx.array, dt_bias: mx.array) -> mx.array:
    """Returns κ = -exp(A_log) ∘ softplus(a + dt_bias), the logarithm of the decay. κ has a's
    shape."""
    return -mx.exp(A_log) * mx.logaddexp(a + dt_bias, 0)


def log_decay_backward(
    a: mx.array, d_log_g: mx.array, A_log: mx.array, dt_bias: mx.array
) -> mx.array:
    """Returns da = -exp(A_log) ∘ sigmoid(a + dt_bias) ∘ dκ. A_log and dt_bias are frozen."""
    return -mx.exp(A_log) * mx.sigmoid(a + dt_bias) * d_log_g


def gated_norm(x: mx.array, z: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Returns y = RMSNorm(x) ∘ silu(z), with a norm for each head.   x, z, y [..., value_dim]"""
    return rms_norm(x, weight, eps) * silu(z)


def gated_norm_backward(
    x: mx.array, z: mx.array, dy: mx.array, weight: mx.array, eps: float
) -> tuple[mx.array, mx.array]:
    """Returns dx = rms_norm_backward(x, dy ∘ silu(z)) and dz = dy ∘ RMSNorm(x) ∘ silu'(z)."""
    dx = rms_norm_backward(x, dy * silu(z), weight, eps)
    return dx, dy * rms_norm(x, weight, eps) * silu_derivative(z)


def _rule_inputs(qkv: mx.array, ba: mx.array, parts: Parts) -> tuple:
    """Returns the convolution's output, q' and k', and the inputs of `gated_delta_rule`.

        q', k', v = silu(conv(qkv))
        q = RMSNorm(q') / key_dim        k = RMSNorm(k') / √key_dim

    The norms are per head, with ε = 10⁻⁶ / key_dim.
    """
    mixer, key_dim = parts.mixer, parts.mixer.key_head_dim
    Hk, Hv, keys = mixer.num_key_heads, mixer.num_value_heads, mixer.num_key_heads * key_dim
    conv = convolution(qkv, parts.vector["linear_attn.conv1d.weight"])
    q, k, v = mx.split(silu(conv), [keys, 2 * keys], axis=-1)
    q, k, v = by_head(q, Hk), by_head(k, Hk), by_head(v, Hv)
    b, a = mx.split(ba[0].T, 2)
    vectors = (parts.vector[f"linear_attn.{name}"][:, None] for name in ("A_log", "dt_bias"))
    taken = (
        rms_norm(q, 1 / key_dim, UNIT_EPS / key_dim),
        rms_norm(k, key_dim**-0.5, UNIT_EPS / key_dim),
        v,
        log_decay(a, *vectors),
        mx.sigmoid(b),
    )
    return conv, q, k, taken


def mix_by_gated_delta_net(x: mx.array, parts: Parts) -> list[mx.array]:
    """Returns [qkv, z, ba, o] for x [1, T, hidden].

    ba concatenates the projections b and a. o concatenates the heads' outputs of
    `gated_delta_rule`.
    """
    qkv, z, b, a = (linear(x, parts.p[name]) for name in ("qkv", "z", "b", "a"))
    qkv, z, ba = map(parts.stored, (qkv, z, mx.concatenate([b, a], axis=-1)))
    *_, taken = _rule_inputs(qkv, ba, parts)
    return [qkv, z, ba, parts.stored(by_token(gated_delta_rule(*taken)))]


def output_of_gated_delta_net(intermediates: list[mx.array], parts: Parts) -> mx.array:
    """Returns RMSNorm(o) ∘ silu(z) [1, T, Hv·value_dim], the input of the output projection.

    The norm is per head.
    """
    _, z, _, o = intermediates
    o, z = (by_head(each, parts.mixer.num_value_heads) for each in (o, z))
    return by_token(gated_norm(o, z, parts.vector["linear_attn.norm.weight"], parts.eps))


def mix_by_gated_delta_net_backward(
    x: mx.array, intermediates: list[mx.array], dy: mx.array, parts: Parts
) -> tuple[mx.array, Matrices]:
    """Returns dx, and the gradients of the LoRA parameters of qkv, z, b and a.

    dy [1, T, Hv·value_dim] is the gradient of the output projection's input.
    """
    mixer, vector = parts.mixer, parts.vector
    qkv, z, ba, o = intermediates
    heads = (by_head(each, mixer.num_value_heads) for each in (o, z, dy))
    do, dz = gated_norm_backward(*heads, vector["linear_attn.norm.weight"], parts.eps)

    conv, q, k, taken = _rule_inputs(qkv, ba, parts)
    dq, dk, dv, d_log_g, d_beta = gated_delta_rule_backward(*taken, do)
    key_dim = mixer.key_head_dim
    dq = rms_norm_backward(q, dq, 1 / key_dim, UNIT_EPS / key_dim)
    dk = rms_norm_backward(k, dk, key_dim**-0.5, UNIT_EPS / key_dim)
    d_conv = mx.concatenate([by_token(each) for each in (dq, dk, dv)], axis=-1)
    d_conv = d_conv * silu_derivative(conv)

    b, a = mx.split(ba[0].T, 2)
    beta = mx.sigmoid(b)
    vectors = (vector[f"linear_attn.{name}"][:, None] for name in ("A_log", "dt_bias"))
    outputs = {
        "qkv": convolution_backward(d_conv, vector["linear_attn.conv1d.weight"]),
        "z": by_token(dz),
        "b": (beta * (1 - beta) * d_beta).T[None],
        "a": log_decay_backward(a, d_log_g, *vectors).T[None],
    }
    return linears_backward(x, outputs, parts.p)
