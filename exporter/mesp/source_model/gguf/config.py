from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, ExpertGatingFuncType

from mesp.errors import MespError
from mesp.models.families import FAMILIES
from mesp.models.rope_scaling import SCALINGS
from mesp.source_model.gguf.header import GGUF
from mesp.source_model.gguf.tensor_names import ARCHITECTURES

_MODEL_TYPES = {
    MODEL_ARCH_NAMES[MODEL_ARCH[name]]: model_type
    for model_type, name in reversed(ARCHITECTURES.items())
}
# The number of blocks of Gemma's 27B models. These models scale attention by 1/√(hidden size /
# number of heads).
_GEMMA_27B = {"gemma2": 46, "gemma3_text": 62}
_NUMBER = (int, float)
# Keys that may stay unread. They do not affect text models, or are read elsewhere.
_NOTHING = ("rope.scaling.finetuned", "rope.dimension_sections", "attention.head_count_kv")


class _Metadata:
    def __init__(self, gguf: GGUF, prefix: str):
        self.gguf, self.prefix = gguf, prefix
        self.read: set[str] = set()

    def get(self, key: str, kind: type | tuple[type, ...] = int) -> Any:
        """Returns the value of ``{architecture}.{key}``, or None if there is no such key.

        A float becomes the shortest decimal with the same float32 value. Raises MespError if the
        value is not of type `kind`.
        """
        self.read.add(key)
        key = f"{self.prefix}.{key}"
        value = self.gguf.metadata.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # equal in all blocks
        if isinstance(value, bool) or not isinstance(value, (kind, type(None))):
            raise MespError(f"{self.gguf.path} cannot be used: its {key} is {value!r:.100}.")
        if isinstance(value, float):
            value = float(str(np.float32(value)))
        return value

    def require(self, key: str, kind: type | tuple[type, ...] = int) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise MespError(
                f"{self.gguf.path} lacks {self.prefix}.{key}; take a file that a newer llama.cpp "
                "wrote."
            )
        return value

    def refuse_unread(self) -> None:
        for key in self.gguf.metadata:
            name = key.removeprefix(f"{self.prefix}.")
            if (
                name.startswith(("rope.", "attention."))
                and name not in self.read
                and name not in _NOTHING
                and (name, self.gguf.metadata[key]) != ("attention.causal", True)
            ):
                raise MespError(
                    f"{self.gguf.path} sets {key} to {self.gguf.metadata[key]!r:.40}, which is not "
                    "supported; take another file of the model."
                )


