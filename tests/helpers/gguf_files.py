import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type

from helpers.models import (
    EXPERT_MATRICES,
    FAMILIES,
    TEXT,
    TINY,
    random_tensors,
    write_tokenizer,
)
from mesp.models.architecture import Architecture
from mesp.models.config_json import complete
from mesp.models.tensor_names import CONVOLUTIONS

_LLAMA = {"attention_bias": False, "mlp_bias": False}
_GEMMA = {"query_pre_attn_scalar": 32}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Phi-3's scaling of RoPE. GGUF stores the attention factor in float32, so it is rounded here too.
_LONGROPE = FAMILIES["phi3"]["rope_scaling"] | {
    "attention_factor": float(str(np.float32(1.5**0.5)))
}
# For each model: llama.cpp's name of the architecture, and a tiny config.json. llama.cpp hard-codes
# SmolLM3's blocks without RoPE and the attention scale of Gemma 2 and Gemma 3, so the configs use
# these values. Gemma 2's windows are longer than the texts, because mlx-lm ignores the windows.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", FAMILIES["qwen2"] | {"max_position_embeddings": 512}),
    "qwen3": ("qwen3", FAMILIES["qwen3"]),
    "llama": ("llama", FAMILIES["llama"]),
    "llama-yarn": ("llama", FAMILIES["llama"] | _LLAMA | {"rope_scaling": _YARN}),
    "llama-linear": (
        "llama",
        FAMILIES["llama"] | _LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "smollm3": (
        "smollm3",
        FAMILIES["smollm3"] | {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    ),
    "granite": ("granite", FAMILIES["granite"]),
    "minicpm": ("minicpm", FAMILIES["minicpm"] | {"head_dim": None}),
    "ministral3": ("mistral3", FAMILIES["mistral3"] | {"model_type": "ministral3"}),
    "gemma2": ("gemma2", FAMILIES["gemma2"] | _GEMMA | {"sliding_window": 64}),
    "gemma3_text": ("gemma3", FAMILIES["gemma3_text"] | _GEMMA),
    "qwen3_5_text": (
        "qwen35",
        FAMILIES["qwen3_5"]
        # llama.cpp requires equal head sizes for keys and values. It also normalizes q and k with
        # the ε of RMSNorm.
        | {"model_type": "qwen3_5_text", "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | {"rms_norm_eps": 1e-6},
    ),
    "lfm2": ("lfm2", FAMILIES["lfm2"]),
    "phi3": ("phi3", FAMILIES["phi3"] | {"rope_scaling": _LONGROPE}),
    # llama.cpp expects experts in every block of Qwen3 MoE. It ignores LFM2's
    # routed_scaling_factor.
    "qwen3_moe": ("qwen3moe", FAMILIES["qwen3_moe"] | {"mlp_only_layers": []}),
    "lfm2_moe": ("lfm2moe", FAMILIES["lfm2_moe"] | {"routed_scaling_factor": 1.0}),
    "wide": (
        "qwen2",
        TINY
        | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
        | {"max_position_embeddings": 512},
    ),
}
INTERLEAVED = ("llama", "smollm3", "granite", "minicpm", "mistral3")

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, Type]]


