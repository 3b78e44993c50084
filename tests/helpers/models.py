import json
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_causal_mask
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from helpers import lfm3
from mesp import reference
from mesp.data.tokenizer import load_tokenizer
from mesp.models import families
from mesp.models.architecture import Architecture, Block
from mesp.models.mixers import AttentionMixer
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import CONVOLUTIONS, name_here, name_there

sys.modules.setdefault("mlx_lm.models.lfm3", lfm3)  # mlx-lm has no LFM3

TINY = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_COMMON = {**TINY, **_HEADS, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}
_COMMON |= {"max_position_embeddings": 512, "num_hidden_layers": 2}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GEMMA = {**_COMMON, "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh"}
_GEMMA |= {"query_pre_attn_scalar": 24, "sliding_window": 5}
_GEMMA3 = {**_GEMMA, "sliding_window_pattern": 2, "rope_local_base_freq": 100.0}
_GRANITE = {**_COMMON, "head_dim": None, "embedding_multiplier": 2.0, "attention_multiplier": 0.1}
_GRANITE |= {"residual_multiplier": 0.5, "logits_scaling": 1.5, "attention_bias": False}
_GRANITE4 = {**_GRANITE, "num_local_experts": 0, "shared_intermediate_size": 128}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 24}
_MAMBA |= {"mamba_d_conv": 4, "mamba_conv_bias": True, "mamba_proj_bias": False}
_LFM2 = {**_COMMON, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3}
# The short and the long factors are equal, because mlx-lm always uses the long ones.
_FACTORS = [1, 1.1, 1.5, 2, 3, 4]
_LONG = {"type": "longrope", "short_factor": _FACTORS, "long_factor": _FACTORS}
_SLIDING = {"rope_type": "default", "rope_theta": 100.0}


def _full(kind: str, theta: float, share: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, "partial_rotary_factor": share}


