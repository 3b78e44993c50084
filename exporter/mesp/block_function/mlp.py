from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

from mesp.block_function import tiles
from mesp.block_function.projection import Projection


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def gelu(x: mx.array) -> mx.array:
    """Returns GELU(x) by the tanh approximation."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


def mlp_by_tokens(
    x: mx.array, gate: Projection, up: Projection, down: Projection,
    act: Callable[[mx.array], mx.array], plus: mx.array | None,
) -> list[mx.array]:  # fmt: skip
    """The tiles are for a GPU, which multiplies by packed weights without unpacking them."""
    length, features = x.shape[1], down.a.shape[0]
    ys, gates, ups = [], [], []
    for rows in tiles.cut(length, max(length * tiles.NUMBERS_A_TOKEN // features, 8)):
        x = mx.depends(x, ys[-1:])
        gates.append(gate(x[:, rows]))
        ups.append(up(x[:, rows]))
        y = down(act(gates[-1]) * ups[-1], None if plus is None else plus[:, rows])
        ys.append(y)
    return [mx.concatenate(parts, axis=1) for parts in (ys, gates, ups)]


def plain_mlp(
    x: mx.array, gate: Projection, up: Projection, down: Projection,
    act: Callable[[mx.array], mx.array], plus: mx.array | None,
) -> list[mx.array]:  # fmt: skip
    """Returns [y, gate(x), up(x)] in float32, with y = down(act(gate(x)) ∘ up(x)), plus `plus` if
    given. x is [1, T, hidden].
    """
    gates, ups = gate(x), up(x)
    return [down(act(gates) * ups, plus), gates, ups]
