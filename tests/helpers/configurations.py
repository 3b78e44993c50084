"""Configurations of every class of transformers that MeSP reads, with keys deleted, nulled, doubled
or moved.

`configurations.json` has a tiny configuration of each class, and the answers to some of its
changes. A change maps a key's path to its new value, or to DELETED. An answer is "refused", "not a
model" if transformers refuses the configuration too, or the fields of the manifest's architecture
that differ from those of the unchanged configuration.
"""

import json
import random
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import KNOWN

FILE = Path(__file__).with_name("configurations.json")
DELETED = "-"
LENGTH = 24  # tokens
KEPT = 40
_UNREAD = ("model_type", "transformers_version", "dtype", "architectures", "per_layer_config")
VALUES: dict[str, Any] = {
    "attention_bias": True, "attention_multiplier": 3.0, "attn_logit_softcapping": 2.0,
    "block_auto_adjust_ff_dim": False, "block_ff_dim": 8, "conv_L_cache": 2, "conv_bias": True,
    "decoder_sparse_step": 2, "embedding_multiplier": 3.0, "final_logit_softcapping": 2.0,
    "full_attention_interval": 3, "full_attn_idxs": [0], "global_head_dim": 8, "head_dim": 8,
    "hidden_act": "relu", "hidden_activation": "relu", "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"], "linear_conv_kernel_dim": 2,
    "logits_scaling": 3.0, "mamba_d_conv": 2, "max_position_embeddings": 32,
    "max_window_layers": 1, "mlp_bias": True, "mlp_only_layers": [0], "moe_intermediate_size": 8,
    "no_rope_layer_interval": 1, "no_rope_layers": [0, 1], "norm_eps": 0.5,
    "norm_topk_prob": False, "num_dense_layers": 1, "num_experts": 4, "num_key_value_heads": 1,
    "num_kv_shared_layers": 1, "num_local_experts": 4, "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.5, "position_embedding_type": "nope", "query_pre_attn_scalar": 7,
    "residual_multiplier": 3.0, "rms_norm_eps": 0.5, "rope_local_base_freq": 50.0,
    "rope_theta": 77.0, "routed_scaling_factor": 2.0, "shared_expert_intermediate_size": 8,
    "shared_intermediate_size": 8, "sliding_window": 3, "sliding_window_pattern": 3,
    "tie_embedding": False, "tie_word_embeddings": True, "use_bidirectional_attention": True,
    "use_double_wide_mlp": True, "use_expert_bias": False, "use_sliding_window": True,
}  # fmt: skip
_FACTORS = [1 + i / 8 for i in range(64)]


def _ropes(pairs: int) -> list[dict[str, Any]]:
    factors = {"short_factor": _FACTORS[:pairs], "long_factor": _FACTORS[1 : pairs + 1]}
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return [
        {},
        {"rope_type": "default"},
        {"type": "linear", "factor": 4.0},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "default", "type": "linear"},
        {**llama3, "original_max_position_embeddings": 16},
        {"rope_type": "longrope", **factors, "original_max_position_embeddings": 16},
        {"type": "longrope", **factors},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"type": "yarn", "factor": 4.0},
        {"rope_type": "proportional"},
        {"rope_type": "dynamic", "factor": 2.0},
    ]


def _changes_of_rope(text: dict[str, Any], prefix: str, draw: random.Random) -> dict[str, Any]:
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    rope, found = dict(draw.choice(_ropes(size // 2))), {}
    for key, value in (("rope_theta", 77.0), ("partial_rotary_factor", 0.5)):
        places = draw.choice([[], ["in"], ["beside"], ["in", "beside"], ["top"]])
        if key == "partial_rotary_factor" and draw.random() < 0.5:
            continue
        rope |= {key: value} if "in" in places else {}
        found |= {prefix + key: value / 2} if "beside" in places else {}
        found |= {key: value / 4} if "top" in places else {}
    place = draw.choice(["rope_parameters", "rope_scaling", "both", "by type", "all", "top"])
    if place in ("by type", "all"):
        local = {"rope_type": "default"} | ({"rope_theta": 33.0} if draw.random() < 0.7 else {})
        kinds = {"full_attention": rope} | ({"sliding_attention": local} if size % 3 else {})
        found[f"{prefix}rope_parameters"] = kinds
        rope = {"rope_type": "linear", "factor": 2.0}
    if place in ("rope_scaling", "both", "all"):
        found[f"{prefix}rope_scaling"] = rope
    if place in ("rope_scaling", "rope_parameters"):
        kept = rope if place == "rope_parameters" else DELETED
        found[f"{prefix}rope_parameters"] = kept
    if place == "top":
        found["rope_scaling"] = rope
    if draw.random() < 0.2:
        found[f"{prefix}rope_local_base_freq"] = 44.0
    return found


def changes(name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    draw = random.Random(name)
    prefix = "text_config." if "text_config" in config else ""
    text = config.get("text_config", config)
    found: list[dict[str, Any]] = [{prefix + key: value} for key, value in VALUES.items()]
    for key in sorted((text.keys() & KNOWN) - {*_UNREAD}):
        found += [{prefix + key: DELETED}, {prefix + key: None}]
        if prefix:
            found.append({prefix + key: DELETED, key: text[key]})
            if key in VALUES:
                found += [{key: VALUES[key]}, {prefix + key: DELETED, key: VALUES[key]}]
    found += [_changes_of_rope(text, prefix, draw) for _ in range(100)]
    found += [{**draw.choice(found), **draw.choice(found)} for _ in range(50)]
    draw.shuffle(found)
    return [{}, *({json.dumps(each, sort_keys=True): each for each in found}).values()]


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    config = deepcopy(config)
    for path, value in change.items():
        *parents, key = path.split(".")
        inner = config
        for parent in parents:
            inner = inner.setdefault(parent, {})
        if value == DELETED:
            inner.pop(key, None)
        else:
            inner[key] = deepcopy(value)
    return config


def _fields(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        value = {
            k: (len(v), *v[1:2], *v[-1:]) if k == "frequencies" else v for k, v in value.items()
        }
        return {
            k: v for key, each in value.items() for k, v in _fields(each, f"{path}.{key}").items()
        }
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return _fields(dict(enumerate(value)), path)
    return {
        path[1:]: json.loads(
            json.dumps(value, default=str), parse_float=lambda n: f"{float(n):.5g}"
        )
    }


def answer(config: dict[str, Any], base: dict[str, Any]) -> Any:
    try:
        found = _fields(Architecture.from_config(config, LENGTH).to_manifest())
    except MespError:
        return "refused"
    usual = _fields(Architecture.from_config(base, LENGTH).to_manifest())
    both = {key: found.get(key) for key in found.keys() | usual.keys()}
    return {key: value for key, value in sorted(both.items()) if value != usual.get(key)}


def read_table() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def write_table(
    bases: dict[str, dict[str, Any]], is_model: Callable[[str, dict[str, Any]], bool]
) -> None:
    table: dict[str, Any] = {}
    for name, config in bases.items():
        answers = []
        for change in changes(name, config)[:KEPT]:
            found = answer(changed(config, change), config)
            is_none = found == "refused" and not is_model(name, change)
            answers.append([change, "not a model" if is_none else found])
        table[name] = {"config": config, "answers": answers}
    lines = [
        f'  "{name}": {{"config": {json.dumps(its["config"], sort_keys=True)}, "answers": [\n    '
        + ",\n    ".join(json.dumps(each, sort_keys=True) for each in its["answers"])
        + "\n  ]}"
        for name, its in table.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