_FAMILIES = {
    "qwen2": {**TINY, "num_hidden_layers": 2},
    "qwen3": {**_COMMON, "head_dim": 32},
    "llama": {
        **_COMMON,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 16},
        "tie_word_embeddings": False,
    },
    "llama-linear": {**_COMMON, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "smollm3": {**_COMMON, "no_rope_layers": [1, 0]},
    "mistral": {**_COMMON, "sliding_window": 5, "rope_scaling": _YARN},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA3,
    "gemma3": {**_GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gemma4": {
        **_GEMMA,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "global_head_dim": 32,
        "query_pre_attn_scalar": 1,
        "layer_types": [
            f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")
        ],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 320,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 2.0,
        "rope_parameters": {
            "full_attention": _full("proportional", 1e4, 0.25),
            "sliding_attention": _SLIDING,
        },
    },
    "granite": {**_GRANITE, "mlp_bias": False},
    "granitemoehybrid": {
        **_GRANITE4,
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
    },
    "granite-mamba": {
        **_GRANITE4,
        **_MAMBA,
        "rms_norm_eps": 1e-3,
        "layer_types": ["mamba", "attention"],
        "position_embedding_type": "nope",
    },
    "minicpm": {**_COMMON, "scale_emb": 2, "scale_depth": 1.4, "dim_model_base": 32},
    "mistral3": {
        **_COMMON,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen3_5": {
        **_COMMON,
        # ε is large, because this tiny model's norm may get inputs near 0. The norm's derivative is
        # 1 / √ε there, and a small ε would amplify rounding errors.
        "rms_norm_eps": 1e-2,
        "head_dim": 32,
        "full_attention_interval": 2,
        "rope_parameters": _full("default", 1e4, 0.5) | {"mrope_section": [3, 3, 2]},
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": False,
    },
    "lfm2": {
        **_LFM2,
        "block_dim": 64,
        "block_ff_dim": 192,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "full_attn_idxs": [1],
    },
    "lfm2_moe": {
        **_LFM2,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.25,
    },
    "qwen3_moe": {
        **_COMMON,
        "head_dim": 32,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "lfm3": {
        **_LFM2,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "rms_norm_eps": 1e-5,  # transformers' other name
        "conv_L_cache": 7,
        "sliding_window": 5,
        "rope_parameters": {
            "sliding_attention": _SLIDING,
            "full_attention": _full("default", 1e4, 0.5),
        },
    },
    "phi3": {
        **_COMMON,
        "partial_rotary_factor": 0.75,
        "rope_scaling": _LONG,
        "original_max_position_embeddings": 64,
        "sliding_window": 5,
        "rms_norm_eps": 1e-5,
    },
}
_FAMILIES["qwen3_5_moe"] = _FAMILIES["qwen3_5"] | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}
_FAMILIES["granite-moe"] = _FAMILIES["granite-mamba"] | {
    "intermediate_size": 64,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
_TYPES = {"llama-linear": "llama"} | dict.fromkeys(
    ("granite-mamba", "granite-moe"), "granitemoehybrid"
)
FAMILIES = {
    name: config | {"model_type": _TYPES.get(name, name)} for name, config in _FAMILIES.items()
}
# Multimodal models that mlx-lm lacks or does not load from their own files -> their text models
_ALONE = {"smolvlm": "llama", "idefics3": "llama", "lfm2_vl": "lfm2", "lfm2-vl": "lfm2"}
# For each `model_type` whose experts are separate tensors on the Hub: MeSP's names of an expert's
# matrices, and Hugging Face's names for them.
EXPERT_MATRICES = {
    "lfm2_moe": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "qwen3_moe": {name: name for name in ("gate_proj", "up_proj", "down_proj")},
}
HEADS_64 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n\n" * 80


def random_tensors(config: dict, seed: int = 0) -> dict[str, mx.array]:
    arch = Architecture.from_config(config)
    keys = iter(mx.random.split(mx.random.key(seed), 20 * arch.num_hidden_layers + 3))

    expert_keys = iter(mx.random.split(mx.random.key(seed + 2), 100 * arch.num_hidden_layers))

    def normal(*shape: int, keys=keys) -> mx.array:
        return mx.random.normal(shape, key=next(keys)) * shape[-1] ** -0.5

    def norm(size: int, offset: int = arch.norm_offset) -> mx.array:
        return 1 + 0.2 * mx.random.normal((size,), key=next(keys)) - offset

    def vector(name: str, shape: tuple[int, ...]) -> mx.array:
        if "norm" in name or name == "layer_scalar":
            return norm(*shape, offset=0)
        if name == "mamba.dt_bias":  # positive, because mlx-lm raises small time steps to 0.001
            return mx.abs(normal(*shape))
        return normal(*shape)[:, None] if name.endswith(CONVOLUTIONS) else normal(*shape) * 3

    tensors = {"model.embed_tokens.weight": normal(arch.vocab_size, arch.hidden_size)}
    for i, block in enumerate(arch.blocks):
        prefix = f"model.layers.{i}."
        for name, (out, inp) in block.sizes().items():
            tensors[name_there(f"{prefix}{name}.weight", arch.model_type)] = normal(out, inp)
            if name in arch.biases:
                tensors[f"{prefix}{name}.bias"] = normal(out) * 3
        for name, (out, inp) in block.frozen().items():
            tensors[f"{prefix}{name}.weight"] = normal(out, inp, keys=expert_keys)
        stacked = block.stacked()
        for theirs, parts in families.FAMILIES[arch.model_type].hf_experts if stacked else ():
            (out, inp), *others = (stacked.pop(part) for part in parts)
            shape = (block.num_experts, out * (1 + len(others)), inp)
            suffix = "" if theirs.startswith("mlp.experts") else ".weight"
            tensors[f"{prefix}{theirs}{suffix}"] = normal(*shape, keys=expert_keys)
        for name, (out, inp) in stacked.items():
            assert block.mlp.experts
            matrix = EXPERT_MATRICES[arch.model_type][name.rpartition(".")[2]]
            layer = prefix + block.mlp.experts.matrices.rpartition(".")[0]
            for e in range(block.mlp.experts.num_experts):
                name = f"{layer}.experts.{e}.{matrix}.weight"
                tensors[name] = normal(out, inp, keys=expert_keys)
        for name, size in block.norms().items():
            weight = norm(size)
            if name.endswith("q_norm.weight") and getattr(block.mixer, "attention_scale", 0) == 1:
                weight = weight * size**-0.5  # the weight includes the scale of attention
            tensors[name_there(prefix + name, arch.model_type)] = weight
        for name, shape in block.vectors().items():
            tensors[prefix + name] = vector(name, shape)
    tensors[name_there("model.norm.weight", arch.model_type)] = norm(arch.hidden_size)
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(arch.vocab_size, arch.hidden_size)
    if arch.per_layer:
        keys = iter(mx.random.split(mx.random.key(seed + 1), 3))
        for name, shape in arch.per_layer_shapes.items():
            tensors[f"{name}.weight"] = normal(*shape, keys=keys)
        tensors["model.per_layer_projection_norm.weight"] = norm(arch.per_layer.size)
    mx.eval(tensors)
    return tensors


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Token 0 is <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    config: dict,
    tensors: dict[str, mx.array] | None = None,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    folder.mkdir(parents=True)
    if tensors is None:
        config, tensors = published(config, random_tensors(config))
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            names = list(tensors)[i::shards]
            mx.save_safetensors(str(folder / file), {name: tensors[name] for name in names})
            weight_map |= dict.fromkeys(names, file)
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
    if tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    return folder


def published(config: dict, tensors: dict[str, mx.array]) -> tuple[dict, dict[str, mx.array]]:
    family = families.FAMILIES[config["model_type"]]
    texts, tensors = family.texts, dict(tensors)
    for theirs, parts in family.hf_modules:
        for i in range(config["num_hidden_layers"]):
            layer = f"model.layers.{i}."
            if f"{layer}{parts[0]}.weight" not in tensors:
                continue
            rows = [tensors.pop(f"{layer}{part}.weight") for part in parts]
            tensors[f"{layer}{theirs}.weight"] = mx.concatenate(rows)
    if not family.mlx_ties:
        config = {k: v for k, v in config.items() if k != "tie_word_embeddings"}
    if not texts or config["model_type"] in texts:
        return config, tensors
    whole = {"model_type": config["model_type"], "vocab_size": config["vocab_size"]}
    whole["text_config"] = {**config, "model_type": texts[-1]}
    whole["tie_word_embeddings"] = config["tie_word_embeddings"]
    return whole, {f"language_model.{name}": array for name, array in tensors.items()}


def write_mixed_model(folder: Path, config: dict, recipe: str = "mixed_4_6") -> Path:
    from mlx_lm.convert import mixed_quant_predicate_builder

    predicate = mixed_quant_predicate_builder(recipe, mlx_lm_model(config))

    def quantization(path: str, module: nn.Module) -> dict:
        return predicate(path, module) | ({"bits": 8} if path == "lm_head" else {})

    return _write_quantized(folder, config, quantization)


def write_model_in_5_bits(folder: Path, config: dict) -> Path:
    def quantization(path: str, module: nn.Module) -> dict:
        return {"bits": 6 if path.endswith("embed_tokens") else 5, "group_size": 32}

    return _write_quantized(folder, config, quantization)


def _write_quantized(
    folder: Path, config: dict, quantization: Callable[[str, nn.Module], dict]
) -> Path:
    from mlx_lm.utils import quantize_model

    model = mlx_lm_model(config)
    model, config = quantize_model(model, config, None, None, quant_predicate=quantization)
    return write_model(folder, config, dict(tree_flatten(model.parameters())))


def mlx_lm_model(
    config: dict, quantization: Callable[[str], Quantization] | None = None, seed: int = 0
) -> nn.Module:
    config = config | {"model_type": _ALONE.get(config["model_type"], config["model_type"])}
    config, weights = published(config, random_tensors(config, seed))
    model_class, arguments = _get_classes(config)
    model = model_class(arguments.from_dict(deepcopy(config)))  # some models change their config
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    model.load_weights(list(weights.items()))
    if quantization:

        def choose(path: str, module: nn.Module) -> bool | dict:
            return hasattr(module, "to_quantized") and asdict(quantization(path))

        nn.quantize(model, class_predicate=choose)
    return model


def text_of(model: nn.Module) -> nn.Module:
    return getattr(model, "language_model", model)


def arrays_of(layer: nn.Module, block: Block) -> dict[str, mx.array]:
    arch, arrays = block.arch, {}
    # mlx-lm adds Qwen3.5's offset on loading
    offset = 0 if arch.model_type.startswith("qwen3_5") else arch.norm_offset
    for theirs, array in tree_flatten(layer.parameters()):
        name = name_here(theirs, arch.model_type)
        if name.endswith(CONVOLUTIONS):
            array = array[..., 0]
        arrays[name] = array + offset if name in block.norms() else array
    return arrays


def mask_of(block: Block, length: int) -> mx.array | None:
    if not isinstance(block.mixer, AttentionMixer):
        return None
    return create_causal_mask(length, window_size=block.mixer.sliding_window)


def residual_factor(layer: nn.Module) -> float:
    if hasattr(layer, "scale_depth"):
        return layer.scale_depth / layer.num_hidden_layers**0.5
    return getattr(layer, "residual_multiplier", 1.0)


def run_layer(
    layer: nn.Module,
    x: mx.array,
    block: Block,
    per_layer: mx.array | None = None,
    shared: tuple[mx.array, mx.array] | None = None,
) -> mx.array:
    """mlx-lm's block may multiply its residual terms by a factor m. It then gets m · x, and its
    output is divided by m. The query factor of Ministral 3 is 1 for short sequences.
    """
    factor = residual_factor(layer)
    if block.arch.per_layer:
        given = {"per_layer_input": per_layer, "shared_kv": shared, "offset": 0}
        return layer(x, mask_of(block, x.shape[1]), **given)[0]
    query_scale = [mx.array(1.0)] if type(layer).__module__.endswith("ministral3") else []
    return layer(factor * x, *query_scale, mask_of(block, x.shape[1])) / factor


def given_to(block: Block, T: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    mixer = block.mixer
    if block.arch.per_layer:
        given["per_layer"] = mx.random.normal((1, T, block.arch.per_layer.size))
    if isinstance(mixer, AttentionMixer) and mixer.keys_of is not None:
        shape = (1, mixer.num_key_value_heads, T, mixer.head_dim)
        given["shared"] = mx.random.normal(shape), mx.random.normal(shape)
    return given


def dequantize_once(patch: pytest.MonkeyPatch) -> None:
    dequantize, known = mx.dequantize, {}

    def remembered(packed: mx.array, *others: mx.array, **options: object) -> mx.array:
        if id(packed) not in known:
            matrix = dequantize(packed, *others, **options)
            # Keeping the packed array alive ensures that no later array gets its id.
            known[id(packed)] = (packed, matrix)
        return known[id(packed)][1]

    patch.setattr(mx, "dequantize", remembered)


def load_lora(layer: nn.Module, flat: mx.array, block: Block, scale: float) -> None:
    modules = dict(layer.named_modules())
    wrapped = []
    for name, (A, B, *m) in reference.unpack_lora(flat, block).items():
        if m:
            lora = DoRALinear.from_base(modules[name], r=A.shape[1], scale=scale)
            lora.m = m[0]
        elif A.ndim == 3:
            lora = LoRASwitchLinear.from_base(modules[name], r=A.shape[2], scale=scale)
            A, B = A.swapaxes(1, 2), B.swapaxes(1, 2)
        else:
            lora = LoRALinear.from_base(modules[name], r=A.shape[1], scale=scale)
        lora.lora_a, lora.lora_b = A, B
        wrapped.append((name, lora))
    layer.freeze()
    for name, lora in wrapped:
        parent, _, child = name.rpartition(".")
        setattr(modules[parent], child, lora)


def byte_tokenizer(folder: Path, has_begin: bool, adds_begin: bool) -> TokenizerWrapper:
    """Token 0 ends a text, and token 1 begins a text if `has_begin`. If `adds_begin`, encoding puts
    token 1 before each text.
    """
    end, begin, *others = (f"<0x{byte:02X}>" for byte in range(256))
    vocabulary = {token: byte for byte, token in enumerate([end, begin, *others])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    config |= {"bos_token": begin} if has_begin else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)
