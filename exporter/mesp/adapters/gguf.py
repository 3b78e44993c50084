"""Adapters as llama.cpp reads them: a GGUF file of the type `adapter`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mesp.adapters.load import Adapters
from mesp.errors import MespError
from mesp.models.architecture import Architecture

# llama.cpp's name of an architecture, by model_type.
ARCHITECTURES = {
    "qwen2": "QWEN2", "qwen3": "QWEN3", "llama": "LLAMA", "mistral": "LLAMA", "smollm3": "SMOLLM3",
    "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "phi3": "PHI3",
}  # fmt: skip
# Those whose q and k llama.cpp turns in pairs of neighbours: rows of a head's halves alternate.
INTERLEAVED = ("LLAMA", "SMOLLM3")


def write_gguf(path: Path, adapters: Adapters, arch: Architecture) -> None:
    """Writes `path`: of each module `blk.N.….lora_a` [rank, in], `….lora_b` [out, rank]; alpha.

    Names, order of rows and keys are those of llama.cpp's convert_lora_to_gguf.py. Raises MespError
    where the gguf package is missing, or the architecture is none of these.
    """
    try:
        import gguf
    except ImportError as error:
        raise MespError(
            "Writing for llama.cpp needs the gguf package: pip install 'mesp[gguf]'."
        ) from error
    name = ARCHITECTURES.get(arch.model_type)
    if name is None:
        raise MespError(
            f"Adapters of {arch.model_type} are not written for llama.cpp; leave out --gguf."
        )
    architecture = gguf.MODEL_ARCH[name]
    names = gguf.get_tensor_name_map(architecture, arch.num_hidden_layers)
    rank = next(iter(adapters.matrices.values()))[0].shape[1]

    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapters.scale * rank)
    attention = arch.mixers[0]
    heads = {"q_proj": attention.num_attention_heads, "k_proj": attention.num_key_value_heads}
    for module, (a, b) in adapters.matrices.items():
        down, up = np.array(a).T, np.array(b).T
        if name in INTERLEAVED and (count := heads.get(module.rpartition(".")[2])):
            halves = up.reshape(count, 2, -1, up.shape[1])
            up = halves.swapaxes(1, 2).reshape(up.shape)
        tensor = names.get_name(module)
        writer.add_tensor(f"{tensor}.weight.lora_a", np.ascontiguousarray(down))
        writer.add_tensor(f"{tensor}.weight.lora_b", np.ascontiguousarray(up))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
