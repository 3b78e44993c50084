from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx


class Projection(NamedTuple):
    """A linear layer: frozen W [out, in] and bias [out] or None; trained A [in, rank] and B [rank,
    out], whose product is scaled by s.

    - `h`: (x ∘ M) A [..., rank] if it was stored, else None.
    - `M`: the mask [T, in] of LoRA dropout, or None.
    - `m`: the trained magnitudes [out] of DoRA, or None.
    """

    W: mx.array
    bias: mx.array | None
    A: mx.array
    B: mx.array
    s: float
    h: mx.array | None = None
    M: mx.array | None = None
    m: mx.array | None = None


def linear(x: mx.array, p: Projection) -> mx.array:
    """Returns y = z + bias [..., T, out], with z = x Wᵀ + s ((x ∘ M) A) B and x [..., T, in].

    With DoRA, y = (m / n) ∘ z + bias, where n is `row_norms`.
    """
    y = x @ p.W.T + p.s * ((_masked(x, p.M) @ p.A) @ p.B)
    if p.m is not None:
        y = (p.m / row_norms(p)) * y
    return y if p.bias is None else y + p.bias


def linear_backward(x: mx.array, dy: mx.array, p: Projection) -> tuple[mx.array, ...]:
    """Returns dx, dA and dB. W and bias are frozen. h is recomputed unless it was stored.

        h = (x ∘ M) A     dh = s dy Bᵀ     dB = s hᵀ dy     dA = (x ∘ M)ᵀ dh
        dx = dy W + (dh Aᵀ) ∘ M

    With DoRA, also returns dm = Σ_t dy_t ∘ z_t / n. The other formulas then have (m / n) ∘ dy in
    place of dy.
    """
    dm = []
    if p.m is not None:
        n, z = row_norms(p), linear(x, p._replace(bias=None, m=None))
        dm = [mx.sum(_rows(dy) * _rows(z), axis=0) / n]
        dy = (p.m / n) * dy
    kept = _masked(x, p.M)
    h = kept @ p.A if p.h is None else p.h
    dh = p.s * (dy @ p.B.T)
    dB = p.s * (_rows(h).T @ _rows(dy))
    dA = _rows(kept).T @ _rows(dh)
    return dy @ p.W + _masked(dh @ p.A.T, p.M), dA, dB, *dm


def linears_backward(
    x: mx.array, outputs: dict[str, mx.array], p: dict[str, Projection]
) -> tuple[mx.array, dict[str, list[mx.array]]]:
    """Returns dx, summed over the projections of x, and the gradients of each one's adapters.

    `outputs` has the gradient of each projection's output.
    """
    dx, grad = mx.zeros_like(x), {}
    for name, dy in outputs.items():
        d_in, *grad[name] = linear_backward(x, dy, p[name])
        dx = dx + d_in
    return dx, grad


def row_norms(p: Projection) -> mx.array:
    """Returns n [out], the norm of each row of W + s (A B)ᵀ, or ∞ if the row is zero. The gradient
    treats n as a constant.
    """
    squares = mx.sum(mx.square(p.W + p.s * (p.A @ p.B).T), axis=1)
    return mx.stop_gradient(mx.where(squares < 2.0**-126, mx.inf, mx.sqrt(squares)))


def _masked(x: mx.array, M: mx.array | None) -> mx.array:
    return x if M is None else x * M


def _rows(x: mx.array) -> mx.array:
    """Reshapes [..., n] to [tokens, n]."""
    return x.reshape(-1, x.shape[-1])


def rms_norm(x: mx.array, weight: mx.array | float, eps: float) -> mx.array:
    """Returns y = x r ∘ w, r = 1 / √(mean(x²) + ε), with x, y [..., n] and w [n] or a number."""
    r = mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * r * weight


def rms_norm_backward(x: mx.array, dy: mx.array, weight: mx.array | float, eps: float) -> mx.array:
    """Returns dx = r g - x r³ mean(g ∘ x), with g = dy ∘ w and r as in `rms_norm`. w is frozen."""
    r = mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    g = dy * weight
    return r * g - x * r**3 * mx.mean(g * x, axis=-1, keepdims=True)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """Reshapes [1, T, heads·D] to [1, heads, T, D]."""
    return x.reshape(1, x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """Reshapes [1, heads, T, D] to [1, T, heads·D], the inverse of `split_heads`."""
    return x.transpose(0, 2, 1, 3).reshape(1, x.shape[2], -1)


def soft_cap(x: mx.array, cap: float | None) -> mx.array:
    """Returns y = c tanh(x / c), or x if there is no cap."""
    return x if cap is None else cap * mx.tanh(x / cap)


def soft_cap_backward(y: mx.array, dy: mx.array, cap: float | None) -> mx.array:
    """Returns dx = dy ∘ (1 - (y / c)²), or dy if there is no cap."""
    return dy if cap is None else dy * (1 - (y / cap) ** 2)


def silu(x: mx.array) -> mx.array:
    """Returns y = x sigmoid(x)."""
    return x * mx.sigmoid(x)


def silu_derivative(x: mx.array) -> mx.array:
    """Returns sigmoid(x) (1 + x (1 - sigmoid(x)))."""
    sigma = mx.sigmoid(x)
    return sigma * (1 + x * (1 - sigma))


def gelu(x: mx.array) -> mx.array:
    """Returns y = ½ x (1 + tanh u),   u = √(2/π) (x + 0.044715 x³)."""
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + mx.tanh(u))


def gelu_derivative(x: mx.array) -> mx.array:
    """Returns ½ (1 + tanh u) + ½ x (1 - tanh² u) u',   u' = √(2/π) (1 + 3 · 0.044715 x²)."""
    tanh = mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * du


ACTIVATIONS = {"silu": (silu, silu_derivative), "gelu": (gelu, gelu_derivative)}


def gated(gate: mx.array, up: mx.array, hidden_act: str) -> mx.array:
    """Returns y = act(gate) ∘ up.   All [..., n]"""
    act, _ = ACTIVATIONS[hidden_act]
    return act(gate) * up


def gated_backward(
    gate: mx.array, up: mx.array, dy: mx.array, hidden_act: str
) -> tuple[mx.array, mx.array]:
    """Returns d_gate = dy ∘ up ∘ act'(gate) and d_up = dy ∘ act(gate)."""
    act, derivative = ACTIVATIONS[hidden_act]
    return dy * up * derivative(gate), dy * act(gate)


def scattered(seed: int) -> int:
    """Returns the first output of SplitMix64 with the state `seed`, an integer of 64 bits."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)
