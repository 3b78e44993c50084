"""llama.cpp's names of architectures and tensors, and the order of rows and columns in its files.

Names and order are those of llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import gguf
import numpy as np

from mesp.models.architecture import Architecture, Block
from mesp.models.mixers import AttentionMixer, GatedDeltaNet, Mamba2Mixer
from mesp.models.tensor_names import name_there

# model_type -> the architecture's name in `gguf.MODEL_ARCH`.
ARCHITECTURES = {
    "qwen2": "QWEN2", "qwen3": "QWEN3", "llama": "LLAMA", "mistral": "LLAMA", "smollm3": "SMOLLM3",
    "granite": "GRANITE", "granitemoehybrid": "GRANITE", "minicpm": "MINICPM",
    "ministral3": "MISTRAL3", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
    "qwen3_5_text": "QWEN35", "lfm2": "LFM2", "phi3": "PHI3", "qwen3_moe": "QWEN3MOE",
    "lfm2_moe": "LFM2MOE",
}  # fmt: skip
# For these architectures, llama.cpp's RoPE rotates adjacent numbers of q and k as a pair. In their
# files, the rows of a head's two halves therefore alternate.
_INTERLEAVED = ("LLAMA", "SMOLLM3", "GRANITE", "GRANITE_HYBRID", "MINICPM", "MISTRAL3")


class Names:
    def __init__(self, arch: Architecture):
        self.arch = arch
        self.name = ARCHITECTURES[arch.model_type]
        if any(isinstance(mixer, Mamba2Mixer) for mixer in arch.mixers):
            self.name = "GRANITE_HYBRID"
        number = gguf.MODEL_ARCH[self.name]
        self.architecture = gguf.MODEL_ARCH_NAMES[number]
        self.map = gguf.get_tensor_name_map(number, arch.num_hidden_layers)

    def tensor(self, name: str) -> str:
        """Raises KeyError if the architecture has no such tensor."""
        theirs = name_there(name, self.arch.model_type).replace(".dt_bias", ".dt_proj.bias")
        theirs = theirs.replace(".expert_bias", ".expert_bias.bias")
        theirs = theirs.replace(".switch_mlp.", ".experts.")
        found = self.map.get_name(theirs, (".weight", ".bias"))
        if found is None:
            raise KeyError(name)
        return found

    def rows(self, block: Block, name: str) -> np.ndarray | None:
        module, mixer = name.removesuffix(".weight").removesuffix(".bias"), block.mixer
        if isinstance(mixer, GatedDeltaNet):
            values = _heads(mixer, mixer.value_head_dim)
            keys = np.arange(mixer.conv_dim - mixer.values)
            joined = np.concatenate([keys, len(keys) + values])
            return {
                **dict.fromkeys(("in_proj_qkv", "conv1d"), joined),
                "in_proj_z": values,
                **dict.fromkeys(("in_proj_b", "in_proj_a", "dt_bias", "A_log"), _heads(mixer, 1)),
            }.get(module.removeprefix("linear_attn."))
        if self.name in _INTERLEAVED and isinstance(mixer, AttentionMixer):
            counts = {"q_proj": mixer.num_attention_heads, "k_proj": mixer.num_key_value_heads}
            if heads := counts.get(module.rpartition(".")[2]):
                order = np.arange(heads * mixer.head_dim).reshape(heads, -1, 2)
                return order.swapaxes(1, 2).ravel()
        return None

    def columns(self, block: Block, module: str) -> np.ndarray | None:
        if module == "linear_attn.out_proj":
            return _heads(block.mixer, block.mixer.value_head_dim)
        return None


def _heads(mixer: GatedDeltaNet, size: int) -> np.ndarray:
    """Returns the index in the file of each channel of the value heads.

    In MeSP, the value heads of a key head are adjacent. In the file, the first value heads of all
    key heads come first, then the second ones, and so on.
    """
    shape = (mixer.num_value_heads // mixer.num_key_heads, mixer.num_key_heads, size)
    return np.arange(mixer.num_value_heads * size).reshape(shape).swapaxes(0, 1).ravel()
