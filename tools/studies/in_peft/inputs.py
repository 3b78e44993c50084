import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle


def write_inputs(
    folder: Path, bundle: Bundle, first: dict[str, mx.array], windows: np.ndarray
) -> None:
    """Writes `model/`, `first.safetensors` and `windows.npy`.

    `first`: the initial adapters, by mlx-lm's names; `windows`: the token ids of each step, int32
    [steps, T + 1].
    """
    write_model(bundle, folder / "model")
    mx.save_safetensors(str(folder / "first.safetensors"), first)
    np.save(folder / "windows.npy", windows)


def first_adapters(bundle: Bundle, rank: int, seed: int) -> dict[str, mx.array]:
    arch, arrays = bundle.architecture, {}
    for layer, flat in enumerate(reference.init_lora(arch, rank, seed)):
        for module, (a, b) in reference.unpack_lora(flat, arch.blocks[layer]).items():
            path = f"model.layers.{layer}.{module}"
            arrays |= {f"{path}.lora_a": a, f"{path}.lora_b": b}
    return arrays


def write_model(bundle: Bundle, folder: Path) -> None:
    arch = bundle.architecture
    columns, head = arch.hidden_size, bundle.head()
    tensors = {"model.norm.weight": head["norm"]}
    tensors["model.embed_tokens.weight"] = reference.dequantize(bundle.embedding(), "", columns)
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = reference.dequantize(head, "", columns)
    for index in range(arch.num_hidden_layers):
        weights, prefix = bundle.block(index), f"model.layers.{index}."
        for name, array in weights.items():
            if name.endswith((".bias", "norm.weight")):
                tensors[prefix + name] = array
        for name, (_, in_size) in arch.blocks[index].sizes().items():
            matrix = reference.dequantize(weights, f"{name}.", in_size)
            tensors[f"{prefix}{name}.weight"] = matrix
    config = json.loads((bundle.path / "config.json").read_text(encoding="utf-8"))
    for key in ("quantization", "quantization_config"):
        config.pop(key, None)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
