"""Completes, checks and converts a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mesp.errors import MespError
from mesp.models.families import FAMILIES, LACKING
from mesp.models.mixers import is_positive, refuse_unsound
from mesp.models.rope_scaling import COMMON, SCALINGS, complete_scaling, type_of

# The largest allowed values of some keys. These values are checked before lists are made whose
# lengths depend on them.
MOST = {"num_hidden_layers": 1024, "head_dim": 4096, "partial_rotary_factor": 1}
# Keys whose values must be positive numbers. The value 0 counts as missing.
_POSITIVE = (
    "rms_norm_eps", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
    "sliding_window_pattern", "full_attention_interval",
)  # fmt: skip
DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with defaults for missing keys, and with RoPE in mlx-lm's keys.

    Raises MespError if the architecture, or a value of a key, is not supported. Raises KeyError,
    ValueError or other errors if the config.json is invalid.
    """
    config = _plain(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        model_type = ""
    if model_type not in FAMILIES:
        missing = ""
        if model_type in LACKING:
            missing = f" ({LACKING[model_type]})"
        elif any("expert" in key for key in (*config, *(config.get("text_config") or ()))):
            missing = " (its mixture of experts is of another kind)"
        elif "text_config" in config:
            missing = " (it has several modalities, and the trainer takes only text)"
        raise MespError(
            f"The architecture {model_type!r} is not supported{missing}; "
            f"supported are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    if family.texts:
        text = config.get("text_config") or {}
        if text.get("model_type", family.texts[0]) not in family.texts:
            raise unsupported("text_config's model_type", text["model_type"])
        # Some keys for the text model, such as the quantization, are outside of text_config.
        whole = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
        config = {**whole, **text, "model_type": model_type}
        if "tie_word_embeddings" in whole:
            config["tie_word_embeddings"] = whole["tie_word_embeddings"]
    config = {**DEFAULTS, **family.defaults, **config}
    for key, most in MOST.items():
        if type(config.get(key)) in (int, float) and not 0 < config[key] <= most:
            raise unsupported(key, config[key])
    refuse_unsound({"num_hidden_layers": type(config.get("num_hidden_layers", 1)) is int})
    if family.experts and config.get("num_local_experts"):  # the key in transformers 5
        config.setdefault("num_experts", config["num_local_experts"])
        if config["num_experts"] != config["num_local_experts"]:
            raise unsupported("num_local_experts", config["num_local_experts"])
    config |= family.read(config) if family.read else {}
    rope = by_type = config.pop("rope_parameters", None) or {}
    if not isinstance(rope, dict):
        raise ValueError("its rope_parameters cannot be used")
    if "full_attention" in rope:
        sliding, rope = rope.get("sliding_attention"), rope["full_attention"]
        if sliding:
            _check_scaling(sliding, "rope_parameters")
            if type_of(sliding) != "default" or sliding.get("partial_rotary_factor") not in (
                None,
                1.0,
            ):
                raise unsupported("rope_parameters", sliding)
            config["rope_local_base_freq"] = sliding["rope_theta"]
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    scaling = config.get("rope_scaling") or rope
    _check_scaling(scaling, key)
    kind = type_of(scaling)
    named = {**scaling, "type": kind, "rope_type": kind}
    config["rope_scaling"] = None if kind == "default" else complete_scaling(named, config)
    if family.rope_by_type:
        config["rope_parameters"] = by_type
    # For some families, mlx-lm reads RoPE's keys only in `rope_parameters`. Models with two RoPE
    # bases have `rope_local_base_freq` instead.
    if (rope or family.texts) and "rope_local_base_freq" not in config:
        keys = ("rope_theta", "partial_rotary_factor")
        turning = {key: config[key] for key in keys if key in config}
        config["rope_parameters"] = {**(config["rope_scaling"] or {"rope_type": kind}), **turning}
    return config


def _plain(value: Any) -> Any:
    """Returns a JSON value with {"__float__": "Infinity"} and the like replaced by numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in _NUMBERS:
            return _NUMBERS[value["__float__"]]
        return {key: _plain(each) for key, each in value.items()}
    return [*map(_plain, value)] if isinstance(value, list) else value


def check_numbers(config: dict[str, Any]) -> None:
    """Raises ValueError if the value of a key in `_POSITIVE` is not a positive number. The value 0
    counts as missing.
    """
    refuse_unsound({key: is_positive(config[key]) for key in _POSITIVE if config.get(key)})


def _check_scaling(scaling: dict[str, Any], key: str) -> None:
    """Raises MespError if RoPE's scaling has an unknown type, or a key that this type does not
    use."""
    kind = type_of(scaling)
    if kind not in SCALINGS:
        raise unsupported(key, scaling)
    for name, value in sorted(scaling.items()):
        if value is not None and name not in COMMON | SCALINGS[kind].keys:
            raise unsupported(f"{name} of {key} (of the type {kind!r})", value)


def check_lengths(config: dict[str, Any], lengths: Sequence[int]) -> None:
    """Raises MespError if one architecture does not fit sequences of all `lengths`, in tokens.

    A length must not exceed the positions that the model was trained for. Two kinds of models have
    a further limit, the original number of positions. Ministral 3 multiplies the query at position
    t by 1 + β log(1 + ⌊t / limit⌋), so lengths above the limit are refused. LongRoPE has other
    factors for sequences longer than the limit, so all lengths must be on one side of the limit.
    """
    config = complete(config)
    positions = find_positions(config)
    if positions is not None and max(lengths) > positions:
        raise MespError(
            f"The model was trained for {positions:,} positions, and sequences of "
            f"{max(lengths):,} tokens have more; take a --seq-len up to {positions}."
        )
    rope = config["rope_scaling"] or {}
    limit = rope.get("original_max_position_embeddings", max(lengths))
    if rope.get("llama_4_scaling_beta") and max(lengths) > limit:
        raise MespError(
            f"From {limit:,} tokens on the model scales its queries, which is not supported; take "
            "a --seq-len up to that."
        )
    if rope.get("type") == "longrope" and min(lengths) <= limit < max(lengths):
        raise MespError(
            f"Beyond {limit:,} tokens the model scales positions differently; export shorter and "
            "longer sequences as two bundles."
        )


def find_positions(config: dict[str, Any]) -> int | None:
    """Returns the number of positions that a model was trained for, or None if config.json lacks
    it.

    `config` is a complete config.json. With YaRN, the result is at least the original number times
    YaRN's factor.
    """
    most = config.get("max_position_embeddings")
    if type(most) is not int or most < 1:
        return None
    rope = config.get("rope_scaling") or {}
    if rope.get("type") != "yarn":
        return most
    return max(most, round(rope["factor"] * rope["original_max_position_embeddings"]))


def for_mlx_lm(config: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns a bundle's config.json, changed so that mlx-lm computes sequences of `length` tokens
    correctly.

    mlx-lm uses LongRoPE's long factors for any length. Raises MespError if mlx-lm ignores a RoPE
    key whose value matters.
    """
    config = dict(config)
    scaling = config.get("rope_scaling") or {}
    limit, ignored = scaling.get("original_max_position_embeddings", length), None
    if scaling.get("type") == "yarn":
        if not scaling.get("truncate", True):
            ignored = "truncate"
        if scaling["factor"] <= 1 and scaling["attention_factor"] != 1:
            ignored = "attention_factor"
    if scaling.get("type") == "longrope":
        longer = max(config["max_position_embeddings"] / limit, 1)
        usual = math.sqrt(1 + math.log(longer) / math.log(limit))
        if not math.isclose(scaling["attention_factor"], usual, rel_tol=1e-6):
            ignored = "attention_factor"
        if length <= limit:
            for key in ("rope_scaling", "rope_parameters"):
                if config.get(key):
                    config[key] = {**config[key], "long_factor": scaling["short_factor"]}
    if ignored:
        raise MespError(
            f"mlx-lm ignores RoPE's {ignored} of {scaling[ignored]!r} and would compute another "
            "model; use the adapters in adapters/peft with PEFT."
        )
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = for_mlx_lm(config["text_config"], length)
    return config


def unsupported(key: str, value: object) -> MespError:
    """Returns the error for an unsupported value in a config.json."""
    said = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return MespError(
        f"The model's config.json sets {key} to {said}, which is not supported; take a model "
        "without it."
    )
