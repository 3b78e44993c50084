from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import ModuleType

import mlx.core as mx

from mesp.block_function import tiles
from mesp.block_function.parts import Parts
from mesp.block_function.rope import Turn, fast_rope, rope
from mesp.models.mixers import AttentionMixer

# The values of head_dim for which MLX's fused attention is used.
FUSED_HEADS = (64, 80, 128)


@dataclass(frozen=True)
class Scoring:
    """The score of a query and a key: soft_cap(scale · q·k), or -inf if the key is not visible."""

    scale: float
    cap: float | None
    # The largest number of keys that a query sees, including its own token's key. None means no
    # limit.
    window: int | None
    starts: mx.array | None = None


def mix_by_attention(
    mixer: AttentionMixer, parts: Parts, x: mx.array
) -> tuple[list[mx.array], mx.array]:
    """Returns [q, k, v, attn_out] of x [1, T, hidden], and the input of the output projection.

    In q, the gate of a head follows the head's query.
    """
    dtype, everywhere = parts.dtype, slice(0, x.shape[1])
    window = mixer.within(x.shape[1]).sliding_window
    scoring = Scoring(mixer.attention_scale, mixer.attn_logit_softcapping, window, parts.starts)
    turn = rope(mixer, everywhere) if parts.fast is None else fast_rope(mixer, parts.fast)

    def heads(x: mx.array, count: int) -> mx.array:  # [1, T, n·size] -> [1, n, T, size]
        return x.reshape(1, x.shape[1], count, -1).swapaxes(1, 2).astype(dtype)

    q = heads(parts.project("q", x), mixer.num_attention_heads)
    if parts.shared:
        (k, v), keys = parts.shared, parts.shared
    else:
        k = heads(parts.project("k", x, q), mixer.num_key_value_heads)
        v = heads(parts.project("v", x, k), mixer.num_key_value_heads)
        keys = keys_and_values(mixer, parts, turn, k, v)
    if mixer.head_gate:
        gate = heads(parts.project("g", x, v), mixer.num_attention_heads)
        q = mx.concatenate([q, gate], axis=-1)
    queries, gates = q[..., : mixer.head_dim], q[..., mixer.head_dim :]
    if parts.fast is None:
        attend = plain_attention
    elif mixer.head_dim in FUSED_HEADS and scoring.cap is None:
        attend = partial(fused_attention, parts.fast)
    else:
        attend = attention
    place = partial(place_rows, mixer, parts, turn, "q")
    attn_out = attend(queries, *keys, place, scoring).astype(dtype)
    if not mixer.gate_dim:
        return [q, k, v, attn_out], attn_out
    gates = mx.sigmoid(gates.swapaxes(1, 2).astype(mx.float32))
    by_head = attn_out.reshape(*gates.shape[:3], mixer.head_dim)
    return [q, k, v, attn_out], (by_head * gates).flatten(2)


def place_rows(
    mixer: AttentionMixer, parts: Parts, turn: Turn, name: str, x: mx.array, rows: slice
) -> mx.array:
    """Returns rows of q or k after RoPE, in float32. The QK-norm, if there is one, is applied
    first."""
    x = x.astype(mx.float32)
    return turn(parts.norm(f"self_attn.{name}_norm", x) if mixer.qk_norm else x, rows)


def keys_and_values(
    mixer: AttentionMixer, parts: Parts, turn: Turn, k: mx.array, v: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns k after the QK-norm, if there is one, and RoPE. Also returns v, normalized if the
    mixer has `v_norm`.
    """
    k = place_rows(mixer, parts, turn, "k", k, slice(0, k.shape[2]))
    if mixer.v_norm:
        v = v.astype(mx.float32)
        v = v * mx.rsqrt(mx.mean(mx.square(v), axis=-1, keepdims=True) + parts.eps)
    return k, v


def soft_cap(scores: mx.array, cap: float | None) -> mx.array:
    return scores if cap is None else cap * mx.tanh(scores / cap)


def visible(rows: slice, keys: slice, scoring: Scoring) -> mx.array:
    """Returns whether each query row sees each key: bool [rows, keys]."""
    row, key = mx.arange(rows.start, rows.stop)[:, None], mx.arange(keys.start, keys.stop)
    seen, window = row >= key, scoring.window
    if window is not None and keys.stop - keys.start > window:
        seen = seen & (row < key + window)
    if scoring.starts is not None:
        seen = seen & (key >= scoring.starts[rows, None])
    return seen


def attention(q: mx.array, k: mx.array, v: mx.array, place: Turn, scoring: Scoring) -> mx.array:
    """Returns causal grouped-query attention, computed in tiles of query rows.

    q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim] -> float32 [1, T, heads·head_dim]
    """
    _, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    k, v = k.astype(mx.float32)[0], v.astype(mx.float32)[0]
    parts = []
    for rows in tiles.cut(length, tiles.ATTENTION_ROWS):
        keys = slice(max(rows.start - (scoring.window or length) + 1, 0), rows.stop)
        tile = q[:, :, rows]
        if parts:
            tile = mx.depends(tile, parts[-1])
        tile = place(tile, rows).reshape(kv_heads, -1, head_dim) * scoring.scale
        scores = soft_cap(tile @ k[:, keys].swapaxes(1, 2), scoring.cap)
        scores = scores.reshape(heads, rows.stop - rows.start, -1)
        seen = visible(rows, keys, scoring)
        weights = mx.softmax(mx.where(seen, scores, -mx.inf), axis=-1)
        out = weights.reshape(kv_heads, -1, weights.shape[-1]) @ v[:, keys]
        parts.append(out.reshape(heads, -1, head_dim).swapaxes(0, 1).flatten(1)[None])
    return mx.concatenate(parts, axis=1)


def fused_attention(
    fast: ModuleType, q: mx.array, k: mx.array, v: mx.array, place: Turn, scoring: Scoring
) -> mx.array:
    """The primitive gets float32, because the backward pass recomputes the scores in float32."""
    everything = slice(0, q.shape[2])
    causal = scoring.window is None and scoring.starts is None
    mask = "causal" if causal else visible(everything, everything, scoring)
    q, k, v = (x.astype(mx.float32) for x in (place(q, everything), k, v))
    out = fast.scaled_dot_product_attention(q, k, v, scale=scoring.scale, mask=mask)
    return out.swapaxes(1, 2).flatten(2)


def plain_attention(
    q: mx.array, k: mx.array, v: mx.array, place: Turn, scoring: Scoring
) -> mx.array:
    _, heads, length, head_dim = q.shape
    everything = slice(0, length)
    q, k, v = place(q, everything), k.astype(mx.float32), v.astype(mx.float32)
    q = q.reshape(1, k.shape[1], -1, length, head_dim) * scoring.scale
    scores = soft_cap(q @ k[:, :, None].swapaxes(-1, -2), scoring.cap)
    scores = mx.where(visible(everything, everything, scoring), scores, -mx.inf)
    out = mx.softmax(scores, axis=-1) @ v[:, :, None]
    return out.reshape(1, heads, length, head_dim).swapaxes(1, 2).flatten(2)
