"""Tiny checkpoints in MLX's format, as on mlx-community."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm import utils

from helpers.models import FAMILIES, mlx_lm_model, published, write_tokenizer
from mesp.block_function.dequantize import pack

Tensors = dict[str, mx.array]
# Rows have 128 or 256 weights, so every group size divides them.
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "num_hidden_layers": 2,
}
_OTHERS = {"ministral3": "mistral3", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
_OTHERS |= {"smolvlm": "llama", "idefics3": "llama"}
_FACTORS = [1 + 0.25 * i for i in range(12)]
_LONG = {"type": "longrope", "short_factor": _FACTORS, "long_factor": [2 * f for f in _FACTORS]}


def _of_family(name: str) -> dict[str, Any]:
    config = FAMILIES[_OTHERS.get(name, name)] | _SIZES
    if name in _OTHERS:
        config["model_type"] = name
    if config.get("head_dim"):
        config["head_dim"] = 32
    return config | ({"rope_scaling": _LONG} if name == "phi3" else {})


CONFIGS = {
    name: _of_family(name)
    for name in (
        *("llama", "llama-linear", "qwen2", "qwen3", "smollm3", "mistral", "gemma3_text", "gemma3"),
        *("gemma2", "granite", "phi3", "ministral3", "mistral3", "qwen2_5_vl", "qwen3_vl"),
        *("smolvlm", "idefics3"),
    )
}
CARD = """---
license: {license}
license_name: a-licence
license_link: https://example.org/licence  # of the model
tags:
- mlx
---
# A model
"""


def write_mlx_model(
    folder: Path,
    config: dict[str, Any],
    *,
    dtype: str = "bfloat16",
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    own: Callable[[str], bool | dict[str, Any]] = lambda path: True,
    shards: int = 1,
    edit: Callable[[Tensors], object] = lambda tensors: None,
    say: Callable[[dict[str, Any]], object] = lambda config: None,
    seed: int = 0,
) -> Path:
    """`dtype` is the dtype of the weights before they are quantized. For a module's path, `own`
    returns False, True or the quantization settings.
    """
    model = mlx_lm_model(config, seed=seed)
    model.set_dtype(getattr(mx, dtype))
    whole, _ = published(config, {})
    model, whole = utils.quantize_model(
        model, whole, group_size, bits, mode, quant_predicate=lambda path, module: own(path)
    )
    # mlx-lm writes no entry for a module that is not quantized. A user may write `false` by hand,
    # as here.
    names = [path for path, module in model.named_modules() if hasattr(module, "to_quantized")]
    whole["quantization"] |= {path: False for path in names if own(path) is False}
    say(whole.get("text_config", whole))

    def cut(tensors: Tensors) -> list[Tensors]:
        edit(tensors)
        names = list(tensors)
        size = math.ceil(len(names) / shards)
        return [{n: tensors[n] for n in names[i : i + size]} for i in range(0, len(names), size)]

    with mock.patch.object(utils, "make_shards", cut):
        utils.save_model(folder, model)
    utils.save_config(whole, folder / "config.json")
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_variation(folder: Path, family: str, seed: int) -> Path:
    """With the seeds 0 to 3, each family has at least two valid models."""
    draw = random.Random(f"{family} {seed}")
    config = dict(CONFIGS[family])
    _vary_shapes(config, draw)
    mode = draw.choice(["affine"] * 5 + ["mxfp4", "nvfp4", "mxfp8"])
    is_affine = mode == "affine"
    return write_mlx_model(
        folder,
        config,
        dtype=draw.choice(["float16", "bfloat16", "float32"]),
        mode=mode,
        bits=draw.choice([1, 2, 3, 4, 4, 4, 5, 6, 8]) if is_affine else None,
        group_size=draw.choice([32, 64, 64, 128]) if is_affine else None,
        own=_vary_quantizations(draw, is_affine),
        shards=draw.choice([1, 1, 2, 5]),
        edit=lambda tensors: _vary_tensors(tensors, config, draw),
        say=lambda text: _vary_config(text, draw),
        seed=seed,
    )


def with_few_values(tensors: Tensors, bits: int, group_size: int) -> Tensors:
    """With 1 bit, the values are ±d. With 2 bits, they are 0 and ±d. Each group has its own float16
    d.
    """
    found = dict(tensors)
    for name, matrix in tensors.items():
        if matrix.ndim != 2:
            continue
        groups = matrix.reshape(len(matrix), -1, group_size)
        d = mx.abs(groups).mean(axis=-1).astype(mx.float16)
        if bits == 1:
            codes, scales = groups > 0, 2 * d
        else:
            codes, scales = mx.clip(mx.round(groups / d[..., None]), -1, 1) + 1, d
        module = name.removesuffix(".weight")
        found[name] = pack(codes.reshape(matrix.shape).astype(mx.uint32), bits)
        found |= {f"{module}.scales": scales, f"{module}.biases": -d}
    return found


_LAYER_TYPES = ("gemma3_text", "gemma3")  # families that may get layer_types


def _vary_shapes(config: dict[str, Any], draw: random.Random) -> None:
    if config["model_type"] in ("llama", "smollm3", "granite"):
        config |= {key: draw.random() < 0.5 for key in ("attention_bias", "mlp_bias")}
    if not config["model_type"].startswith("gemma"):  # Gemma's head is tied
        config["tie_word_embeddings"] = draw.random() < 0.6
    config["num_hidden_layers"] = draw.choice([1, 2, 3])
    if "layer_types" in config or (draw.random() < 0.3 and config["model_type"] in _LAYER_TYPES):
        kinds = ("sliding_attention", "full_attention")
        types = [draw.choice(kinds) for _ in range(config["num_hidden_layers"])]
        config["layer_types"] = [*types[1:], "full_attention"]
        config["sliding_window"] = draw.choice([5, 100])
    if "no_rope_layers" in config:
        layers = [draw.choice([0, 1]) for _ in range(config["num_hidden_layers"])]
        config["no_rope_layers"] = layers


def _vary_quantizations(
    draw: random.Random, is_affine: bool
) -> Callable[[str], bool | dict[str, Any]]:
    kind = draw.choice(["alike", "alike", "head", "mixed", "mode"])
    left = draw.choice(["q_proj", "embed_tokens"]) if draw.random() < 0.05 else "none"
    own = random.Random(draw.random())
    known: dict[str, bool | dict[str, Any]] = {}

    def decide(path: str) -> bool | dict[str, Any]:
        if path.endswith(left):
            return False
        if kind == "head":
            is_head = path.endswith(("embed_tokens", "lm_head"))
            return {"bits": 8, "group_size": 64} if is_head and is_affine else True
        if kind == "mixed" and is_affine:
            return {
                "bits": own.choice([1, 2, 3, 4, 5, 6, 8]),
                "group_size": own.choice([32, 64, 128]),
            }
        if kind == "mode" and "mlp" in path:
            return {"mode": "mxfp4", "bits": 4, "group_size": 32}
        return True

    return lambda path: known.setdefault(path, decide(path))


def _vary_tensors(tensors: Tensors, config: dict[str, Any], draw: random.Random) -> None:
    prefix = "language_model." if "language_model.model.norm.weight" in tensors else ""
    if draw.random() < 0.3:
        for i in range(config["num_hidden_layers"]):
            name = f"{prefix}model.layers.{i}.self_attn.rotary_emb.inv_freq"
            tensors[name] = mx.ones(16)
    if prefix and draw.random() < 0.6:
        tensors["vision_tower.patch_embedding.weight"] = mx.ones((4, 3, 2, 2), mx.bfloat16)
        tensors["multi_modal_projector.linear.weight"] = mx.ones((4, 4), mx.float16)
        tensors["visual.blocks.0.attn.qkv.weight"] = mx.ones((4, 4), mx.int32)
    stored = draw.choice(["none", "none", "equal", "other", "alone"])
    embedding = f"{prefix}model.embed_tokens."
    if config["tie_word_embeddings"] and stored != "none":
        for name in [name for name in tensors if name.startswith(embedding)]:
            array = tensors.pop(name) if stored == "alone" else tensors[name]
            part = name.removeprefix(embedding)
            head = array[::-1] if stored == "other" else array
            tensors[f"{prefix}lm_head.{part}"] = mx.contiguous(head)
    if draw.random() < 0.1:
        names = [name for name in tensors if name.endswith("norm.weight")]
        name = draw.choice(names)
        tensors[name] = tensors[name].astype(draw.choice([mx.float16, mx.float32, mx.bfloat16]))


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"factor": 4, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
_SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 3},
    {"rope_type": "llama3", **_LLAMA3, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", **_LLAMA3},
    {"type": "yarn", "factor": 2.5},
    {"rope_type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "yarn", **_YARN, "attention_factor": 1.25},
    {"type": "default"},
    {"type": "mrope", "mrope_section": [4, 6, 6]},
]
_UNKNOWN = {"rope_type": "dynamic", "factor": 2.0}
_CHANGED = {
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000,
    "max_position_embeddings": 100,
    "sliding_window": 7,
    "query_pre_attn_scalar": 32,
    "rope_local_base_freq": 5000,
    "sliding_window_pattern": 3,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": 7.5,
    "embedding_multiplier": 12,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.22,
    "logits_scaling": 8,
    "hidden_act": "silu",
    "tie_word_embeddings": None,
}


def _vary_config(text: dict[str, Any], draw: random.Random) -> None:
    if draw.random() < 0.6:
        scaling = dict(draw.choice(_SCALINGS) if draw.random() < 0.95 else _UNKNOWN)
        if draw.random() < 0.5:
            text["rope_scaling"] = scaling
        else:  # the form of transformers 5
            text.pop("rope_scaling", None)
            scaling.setdefault("rope_theta", text.pop("rope_theta", 1e4))
            if draw.random() < 0.5 and "rope_local_base_freq" in text:
                local = {"rope_type": "default", "rope_theta": text.pop("rope_local_base_freq")}
                scaling = {"full_attention": scaling, "sliding_attention": local}
            text["rope_parameters"] = scaling
    for key in draw.sample(sorted(_CHANGED), 2):
        if key in text and draw.random() < 0.5:
            del text[key]
        elif key in text and _CHANGED[key] is not None:
            text[key] = _CHANGED[key]
    if draw.random() < 0.2:
        text["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    if draw.random() < 0.3:
        text["eos_token_id"] = draw.choice([0, [0, 1]])


def add_terms(folder: Path, license: str = "other") -> list[str]:
    terms = ["LICENSE", "Notice.txt", "USE_POLICY.md"]
    for name in terms:
        (folder / name).write_text(f"The {name} of a model.\n")
    (folder / "README.md").write_text(CARD.format(license=license))
    (folder / "modeling.py").write_text("raise SystemExit\n")
    return terms


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