def q8_0(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
    return gguf.quantize(matrix, Type.Q8_0), Type.Q8_0


def write_gguf(
    path: Path,
    model: str,
    tensors: dict[str, mx.array] | None = None,
    encode: Encode = q8_0,
    vocabulary: str = "gpt-2",
    without: Sequence[str] = (),
    changed: Mapping[str, gguf.GGUFValue] | None = None,
) -> Path:
    """By default the tensors are random. `encode` encodes each matrix except convolutions.

    `vocabulary` is ``numbers``, ``pieces`` for SentencePiece's pieces, or the name of a
    pre-tokenizer for byte-level BPE. Metadata keys in `without` are left out. Those in `changed`
    get the given values.
    """
    name, said = MODELS[model]
    tensors = random_tensors(said) if tensors is None else tensors
    config = complete(said)
    writer = gguf.GGUFWriter(path, name)
    _write_keys(writer, name, config)
    write_vocabulary(writer, vocabulary, path.with_suffix(".tokenizer"), config["vocab_size"])
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for key, tensor in _stacked(config, tensors).items():
        array = _converted(name, config, key, np.array(tensor.astype(mx.float32)))
        key = key.replace(".dt_bias", ".dt_proj.bias")
        key = key.replace(".expert_bias", ".expert_bias.bias")
        theirs = names.get_name(key, (".weight", ".bias"))
        if array.ndim >= 2 and not key.endswith(CONVOLUTIONS):
            data, kind = encode(theirs, array)
            writer.add_tensor(theirs, data, raw_dtype=kind)
        else:
            writer.add_tensor(theirs, array)
    _write_rope(writer, config, said)
    for key in without:
        del writer.kv_data[0][key]
    writer.kv_data[0] |= changed or {}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacked(config: dict[str, Any], tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    names = {theirs: ours for ours, theirs in EXPERT_MATRICES.get(config["model_type"], {}).items()}
    found, experts = {}, {}
    for key, tensor in tensors.items():
        if part := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)\.weight", key):
            experts.setdefault(f"{part[1]}.{names[part[2]]}.weight", []).append(tensor)
        else:
            found[key] = tensor
    return found | {key: mx.stack(each) for key, each in experts.items()}


def _write_keys(writer: gguf.GGUFWriter, name: str, config: dict[str, Any]) -> None:
    arch = Architecture.from_config(config)
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(
        [config["num_key_value_heads"] if b.mixer.type == "attention" else 0 for b in arch.blocks]
        if name.startswith("lfm2")
        else config["num_key_value_heads"]
    )
    if config.get("head_dim") and name != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1.0)))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        writer.add_float32("gemma3.rope.freq_base_swa", config["rope_local_base_freq"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("attention_multiplier"):
        writer.add_attention_scale(config["attention_multiplier"])
    if config.get("embedding_multiplier"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if name == "qwen35":
        writer.add_rope_dimension_sections([3, 3, 2, 0])
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        writer.add_ssm_inner_size(inner)
        writer.add_full_attention_interval(config["full_attention_interval"])
    if name.endswith("moe"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if name == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name.startswith("lfm2"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_shortconv_l_cache(config["conv_L_cache"])


def _write_rope(writer: gguf.GGUFWriter, config: dict[str, Any], said: dict[str, Any]) -> None:
    scaling = config["rope_scaling"] or {"type": "default"}
    if scaling["type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif scaling["type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "rope_parameters" in said:
            writer.add_rope_scaling_yarn_log_mul(said["rope_parameters"]["mscale_all_dim"])
            writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])
    elif scaling["type"] == "llama3":
        size = config["head_dim"]
        base = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
        mixer = Architecture.from_config(config).mixers[0]
        writer.add_tensor("rope_freqs.weight", np.float32(base / np.array(mixer.frequencies)))
    elif scaling["type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(Architecture.from_config(config).mixers[0].rope_scale)
        for size in ("long", "short"):
            factors = np.array(scaling[f"{size}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{size}.weight", factors)


def _converted(name: str, config: dict[str, Any], key: str, array: np.ndarray) -> np.ndarray:
    if name in INTERLEAVED and ("q_proj" in key or "k_proj" in key):
        heads = config["num_attention_heads" if "q_proj" in key else "num_key_value_heads"]
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        return halves.swapaxes(1, 2).reshape(array.shape)
    is_offset = name in ("gemma2", "gemma3", "qwen35") and "linear_attn" not in key
    if is_offset and key.endswith("norm.weight"):
        return array + np.float32(1)
    if key.endswith(CONVOLUTIONS):
        array = array[:, 0]
    if "linear_attn" not in key:
        return array
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    before = 2 * keys * config["linear_key_head_dim"]

    def tiled(part: np.ndarray, size: int) -> np.ndarray:
        heads = part.reshape(keys, values // keys, size, *part.shape[1:])
        return heads.swapaxes(0, 1).reshape(part.shape)

    if "in_proj_qkv" in key or "conv1d" in key:
        return np.concatenate([array[:before], tiled(array[before:], size)])
    if "in_proj_z" in key:
        return tiled(array, size)
    if "out_proj" in key:
        return np.ascontiguousarray(tiled(array.T, size).T)
    if key.endswith("A_log"):
        return -np.exp(tiled(array, 1))
    return array if "norm" in key else tiled(array, 1)


def write_vocabulary(writer: gguf.GGUFWriter, kind: str, folder: Path, size: int) -> None:
    merges = []
    if kind == "numbers":
        tokens, types = [str(token) for token in range(size)], [1] * size
        writer.add_token_scores([0.0] * size)
    elif kind == "pieces":
        text = "▁".join(TEXT[:90].split())
        pieces = {text[i : i + n] for n in range(1, 6) for i in range(len(text))}
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        types = [2, 3, 3] + [6] * 256
        tokens += sorted(pieces, key=lambda piece: (len(piece), piece))[: size - len(tokens)]
        types += [1] * (size - len(types))
        writer.add_token_scores([0.0] * 259 + [float(-i) for i in range(size - 259)])
    else:
        folder.mkdir(exist_ok=True)
        write_tokenizer(folder, size)
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        tokens = sorted(model["vocab"], key=model["vocab"].get)
        types = [3] + [1] * (len(tokens) - 1) + [5] * (size - len(tokens))
        tokens += [f"<unused{i}>" for i in range(size - len(tokens))]
        merges = [" ".join(merge) for merge in model["merges"]]
        writer.add_tokenizer_pre(kind)
        writer.add_token_merges(merges)
    writer.add_tokenizer_model("gpt2" if merges else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1 if kind == "pieces" else 0)
    writer.add_eos_token_id(2 if kind == "pieces" else 0)
