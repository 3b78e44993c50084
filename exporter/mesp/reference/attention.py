from __future__ import annotations

import mlx.core as mx

from mesp.models.mixers import AttentionMixer
from mesp.reference.model import Matrices, Parts
from mesp.reference.pieces import (
    linear,
    linears_backward,
    merge_heads,
    rms_norm,
    rms_norm_backward,
    soft_cap,
    soft_cap_backward,
    split_heads,
)


def rope(x: mx.array, mixer: AttentionMixer, direction: int = 1) -> mx.array:
    """Returns y_t = m R(t) x_t, which rotates dimensions i and i + n by the angle t f_i, for i < n.

    x, y [..., T, D]. f are the mixer's n frequencies, and m is its `rope_scale`. Dimensions from 2n
    on stay unchanged. With the `direction` -1, angles are negated.
    """
    half = len(mixer.frequencies)
    if half == 0:
        return x
    t = mx.arange(x.shape[-2], dtype=mx.float32)[:, None]
    angle = direction * t * mx.array(mixer.frequencies)
    cos, sin = mixer.rope_scale * mx.cos(angle), mixer.rope_scale * mx.sin(angle)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def rope_backward(dy: mx.array, mixer: AttentionMixer) -> mx.array:
    """Returns dx_t = m R(t)ᵀ dy_t = m R(-t) dy_t."""
    return rope(dy, mixer, direction=-1)


def _by_group(q: mx.array, kv_heads: int) -> mx.array:
    """Reshapes [1, heads, T, D] to [1, kv_heads, group, T, D]."""
    return q.reshape(1, kv_heads, -1, *q.shape[2:])


def _scores(q: mx.array, k: mx.array, mixer: AttentionMixer) -> tuple[mx.array, mx.array]:
    """Returns S = cap(a q kᵀ) and its softmax P over the keys s that t sees: t - window < s ≤ t.

    q [1, kv_heads, group, T, D], k [1, kv_heads, 1, T, D]; a is the attention scale.
    """
    t = mx.arange(q.shape[-2])[:, None]
    s = mx.arange(q.shape[-2])
    seen = s <= t
    if mixer.sliding_window is not None:
        seen = seen & (s > t - mixer.sliding_window)
    S = soft_cap(mixer.attention_scale * (q @ k.swapaxes(-1, -2)), mixer.attn_logit_softcapping)
    return S, mx.softmax(mx.where(seen, S, -mx.inf), axis=-1)


def attention(q: mx.array, k: mx.array, v: mx.array, mixer: AttentionMixer) -> mx.array:
    """Returns O = P v, P = softmax(cap(a q kᵀ)), causal and grouped-query; heads concatenated.

    q [1, heads, T, D], k and v [1, kv_heads, T, D] -> attn_out [1, T, heads·D]; a is the attention
    scale.
    """
    k, v = k[:, :, None], v[:, :, None]
    _, P = _scores(_by_group(q, k.shape[1]), k, mixer)
    return merge_heads((P @ v).reshape(q.shape))


