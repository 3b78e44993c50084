from __future__ import annotations

import math

import mlx.core as mx

from mesp.reference.model import Matrices, Model, Parts, dequantize
from mesp.reference.pieces import (
    gated,
    gated_backward,
    linear,
    linear_backward,
    rms_norm,
    rms_norm_backward,
)

NORM = "post_per_layer_input_norm.weight"


def layer_input(model: Model, tokens: mx.array, x0: mx.array, layer: int) -> mx.array | None:
    """Returns p [1, T, size] of a layer, from the tokens [T] and the first block's input x₀ [1, T,
    hidden], or None if the model has no per-layer embeddings.

        p = (RMSNorm(x₀ Wᵀ / √hidden) + √size e) / √2

    e are the tokens' rows of the table, cut to the layer's columns. W [size, hidden] are the
    layer's rows of the projection. p depends on no trained parameter.
    """
    arch, arrays = model.arch, model.per_layer
    if arch.per_layer is None:
        return None
    size = arch.per_layer.size
    of_layer = slice(layer * size, (layer + 1) * size)
    table, projection = (f"{name}." for name in arch.per_layer_shapes)
    rows = {n: array[tokens] for n, array in arrays.items() if n.startswith(table)}
    e = dequantize(rows, table, arch.num_hidden_layers * size)[:, of_layer]
    W = dequantize(arrays, projection, arch.hidden_size)[of_layer]
    weight = arrays["model.per_layer_projection_norm.weight"].astype(mx.float32)
    r = rms_norm(x0 @ W.T / math.sqrt(arch.hidden_size), weight, arch.rms_norm_eps)
    return (r + math.sqrt(size) * e) / math.sqrt(2)


def add_per_layer(h: mx.array, per_layer: mx.array, parts: Parts, hidden_act: str) -> mx.array:
    """Returns y = c (h + RMSNorm(out(act(gate(h)) ∘ p))), with h, y [1, T, hidden] and p [1, T,
    size].

    c is the block's `layer_scalar`.
    """
    p, vector, eps, *_ = parts
    z = linear(gated(linear(h, p["ple_gate"]), per_layer, hidden_act), p["ple_out"])
    return vector["layer_scalar"] * (h + rms_norm(z, vector[NORM], eps))


def add_per_layer_backward(
    h: mx.array, per_layer: mx.array, dy: mx.array, parts: Parts, hidden_act: str
) -> tuple[mx.array, Matrices]:
    """Returns dh, and the gradients of the LoRA parameters of gate and out. p is frozen.

    u = gate(h), m = act(u) ∘ p and z = out(m) are recomputed from h.

        dh₁ = c dy     dz = rms_norm_backward(z, dh₁)     dm = input gradient of out for dz
        du = dm ∘ p ∘ act'(u)     dh = dh₁ + input gradient of gate for du
    """
    p, vector, eps, *_ = parts
    u = linear(h, p["ple_gate"])
    m = gated(u, per_layer, hidden_act)
    z = linear(m, p["ple_out"])
    dh, grad = vector["layer_scalar"] * dy, {}
    dz = rms_norm_backward(z, dh, vector[NORM], eps)
    dm, *grad["ple_out"] = linear_backward(m, dz, p["ple_out"])
    du, _ = gated_backward(u, per_layer, dm, hidden_act)
    dh_gate, *grad["ple_gate"] = linear_backward(h, du, p["ple_gate"])
    return dh + dh_gate, grad
