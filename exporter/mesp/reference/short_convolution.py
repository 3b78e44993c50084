from __future__ import annotations

import mlx.core as mx

from mesp.reference.model import Matrices, Parts
from mesp.reference.pieces import linear, linears_backward


def convolution(x: mx.array, w: mx.array) -> mx.array:
    """Returns y_t = Σ_j w_j ∘ x_{t-K+1+j} for each channel. x is padded with zeros on the left.

    x, y [1, T, channels], w [channels, K]
    """
    T, K = x.shape[1], w.shape[1]
    padded = mx.pad(x, ((0, 0), (K - 1, 0), (0, 0)))
    return sum(w[:, j] * padded[:, j : j + T] for j in range(K))


def convolution_backward(dy: mx.array, w: mx.array) -> mx.array:
    """Returns dx_s = Σ_j w_j ∘ dy_{s+K-1-j}. w is frozen."""
    T, K = dy.shape[1], w.shape[1]
    padded = mx.pad(dy, ((0, 0), (0, K - 1), (0, 0)))
    return sum(w[:, j] * padded[:, K - 1 - j : K - 1 - j + T] for j in range(K))


def mix_by_short_convolution(x: mx.array, parts: Parts) -> list[mx.array]:
    """Returns [b, c, u, conv(b ∘ u)] with b, c, u = in(x). All have the shape of x [1, T,
    hidden]."""
    b, c, u = map(parts.stored, mx.split(linear(x, parts.p["in"]), 3, axis=-1))
    return [b, c, u, parts.stored(convolution(b * u, parts.vector["conv.conv.weight"]))]


def output_of_short_convolution(intermediates: list[mx.array], parts: Parts) -> mx.array:
    """Returns y = c ∘ conv_out, the input of the output projection."""
    _, c, _, conv_out = intermediates
    return c * conv_out


def mix_by_short_convolution_backward(
    x: mx.array, intermediates: list[mx.array], dy: mx.array, parts: Parts
) -> tuple[mx.array, Matrices]:
    """Returns dx, and the gradients of the LoRA parameters of the input projection.

    dc = dy ∘ conv_out        d_bu = convolution_backward(dy ∘ c)
    db = u ∘ d_bu        du = b ∘ d_bu
    """
    b, c, u, conv_out = intermediates
    d_bu = convolution_backward(dy * c, parts.vector["conv.conv.weight"])
    d_in = mx.concatenate([d_bu * u, dy * conv_out, d_bu * b], axis=-1)
    return linears_backward(x, {"in": d_in}, parts.p)
