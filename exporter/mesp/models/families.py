"""The families of models that can be trained: what each `model_type` says by its name alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from mesp.models.mixers import Modules

# The linear layers of attention and of an MLP, and the projections that each computes, in the order
# of their rows.
SEPARATE_ATTENTION: Modules = (
    ("self_attn.q_proj", ("q",)),
    ("self_attn.k_proj", ("k",)),
    ("self_attn.v_proj", ("v",)),
    ("self_attn.o_proj", ("o",)),
)
SEPARATE_MLP: Modules = (
    ("mlp.gate_proj", ("gate",)),
    ("mlp.up_proj", ("up",)),
    ("mlp.down_proj", ("down",)),
)
FUSED_ATTENTION: Modules = (("self_attn.qkv_proj", ("q", "k", "v")), ("self_attn.o_proj", ("o",)))
FUSED_MLP: Modules = (("mlp.gate_up_proj", ("gate", "up")), ("mlp.down_proj", ("down",)))


def short(module: str) -> str:
    """`q` of ``self_attn.q_proj``."""
    return module.split(".")[-1].removesuffix("_proj")


# The short names of all modules that some model has, in the order of the projections.
TRAINABLE = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` says by its name alone; the rest is in the config.json."""

    attention: Modules = SEPARATE_ATTENTION
    mlp: Modules = SEPARATE_MLP
    biases: tuple[str, ...] = ()  # modules that have one, whatever the config.json says
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: int = 0  # a norm multiplies by this plus the weight in the checkpoint
    activation: str = "silu"
    full_every: float = 1  # each how many-th layer attends beyond the window; inf: none
    embedding_scale: Callable[[int], float] = lambda hidden: 1.0
    takes: tuple[str, ...] = ()  # of VARIANTS
    defaults: dict[str, Any] = field(default_factory=dict)  # of keys that may be missing


_LLAMA = Family(takes=("attention_bias", "mlp_bias"))
_GEMMA = Family(
    post_norms=True,
    norm_offset=1,
    activation="gelu_pytorch_tanh",
    full_every=2,
    embedding_scale=math.sqrt,
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
)
FAMILIES = {
    "qwen2": Family(
        biases=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        defaults={"rope_theta": 1e6},
    ),
    "qwen3": Family(qk_norm=True, defaults={"head_dim": 128}),
    "llama": _LLAMA,
    "smollm3": replace(_LLAMA, defaults={"rope_theta": 2e6}),
    "mistral": replace(_LLAMA, full_every=math.inf, defaults={"sliding_window": 4096}),
    "gemma2": _GEMMA,
    "gemma3_text": replace(
        _GEMMA,
        qk_norm=True,
        full_every=6,
        embedding_scale=lambda hidden: mx.array(math.sqrt(hidden), mx.bfloat16).item(),
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    "phi3": Family(
        attention=FUSED_ATTENTION,
        mlp=FUSED_MLP,
        full_every=math.inf,
        takes=("partial_rotary_factor",),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    ),
}

# What some families have and others don't, with the value that is as if it weren't there.
VARIANTS = {
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_traditional": False,
    "use_bidirectional_attention": False,
}
