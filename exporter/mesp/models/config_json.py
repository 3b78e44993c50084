from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mesp.errors import MespError
from mesp.models.families import CLASSES, FAMILIES, LACKING
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
TYPES: dict[str, tuple[type, ...]] = {
    key: {bool: (bool,), int: (int,), float: (int, float)}[type(default)]
    for keys in CLASSES.values()
    for key, default in keys.items()
    if type(default) in (bool, int, float)
}
KNOWN = frozenset(key for keys in CLASSES.values() for key in keys)
_ROPE = ("rope_theta", "partial_rotary_factor")
PERIODS = ("sliding_window_pattern", "full_attention_interval")
_KINDS = ("full_attention", "sliding_attention")
_NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with only the keys that transformers reads for its class, and with the
    class's defaults.

    Raises MespError if the architecture, or a value of a key, is not supported.
    """
    config = plain_json(config)
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
    config, keys = _read_keys(config, model_type)
    for key, most in MOST.items():
        if type(config.get(key)) in (int, float) and not 0 < config[key] <= most:
            raise unsupported(key, config[key])
    for key, value in config.items():
        types = TYPES.get(key, (type(value),))
        needs_value = key in ("num_hidden_layers", "hidden_size")
        refuse_unsound({key: type(value) in types or (value is None and not needs_value)})
    if (rows := config.get("vocab_size_per_layer_input")) not in (None, config["vocab_size"]):
        raise unsupported("vocab_size_per_layer_input", rows)
    config |= family.fixed | (family.read(config) if family.read else {})
    if config.get("layer_types"):
        config |= {key: _period(config["layer_types"]) for key in PERIODS if key in keys}
    return _complete_rope(config, keys)


def _period(types: Sequence[str]) -> int | None:
    full = [number for number, each in enumerate(types, 1) if each == "full_attention"]
    period = full[0] if full else len(types) + 1
    return period if full == [*range(period, len(types) + 1, period)] else None


def _read_keys(config: dict[str, Any], model_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the values of a config.json that transformers reads, and the keys of the class with
    their defaults.

    The class of a multimodal model is that of its text model, with its keys in `text_config`.
    """
    texts, text, name = FAMILIES[model_type].texts, config, model_type
    if texts and model_type not in texts:
        text = config.get("text_config")
        if text is None and "hidden_size" not in config:
            raise KeyError("text_config")
        text = config if text is None else text  # Qwen2.5-VL's text keys may be at the top
        name = texts[0] if text is config else text.get("model_type", texts[0])
        if name not in texts:
            raise unsupported("text_config's model_type", name)
    keys = CLASSES[name]
    read = {key: value for key, value in config.items() if key not in KNOWN}
    read |= {key: value for key, value in text.items() if key in keys or key not in KNOWN}
    for key, default in keys.items():
        if isinstance(default, str) and default.startswith("="):
            read |= {default[1:]: read.pop(key)} if key in read else {}
        elif default is not None:
            read.setdefault(key, default)
    if name != model_type:
        tied = CLASSES[model_type]["tie_word_embeddings"]
        read["tie_word_embeddings"] = config.get("tie_word_embeddings", tied)
        if model_type == "qwen2_5_vl" and text.get("tie_word_embeddings"):
            read["tie_word_embeddings"] = True
        if name == "lfm2" and "tie_embedding" in config:
            read["tie_word_embeddings"] = config["tie_embedding"]
    for key in ("text_config", "vision_config"):
        read.pop(key, None)
    return read | {"model_type": model_type}, keys


