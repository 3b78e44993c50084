from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mesp.models.mixers import Modules
from mesp.models.mlps import Experts


def _modules(prefix: str, **layers: str) -> Modules:
    """Returns linear layers with the projections, or the layers, that each has in its rows."""
    return tuple((f"{prefix}.{name}", tuple(each.split())) for name, each in layers.items())


def _gate_up_down(prefix: str, gate: str, up: str, down: str) -> Modules:
    return _modules(prefix, **{gate: "gate", up: "up", down: "down"})


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SEPARATE_ATTENTION = _modules("self_attn", q_proj="q", k_proj="k", v_proj="v", o_proj="o")
SEPARATE_MLP = _gate_up_down("mlp", *_PROJECTIONS)
GATED_DELTA_NET = _modules(
    "linear_attn", in_proj_qkv="qkv", in_proj_z="z", in_proj_b="b", in_proj_a="a", out_proj="out"
)
SHORT_CONVOLUTION = _modules("conv", in_proj="in", out_proj="out")
MAMBA2 = _modules("mamba", in_proj="in", out_proj="out")
_LFM_MLP = _gate_up_down("feed_forward", "w1", "w3", "w2")
_GRANITE_EXPERTS = "block_sparse_moe.switch_mlp"


# Mamba's time step limits in a model without limits. JSON has no infinity, so the upper limit is
# 1e38.
NO_LIMITS = [0.0, 1e38]


def short(module: str) -> str:
    return module.split(".")[-1].removesuffix("_proj")


EXPERTS = "experts"
TRAINABLE = (
    "q", "k", "v", "qkv", "g", "o", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in",
    "out", "gate", "up", "gate_up", "down", "w1", "w3", "w2", "input_linear", "output_linear",
    "per_layer_input_gate", "per_layer_projection", EXPERTS,
)  # fmt: skip


# Several names have the same formula.
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate"), "gelu"),
}