def config_of(gguf: GGUF) -> dict[str, Any]:
    """Raises MespError if the file is not a whole model of a supported kind, or if the metadata is
    incomplete, invalid or not supported.
    """
    if rotation := next((key for key in sorted(gguf.metadata) if "hadamard" in key), None):
        raise MespError(
            f"{gguf.path} has weights in a rotated basis ({rotation!r:.60}), which is not "
            "supported; take a file of the model without a rotation."
        )
    name, kind = gguf.text("general.architecture"), gguf.text("general.type", "model")
    if kind != "model":
        raise MespError(f"{gguf.path} holds no model ({kind!s:.40}); name the model's file.")
    parts = gguf.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise MespError(
            f"{gguf.path} is one part of several; join them with llama-gguf-split --merge."
        )
    model_type = _MODEL_TYPES.get(name)
    if model_type is None:
        raise MespError(
            f"The architecture {name!r:.60} of {gguf.path} is not supported; supported are "
            f"{', '.join(_MODEL_TYPES)}."
        )
    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise MespError(f"{gguf.path} has no token_embd.weight; it holds no whole model.")
    its = _Metadata(gguf, name)
    if its.get("expert_count") and FAMILIES[model_type].experts is None:
        raise MespError(
            f"{gguf.path} mixes experts, which is not supported in a GGUF file of {name}; take the "
            "model in safetensors."
        )
    hidden, heads = its.require("embedding_length"), its.require("attention.head_count")
    head_dim = its.get("attention.key_length") or (hidden // heads if heads else 0)
    begin = gguf.metadata.get("tokenizer.ggml.bos_token_id")
    config = {
        "model_type": model_type,
        "vocab_size": table.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": its.require("block_count") - (its.get("nextn_predict_layers") or 0),
        "intermediate_size": its.require("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "rms_norm_eps": its.require("attention.layer_norm_rms_epsilon", float),
        "rope_theta": its.get("rope.freq_base", _NUMBER) or 10000.0,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "hidden_act": FAMILIES[model_type].activation,
        "attention_bias": "blk.0.attn_output.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in gguf.tensors,
        "bos_token_id": begin if type(begin) is int else None,
        "max_position_embeddings": its.get("context_length") or None,
        "original_max_position_embeddings": its.get("rope.scaling.original_context_length") or None,
        "sliding_window": its.get("attention.sliding_window") or None,
    }
    if (its.get("attention.value_length") or head_dim) != head_dim:
        raise MespError(
            f"{gguf.path} has values of another size than keys, which is not supported."
        )
    rotated = its.get("rope.dimension_count")
    if rotated and rotated != head_dim:
        config["partial_rotary_factor"] = rotated / (head_dim or 1)
    config |= _READ.get(model_type, lambda its, config: {})(its, config)
    if not model_type.startswith("lfm2"):  # `_lfm2` reads LFM2's list of head counts
        config["num_key_value_heads"] = its.get("attention.head_count_kv") or heads
    config["rope_scaling"] = _rope_scaling(its, config)
    if model_type == "ministral3":
        scaling = config.pop("rope_scaling") or {"type": "default"}
        config["rope_parameters"] = {
            "rope_type": scaling.pop("type"),
            "rope_theta": config["rope_theta"],
            "llama_4_scaling_beta": its.get("attention.temperature_scale", _NUMBER) or 0.0,
            **scaling,
        }
    its.refuse_unread()
    return {key: value for key, value in config.items() if value is not None}


def _gemma(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    large = config["num_hidden_layers"] == _GEMMA_27B[config["model_type"]]
    size = config["hidden_size"] // (config["num_attention_heads"] or 1)
    return {
        "hidden_activation": config["hidden_act"],
        "query_pre_attn_scalar": size if large else config["head_dim"],
        "attn_logit_softcapping": its.get("attn_logit_softcapping", _NUMBER),
        "final_logit_softcapping": its.get("final_logit_softcapping", _NUMBER),
        "sliding_window": its.require("attention.sliding_window"),
    }


def _gemma3(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(its, config) | {
        "rope_local_base_freq": its.get("rope.freq_base_swa", _NUMBER) or 10000.0,
        "sliding_window_pattern": its.get("attention.sliding_window_pattern") or 6,
    }


def _granite(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    }  # fmt: skip
    return {key: its.require(theirs, _NUMBER) for key, theirs in keys.items()}


def _minicpm(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    try:
        depth = its.require("residual_scale", _NUMBER) * math.sqrt(config["num_hidden_layers"])
        base = config["hidden_size"] / its.require("logit_scale", _NUMBER)
    except (ValueError, ArithmeticError) as error:
        raise MespError(
            f"{its.gguf.path} cannot be used: its minicpm.logit_scale or its minicpm.block_count "
            "is not above 0."
        ) from error
    return {
        "scale_emb": its.require("embedding_scale", _NUMBER),
        "scale_depth": float(str(np.float32(depth))),
        "dim_model_base": float(str(np.float32(base))),
    }


def _lfm2(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Returns LFM2's part of config.json. A block with 0 key heads is a convolution."""
    key = f"{its.prefix}.attention.head_count_kv"
    counts = its.gguf.metadata.get(key)
    if not isinstance(counts, np.ndarray) or len({*counts.tolist()} - {0}) != 1:
        raise MespError(
            f"{its.gguf.path} cannot be used: its {key} is not a list of 0 and a number."
        )
    return {
        "num_key_value_heads": int(counts.max()),
        "layer_types": ["full_attention" if n else "conv" for n in counts.tolist()],
        "conv_L_cache": its.require("shortconv.l_cache"),
        "conv_bias": False,
        "block_dim": config["hidden_size"],
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }


def _experts(its: _Metadata, scores: ExpertGatingFuncType) -> dict[str, Any]:
    """Returns the part of config.json on a mixture of experts.

    The weights of a token's experts add up to 1.
    """
    if its.get("expert_gating_func") not in (None, scores.value) or its.get(
        "expert_weights_scale", _NUMBER
    ) not in (None, 0, 1):
        raise MespError(f"{its.gguf.path} weighs experts in a way that is not supported.")
    return {
        "num_experts": its.require("expert_count"),
        "num_experts_per_tok": its.require("expert_used_count"),
        "moe_intermediate_size": its.require("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _qwen3_moe(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_experts(its, ExpertGatingFuncType.SOFTMAX),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _lfm2_moe(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_lfm2(its, config),
        **_experts(its, ExpertGatingFuncType.SIGMOID),
        "num_dense_layers": its.require("leading_dense_block_count"),
        "routed_scaling_factor": 1.0,
        "use_expert_bias": True,
    }


def _qwen3_5(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    values = its.require("ssm.time_step_rank")
    return {
        "linear_conv_kernel_dim": its.require("ssm.conv_kernel"),
        "linear_key_head_dim": its.require("ssm.state_size"),
        "linear_num_key_heads": its.require("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": its.require("ssm.inner_size") // (values or 1),
        "full_attention_interval": its.get("full_attention_interval") or 4,
    }


_READ = {
    "gemma2": _gemma, "gemma3_text": _gemma3, "granite": _granite, "minicpm": _minicpm,
    "lfm2": _lfm2, "qwen3_5_text": _qwen3_5, "qwen3_moe": _qwen3_moe, "lfm2_moe": _lfm2_moe,
}  # fmt: skip


def _rope_scaling(its: _Metadata, config: dict[str, Any]) -> dict[str, Any] | None:
    length = config["original_max_position_embeddings"] or config["max_position_embeddings"]
    kind = its.get("rope.scaling.type", str) or "linear"
    factor, older = (its.get(f"rope.{key}", _NUMBER) for key in ("scaling.factor", "scale_linear"))
    factor = older if factor is None else factor
    slows = kind != "none" and factor not in (None, 0, 1)
    attention_factor = its.get("rope.scaling.attn_factor", _NUMBER) or 1.0
    otherwise = MespError(f"{its.gguf.path} scales RoPE in a way that is not supported ({kind}).")
    has_long = "rope_factors_long.weight" in its.gguf.tensors
    has_factors = "rope_freqs.weight" in its.gguf.tensors
    if (slows and (has_long or has_factors)) or (attention_factor != 1 and not has_long):
        raise otherwise
    if has_long:
        return {
            "type": "longrope",
            "short_factor": _factors(its.gguf, "rope_factors_short.weight"),
            "long_factor": _factors(its.gguf, "rope_factors_long.weight"),
            "original_max_position_embeddings": length,
            "attention_factor": attention_factor,
        }
    if has_factors:
        return _llama3(its, config)
    if not slows:
        return None
    if kind == "linear":
        return {"type": "linear", "factor": factor}
    if kind != "yarn":
        raise otherwise
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": its.get("rope.scaling.yarn_beta_fast", _NUMBER),
        "beta_slow": its.get("rope.scaling.yarn_beta_slow", _NUMBER),
        "mscale": 1.0,
        "mscale_all_dim": its.get("rope.scaling.yarn_log_multiplier", _NUMBER),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _factors(gguf: GGUF, name: str) -> list[float]:
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.type != "F32" or len(tensor.shape) != 1:
        raise MespError(f"{gguf.path} has no {name} of float32 numbers; download it again.")
    return [float(str(each)) for each in tensor.data.view("<f4")[0]]


def _llama3(its: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    factors = np.array(_factors(its.gguf, "rope_freqs.weight"))
    size, theta = config["head_dim"], config["rope_theta"]
    possible = 0 < size <= 4096 and theta > 0
    base = [theta ** (-i / size) for i in range(0, size, 2)] if possible else []
    for exponent in range(3, 21):
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1 << exponent,
        }
        scaled = SCALINGS["llama3"].frequencies(base, scaling, config)
        if len(scaled) == len(factors) and np.allclose(np.divide(base, scaled), factors, 1e-4):
            return scaling
    raise MespError(
        f"{its.gguf.path} scales RoPE's frequencies differently from Llama 3, which is not "
        "supported."
    )
