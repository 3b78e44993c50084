from __future__ import annotations

import math
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from safetensors import SafetensorError, deserialize, safe_open

from mesp.adapters.config import CONFIG, AdapterConfig, check_ranks, read_config, unsupported
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.source_model.safetensors import TENSOR_DTYPES

_FLOATS = {"F32", "F16", "BF16"}
WEIGHTS, PEFT_WEIGHTS = "adapters.safetensors", "adapter_model.safetensors"
_PEFT = "base_model.model."
# The prefix of layer names if PEFT trained only the text part of a larger model.
_TEXT_PREFIX = "model"


@dataclass(frozen=True)
class Adapters:
    """The LoRA matrices of a folder, by the modules' paths in the model.

    A module has A [in, rank], B [rank, out] and, with DoRA, m [out], in float32. Experts have A
    [experts, rank, in] and B [experts, out, rank]. From PEFT, `scale` is alpha / rank or, with
    rsLoRA, alpha / √rank.
    """

    folder: Path
    matrices: dict[str, tuple[mx.array, ...]]
    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterSum:
    """The change that adapters make to a model's linear layers: y = G ∘ (x Wᵀ) + scale · (x A) B +
    bias.
    """

    matrices: dict[str, tuple[mx.array, mx.array]]
    rank: int
    scale: float
    gains: dict[str, mx.array]


def read_adapters(folder: Path, arch: Architecture) -> Adapters:
    """Reads a folder of adapters that mlx-lm or PEFT wrote.

    Raises MespError if a file is missing, cannot be read or is damaged, if the configuration is not
    valid or not supported, or if a tensor is missing, not supported, not finite or of a wrong
    shape.
    """
    try:
        config = read_config(folder, arch)
        file = folder / (PEFT_WEIGHTS if config.is_peft else WEIGHTS)
        shapes = _shapes(file)
        layers = _layers(arch, config, shapes)
        _check(layers, shapes, config)
        arrays = {name: _array(tensor) for name, tensor in deserialize(file.read_bytes())}
        for name, array in sorted(arrays.items()):
            if not is_finite(array):
                raise ValueError(f"{name} has numbers that are not finite; train them again")
        matrices = {}
        for layer in layers:
            if layer.names[0] in arrays:
                matrices |= layer.matrices([arrays[name] for name in layer.names], config)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise MespError(f"Cannot load the adapters in {folder}: {said}.") from error
    return Adapters(folder, matrices, config.rank, config.scale)


def stack_adapters(weighted: Sequence[tuple[Adapters, float]], model: nn.Module) -> AdapterSum:
    """Returns the weighted sum of the changes that adapters make to a model of mlx-lm.

    The sum of several adapters has scale 1, and its rank is the sum of their ranks. DoRA's m
    becomes the gain g = m / ‖W + s (A B)ᵀ‖ of each row of W. Adapters with DoRA add (g - 1) ∘ W + g
    ∘ s (A B)ᵀ to W.

    Raises MespError naming the folder if a matrix fits no layer of the model, or if its numbers are
    too large.
    """
    modules = dict(model.named_modules())
    kept = [(_with_gains(each, modules), weight) for each, weight in weighted if weight]
    gains: dict[str, mx.array] = {}
    for each, weight in kept:
        for path, gain in each.gains.items():
            gains[path] = gains.get(path, 1.0) + weight * (gain - 1)
    if len(kept) == 1:
        ((only, weight),) = kept
        return AdapterSum(only.matrices, only.rank, only.scale * weight, gains)
    paths = dict.fromkeys(path for each, _ in kept for path in each.matrices)
    matrices = {path: _stack(kept, path) for path in paths}
    if not is_finite(*(b for _, b in matrices.values()), *gains.values()):
        raise MespError("The sum of the adapters has numbers that are too large; lower --weights.")
    return AdapterSum(matrices, sum(each.rank for each, _ in kept), 1.0, gains)


def _with_gains(adapters: Adapters, modules: dict[str, nn.Module]) -> AdapterSum:
    """Returns adapters with DoRA's m replaced by the gains g, and B replaced by g ∘ B."""
    matrices, gains = {}, {}
    for path, (a, b, *m) in adapters.matrices.items():
        linear = _linear(modules, path, a, b, adapters.folder)
        if m:
            whole = dequantized(linear) + adapters.scale * (a @ b).T
            squares = mx.square(whole).sum(axis=1)
            # As in the trainer, also for a row whose squares are below float32's normal numbers.
            norms = mx.where(squares < 2.0**-126, mx.inf, mx.sqrt(squares))
            gains[path] = m[0] / norms
            b = gains[path] * b
            # Evaluated here, so that only one whole matrix is in memory at a time.
            mx.eval(gains[path], b)
            if not is_finite(squares):
                raise MespError(
                    f"The adapters in {adapters.folder} have numbers too large for {path}; train "
                    "them again."
                )
        matrices[path] = a, b
    return AdapterSum(matrices, adapters.rank, adapters.scale, gains)