@dataclass(frozen=True)
class Family:
    attention: Modules = SEPARATE_ATTENTION
    mlp: Modules = SEPARATE_MLP
    biases: tuple[str, ...] = ()
    qk_norm: bool = False
    v_norm: bool = False
    experts: Experts | None = None
    beside_experts: Modules = ()
    per_layer: Modules = ()
    output_gate: bool = False
    post_norms: bool = False
    norm_offset: int = 0
    names: dict[str, str] = field(default_factory=dict)
    # The `model_type`s that the text part of a multimodal model may have.
    texts: tuple[str, ...] = ()
    mlx_type: str | None = None
    # Whether mlx-lm shares the embedding with the head of a tied model.
    mlx_ties: bool = True
    # Linear layers of Hugging Face's checkpoints that have other names than MeSP's, or that stack
    # several of MeSP's layers in equal parts. `hf_experts` has such layers for experts' matrices.
    hf_modules: Modules = ()
    hf_experts: Modules = ()
    mlx_prefix: str = "model"  # the prefix of `.layers` in adapters for mlx-lm or mlx-vlm
    hf_prefix: str = "model"
    activation: str = "silu"
    full_every: float = 1
    other_layers: str = "sliding_attention"  # the type of the other layers in `layer_types`
    has_no_rope_layers: bool = False
    embedding_factor: str = "one"  # "one", "root" or "rounded_root"
    takes: tuple[str, ...] = ()
    # values that the class sets, whatever config.json says
    fixed: dict[str, Any] = field(default_factory=dict)
    # converts other keys to the standard keys
    read: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every block consists of attention and one MLP that the standard keys of
        config.json describe.
        """
        special = (self.read, self.experts, self.per_layer, self.v_norm, self.hf_modules)
        return not any(special) and self.other_layers == "sliding_attention"

    def embedding_scale(self, hidden: int) -> float:
        root = math.sqrt(hidden)
        rounded = mx.array(root, mx.bfloat16).item()
        return {"one": 1.0, "root": root, "rounded_root": rounded}[self.embedding_factor]


def _read_lfm2(config: dict[str, Any]) -> dict[str, Any]:
    found = {"rms_norm_eps": config["norm_eps"], "block_dim": config["hidden_size"]}
    if not config.get("layer_types"):
        layers = range(config["num_hidden_layers"])
        attention = config.get("full_attn_idxs")
        found["layer_types"] = [
            "full_attention" if attention is None or i in attention else "conv" for i in layers
        ]
    width = found["block_ff_dim"] = config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = math.ceil(width / config["block_multiple_of"]) * config["block_multiple_of"]
    return found | {"intermediate_size": width}


def _read_lfm2_moe(config: dict[str, Any]) -> dict[str, Any]:
    if not config.get("layer_types"):
        raise KeyError("layer_types")
    return _read_lfm2({**config, "block_auto_adjust_ff_dim": False})


def _read_lfm3(config: dict[str, Any]) -> dict[str, Any]:
    """Returns LFM3's RoPE, norm ε and layers in the standard keys.

    Liquid AI's own code rotates half of the pairs, with the frequencies of a whole head.
    """
    found = {"rms_norm_eps": config["norm_eps"]}
    if not config.get("layer_types"):
        found["layer_types"] = [
            "conv" if i % 2 or not i else "sliding_attention" if i % 4 == 0 else "full_attention"
            for i in range(config["num_hidden_layers"])
        ]
    rope = config["rope_parameters"]
    full = rope["full_attention"]
    if full.get("rope_type", "default") == "default":
        full = {**full, "rope_type": "proportional"}
        found["rope_parameters"] = {**rope, "full_attention": full}
    return found


def _read_granite4(config: dict[str, Any]) -> dict[str, Any]:
    """Returns Granite 4's settings in the standard keys.

    transformers uses RoPE only if `position_embedding_type` is "rope". mlx-lm uses RoPE unless the
    value is "nope".
    """
    names = {"full_attention": "attention", "linear_attention": "mamba"}
    rotates = config.get("position_embedding_type") == "rope"
    types = config.get("layer_types") or ["mamba"] * config["num_hidden_layers"]
    experts = config["num_local_experts"] or 0
    mlx_width = config["intermediate_size" if experts else "shared_intermediate_size"]
    limits = [*(config.get("time_step_limit") or (0.0, math.inf))]
    return {
        # Without this key, mlx-lm limits the time steps, unlike the model.
        "time_step_limit": NO_LIMITS if limits == [0.0, math.inf] else limits,
        "num_experts": experts,
        "moe_intermediate_size": config["intermediate_size"],
        "intermediate_size": mlx_width,
        "layer_types": [names.get(each, each) for each in types],
        "position_embedding_type": "rope" if rotates else "nope",
    }


def _read_gemma4(config: dict[str, Any]) -> dict[str, Any]:
    types = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % 6 else "full_attention"
        for i in range(config["num_hidden_layers"])
    ]
    types = [*types[:-1], "full_attention"]
    # Gemma 4 does not scale its attention scores.
    found: dict[str, Any] = {"query_pre_attn_scalar": 1, "layer_types": types}
    if sizes := config.get("per_layer_config"):
        full = [str(i) for i, each in enumerate(types) if each == "full_attention"]
        (first, *others) = sizes.values()
        same = first.keys() == {"head_dim"} and all(each == first for each in others)
        if same and sorted(map(str, sizes)) == sorted(full):
            found["global_head_dim"] = first["head_dim"]
            del config["per_layer_config"]
    elif "per_layer_config" in config:
        found["global_head_dim"] = config["head_dim"]
    return found


def _in_several(text: Family, *names: str) -> Family:
    return replace(
        text, texts=names, mlx_prefix="language_model.model", hf_prefix="model.language_model"
    )


def _read_minicpm(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "embedding_multiplier": config["scale_emb"],
        "residual_multiplier": config["scale_depth"] / math.sqrt(config["num_hidden_layers"]),
        "logits_scaling": config["hidden_size"] / config["dim_model_base"],
    }


_LLAMA = Family(takes=("attention_bias",))
_SMOLVLM = replace(
    _LLAMA, texts=("llama",), mlx_type="llama", mlx_prefix="language_model",
    hf_prefix="model.text_model",
)  # fmt: skip
_MISTRAL = Family(full_every=math.inf)
# The class has no window unless `use_sliding_window` is true, which VARIANTS refuses.
_NO_WINDOW = {"sliding_window": None}
_QWEN2 = Family(
    biases=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), fixed=_NO_WINDOW
)
_QWEN3 = Family(qk_norm=True, fixed=_NO_WINDOW)
_GEMMA = Family(
    post_norms=True,
    norm_offset=1,
    activation="gelu_pytorch_tanh",
    full_every=2,
    embedding_factor="root",
    takes=("attn_logit_softcapping", "final_logit_softcapping"),
)
_QWEN3_5 = Family(
    qk_norm=True,
    output_gate=True,
    norm_offset=1,
    texts=("qwen3_5_text",),
    mlx_type="qwen3_5",
    mlx_prefix="language_model.model",
    full_every=4,
    other_layers="linear_attention",
    takes=("partial_rotary_factor",),
)
_GEMMA3 = replace(_GEMMA, qk_norm=True, full_every=6, embedding_factor="rounded_root", takes=())
_GEMMA4 = Family(
    qk_norm=True,
    v_norm=True,
    per_layer=(("per_layer_input_gate", ("ple_gate",)), ("per_layer_projection", ("ple_out",))),
    post_norms=True,
    activation="gelu_pytorch_tanh",
    embedding_factor="rounded_root",
    takes=("final_logit_softcapping",),
    read=_read_gemma4,
)
_LFM2 = Family(
    attention=_modules("self_attn", q_proj="q", k_proj="k", v_proj="v", out_proj="o"),
    mlp=_LFM_MLP,
    qk_norm=True,
    other_layers="conv",
    names={
        "input_layernorm": "operator_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "model.norm": "model.embedding_norm",
    },
    read=_read_lfm2,
)
_LFM2_VL = replace(_in_several(_LFM2, "lfm2"), mlx_type="lfm2-vl")
_QWEN3_EXPERTS = Experts("mlp.gate", "mlp.switch_mlp", "softmax", None)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    texts=("qwen3_5_moe_text",),
    mlx_type="qwen3_5_moe",
    experts=replace(_QWEN3_EXPERTS, mlp_gate="mlp.shared_expert_gate"),
    beside_experts=_gate_up_down("mlp.shared_expert", *_PROJECTIONS),
    hf_experts=_QWEN3_EXPERTS.hf_modules(),
    takes=(*_QWEN3_5.takes, "num_experts"),
    read=lambda config: {
        "intermediate_size": 0,
        "shared_intermediate_size": config["shared_expert_intermediate_size"],
    },
)
# For each class of transformers, the keys that it reads, with their defaults
# (tools/class_defaults.py).
CLASSES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("classes.json").read_text(encoding="utf-8")
)
# MiniCPM's class is in the repositories of its models.
CLASSES["minicpm"] = {
    **{key: value for key, value in CLASSES["llama"].items() if key != "mlp_bias"},
    **dict.fromkeys(("scale_emb", "scale_depth", "dim_model_base", "sparse_config")),
    "tie_word_embeddings": True,
}
CLASSES["lfm2-vl"] = CLASSES["lfm2_vl"]  # the older name, which mlx-lm has
FAMILIES = {
    "qwen2": _QWEN2,
    "qwen2_5_vl": _in_several(_QWEN2, "qwen2_5_vl_text"),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, experts=_QWEN3_EXPERTS, takes=("num_experts",)),
    "qwen3_vl": _in_several(_QWEN3, "qwen3_vl_text"),
    "llama": _LLAMA,
    "smolvlm": _SMOLVLM,
    "idefics3": _SMOLVLM,
    "smollm3": replace(_LLAMA, has_no_rope_layers=True),
    "granite": _LLAMA,
    "granitemoehybrid": Family(
        # mlx-lm has two layers in place of the first, in models without experts.
        hf_modules=_modules(
            "shared_mlp", input_linear="mlp.gate_proj mlp.up_proj", output_linear="mlp.down_proj"
        ),
        experts=Experts("block_sparse_moe.router.layer", _GRANITE_EXPERTS, "softmax", None),
        beside_experts=_modules("shared_mlp", input_linear="gate up", output_linear="down"),
        hf_experts=_modules(
            "block_sparse_moe",
            input_linear=f"{_GRANITE_EXPERTS}.gate_proj {_GRANITE_EXPERTS}.up_proj",
            output_linear=f"{_GRANITE_EXPERTS}.down_proj",
        ),
        other_layers="mamba",
        takes=("attention_bias", "num_experts"),
        read=_read_granite4,
    ),
    "minicpm": Family(mlx_ties=False, read=_read_minicpm),
    "mistral": _MISTRAL,
    "ministral3": _MISTRAL,
    "mistral3": _in_several(_MISTRAL, "mistral", "ministral3"),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA3,
    "gemma3": _in_several(_GEMMA3, "gemma3_text"),
    "gemma4_text": _GEMMA4,
    "gemma4": _in_several(_GEMMA4, "gemma4_text"),
    "qwen3_5": _in_several(_QWEN3_5, "qwen3_5_text"),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _in_several(_QWEN3_5_MOE, "qwen3_5_moe_text"),
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "lfm2": _LFM2,
    "lfm2_vl": _LFM2_VL,
    "lfm2-vl": _LFM2_VL,
    "lfm2_moe": replace(
        _LFM2,
        mlp=_gate_up_down("feed_forward", *_PROJECTIONS),
        hf_modules=tuple(
            (f"feed_forward.{there}", (f"feed_forward.{here}",))
            for there, here in zip(("w1", "w3", "w2"), _PROJECTIONS, strict=True)
        ),
        experts=Experts(
            "feed_forward.gate", "feed_forward.switch_mlp", "sigmoid", "feed_forward.expert_bias"
        ),
        takes=("num_experts",),
        read=_read_lfm2_moe,
    ),
    "lfm3": Family(
        attention=_modules("self_attn", q_proj="q", k_proj="k", v_proj="v", g_proj="g", o_proj="o"),
        mlp=_LFM_MLP,
        qk_norm=True,
        post_norms=True,
        other_layers="conv",
        names={
            "input_layernorm": "operator_norm",
            "post_attention_layernorm": "post_operator_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffn_norm",
            "self_attn.g_proj": "self_attn.gate_proj",  # "g_proj" in transformers and PEFT
            "model.norm": "model.embedding_norm",
        },
        read=_read_lfm3,
    ),
    "phi3": Family(
        attention=_modules("self_attn", qkv_proj="q k v", o_proj="o"),
        mlp=_modules("mlp", gate_up_proj="gate up", down_proj="down"),
        full_every=math.inf,
        takes=("partial_rotary_factor",),
    ),
}

# Keys that a class reads, but not every family supports, with the value that changes nothing. For a
# family that does not support a key, the key must be missing or null, or have this value.
VARIANTS = {
    "use_sliding_window": False,
    "attention_bias": False,
    "rope_traditional": False,
    "use_bidirectional_attention": False,
    "attn_output_gate": True,
    "conv_bias": False,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    # with several groups, transformers normalizes each one separately; MeSP does not
    "mamba_n_groups": 1,
    "time_step_limit": NO_LIMITS,
    "use_attention_gate": True,
    "use_sandwich_norm": True,
    "sparse_config": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "per_layer_config": None,
    "norm_topk_prob": True,
    "num_experts": 0,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}

LACKING = {
    **dict.fromkeys(
        ("olmo2", "olmo3"),
        "its blocks norm only the outputs of attention and MLP, and q and k over all heads",
    ),
    "exaone4": "its blocks norm only the outputs of attention and MLP",
    "olmoe": "its experts' weights do not add up to 1, and it norms q and k over all heads",
    **dict.fromkeys(
        ("glm", "glm4", "ernie4_5", "helium"),
        "its RoPE rotates neighbours, and the trainer's rotates halves",
    ),
    "hunyuan_v1_dense": "it norms q and k after RoPE",
    "gemma": "its activation in mlx-lm is not the one that it was trained with",
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"),
        "its blocks have four streams: one is computed, and the others are predicted",
    ),
    **dict.fromkeys(("mamba", "mamba2", "falcon_h1", "nemotron_h", "jamba"), "it has Mamba mixers"),
    **dict.fromkeys(
        ("olmo", "cohere", "cohere2", "phi", "stablelm", "starcoder2", "gpt2", "gpt_neox"),
        "its norms are LayerNorms",
    ),
    "bitnet": "its blocks norm the inputs of o_proj and down_proj, and its activation is a "
    "squared ReLU",
    "prism_hadamard_qwen35": "its weights are in a basis that a Hadamard transform rotates",
}
