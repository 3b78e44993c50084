from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import mlx.core as mx

from mesp.models.mixers import AttentionMixer

Turn = Callable[[mx.array, slice], mx.array]  # rotates rows of [1, heads, T, head_dim]


def _periods(mixer: AttentionMixer) -> mx.array:
    """Returns 1 / frequency, as MLX expects. A pair that is not rotated has the largest float32.

    Infinity is not used, because its reciprocal is undefined under fast math. The largest float32
    rotates a pair by a negligible angle.
    """
    most = float(mx.finfo(mx.float32).max)
    return mx.array([min(1 / f, most) if f else most for f in mixer.frequencies])


def fast_rope(mixer: AttentionMixer, fast: ModuleType) -> Turn:
    """Returns RoPE by the fused primitive of `fast`."""
    if not mixer.frequencies:
        return lambda x, rows: x
    size, periods = 2 * len(mixer.frequencies), _periods(mixer)
    options = {"traditional": False, "base": None, "scale": 1.0, "freqs": periods}

    def turn(x: mx.array, rows: slice) -> mx.array:
        if mixer.rope_scale != 1:
            x = mx.concatenate([x[..., :size] * mixer.rope_scale, x[..., size:]], axis=-1)
        return fast.rope(x, size, offset=rows.start, **options)

    return turn


def rope(mixer: AttentionMixer, everywhere: slice) -> Turn:
    half = len(mixer.frequencies)
    if not half:
        return lambda x, rows: x
    frequencies = mx.reciprocal(_periods(mixer))
    angle = mx.arange(everywhere.stop, dtype=mx.float32)[:, None] * frequencies
    cos, sin = mixer.rope_scale * mx.cos(angle), mixer.rope_scale * mx.sin(angle)

    def turn(x: mx.array, rows: slice) -> mx.array:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        c, s = cos[rows], sin[rows]
        return mx.concatenate([a * c - b * s, a * s + b * c, rest], axis=-1)

    return turn
