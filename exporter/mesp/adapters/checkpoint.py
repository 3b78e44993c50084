from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from mesp.bundle.reader import Bundle
from mesp.files import create
from mesp.folders import check_disk
from mesp.models.families import FAMILIES

# The model_type of a larger model's text part -> the model_type of that part when saved alone.
_ALONE = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}


def make_checkpoint(model: nn.Module, bundle: Bundle) -> dict[str, mx.array]:
    arch = bundle.architecture
    family = FAMILIES[arch.model_type]
    fused = dict(tree_flatten(model.parameters()))
    prefix = arch.mlx_root
    stored, found = bundle.checkpoint(), {}
    for name, array in stored.items():
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            continue
        its = fused[prefix + name]
        # An array that the bundle does not quantize is copied from the bundle, in the checkpoint's
        # shape.
        found[name] = its if f"{stem}.scales" in stored else array.astype(its.dtype)
    for index, block in enumerate(arch.blocks):
        layer = f"model.layers.{index}."
        for theirs, parts in family.hf_modules:
            if layer + parts[0] + ".weight" in found:
                rows = [found.pop(f"{layer}{part}.weight") for part in parts]
                found[f"{layer}{theirs}.weight"] = mx.concatenate(rows)
        stacked = {name: found.pop(f"{layer}{name}.weight") for name in block.stacked()}
        for theirs, parts in family.hf_experts if stacked else ():
            # In Qwen's checkpoints, experts' matrices that are stacked have names without
            # `.weight`.
            suffix = "" if theirs.endswith("_proj") else ".weight"
            matrices = [stacked.pop(part) for part in parts]
            found[f"{layer}{theirs}{suffix}"] = mx.concatenate(matrices, axis=1)
        own = {ours[0]: theirs for theirs, ours in family.hf_modules}
        for name, matrices in stacked.items():
            parent, _, matrix = name.replace(".switch_mlp.", ".").rpartition(".")
            matrix = own.get(f"{parent}.{matrix}", matrix).rpartition(".")[2]
            for number, each in enumerate(matrices):
                found[f"{layer}{parent}.experts.{number}.{matrix}.weight"] = each
    if family.texts and not _alone(bundle.config()):
        larger = "model.language_model."
        found = {
            larger + name.removeprefix("model.") if name.startswith("model.") else name: array
            for name, array in found.items()
        }
    return found


def config_of_text(config: dict[str, Any]) -> dict[str, Any]:
    """Returns `config`, a bundle's config.json, with the changes that transformers needs."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if alone := _alone(config):
        config = {**config, **config["text_config"], "model_type": alone}
        del config["text_config"]
        # For text, M-RoPE's three positions are equal, so M-RoPE equals plain RoPE.
        for key in ("rope_scaling", "rope_parameters"):
            if (config.get(key) or {}).get("rope_type") == "mrope":
                kept = {"rope_theta": config["rope_theta"], "rope_type": "default"}
                config[key] = None if key == "rope_scaling" else kept
    by_type = "full_attention" in (config.get("rope_parameters") or {})
    if by_type and "rope_local_base_freq" not in config:
        # If rope_scaling and rope_parameters both exist, transformers reads only rope_scaling.
        config = {key: value for key, value in config.items() if key != "rope_scaling"}
    if name := CLASSES.get(config["model_type"]):
        config = {**config, "architectures": [name]}
    return config


def save_checkpoint(folder: Path, tensors: dict[str, mx.array]) -> None:
    from mesp.dependencies import mlx_lm

    size = sum(array.nbytes for array in tensors.values())
    check_disk(folder, size)
    shards = mlx_lm.utils.make_shards(tensors)
    files = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        with create(folder / file) as opened:
            mx.save_safetensors(opened, shard, metadata={"format": "mlx"})
        files |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))


def _alone(config: dict[str, Any]) -> str | None:
    text = (config.get("text_config") or {}).get("model_type")
    text = _ALONE.get(text, text)
    return text if text in FAMILIES and not FAMILIES[text].texts else None