def is_finite(*arrays: mx.array) -> bool:
    return all(mx.isfinite(array).all().item() for array in arrays)


def _linear(
    modules: dict[str, nn.Module], path: str, a: mx.array, b: mx.array, folder: Path
) -> nn.Module:
    from mesp.dependencies import mlx_lm

    stacked, linear = a.ndim == 3, modules.get(path)
    inputs, outputs = (a.shape[2], b.shape[1]) if stacked else (a.shape[0], b.shape[1])
    switch = mlx_lm.models.switch_layers
    kinds = (nn.Linear, nn.QuantizedLinear)
    if stacked:
        kinds = switch.SwitchLinear, switch.QuantizedSwitchLinear
    if not isinstance(linear, kinds) or _shape(linear) != (*a.shape[:-2], outputs, inputs):
        raise MespError(
            f"The adapters in {folder} are of another model: this one has no {path} of "
            f"{inputs} inputs and {outputs} outputs."
        )
    return linear


def dequantized(linear: nn.Module) -> mx.array:
    """Returns W [out, in] of a linear layer, quantized or not."""
    if not isinstance(linear, nn.QuantizedLinear):
        return linear.weight
    packed, how = (linear.weight, linear.scales, linear.biases), (linear.group_size, linear.bits)
    return mx.dequantize(*packed, *how, mode=linear.mode, dtype=mx.float32)


def _stack(kept: Sequence[tuple[AdapterSum, float]], path: str) -> tuple[mx.array, mx.array]:
    one = next(each.matrices[path] for each, _ in kept if path in each.matrices)
    down, up = (-2, -1) if one[0].ndim == 3 else (-1, -2)  # the axes of the rank in A and in B

    def zeros(array: mx.array, axis: int, rank: int) -> mx.array:
        shape = list(array.shape)
        shape[axis] = rank
        return mx.zeros(shape)

    parts = [
        each.matrices.get(path) or (zeros(one[0], down, each.rank), zeros(one[1], up, each.rank))
        for each, _ in kept
    ]
    scaled = [weight * each.scale * b for (each, weight), (_, b) in zip(kept, parts, strict=True)]
    return mx.concatenate([a for a, _ in parts], down), mx.concatenate(scaled, up)


@dataclass(frozen=True)
class _Layer:
    """A linear layer, or a parameter of experts' matrices, that may have adapters.

    One PEFT layer may stand for several layers of mlx-lm, with concatenated outputs. `stack` is
    empty, or has the number of experts.
    """

    names: tuple[str, ...]
    paths: tuple[str, ...]
    stack: tuple[int, ...]
    inputs: int
    outputs: tuple[int, ...]
    is_adapted: bool

    def rank(self, config: AdapterConfig) -> int:
        return config.rank * (len(self.paths) if config.joins else 1)

    def shapes(self, config: AdapterConfig) -> list[list[int]]:
        rank, outputs, stack = self.rank(config), sum(self.outputs), self.stack
        magnitudes = [[outputs]] * (len(self.names) - 2)
        if not config.is_peft and not stack:
            return [[self.inputs, rank], [rank, outputs], *magnitudes]
        if not config.is_peft:
            return [[*stack, rank, self.inputs], [*stack, outputs, rank]]
        count = math.prod(stack)
        return [[count * rank, self.inputs], [outputs, rank * count], *magnitudes]

    def matrices(
        self, arrays: list[mx.array], config: AdapterConfig
    ) -> dict[str, tuple[mx.array, ...]]:
        if not config.is_peft:
            return {self.paths[0]: tuple(arrays)}
        a, b, *magnitudes = arrays
        if self.stack:  # to mlx-lm's form: A [experts, rank, in], B [experts, out, rank]
            a = a.reshape(*self.stack, -1, self.inputs)
            b = b.reshape(sum(self.outputs), -1, *self.stack).transpose(2, 0, 1)
        found, start, rank = {}, 0, config.rank
        for index, (path, size) in enumerate(zip(self.paths, self.outputs, strict=True)):
            first = index * rank if config.joins else 0
            rows = b[..., start : start + size, :]
            part = rows[..., first : first + rank]
            check_ranks(mx.array_equal((rows != 0).sum(), (part != 0).sum()).item())
            a_part = a[..., first : first + rank, :]
            found[path] = (a_part, part) if self.stack else (a_part.T, part.T)
            found[path] += tuple(m[start : start + size] for m in magnitudes)
            start += size
        return found


