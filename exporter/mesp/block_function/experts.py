"""A mixture of experts. MLX cannot trace this code, because the router's output decides what is
computed.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mesp.block_function.parts import Parts
from mesp.models.mlps import Experts


def mix_by_experts(
    experts: Experts, parts: Parts, x: mx.array, act: Callable[[mx.array], mx.array]
) -> mx.array:
    """Returns the weighted sum of the outputs of each token's experts, in float32.

    `x` and the result are [1, T, hidden].
    """
    assert parts.expert
    x = x[0].astype(mx.float32)
    chosen, weights = _route(experts, parts, x)
    y = mx.zeros(x.shape)
    for e in range(experts.num_experts):
        rows, slots = (mx.array(found) for found in np.nonzero(chosen == e))
        if rows.size:
            gate, up, down = parts.expert(e)
            some = x[rows]
            out = down(act(gate(some)) * up(some))
            y = y.at[rows].add(weights[rows, slots][:, None] * out)
            mx.eval(y)
    return y[None]


def _route(experts: Experts, parts: Parts, x: mx.array) -> tuple[np.ndarray, mx.array]:
    """Returns the experts of each token and their weights, both [T, k]."""
    z = parts.p[experts.router](x[None])[0]
    scores = mx.sigmoid(z) if experts.scores == "sigmoid" else mx.softmax(z, axis=-1)
    biased = scores if experts.bias is None else scores + parts.vector(experts.bias)
    chosen = mx.argsort(-biased, axis=-1)[:, : experts.num_experts_per_tok]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    total = mx.sum(weights, axis=-1, keepdims=True)
    total = total + 1e-6 if experts.scores == "sigmoid" else total
    return np.array(chosen), experts.scaling * weights / total
