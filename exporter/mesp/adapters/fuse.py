from __future__ import annotations

from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten

from mesp.adapters.checkpoint import config_of_text, make_checkpoint, save_checkpoint
from mesp.adapters.load import is_finite
from mesp.bundle.model_card import write_card
from mesp.bundle.reader import Bundle
from mesp.errors import MespError
from mesp.files import read_object
from mesp.models.config_json import for_mlx_lm
from mesp.source_model.copied_files import copy_files, files_to_copy, write_config

BFLOAT16 = 16  # the value of `bits` that means "not quantized"
GROUPS = (64, 32)  # quantization group sizes; the first that divides the row length is used


def fuse(model: nn.Module, bits: int) -> dict[str, dict[str, int]]:
    """A layer with adapters becomes a plain layer with the weight W + scale · (A B)ᵀ or, with DoRA,
    G ∘ W + scale · (A B)ᵀ. For stacked experts, the weight is W + scale · B A. The new weight is
    quantized to `bits`.

    Raises MespError if a weight is not finite.

    Returns: the quantization of each quantized new layer, by its path, as in mlx-lm's config.json.
    """
    from mesp.dependencies import mlx_lm

    lora = mlx_lm.tuner.lora
    fused, quantized = [], {}
    for path, layer in model.named_modules():
        if not isinstance(layer, lora.LoRALinear | lora.LoRASwitchLinear):
            continue
        linear = layer.fuse(dequantize=True)
        _check_finite(path, linear)
        if bits != BFLOAT16:
            group = next(size for size in GROUPS if linear.weight.shape[-1] % size == 0)
            linear = linear.to_quantized(group, bits)
            quantized[path] = {"group_size": group, "bits": bits}
        mx.eval(linear.parameters())
        fused.append((path, linear))
    model.update_modules(tree_unflatten(fused))
    if bits == BFLOAT16:
        mlx_lm.utils.dequantize_model(model)
    keeps = getattr(model, "cast_predicate", lambda path: True)
    model.update(
        tree_map_with_path(
            lambda path, a: (
                a.astype(mx.bfloat16) if keeps(path) and mx.issubdtype(a.dtype, mx.floating) else a
            ),
            model.parameters(),
        )
    )
    _check_finite("the model", model)
    return quantized


def _check_finite(name: str, module: nn.Module) -> None:
    arrays = (array for _, array in tree_flatten(module.parameters()))
    if not is_finite(*(array for array in arrays if mx.issubdtype(array.dtype, mx.floating))):
        raise MespError(
            f"With the adapters in it, {name} has numbers that are not finite; train them again."
        )


def save(
    folder: Path, model: nn.Module, bundle: Bundle, quantized: dict[str, dict[str, int]]
) -> None:
    config = bundle.config()
    config.pop("quantization_config", None)
    for key in ("torch_dtype", "dtype"):
        if key in config:
            config[key] = "bfloat16"
    if quantized:
        config = for_mlx_lm(config, max(bundle.manifest.seq_lens))
        config["quantization"] |= quantized
        tensors = dict(tree_flatten(model.parameters()))
    else:
        config.pop("quantization", None)
        config = config_of_text(config)
        tensors = make_checkpoint(model, bundle)
    save_checkpoint(folder, tensors)
    write_config(folder / "config.json", config)
    listed = (entry.path for entry in bundle.manifest.files)
    copy_files(bundle.path, files_to_copy(listed), folder)
    write_card(bundle.manifest, folder)
    if ends := bundle.manifest.end_tokens:
        file = folder / "generation_config.json"
        said = read_object(file) if file.exists() else {}
        write_config(file, said | {"eos_token_id": list(ends)})
