"""RoPE: rotates q and k by their positions."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import mlx.core as mx

from mesp.models.mixers import AttentionMixer

Turn = Callable[[mx.array, slice], mx.array]  # rotates rows of [1, heads, T, head_dim]


def _periods(mixer: AttentionMixer) -> mx.array:
    """Returns the frequencies in MLX's form, as positions a radian. A pair that is not rotated has
    the largest number.

    Infinity is not used, because a kernel under fast math does not define its inverse. The largest
    number rotates a pair by less than 1e-32, which changes none of the pair's bits.
    """
    most = float(mx.finfo(mx.float32).max)
    return mx.array([min(1 / f, most) if f else most for f in mixer.frequencies])


def fast_rope(mixer: AttentionMixer, fast: ModuleType) -> Turn:
    """Returns RoPE of the first dimensions in float32, by the fused primitive of `fast`.

    The other dimensions stay unchanged.
    """
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
    """Returns RoPE in plain operations, which compute the angles once."""
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
