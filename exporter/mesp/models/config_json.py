"""A Hugging Face config.json, with what it leaves out."""

from __future__ import annotations

from typing import Any

from mesp.errors import MespError
from mesp.models.families import FAMILIES, LACKING
from mesp.models.rope_scaling import SCALINGS

# The types of lists' elements, before they are checked.
_MOST = {"num_hidden_layers": 1024, "head_dim": 4096, "partial_rotary_factor": 1}
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True}


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with what it leaves out, and RoPE by the keys that mlx-lm reads.

    (transformers 5 keeps RoPE in `rope_parameters`.) Raises MespError where the architecture is
    not supported.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        missing = ""
        if model_type in LACKING:
            missing = f" ({LACKING[model_type]})"
        elif any("expert" in key for key in (*config, *(config.get("text_config") or ()))):
            missing = " (it mixes experts in a way of its own)"
        elif "text_config" in config:
            missing = " (it is of several modalities, and the trainer takes text alone)"
        raise MespError(
            f"The architecture {model_type!r} is not supported{missing}; "
            f"supported are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    if family.texts:
        text = config.get("text_config") or {}
        if text.get("model_type", family.texts[0]) not in family.texts:
            raise unsupported("text_config's model_type", text["model_type"])
        # Some things are said of the whole model, such as how it is quantized.
        whole = {k: v for k, v in config.items() if k not in ("text_config", "vision_config")}
        config = {**whole, **text, "model_type": model_type}
    config = {**_DEFAULTS, **family.defaults, **config}
    for key, most in _MOST.items():
        if isinstance(config.get(key), int | float) and not 0 < config[key] <= most:
            raise unsupported(key, config[key])
    config |= family.read(config)
    rope = by_type = config.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
        sliding, rope = rope.get("sliding_attention"), rope["full_attention"]
        if sliding:
            if sliding.get("rope_type", "default") != "default":
                raise unsupported("rope_parameters", sliding)
            config["rope_local_base_freq"] = sliding["rope_theta"]
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    if kind not in SCALINGS:
        raise unsupported("rope_scaling", scaling)
    named = {**scaling, "type": kind, "rope_type": kind}
    config["rope_scaling"] = None if kind == "default" else named
    if family.rope_by_type:
        config["rope_parameters"] = by_type
    # mlx-lm reads these of some families there alone, where there is one base.
    if (rope or family.texts) and "rope_local_base_freq" not in config:
        keys = ("rope_theta", "partial_rotary_factor")
        turning = {key: config[key] for key in keys if key in config}
        config["rope_parameters"] = {**(config["rope_scaling"] or {"rope_type": kind}), **turning}
    return config


def check_length(config: dict[str, Any], length: int) -> None:
    """Raises MespError where sequences of `length` tokens reach beyond what the blocks describe.

    Ministral 3 multiplies the query at position t by 1 + β log(1 + ⌊t / L⌋), which is 1 below L.
    """
    rope = complete(config)["rope_scaling"] or {}
    limit = rope.get("original_max_position_embeddings", length)
    if rope.get("llama_4_scaling_beta") and length > limit:
        raise MespError(
            f"From {limit:,} tokens on the model scales its queries, which is not supported; take "
            "a --seq-len up to that."
        )


def unsupported(key: str, value: object) -> MespError:
    """The error for a config.json that asks for something the trainer lacks."""
    return MespError(
        f"The model's config.json sets {key} to {value!r}, which is not supported; take a model "
        "without it."
    )