def attention_backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    attn_out: mx.array,
    d_attn_out: mx.array,
    mixer: AttentionMixer,
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns dq, dk, dv. S and P are recomputed. Shapes as in `attention`.

        dv = Pᵀ dO     dP = dO vᵀ     dS = P ∘ (dP - δ)     dZ = cap'(S) ∘ dS, Z = a q kᵀ
        dq = a dZ k     dk = a dZᵀ q

    δ = rowsum(P ∘ dP) = rowsum(O ∘ dO) is the softmax's correction term. dk and dv are sums over
    the query heads that share a key and value head.
    """
    q_shape = q.shape
    heads, kv_heads = q.shape[1], k.shape[1]
    out, d_out = split_heads(attn_out, heads), split_heads(d_attn_out, heads)
    q, out, d_out = (_by_group(heads_array, kv_heads) for heads_array in (q, out, d_out))
    k, v = k[:, :, None], v[:, :, None]
    S, P = _scores(q, k, mixer)
    dv = (P.swapaxes(-1, -2) @ d_out).sum(axis=2)
    dP = d_out @ v.swapaxes(-1, -2)
    delta = (out * d_out).sum(axis=-1, keepdims=True)
    dS = P * (dP - delta)
    dZ = soft_cap_backward(S, dS, mixer.attn_logit_softcapping)
    dq = (mixer.attention_scale * (dZ @ k)).reshape(q_shape)
    dk = (mixer.attention_scale * (dZ.swapaxes(-1, -2) @ q)).sum(axis=2)
    return dq, dk, dv


Q_NORM, K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"


def place(x: mx.array, norm: str, parts: Parts) -> mx.array:
    """Returns y = RoPE(QKNorm(x)), with x, y [1, heads, T, D]. Without the weight `norm`, there is
    no norm.
    """
    weight = parts.vector.get(norm)
    return rope(x if weight is None else rms_norm(x, weight, parts.eps), parts.mixer)


def place_backward(x: mx.array, dy: mx.array, norm: str, parts: Parts) -> mx.array:
    dy, weight = rope_backward(dy, parts.mixer), parts.vector.get(norm)
    return dy if weight is None else rms_norm_backward(x, dy, weight, parts.eps)


Shared = tuple[mx.array, mx.array]  # k̂ and v̂ [1, kv_heads, T, D], or their gradients


def keys_and_values(k: mx.array, v: mx.array, parts: Parts) -> Shared:
    """Returns k̂ = place(k), and v̂ = RMSNorm(v) or, without a norm of v, v.

    All shapes are [1, kv_heads, T, D].
    """
    return place(k, K_NORM, parts), rms_norm(v, 1.0, parts.eps) if parts.mixer.v_norm else v


def keys_and_values_backward(k: mx.array, v: mx.array, dy: Shared, parts: Parts) -> Shared:
    """Returns dk and dv from `dy`, the gradients with respect to k̂ and v̂, summed over all blocks
    that use them.
    """
    dk, dv = place_backward(k, dy[0], K_NORM, parts), dy[1]
    return dk, rms_norm_backward(v, dv, 1.0, parts.eps) if parts.mixer.v_norm else dv


def mix_by_attention(x: mx.array, parts: Parts, shared: Shared | None = None) -> list[mx.array]:
    """Returns [q, k, v, attn_out] for x [1, T, hidden].

        attn_out = attention(place(q(x)), k̂, v̂)

    With a gate, the returned q has each head's query followed by the head's gate. An output gate
    has D values from q(x), a head gate one value from g(x). `shared` are another block's k̂ and v̂,
    for a block that computes no keys and values. They are then returned as k and v.
    """
    p, mixer, stored = parts.p, parts.mixer, parts.stored
    heads, kv_heads = mixer.num_attention_heads, mixer.num_key_value_heads
    q = split_heads(linear(x, p["q"]), heads)
    if mixer.head_gate:
        q = mx.concatenate([q, split_heads(linear(x, p["g"]), heads)], axis=-1)
    q = stored(q)
    if shared:
        (k, v), keys = shared, shared
    else:
        k, v = (stored(split_heads(linear(x, p[name]), kv_heads)) for name in "kv")
        keys = keys_and_values(k, v, parts)
    placed_q = place(q[..., : mixer.head_dim], Q_NORM, parts)
    return [q, k, v, stored(attention(placed_q, *keys, mixer))]


def output_of_attention(intermediates: list[mx.array], parts: Parts) -> mx.array:
    """Returns the input of o [1, T, heads·D]: attn_out ∘ sigmoid(gate), or attn_out without a gate.

    The gate's shape is [1, heads, T, 1 or D].
    """
    (q, _, _, attn_out), mixer = intermediates, parts.mixer
    if not mixer.gate_dim:
        return attn_out
    by_head = split_heads(attn_out, mixer.num_attention_heads)
    return merge_heads(by_head * mx.sigmoid(q[..., mixer.head_dim :]))


def mix_by_attention_backward(
    x: mx.array,
    intermediates: list[mx.array],
    dy: mx.array,
    parts: Parts,
    d_shared: Shared | None = None,
) -> tuple[mx.array, Matrices, Shared | None]:
    """Returns dx, the gradients of the LoRA parameters of q, k, v and g, and the gradient with
    respect to `shared`.

    `intermediates` are the result of `mix_by_attention`. dy is the gradient with respect to the
    input of o. With a gate and s = sigmoid(gate):

        d_attn_out = dy ∘ s        d_gate = dy ∘ attn_out ∘ s ∘ (1 - s)

    For a head gate, d_gate is summed over the head's D values.

    If other blocks use k̂ and v̂ too, `d_shared` has the sums of their gradients:

        d_k̂ += d_shared[0]        d_v̂ += d_shared[1]

    A block that uses another block's k̂ and v̂ has no LoRA parameters of k and v. Other blocks
    return None for `shared`.
    """
    mixer = parts.mixer
    q, k, v, attn_out = intermediates
    q, gate = q[..., : mixer.head_dim], q[..., mixer.head_dim :]
    d_attn_out = dy
    if mixer.gate_dim:
        s, heads = mx.sigmoid(gate), mixer.num_attention_heads
        d_attn_out = merge_heads(split_heads(dy, heads) * s)
        d_gate = split_heads(dy * attn_out, heads) * s * (1 - s)
    is_own = mixer.keys_of is None
    keys = keys_and_values(k, v, parts) if is_own else (k, v)
    placed_q = place(q, Q_NORM, parts)
    dq, *d_keys = attention_backward(placed_q, *keys, attn_out, d_attn_out, mixer)
    dq = place_backward(q, dq, Q_NORM, parts)
    if mixer.output_gate:
        dq = mx.concatenate([dq, d_gate], axis=-1)
    of_outputs = {"q": dq}
    if is_own:
        if d_shared:
            d_keys = [a + b for a, b in zip(d_keys, d_shared, strict=True)]
        of_outputs["k"], of_outputs["v"] = keys_and_values_backward(k, v, d_keys, parts)
    if mixer.head_gate:
        of_outputs["g"] = d_gate.sum(axis=-1, keepdims=True)
    of_outputs = {name: merge_heads(d_heads) for name, d_heads in of_outputs.items()}
    dx, grad = linears_backward(x, of_outputs, parts.p)
    return dx, grad, None if is_own else tuple(d_keys)
