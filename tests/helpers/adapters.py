import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model

from helpers.commands import call
from helpers.models import write_model
from mesp import reference
from mesp.bundle.reader import Bundle

RANK, SCALE = 2, 3.0


def exported(folder: Path, config: dict[str, Any]) -> Path:
    model, bundle = write_model(folder / "model", config), folder / "bundle.mesp"
    size = ("--seq-len", 8, "--rank", RANK, "--group-size", 32, "--data", "python-docs")
    call("export", "--model", model, "--out", bundle, *size)
    return bundle


def write_adapters(
    folder: Path,
    bundle: Path,
    size: float = 0.1,
    rank: int = RANK,
    scale: float = SCALE,
    seed: int = 1,
    without: Collection[str] = (),
    dora: bool = False,
) -> Path:
    """The adapters change the model much.

    All modules and experts get adapters, except those whose last names are in `without`. With
    `dora`, modules get adapters of DoRA, and experts get none.
    """
    opened = Bundle(bundle)
    arch = opened.architecture if dora else opened.architecture.training_experts()
    matrices = {}
    for i, flat in enumerate(reference.init_lora(arch, rank, seed)):
        key = mx.random.key(1000 * (seed - 1) + i)
        flat = flat + size * mx.random.normal(flat.shape, key=key)
        if dora:
            flat = reference.add_magnitudes(flat, opened.block(i), arch.blocks[i])
        for name, pair in reference.unpack_lora(flat, arch.blocks[i]).items():
            if name.rpartition(".")[2] in without:
                continue
            for part, matrix in zip(("lora_a", "lora_b", "m"), pair, strict=False):
                matrix = matrix.swapaxes(1, 2) if matrix.ndim == 3 else matrix
                if part == "m":
                    matrix = matrix * (1 + 0.3 * mx.random.normal(matrix.shape, key=key))
                matrices[f"{arch.mlx_prefix}.layers.{i}.{name}.{part}"] = matrix
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), matrices)
    keys = [*{name for block in arch.kinds for name in block.adapted()}]
    lora = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    config = {"num_layers": arch.num_hidden_layers, "lora_parameters": lora}
    config |= {"fine_tune_type": "dora"} if dora else {}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def with_weighted_sum(bundle: Path, weights: Mapping[Path, float]) -> nn.Module:
    model = Bundle(bundle).to_mlx_lm()
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    base = dict(tree_flatten(model.parameters()))
    matrices = dict(base)
    for folder, weight in weights.items():
        config = json.loads((folder / "adapter_config.json").read_text())
        scale = config["lora_parameters"]["scale"]
        arrays = mx.load(str(folder / "adapters.safetensors"))
        for key in (key for key in arrays if key.endswith(".lora_a")):
            path = key.removesuffix(".lora_a")
            a, b, m = arrays[key], arrays[f"{path}.lora_b"], arrays.get(f"{path}.m")
            W = base[f"{path}.weight"]
            tuned = W + scale * (b @ a if a.ndim == 3 else (a @ b).T)
            if m is not None:
                tuned = (m / mx.linalg.norm(tuned, axis=1))[:, None] * tuned
            matrices[f"{path}.weight"] = matrices[f"{path}.weight"] + weight * (tuned - W)
    model.update(tree_unflatten([*matrices.items()]))
    return model


def write_peft(folder: Path, bundle: Path, adapters: Path) -> Path:
    """If PEFT joins n layers of mlx-lm into one, the joined layer has n times the rank."""
    arch = Bundle(bundle).architecture
    ours = mx.load(str(adapters / "adapters.safetensors"))
    is_dora = any(name.endswith(".m") for name in ours)
    arch = arch if is_dora else arch.training_experts()
    joined = {name: len(parts) for name, parts in arch.hf_modules if len(parts) > 1}
    matrices, targets, parameters = {}, set(), set()
    for i, block in enumerate(arch.blocks):
        shapes = block.adapted()
        layers = {parts[0]: (name, parts) for name, parts in arch.hf_modules}
        inner = {part for _, parts in arch.hf_modules for part in parts[1:]}
        for first in (name for name in shapes if name not in inner):
            name, parts = layers.get(first, (first, (first,)))
            pairs = [
                tuple(ours[f"{arch.mlx_prefix}.layers.{i}.{part}.lora_{each}"] for each in "ab")
                for part in parts
            ]
            stacked = len(shapes[first]) == 3
            a = [a if stacked else a.T for a, _ in pairs]
            b = [b if stacked else b.T for _, b in pairs]
            rows = [
                mx.concatenate([b[m] if m == n else mx.zeros_like(b[n]) for m in range(len(b))], -1)
                for n in range(len(b))
            ]
            a, b = mx.concatenate(a, -2), mx.concatenate(rows, -2)
            layer = f"{arch.hf_prefix}.layers.{i}.{name}"
            if stacked:
                parameters.add(layer)
                layer = layer.rpartition(".")[0] + (".base_layer" if len(parts) > 1 else "")
                a, b = a.flatten(0, 1), b.transpose(1, 2, 0).flatten(1)
            else:
                targets.add(layer)
            matrices[f"base_model.model.{layer}.lora_A.weight"] = mx.contiguous(a)
            matrices[f"base_model.model.{layer}.lora_B.weight"] = mx.contiguous(b)
            if is_dora:
                m = [ours[f"{arch.mlx_prefix}.layers.{i}.{part}.m"] for part in parts]
                matrices[f"base_model.model.{layer}.lora_magnitude_vector"] = mx.concatenate(m)
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), matrices, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "use_dora": is_dora,
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "task_type": "CAUSAL_LM",
    }
    config |= {"target_modules": sorted(targets), "target_parameters": sorted(parameters)}
    config["rank_pattern"] = {name: count * RANK for name, count in joined.items()}
    config["alpha_pattern"] = {name: count * RANK * SCALE for name, count in joined.items()}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
