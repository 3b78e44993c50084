from __future__ import annotations

import mlx.core as mx

from mesp.block_function.parts import Parts
from mesp.models.mixers import ShortConvolution


def convolution(x: mx.array, w: mx.array, starts: mx.array | None) -> mx.array:
    """Returns y_t = Σ_j w_j ∘ x_{t-K+1+j} in float32, for x [1, T, channels] and w [channels, K].

    The record of token t begins at position starts_t. Inputs before that position count as 0.
    """
    length, kernel = x.shape[1], w.shape[1]
    before = mx.zeros((1, kernel - 1, x.shape[2]))
    padded = mx.concatenate([before, x.astype(mx.float32)], axis=1)

    def term(j: int) -> mx.array:
        seen = padded[:, j : j + length]
        back = kernel - 1 - j
        if back and starts is not None:
            of_record = mx.arange(-back, length - back) >= starts
            seen = mx.where(of_record[:, None], seen, mx.array(0.0))
        return seen * w[:, j]

    y = term(0)
    for j in range(1, kernel):
        y = y + term(j)
    return y


def mix_by_short_convolution(
    mixer: ShortConvolution, parts: Parts, x: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Returns [b, c, u, conv(b ∘ u)] of x [1, T, hidden], and the output projection's input.

    The input projection's output is b, c and u, concatenated. The output projection's input is c ∘
    conv(b ∘ u).
    """
    b, c, u = mx.split(parts.project("in", x).astype(parts.dtype), 3, axis=-1)
    gated = b.astype(mx.float32) * u
    conv_out = convolution(gated, parts.vector("conv.conv.weight"), parts.starts).astype(
        parts.dtype
    )
    return [b, c, u, conv_out], c.astype(mx.float32) * conv_out
