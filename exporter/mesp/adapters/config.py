"""Reads adapter_config.json, as mlx-lm and PEFT write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesp.files import read_object
from mesp.models.architecture import Architecture
from mesp.models.mixers import is_positive, is_size

CONFIG = "adapter_config.json"
# PEFT's defaults of r and lora_alpha.
DEFAULT_RANK = DEFAULT_ALPHA = 8
_NESTED = re.compile(r"[*+}][^()]*\)+[*+{]")
FIELDS = read_object(Path(__file__).with_name("fields.json"))


@dataclass(frozen=True)
class AdapterConfig:
    is_peft: bool
    is_dora: bool
    rank: int
    scale: float
    joins: bool
    fields: dict[str, Any]

    def adapts(self, layer: str, index: int, count: int) -> bool:
        """Returns whether this configuration gives a block's linear layer adapters.

        As in PEFT, a string in `target_modules` or `exclude_modules` is a regular expression of
        whole names, except `all-linear`.
        """
        if not self.is_peft:
            last, keys = self.fields.get("num_layers"), self.fields["lora_parameters"].get("keys")
            name = layer.partition(f".layers.{index}.")[2]
            return (last is None or last <= 0 or index >= count - last) and (
                keys is None or not {layer, name}.isdisjoint(keys)
            )
        if _names(layer, self.fields.get("exclude_modules") or []):
            return False
        targets = self.fields.get("target_modules") or []
        blocks = self.fields.get("layers_to_transform")
        if targets == "all-linear" or layer in (targets if isinstance(targets, list) else []):
            return True
        if isinstance(targets, str):
            return _names(layer, targets)
        blocks = [blocks] if isinstance(blocks, int) else blocks
        return _names(layer, targets) and (not blocks or index in blocks)

    def adapts_parameter(self, name: str) -> bool:
        return _names(name, self.fields.get("target_parameters") or [])


def read_config(folder: Path, arch: Architecture) -> AdapterConfig:
    """Raises ValueError if the file is missing, invalid or unsupported, and OSError if the file
    cannot be read.
    """
    try:
        config = read_object(folder / CONFIG)
    except FileNotFoundError as error:
        raise ValueError(f"it has no {CONFIG}") from error
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not valid") from error
    if config.get("peft_type") is None:
        check_fields(config, FIELDS["mlx"])
        parameters = config.get("lora_parameters")
        if not isinstance(parameters, dict):
            raise ValueError(f"{CONFIG} lacks lora_parameters")
        check_fields(parameters, FIELDS["lora_parameters"])
        _check_types(parameters, keys=_is_names)
        _check_types(config, num_layers=lambda value: type(value) is int)
        rank, scale = parameters.get("rank"), parameters.get("scale")
    else:
        check_fields(config, FIELDS["peft"])
        _check_types(
            config,
            use_rslora=lambda value: type(value) is bool,
            target_modules=lambda value: isinstance(value, str) or _is_names(value),
            exclude_modules=lambda value: isinstance(value, str) or _is_names(value),
            target_parameters=_is_names,
            layers_to_transform=_is_numbers,
            rank_pattern=_is_pattern,
            alpha_pattern=_is_pattern,
        )
        rank, alpha = config.get("r", DEFAULT_RANK), config.get("lora_alpha", DEFAULT_ALPHA)
        if rank is None or alpha is None:
            raise ValueError(f"{CONFIG} lacks r or lora_alpha")
        scale = alpha
        if is_size(rank) and is_positive(alpha):
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not is_size(rank) or not is_positive(scale):
        raise ValueError(f"{CONFIG} has a rank or scale that is not a positive number")
    if rank > arch.hidden_size:
        raise ValueError(f"their rank, {rank}, is above the model's width of {arch.hidden_size}")
    is_peft = config.get("peft_type") is not None
    is_dora = config.get("use_dora") is True if is_peft else config.get("fine_tune_type") == "dora"
    found = AdapterConfig(is_peft, is_dora, rank, float(scale), False, config)
    return replace(found, joins=_joins(found, arch)) if is_peft else found


def check_fields(config: dict[str, Any], fields: dict[str, Any]) -> None:
    for key, value in sorted(config.items()):
        allowed = [json.dumps(each) for each in fields["required"].get(key, [None])]
        if key in fields["used"] or key in fields["ignored"] or json.dumps(value) in allowed:
            continue
        raise unsupported(f'{key} "{value}"' if isinstance(value, str) else key)


def check_ranks(is_supported: bool) -> None:
    """Raises ValueError unless `is_supported`, which tells whether a configuration's ranks and
    alphas are supported.

    Either all layers have the configuration's rank and alpha, or, without rsLoRA, exactly the
    layers that join n modules have n times that rank and alpha.
    """
    if not is_supported:
        raise unsupported("rank_pattern or alpha_pattern")


def unsupported(what: str) -> ValueError:
    return ValueError(f"they use {what}, which is not supported; train plain LoRA adapters")


def _joins(adapters: AdapterConfig, arch: Architecture) -> bool:
    """As in PEFT, a pattern is a regular expression of the end of a layer's name."""
    config, joined = adapters.fields, {name: len(parts) for name, parts in arch.hf_modules}
    inner = {part for _, parts in arch.hf_modules for part in parts}
    layers = [
        layer
        for index, block in enumerate(arch.blocks)
        for name in (block.adapted().keys() - inner) | joined.keys()
        if (layer := f"{arch.hf_prefix}.layers.{index}.{name}")
        and (name in joined or adapters.adapts(layer, index, len(arch.blocks)))
    ]

    def changes(key: str, usual: float) -> dict[str, float]:
        return {
            pattern: value / usual
            for pattern, value in (config.get(key) or {}).items()
            if value != usual and any(_matches(rf"(.*\.)?({pattern})", each) for each in layers)
        }

    ranks = changes("rank_pattern", adapters.rank)
    alphas = changes("alpha_pattern", config.get("lora_alpha", DEFAULT_ALPHA))
    if not ranks and not alphas:
        return False
    several = {name: count for name, count in joined.items() if count > 1}
    check_ranks(not config.get("use_rslora") and ranks == alphas == several)
    return True


def _names(layer: str, names: list[str] | str) -> bool:
    if isinstance(names, str):
        return _matches(names, layer)
    return any(f".{layer}".endswith(f".{name}") for name in names)


def _matches(pattern: str, name: str) -> bool:
    """Raises ValueError if the expression is not valid, or repeats a repetition, which may take
    unlimited time.
    """
    if _NESTED.search(pattern):
        raise unsupported(f'the expression "{pattern}"')
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise ValueError(f'{CONFIG} is not valid: "{pattern}" is no regular expression') from error


def _check_types(config: dict[str, Any], **checks: Callable[[Any], bool]) -> None:
    for key, is_sound in checks.items():
        value = config.get(key)
        if value is not None and not is_sound(value):
            raise ValueError(f"{CONFIG} is not valid: {key} has the wrong type")


def _is_pattern(value: Any) -> bool:
    return isinstance(value, dict) and all(type(each) in (int, float) for each in value.values())


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_numbers(value: Any) -> bool:
    return all(type(each) is int for each in (value if isinstance(value, list) else [value]))
