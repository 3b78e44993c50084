from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from mesp.models.mixers import is_positive, refuse_unsound


def rope_frequencies(
    config: dict[str, Any], head_dim: int, local: bool = False
) -> tuple[tuple[float, ...], float]:
    """Returns the frequencies of the rotated pairs, in radians per position, and the factor by
    which the rotated part of q and k is multiplied.

    The unscaled frequencies are θ^(-2i/D) for i < D/2, with D = head_dim · partial_rotary_factor,
    or D = head_dim for the scaling type "proportional". `rope_parameters` changes them. `local`
    selects attention in a sliding window, for which some models have other `rope_parameters`.
    """
    rope = config["rope_parameters"]
    if "full_attention" in rope:
        rope = rope["sliding_attention" if local else "full_attention"]
    theta, share = rope["rope_theta"], rope.get("partial_rotary_factor") or 1.0
    refuse_unsound({"rope_theta": is_positive(theta), "partial_rotary_factor": is_positive(share)})
    refuse_unsound({"partial_rotary_factor": share <= 1})
    _check_numbers(rope)
    rotated = head_dim if rope["rope_type"] == "proportional" else int(head_dim * share)
    if rotated > 4096:
        raise ValueError(f"RoPE turns {rotated:,} numbers of a head")
    base = [theta ** (-i / rotated) for i in range(0, rotated, 2)]
    frequencies = SCALINGS[rope["rope_type"]].frequencies(base, rope, config)
    return tuple(frequencies), rope.get("attention_factor") or 1.0


def complete_scaling(scaling: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns a `rope_scaling`, completed from the config.json and by the formulas of YaRN and
    LongRoPE.

    Raises KeyError if the config.json lacks a needed key, and ValueError if a number is invalid.
    """
    kind = scaling["type"]
    if kind not in ("llama3", "longrope", "yarn"):
        return scaling
    length = config.get("original_max_position_embeddings")
    length = length or scaling.get("original_max_position_embeddings")
    length = length or config["max_position_embeddings"]
    refuse_unsound({"original_max_position_embeddings": is_positive(length)})
    scaling = {**scaling, "original_max_position_embeddings": length}
    if kind != "llama3" and scaling.get("factor") is None:
        longest = config["max_position_embeddings"]
        refuse_unsound({"max_position_embeddings": is_positive(longest)})
        scaling["factor"] = longest / length
    if kind != "llama3":
        _check_numbers(scaling)
    if kind == "yarn":
        scaling["attention_factor"] = _yarn_attention_factor(scaling)
        # mlx-lm does not read attention_factor. With mscale_all_dim = 0 and factor > 1, it computes
        # 0.1 · mscale · ln(factor) + 1 instead.
        slower = 0.1 * math.log(scaling["factor"]) if scaling["factor"] > 1 else math.inf
        scaling["mscale"] = (scaling["attention_factor"] - 1) / slower
        scaling["mscale_all_dim"] = 0
    if kind == "longrope" and scaling.get("attention_factor") is None:
        factor = scaling["factor"]
        longer = math.log(factor) / math.log(length) if factor > 1 else 0
        scaling["attention_factor"] = math.sqrt(1 + longer)
    return scaling


def _check_numbers(scaling: dict[str, Any]) -> None:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
    refuse_unsound({k: is_positive(scaling[k]) for k in keys if scaling.get(k) is not None})
    keys = ("beta_fast", "beta_slow")
    refuse_unsound({k: is_positive(scaling[k]) for k in keys if scaling.get(k)})


def _proportional(base: list[float], scaling: dict, config: dict) -> list[float]:
    """Divides the frequencies of the first pairs by `factor`, and sets the others to 0."""
    turning = int((scaling.get("partial_rotary_factor") or 1.0) * len(base))
    turned = [f / scaling.get("factor", 1.0) for f in base[:turning]]
    return turned + [0.0] * (len(base) - turning)


def _llama3(base: list[float], scaling: dict, config: dict) -> list[float]:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length = scaling["original_max_position_embeddings"]
    frequencies = []
    for f in base:
        turns = length * f / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(f * (kept + (1 - kept) / scaling["factor"]))
    return frequencies


def _longrope(base: list[float], scaling: dict, config: dict) -> list[float]:
    """Divides each pair's frequency by its own factor, which depends on the sequence length."""
    is_long = config.get("sequence_length", 1) > scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if is_long else "short_factor"]
    return [f / slower for f, slower in zip(base, factors, strict=True)]


def _yarn(base: list[float], scaling: dict, config: dict) -> list[float]:
    factor, size = scaling["factor"], 2 * len(base)
    length = scaling["original_max_position_embeddings"]

    def pair(turns: float) -> float:
        """Returns the index of the pair that makes this many turns within the original length."""
        longest = length / (turns * 2 * math.pi)
        return size * math.log(longest) / (2 * math.log(scaling["rope_theta"]))

    low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp = [min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0) for i in range(len(base))]
    return [f * (1 - r + r / factor) for f, r in zip(base, ramp, strict=True)]


def _yarn_attention_factor(scaling: dict[str, Any]) -> float:
    def magnitude(weight: float) -> float:
        factor = scaling["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    weights = {key: scaling.get(key) for key in ("mscale", "mscale_all_dim")}
    if not all(weights.values()):
        return magnitude(1)
    refuse_unsound({key: is_positive(weight) for key, weight in weights.items()})
    return magnitude(weights["mscale"]) / magnitude(weights["mscale_all_dim"])


class Scaling(NamedTuple):
    frequencies: Callable[[list[float], dict, dict], list[float]]  # computes the scaled frequencies
    keys: frozenset[str] = frozenset()


COMMON = frozenset(
    ("type", "rope_type", "rope_theta", "partial_rotary_factor", "llama_4_scaling_beta",
     "mrope_section", "mrope_interleaved", "max_position_embeddings", "finetuned")
)  # fmt: skip
_LENGTH = frozenset(("factor", "original_max_position_embeddings"))
_YARN = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
SCALINGS: dict[str, Scaling] = {
    **dict.fromkeys(("default", "mrope"), Scaling(lambda base, scaling, config: base)),
    "linear": Scaling(
        lambda base, scaling, config: [f / scaling["factor"] for f in base], frozenset(("factor",))
    ),
    "proportional": Scaling(_proportional, frozenset(("factor",))),
    "llama3": Scaling(_llama3, _LENGTH | {"low_freq_factor", "high_freq_factor"}),
    "longrope": Scaling(_longrope, _LENGTH | {"long_factor", "short_factor", "attention_factor"}),
    "yarn": Scaling(_yarn, _LENGTH | _YARN),
}


def type_of(scaling: dict[str, Any]) -> str:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    return "longrope" if kind == "su" else kind
