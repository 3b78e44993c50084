"""Reads adapter_config.json, as mlx-lm and PEFT write it.

fields.json lists the keys that are used, the keys that are ignored, and the keys that may only have
certain values. Any other key is refused unless its value is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp.files import read_object
from mesp.models.architecture import Architecture
from mesp.models.mixers import is_positive, is_size

CONFIG = "adapter_config.json"
FIELDS = read_object(Path(__file__).with_name("fields.json"))


@dataclass(frozen=True)
class AdapterConfig:
    """The properties of an adapter_config.json that the readers use.

    `is_dora` tells whether layers have magnitudes. `joins` tells whether a PEFT layer that joins n
    layers of mlx-lm has n times the rank.
    """

    is_peft: bool
    is_dora: bool
    rank: int
    scale: float
    joins: bool
    fields: dict[str, Any]

    def adapts(self, layer: str, index: int, count: int) -> bool:
        """Returns whether this configuration gives a block's linear layer adapters.

        If PEFT's `target_modules` is a string, such as a pattern, every layer has adapters unless a
        list `exclude_modules` names the layer. A pattern in `exclude_modules` is ignored.

        Args:
            layer: the layer's full name, without PEFT's prefix
            index: the number of the block
            count: the model's number of blocks
        """
        if not self.is_peft:
            last, keys = self.fields.get("num_layers"), self.fields["lora_parameters"].get("keys")
            name = layer.partition(f".layers.{index}.")[2]
            return (last is None or last <= 0 or index >= count - last) and (
                keys is None or not {layer, name}.isdisjoint(keys)
            )
        if _ends(layer, self.fields.get("exclude_modules") or []):
            return False
        targets = self.fields.get("target_modules")
        blocks = self.fields.get("layers_to_transform")
        if isinstance(targets, str) or layer in (targets or []):
            return True
        blocks = [blocks] if isinstance(blocks, int) else blocks
        return _ends(layer, targets or []) and (not blocks or index in blocks)

    def adapts_parameter(self, name: str) -> bool:
        """Returns whether PEFT would give the experts' parameter `name` adapters. `name` is a full
        name.
        """
        return _ends(name, self.fields.get("target_parameters") or [])


def read_config(folder: Path, arch: Architecture) -> AdapterConfig:
    """Reads a folder's adapter_config.json.

    Raises ValueError if the file is missing, invalid or unsupported, and OSError if the file cannot
    be read. The text of a ValueError is the end of a sentence.
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
        rank, scale, joins = parameters.get("rank"), parameters.get("scale"), False
    else:
        check_fields(config, FIELDS["peft"])
        _check_types(
            config,
            use_rslora=lambda value: type(value) is bool,
            target_modules=lambda value: isinstance(value, str) or _is_names(value),
            exclude_modules=lambda value: isinstance(value, str) or _is_names(value),
            target_parameters=_is_names,
            layers_to_transform=_is_numbers,
            rank_pattern=_is_object,
            alpha_pattern=_is_object,
        )
        rank, alpha = config.get("r"), config.get("lora_alpha")
        if rank is None or alpha is None:
            raise ValueError(f"{CONFIG} lacks r or lora_alpha")
        joins = _joins(config, arch)
        scale = alpha
        if is_size(rank) and is_positive(alpha):
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if not is_size(rank) or not is_positive(scale):
        raise ValueError(f"{CONFIG} has a rank or scale that is not a positive number")
    if rank > arch.hidden_size:
        raise ValueError(f"their rank, {rank}, is above the model's width of {arch.hidden_size}")
    is_peft = config.get("peft_type") is not None
    is_dora = config.get("use_dora") is True or config.get("fine_tune_type") == "dora"
    return AdapterConfig(is_peft, is_dora, rank, float(scale), joins, config)


def check_fields(config: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raises ValueError, which names the key, if the readers do not support a key or its value."""
    for key, value in sorted(config.items()):
        allowed = [json.dumps(each) for each in fields["required"].get(key, [None])]
        if key in fields["used"] or key in fields["ignored"] or json.dumps(value) in allowed:
            continue
        raise unsupported(f'{key} "{value}"' if isinstance(value, str) else key)


def check_ranks(is_supported: bool) -> None:
    """Raises ValueError unless `is_supported`, which tells whether a configuration's ranks and
    alphas are supported.

    There are two supported cases. Either all layers have the configuration's rank and alpha, or,
    without rsLoRA, exactly the layers that join n modules have n times that rank and alpha.
    """
    if not is_supported:
        raise unsupported("rank_pattern or alpha_pattern")


def unsupported(what: str) -> ValueError:
    return ValueError(f"they use {what}, which is not supported; train plain LoRA adapters")


def _joins(config: dict[str, Any], arch: Architecture) -> bool:
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not ranks and not alphas:
        return False
    joined = {name: len(parts) for name, parts in arch.hf_modules if len(parts) > 1}
    check_ranks(
        bool(joined)
        and not config.get("use_rslora")
        and ranks == {name: count * config["r"] for name, count in joined.items()}
        and alphas == {name: count * config["lora_alpha"] for name, count in joined.items()}
    )
    return True


def _ends(layer: str, names: list[str] | str) -> bool:
    """Returns whether a layer's name ends with one of `names`. False if `names` is a string."""
    return not isinstance(names, str) and any(f".{layer}".endswith(f".{name}") for name in names)


def _check_types(config: dict[str, Any], **checks: Callable[[Any], bool]) -> None:
    for key, is_sound in checks.items():
        value = config.get(key)
        if value is not None and not is_sound(value):
            raise ValueError(f"{CONFIG} is not valid: {key} has the wrong type")


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_numbers(value: Any) -> bool:
    return all(type(each) is int for each in (value if isinstance(value, list) else [value]))
