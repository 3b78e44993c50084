"""Adapters as mlx-lm keeps them, read from a folder and put on mlx-lm's model."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from safetensors import SafetensorError, deserialize, safe_open

from mesp.errors import MespError
from mesp.files import read_object
from mesp.models.architecture import Architecture
from mesp.models.mixers import is_positive
from mesp.source_model.safetensors import TENSOR_DTYPES

_FLOATS = {"F32", "F16", "BF16"}
WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Adapters:
    """LoRA matrices: of each module, by its path in the model, A [in, rank] and B [rank, out] in
    float32, of experts A [experts, rank, in] and B [experts, out, rank], and `scale`, alpha over
    rank, which their product is multiplied by."""

    matrices: dict[str, tuple[mx.array, mx.array]]
    scale: float


def read_adapters(folder: Path, arch: Architecture) -> Adapters:
    """Reads `adapters.safetensors` and `adapter_config.json` of `folder`.

    Raises MespError if they are not valid, or not of the architecture: matrices of its modules, of
    one rank that is at most its width, and finite. Nothing is read of a file before its header was
    found to describe it.
    """
    file = folder / WEIGHTS
    try:
        scale = read_object(folder / CONFIG)["lora_parameters"]["scale"]
        if not is_positive(scale):
            raise ValueError("its scale is not a number above 0")
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is not a regular file")
        with safe_open(file, "numpy") as tensors:
            found = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            found = {name: (each.get_shape(), each.get_dtype()) for name, each in found.items()}
        paths = sorted({name.rpartition(".")[0] for name in found})
        if found.keys() != {f"{path}.lora_{part}" for path in paths for part in "ab"}:
            raise ValueError("it has tensors beside LoRA matrices, as DoRA's magnitudes")
        ranks = {_rank(found, path, folder, arch) for path in paths}
        if len(ranks) > 1:
            raise ValueError("its matrices have several ranks")
        arrays = {name: _array(tensor) for name, tensor in deserialize(file.read_bytes())}
        matrices = {path: (arrays[f"{path}.lora_a"], arrays[f"{path}.lora_b"]) for path in paths}
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise MespError(
            f"{folder} holds no adapters in mlx-lm's form ({WEIGHTS} and {CONFIG}); name a run's "
            "adapters folder."
        ) from error
    if not matrices:
        raise MespError(f"{file} is empty; train the adapters again.")
    for path, pair in matrices.items():
        if not all(mx.isfinite(matrix).all() for matrix in pair):
            raise MespError(f"{file} has numbers in {path} that are not finite; train them again.")
    return Adapters(matrices, scale)


def _rank(
    found: dict[str, tuple[list[int], str]], path: str, folder: Path, arch: Architecture
) -> int:
    """The rank of a module's matrices. Raises MespError where they are not the architecture's,
    ValueError or KeyError where they are not adapters."""
    (a, a_type), (b, b_type) = (found[f"{path}.lora_{part}"] for part in "ab")
    if not {a_type, b_type} <= _FLOATS or len(a) != len(b) or len(a) not in (2, 3):
        raise ValueError(f"{path} has no matrices A and B of floating-point numbers")
    if stack := a[:-2]:  # of experts, of which the last dimension of A is its inputs
        a, b = [*a[:1], *a[:0:-1]], [*b[:1], *b[:0:-1]]
        if stack != b[:-2]:
            raise ValueError(f"{path} has A and B of another number of experts")
    *_, inputs, rank = a
    *_, b_rank, outputs = b
    layers = f"{arch.mlx_prefix}.layers."
    layer, _, module = path.removeprefix(layers).partition(".")
    is_layer = path.startswith(layers) and layer in map(str, range(arch.num_hidden_layers))
    shapes = arch.training_experts().blocks[int(layer)].adapted() if is_layer else {}
    if shapes.get(module) != (*stack, outputs, inputs):
        raise MespError(
            f"The adapters in {folder} are of another model: this one has no {path} of "
            f"{inputs} inputs and {outputs} outputs."
        )
    if rank != b_rank:
        raise ValueError(f"A of {path} has rank {rank}, and B {b_rank}")
    if not 0 < rank <= arch.hidden_size:
        raise MespError(
            f"The adapters in {folder} have rank {rank:,}, and the model's width is "
            f"{arch.hidden_size:,}; train some of a lower rank."
        )
    return rank


def _array(tensor: dict[str, Any]) -> mx.array:
    """A tensor of `deserialize`'s, in float32."""
    stored, dtype = TENSOR_DTYPES[tensor["dtype"]]
    array = np.frombuffer(tensor["data"], stored).reshape(tensor["shape"])
    return mx.array(array).view(dtype).astype(mx.float32)


def apply_adapters(model: nn.Module, adapters: Adapters, folder: Path) -> None:
    """Puts them beside the model's linear layers, as mlx-lm's `LoRALinear`, and its stacked ones of
    experts, as its `LoRASwitchLinear`.

    Raises MespError where a matrix has no place in the model.
    """
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
    from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

    modules = dict(model.named_modules())
    layers = []
    for path, (a, b) in adapters.matrices.items():
        stacked = a.ndim == 3
        (inputs, rank), outputs = a.shape[:0:-1] if stacked else a.shape, b.shape[1]
        kinds = (
            (SwitchLinear, QuantizedSwitchLinear) if stacked else (nn.Linear, nn.QuantizedLinear)
        )
        linear = modules.get(path)
        if not isinstance(linear, kinds) or _shape(linear) != (*a.shape[:-2], outputs, inputs):
            raise MespError(
                f"The adapters in {folder} are of another model: this one has no {path} of "
                f"{inputs} inputs and {outputs} outputs."
            )
        kind = LoRASwitchLinear if stacked else LoRALinear
        layer = kind.from_base(linear, r=rank, scale=adapters.scale)
        layer.lora_a, layer.lora_b = a, b
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))


def _shape(linear: nn.Module) -> tuple[int, ...]:
    """(outputs, inputs) of a linear layer, quantized or not; of experts, their number first."""
    *rows, columns = linear.weight.shape
    return *rows, columns * 32 // getattr(linear, "bits", 32)