def _shapes(file: Path) -> dict[str, list[int]]:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{file.name} is not a regular file")
    except FileNotFoundError as error:
        raise ValueError(f"it has no {file.name}") from error
    try:
        with safe_open(file, "numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
            if not {each.get_dtype() for each in slices.values()} <= _FLOATS:
                raise ValueError(f"{file.name} has numbers that are not F32, F16 or BF16")
            shapes = {name: each.get_shape() for name, each in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{file.name} is damaged") from error
    if not shapes:
        raise ValueError(f"{file.name} is empty")
    return shapes


def _layers(
    arch: Architecture, config: AdapterConfig, shapes: dict[str, list[int]]
) -> list[_Layer]:
    prefix = arch.hf_prefix if config.is_peft else arch.mlx_prefix
    if config.is_peft and not any(name.startswith(f"{_PEFT}{prefix}.layers.") for name in shapes):
        prefix = _TEXT_PREFIX
    found: list[_Layer] = []
    for index, block in enumerate(arch.training_experts().blocks):
        blocks = f"{prefix}.layers.{index}."
        adapted = block.adapted()
        joined = [each for each in arch.hf_modules if each[1][0] in adapted] * config.is_peft
        there = {parts[0]: (name, parts) for name, parts in joined}
        inner = {part for _, parts in joined for part in parts[1:]}
        for first in (name for name in adapted if name not in inner):
            name, parts = there.get(first, (first, (first,)))
            *stack, _, inputs = adapted[first]
            layer = f"{blocks}{name}"
            names: tuple[str, ...] = (f"{layer}.lora_a", f"{layer}.lora_b")
            magnitudes = f"{layer}.m"
            if config.is_peft:
                # PEFT wraps a parameter in a layer with the name of the parameter's module.
                others = (blocks + other for other, _ in joined if other != name)
                is_nested = any(map(config.adapts_parameter, others))
                inside = ".base_layer" if len(parts) > 1 and is_nested else ""
                place = f"{layer.rpartition('.')[0]}{inside}" if stack else layer
                names = (f"{_PEFT}{place}.lora_A.weight", f"{_PEFT}{place}.lora_B.weight")
                magnitudes = f"{_PEFT}{place}.lora_magnitude_vector"
                # PEFT reads the name with `.weight` and the name without
                if f"{magnitudes}.weight" in shapes:
                    magnitudes += ".weight"
            if config.is_dora and not stack:
                names += (magnitudes,)
            by_name = config.adapts_parameter(layer)
            is_adapted = config.adapts(layer, index, arch.num_hidden_layers)
            found.append(
                _Layer(
                    names=names,
                    paths=tuple(f"{arch.mlx_root}model.layers.{index}.{part}" for part in parts),
                    stack=tuple(stack),
                    inputs=inputs,
                    outputs=tuple(adapted[part][-2] for part in parts),
                    is_adapted=by_name if stack and config.is_peft else is_adapted,
                )
            )
    taken = {layer.names for layer in found if layer.is_adapted}
    return [layer for layer in found if layer.is_adapted or layer.names not in taken]


def _check(layers: list[_Layer], shapes: dict[str, list[int]], config: AdapterConfig) -> None:
    known = {name for layer in layers for name in layer.names}
    for name in sorted(shapes.keys() - known):
        raise ValueError(
            f"it holds {name}, which is not a LoRA matrix of one of this model's layers"
        )
    for layer in layers:
        missing = [name for name in layer.names if name not in shapes]
        if len(missing) == len(layer.names):
            continue
        if config.is_dora and layer.stack:
            raise unsupported("DoRA for experts")
        if missing:
            raise ValueError(f"{missing[0]} is missing")
        for name, needed in zip(layer.names, layer.shapes(config), strict=True):
            if not layer.is_adapted:
                raise ValueError(f"it holds {name}, which its {CONFIG} gives no place")
            if shapes[name] != needed:
                raise ValueError(
                    f"{name} has the shape {shapes[name]}, where the model needs {needed}"
                )


def _array(tensor: dict[str, Any]) -> mx.array:
    stored, dtype = TENSOR_DTYPES[tensor["dtype"]]
    array = np.frombuffer(tensor["data"], stored).reshape(tensor["shape"])
    return mx.array(array).view(dtype).astype(mx.float32)


def apply_adapters(model: nn.Module, adapters: AdapterSum) -> None:
    """Adds `adapters` to the model's linear layers.

    A linear layer becomes mlx-lm's `LoRALinear` or, with gains, `LoRALinearWithGains`. Stacked
    layers of experts become mlx-lm's `LoRASwitchLinear`.
    """
    from mesp.adapters.layer_with_gains import LoRALinearWithGains
    from mesp.dependencies import mlx_lm

    modules = dict(model.named_modules())
    layers = []
    for path, (a, b) in adapters.matrices.items():
        linear, gains = modules[path], adapters.gains.get(path)
        if gains is None:
            lora = mlx_lm.tuner.lora
            kind = lora.LoRASwitchLinear if a.ndim == 3 else lora.LoRALinear
            layer = kind.from_base(linear, r=adapters.rank, scale=adapters.scale)
            layer.lora_a, layer.lora_b = a, b
        else:
            layer = LoRALinearWithGains(linear, a, b, adapters.scale, gains)
        layers.append((path, layer))
    model.update_modules(tree_unflatten(layers))


def _shape(linear: nn.Module) -> tuple[int, ...]:
    """Returns (outputs, inputs) of a linear layer, quantized or not, or (experts, outputs, inputs)
    of stacked layers.
    """
    *rows, columns = linear.weight.shape
    return *rows, columns * 32 // getattr(linear, "bits", 32)
