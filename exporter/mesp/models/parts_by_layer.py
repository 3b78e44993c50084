from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mesp.errors import MespError
from mesp.models.config_json import PERIODS, unsupported
from mesp.models.families import FAMILIES, GATED_DELTA_NET, MAMBA2, SHORT_CONVOLUTION
from mesp.models.mixers import (
    AttentionMixer,
    GatedDeltaNet,
    Mamba2Mixer,
    Mixer,
    ShortConvolution,
    refuse_unsound,
)
from mesp.models.mlps import MLP
from mesp.models.rope_scaling import rope_frequencies


def mixers_by_layer(config: dict[str, Any]) -> list[Mixer]:
    count, family = config["num_hidden_layers"], FAMILIES[config["model_type"]]
    every = next((config[key] for key in PERIODS if config.get(key)), family.full_every)
    types = config.get("layer_types") or [
        family.other_layers if (i + 1) % every else "full_attention" for i in range(count)
    ]
    interval = config.get("no_rope_layer_interval", 4)
    has_rope = [True] * count
    if family.has_no_rope_layers:
        has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    if config.get("position_embedding_type") == "nope":
        has_rope = [False] * count
    for key, each in (("layer_types", types), ("no_rope_layers", has_rope)):
        refuse_unsound({key: isinstance(each, list)})
        if len(each) != count:
            raise MespError(
                f"The model's config.json is not valid: {key} has {len(each)} entries for "
                f"{count} blocks; take an unchanged config.json."
            )
    # Each of the last `num_kv_shared_layers` blocks takes its keys and values from an earlier
    # block.
    owners = types[: max(count - (config.get("num_kv_shared_layers") or 0), 0)]
    if lacking := set(types) - set(owners):
        raise MespError(
            f"The model's config.json is not valid: no block before the last "
            f"{count - len(owners)}, which share keys, is of the type {min(lacking)!r}; take an "
            "unchanged config.json."
        )
    mixers: list[Mixer] = []
    for layer, (layer_type, rotates) in enumerate(zip(types, has_rope, strict=True)):
        if layer_type in ("full_attention", "attention", "sliding_attention"):
            slides = layer_type == "sliding_attention"
            keys_of = None
            if layer >= len(owners):
                keys_of = max(i for i, each in enumerate(owners) if each == layer_type)
            if slides and not config.get("sliding_window") and family.full_every < math.inf:
                raise unsupported("sliding_window", config.get("sliding_window"))
            mixers.append(_attention(config, slides, bool(rotates), keys_of))
        elif layer_type == family.other_layers:
            mixers.append(_OTHERS[layer_type](config))
        else:
            raise unsupported("layer_types", layer_type)
    return mixers


def _gated_delta_net(config: dict[str, Any]) -> GatedDeltaNet:
    return GatedDeltaNet(
        modules=GATED_DELTA_NET,
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        kernel_size=config["linear_conv_kernel_dim"],
    )


def _mamba2(config: dict[str, Any]) -> Mamba2Mixer:
    heads, head_dim = config["mamba_n_heads"], config["mamba_d_head"]
    if head_dim == "auto":
        head_dim = config["mamba_expand"] * config["hidden_size"] // heads
    return Mamba2Mixer(
        modules=MAMBA2,
        num_heads=heads,
        head_dim=head_dim,
        num_groups=config["mamba_n_groups"],
        state_size=config["mamba_d_state"],
        kernel_size=config["mamba_d_conv"],
        norm_eps=config["rms_norm_eps"],
    )


_OTHERS = {
    "linear_attention": _gated_delta_net,
    "conv": lambda config: ShortConvolution(SHORT_CONVOLUTION, config["conv_L_cache"]),
    "mamba": _mamba2,
}


def _attention(
    config: dict[str, Any], slides: bool, rotates: bool, keys_of: int | None
) -> AttentionMixer:
    family = FAMILIES[config["model_type"]]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if not slides:
        head_dim = config.get("global_head_dim") or head_dim
    frequencies, rope_scale = (), 1.0
    if rotates:
        frequencies, rope_scale = rope_frequencies(config, head_dim, local=slides)
    return AttentionMixer(
        modules=tuple(
            each for each in family.attention if keys_of is None or each[1] not in (("k",), ("v",))
        ),
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        qk_norm=family.qk_norm,
        output_gate=family.output_gate,
        attention_scale=config.get("attention_multiplier")
        or (config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        attn_logit_softcapping=config.get("attn_logit_softcapping"),
        frequencies=frequencies,
        rope_scale=rope_scale,
        sliding_window=(config.get("sliding_window") if slides else None) or None,
        v_norm=family.v_norm,
        keys_of=keys_of,
    )


def mlps_by_layer(config: dict[str, Any], mixers: list[Mixer]) -> list[MLP]:
    family = FAMILIES[config["model_type"]]
    dense = [MLP(family.mlp, width) for width in _widths(config, mixers)]
    if family.experts is None or config["num_experts"] == 0:
        return dense
    experts = replace(
        family.experts,
        bias=family.experts.bias if config.get("use_expert_bias", True) else None,
        num_experts=config["num_experts"],
        num_experts_per_tok=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        scaling=float(config.get("routed_scaling_factor") or 1.0),
    )
    beside = family.beside_experts
    mixture = MLP(beside, config["shared_intermediate_size"] if beside else 0, experts)
    return [mixture if _has_experts(config, layer) else mlp for layer, mlp in enumerate(dense)]


def _has_experts(config: dict[str, Any], layer: int) -> bool:
    """Returns whether a layer has experts.

    In LFM2, the first `num_dense_layers` layers have no experts. In Qwen3, every
    `decoder_sparse_step`-th layer has experts, except for the layers in `mlp_only_layers`.
    """
    if layer < config.get("num_dense_layers", 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % config.get("decoder_sparse_step", 1) == 0


def _widths(config: dict[str, Any], mixers: list[Mixer]) -> list[int]:
    width = config["intermediate_size"]
    wide = 2 * width if config.get("use_double_wide_mlp") else width
    return [
        wide if isinstance(each, AttentionMixer) and each.keys_of is not None else width
        for each in mixers
    ]