def _complete_rope(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Returns a config.json with complete `rope_parameters`, for each layer type if the class has
    them so, and with RoPE in mlx-lm's keys.

    `rope_scaling` replaces `rope_parameters`.
    """
    scaling, rope = config.pop("rope_scaling", None), config.pop("rope_parameters", None)
    rope = keys["rope_parameters"] if rope is None else rope
    refuse_unsound(
        {
            "rope_parameters": isinstance(rope or {}, dict),
            "rope_scaling": isinstance(scaling or {}, dict),
        }
    )
    source = "rope_scaling" if scaling else "rope_parameters"
    beside = {key: config.pop(key) for key in _ROPE if key in config}
    if "rope_local_base_freq" in keys:  # Gemma 3
        kinds = {kind: (rope or {}).get(kind) or {"rope_type": "default"} for kind in _KINDS}
        kinds["full_attention"] = {**kinds["full_attention"], **(scaling or {})}
        local = {"rope_theta": config["rope_local_base_freq"]}
    elif "full_attention" in (keys["rope_parameters"] or {}):
        kinds, local = {kind: (scaling or rope)[kind] for kind in _KINDS}, beside
    else:
        found = _complete_rope_of(scaling or rope or {}, beside, config, source)
        return config | _for_mlx_lm(found) | {"rope_parameters": found}
    inner = {key: config[key] for key in config if key != "original_max_position_embeddings"}
    full, sliding = (
        _complete_rope_of(kinds[kind], its, inner, source)
        for kind, its in zip(_KINDS, (beside, local), strict=True)
    )
    if sliding["rope_type"] != "default":
        raise unsupported(source, kinds["sliding_attention"])
    if "rope_local_base_freq" in keys:
        config |= _for_mlx_lm(full) | {"rope_local_base_freq": sliding["rope_theta"]}
    return config | {"rope_parameters": dict(zip(_KINDS, (full, sliding), strict=True))}


def _for_mlx_lm(rope: dict[str, Any]) -> dict[str, Any]:
    scaling = None if rope["rope_type"] == "default" else rope
    return {"rope_scaling": scaling} | {key: rope[key] for key in _ROPE if key in rope}


def _complete_rope_of(
    rope: dict[str, Any], beside: dict[str, Any], config: dict[str, Any], source: str
) -> dict[str, Any]:
    """Returns the complete RoPE of a layer type, with values of `beside` for missing ones.

    A default RoPE rotates whole heads in most classes, whatever `partial_rotary_factor` is.
    """
    _check_scaling(rope, source)
    kind = type_of(rope)
    rope = {**beside, **rope, "type": kind, "rope_type": kind}
    share = rope.get("partial_rotary_factor")
    if (
        "partial_rotary_factor" not in FAMILIES[config["model_type"]].takes
        and kind != "proportional"
    ):
        if kind not in ("default", "mrope") and share not in (None, 1):
            raise unsupported("partial_rotary_factor", share)
        rope.pop("partial_rotary_factor", None)
    return complete_scaling(rope, config)


def plain_json(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in _NUMBERS:
            return _NUMBERS[value["__float__"]]
        return {key: plain_json(each) for key, each in value.items()}
    return [*map(plain_json, value)] if isinstance(value, list) else value


def check_numbers(config: dict[str, Any]) -> None:
    refuse_unsound({key: is_positive(config[key]) for key in _POSITIVE if config.get(key)})


def _check_scaling(scaling: dict[str, Any], key: str) -> None:
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
    rope = config.get("rope_scaling") or {}
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

    With YaRN, the result is at least the original number times YaRN's factor.
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

    Raises MespError if mlx-lm ignores a key whose value matters.
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
    said = f"RoPE's {ignored} of {scaling[ignored]!r}" if ignored else ""
    if config.get("layer_types") and any(config.get(key, 1) is None for key in PERIODS):
        said = "the layer_types"
    if said:
        raise MespError(
            f"mlx-lm ignores {said} and would compute another model; use the adapters in "
            "adapters/peft with PEFT."
        )
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = for_mlx_lm(config["text_config"], length)
    return config


def unsupported(key: str, value: object) -> MespError:
    said = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return MespError(
        f"The model's config.json sets {key} to {said}, which is not supported; take a model "
        "without it."
    )
