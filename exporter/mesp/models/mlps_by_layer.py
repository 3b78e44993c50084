from __future__ import annotations

from dataclasses import replace
from typing import Any

from mesp.models.families import FAMILIES
from mesp.models.mixers import AttentionMixer, Mixer
from mesp.models.mlps import MLP


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
