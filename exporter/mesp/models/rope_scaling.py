"""RoPE's frequencies, and how a model's `rope_scaling` changes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def rope_frequencies(
    config: dict[str, Any], head_dim: int, local: bool = False
) -> tuple[tuple[float, ...], float]:
    """The frequencies of the rotated pairs, in radians a position, and what scales the pairs.

    θ^(-2i/D) for i < D/2, D = head_dim · partial_rotary_factor, and scaled by `rope_scaling`; where
    sliding windows have a base of their own (`local`), that base with D = head_dim and no scaling.
    """
    theta, scaling = config["rope_theta"], config["rope_scaling"] or {"type": "default"}
    share = config.get("partial_rotary_factor") or 1.0
    if local and "rope_local_base_freq" in config:
        theta, scaling, share = config["rope_local_base_freq"], {"type": "default"}, 1.0
    rotated = head_dim if scaling["type"] == "proportional" else int(head_dim * share)
    if rotated > 4096:
        raise ValueError(f"RoPE turns {rotated:,} numbers of a head")
    base = [theta ** (-i / rotated) for i in range(0, rotated, 2)]
    frequencies, scale = SCALINGS[scaling["type"]](base, scaling, {**config, "rope_theta": theta})
    return tuple(frequencies), scale


def _linear(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    return [f / scaling["factor"] for f in base], 1.0


def _proportional(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """As mlx-lm: the first pairs turn, a share `partial_rotary_factor` of them; the others stay."""
    turning = int((config.get("partial_rotary_factor") or 1.0) * len(base))
    turned = [f / scaling.get("factor", 1.0) for f in base[:turning]]
    return turned + [0.0] * (len(base) - turning), 1.0


def _llama3(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """Slow pairs turn slower by `factor`, fast ones as ever, and between them in between."""
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    length = scaling.get("original_max_position_embeddings", 8192)
    frequencies = []
    for f in base:
        turns = length * f / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(f * (kept + (1 - kept) / scaling["factor"]))
    return frequencies, 1.0


def _longrope(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """As mlx-lm: the long factors, whatever the length of the sequence."""
    length = scaling.get("original_max_position_embeddings")
    length = length or config.get("original_max_position_embeddings", 4096)
    longer = config["max_position_embeddings"] / length
    scale = math.sqrt(1 + math.log(longer) / math.log(length)) if longer > 1 else 1.0
    return [f / long for f, long in zip(base, scaling["long_factor"], strict=True)], scale


def _yarn(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """As mlx-lm: a ramp over the pairs, from those that turn as ever to those slowed down."""
    factor, size = scaling["factor"], 2 * len(base)
    length = scaling.get("original_max_position_embeddings", 4096)

    def pair(turns: float) -> float:  # which turns so often within the original length
        return (
            size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config["rope_theta"]))
        )

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(scaling.get("beta_slow", 1))), size - 1)
    ramp = [min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0) for i in range(len(base))]
    scale = magnitude(scaling.get("mscale", 1)) / magnitude(scaling.get("mscale_all_dim", 0))
    return [f * (1 - r + r / factor) for f, r in zip(base, ramp, strict=True)], scale


# By their names in config.json: what makes of the unscaled frequencies, the `rope_scaling` and the
# config.json the scaled frequencies, and the factor of the rotated part of q and k.
SCALINGS: dict[str, Callable[[list[float], dict, dict], tuple[list[float], float]]] = {
    "default": lambda base, scaling, config: (base, 1.0),
    "mrope": lambda base, scaling, config: (base, 1.0),  # three positions, which text has alike
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
    "yarn": _yarn,
}
