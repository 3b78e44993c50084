"""Adapters as mlx-lm keeps them, read from a folder and put on mlx-lm's model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from mesp.errors import MespError

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Adapters:
    """LoRA matrices: of each module, by its path in the model, A [in, rank] and B [rank, out] in
    float32, and `scale`, alpha over rank, which their product is multiplied by."""

    matrices: dict[str, tuple[mx.array, mx.array]]
    scale: float


def read_adapters(folder: Path) -> Adapters:
    """Reads `adapters.safetensors` and `adapter_config.json` of `folder`. Raises MespError."""
    try:
        arrays = mx.load(str(folder / WEIGHTS))
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        scale = float(config["lora_parameters"]["scale"])
        paths = {name.rpartition(".")[0] for name in arrays}
        matrices = {
            path: tuple(
                arrays[f"{path}.{part}"].astype(mx.float32) for part in ("lora_a", "lora_b")
            )
            for path in sorted(paths)
        }
    except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise MespError(
            f"{folder} holds no adapters in mlx-lm's form ({WEIGHTS} and {CONFIG}); name a run's "
            "adapters folder."
        ) from error
    if not matrices:
        raise MespError(f"{folder / WEIGHTS} is empty; train the adapters again.")
    return Adapters(matrices, scale)


def apply_adapters(model: nn.Module, adapters: Adapters, folder: Path) -> None:
    """Puts them beside the model's linear layers, as mlx-lm's `LoRALinear`.

    Raises MespError where a matrix has no place in the model.
    """
    from mlx_lm.tuner.lora import LoRALinear

    modules = dict(model.named_modules())
    layers = []
    for path, (a, b) in adapters.matrices.items():
        linear = modules.get(path)
        if not isinstance(linear, nn.Linear | nn.QuantizedLinear) or _shape(linear) != (
            b.shape[1],
            a.shape[0],
        ):
            raise MespError(
                f"The adapters in {folder} are of another model: this one has no {path} of "
                f"{a.shape[0]} inputs and {b.shape[1]} outputs."
            )
        layer = LoRALinear.from_base(linear, r=a.shape[1], scale=adapters.scale)
        layer.lora_a, layer.lora_b = a, b
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))


def _shape(linear: nn.Module) -> tuple[int, int]:
    """(outputs, inputs) of a linear layer, quantized or not."""
    rows, columns = linear.weight.shape
    bits = linear.bits if isinstance(linear, nn.QuantizedLinear) else 32
    return rows, columns * 32 // bits
