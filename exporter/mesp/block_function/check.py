"""Checks a file of functions against `allowed_primitives.json`, before MLX reads it.

MLX does not check output shapes or `Gather` indices in a file. A function that passes the check
here reads and writes only within its arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mesp.block_function.mlxfn import (
    ALLOWED,
    DEVICES,
    DTYPES,
    Array,
    Function,
    Primitive,
    functions,
)
from mesp.models.architecture import Block
from mesp.models.mixers import AttentionMixer, GatedDeltaNet, Mamba2Mixer

_TYPES = {tuple(code): name for name, code in ALLOWED["types"].items()}
_STATE, _INPUTS = "unsupported parameters", "its inputs do not match"
_AND = 0  # MLX's code of `and` in BitwiseBinary
_CODES = {name: code for code, name in _TYPES.items()}
_QUANTIZATIONS = {
    (group, bits, int(mode))
    for mode, each in ALLOWED["quantizations"].items()
    for bits, group in each
}


def check_functions(file: bytes, device: str) -> list[Function]:
    """Returns the functions in a file, which must all be for `device`, "cpu" or "gpu".

    Raises ValueError if the file is damaged, does not pass the check, or is not in the file layout
    of MLX that `mlxfn` reads.
    """
    try:
        found = functions(file)
    except KeyError as error:
        raise ValueError(f"the primitive {error.args[0]!r:.50} is not supported") from error
    for function in found:
        _check_function(function, DEVICES[device])
    return found


def check_block_functions(
    file: bytes,
    device: str,
    dtype: mx.Dtype,
    block: Block,
    words: int,
    lengths: list[int],
    ranks: list[int],
    packed: bool = False,
) -> None:
    """Raises ValueError unless a file has one function of `block` for each rank and length, in this
    order.

    The functions must have the inputs and outputs that the architecture implies. `words` is the
    number of uint32 words in the block's weights.
    """
    found = [(list(each.inputs.values()), _outputs(each)) for each in check_functions(file, device)]
    expected = [
        _signature(block, dtype, words, length, rank, packed)
        for rank in ranks
        for length in lengths
    ]
    _require(found == expected, "it does not have the inputs and outputs of a block")


def _outputs(function: Function) -> list[Array]:
    known = dict(function.inputs)
    known |= {id: array for id, (array, _) in function.constants.items()}
    for primitive in function.primitives:
        known |= primitive.outputs
    return [known[id] for id in function.outputs]


def _signature(
    block: Block, dtype: mx.Dtype, words: int, length: int, rank: int, packed: bool
) -> tuple[list[Array], list[Array]]:
    arch, mixer, listed = block.arch, block.mixer, ALLOWED["signature"]
    sizes = {
        "1": 1,
        "length": length,
        "hidden": arch.hidden_size,
        "intermediate": block.mlp.intermediate_size,
        "lora": block.lora_size(rank),
        "words": words,
    }
    if isinstance(mixer, AttentionMixer):
        heads, dim = mixer.num_attention_heads, mixer.head_dim
        sizes |= {"heads": heads, "kv_heads": mixer.num_key_value_heads, "head_dim": dim}
        sizes |= {"query": dim + mixer.gate_dim, "mixer_width": heads * dim}
    elif isinstance(mixer, GatedDeltaNet):
        sizes |= {"channels": mixer.conv_dim, "mixer_width": mixer.values}
        sizes |= {"ba": 2 * mixer.num_value_heads}
    elif isinstance(mixer, Mamba2Mixer):
        sizes |= {"channels": mixer.conv_dim, "mixer_width": mixer.values, "heads": mixer.num_heads}
    codes = _CODES | {"dtype": (DTYPES.index(dtype), dtype.size)}

    def array(text: str) -> Array:
        kind, *shape = text.split()
        return Array(tuple(sizes[name] for name in shape), codes[kind])

    outputs = listed["first"] + listed[mixer.type] + listed["then"]
    outputs += listed["post_norms"] if arch.post_norms else []
    if arch.per_layer:
        sizes["per_layer"] = arch.per_layer.size
    inputs = listed["inputs"] + (listed["per_layer"] if arch.per_layer else [])
    inputs += listed["shared"] if block.keys_of is not None else []
    inputs += listed["packed"] if packed else []
    return [*map(array, inputs)], [*map(array, outputs)]


def _check_function(function: Function, device: int) -> None:
    _require(not function.keywords, "it has inputs with names")
    known = dict(function.inputs)
    for id, (array, _) in function.constants.items():
        _add(known, id, array)
    for array in known.values():
        _check_array(array)
    greatest = {
        id: top for id in function.constants if (top := _greatest(function, id)) is not None
    }
    for primitive in function.primitives:
        try:
            _require(primitive.device == device, "it is for another device")
            _require(known.keys() >= set(primitive.inputs), "an input is not computed before")
            inputs = [known[id] for id in primitive.inputs]
            outputs = list(primitive.outputs.values())
            for array in outputs:
                _check_array(array)
            _check_primitive(primitive, inputs, outputs)
            if primitive.name == "Gather":
                _check_indices(primitive, inputs, greatest)
            for id, array in primitive.outputs.items():
                _add(known, id, array)
            tops = [greatest[id] for id in primitive.inputs if id in greatest]
            is_and = primitive.name == "BitwiseBinary" and primitive.state == (_AND,)
            if tops and (is_and or primitive.name == "Broadcast"):
                greatest |= dict.fromkeys(primitive.outputs, min(tops))
        except (ValueError, IndexError, ArithmeticError) as error:
            raise ValueError(f"{primitive.name}: {error}") from error
    _require(known.keys() >= set(function.outputs), "an output is not computed")


def _add(known: dict[int, Array], id: int, array: Array) -> None:
    _require(id not in known, "two arrays have one id")
    known[id] = array


def _check_array(array: Array) -> None:
    limits = ALLOWED["limits"]
    _require(array.dtype in _TYPES, "an unsupported type")
    _require(len(array.shape) <= limits["dimensions"], "an array has too many dimensions")
    _require(array.nbytes <= limits["array_bytes"], "an array is too large")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _check_primitive(primitive: Primitive, inputs: list[Array], outputs: list[Array]) -> None:
    allowed = ALLOWED["primitives"][primitive.name]
    _require(primitive.device == allowed.get("device", primitive.device), "it is for a GPU only")
    for value, values in zip(primitive.state, allowed.get("allowed", ()), strict=False):
        _require(value in values, _STATE)
    if "inputs" in allowed:
        _require(len(inputs) == allowed["inputs"], "a wrong number of inputs")
    if not allowed.get("empty"):
        _require(all(0 not in each.shape for each in inputs + outputs), "an array is empty")
    expected = getattr(_Rules(primitive, inputs), allowed["rule"])()
    _require(outputs == expected, "its outputs have other shapes or types than its inputs make")
    if allowed.get("changes"):
        _require(outputs != inputs[:1], "it changes nothing")
    kinds = {_TYPES[each.dtype] for each in (inputs or outputs)[:1]}
    if allowed["rule"] == "select":
        kinds = {_TYPES[inputs[1].dtype]}
    _require(kinds <= set(allowed["types"]), "an unsupported type")


def _greatest(function: Function, id: int) -> int | None:
    array, data = function.constants[id]
    kind = _TYPES[array.dtype]
    if not data or "int" not in kind:
        return None
    values = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
    return int(values.max()) if values.min() >= 0 else None


def _check_indices(primitive: Primitive, inputs: list[Array], greatest: dict[int, int]) -> None:
    (place,), _ = primitive.state
    size, kind = inputs[0].shape[place], _TYPES[inputs[1].dtype]
    top = greatest.get(primitive.inputs[1], 255 if kind == "uint8" else None)
    _require(top is not None and top < size, "its indices may be out of bounds")


def _ascending(places: tuple[int, ...], stop: int) -> None:
    is_within = all(0 <= place < stop for place in places)
    _require(is_within and list(places) == sorted(set(places)), _STATE)


def has_attention(heads: int, kv_heads: int, length: int, head_dim: int) -> bool:
    kernels = ALLOWED["attention"]
    if length > kernels["short"]:
        return head_dim in kernels["long_dims"]
    rows = length * (heads // kv_heads)
    return head_dim in kernels["short_dims"] and rows <= kernels["short_rows"]


@dataclass(frozen=True)
class _Rules:
    """The rules of `allowed_primitives.json`. Each returns the outputs that the inputs make."""

    primitive: Primitive
    inputs: list[Array]

    @property
    def state(self) -> tuple:
        return self.primitive.state

    @property
    def x(self) -> Array:
        _require(len(self.inputs) == 1, "a wrong number of inputs")
        return self.inputs[0]

    def elementwise(self) -> list[Array]:
        _require(all(each == self.inputs[0] for each in self.inputs), _INPUTS)
        return [self.inputs[0]]

    def compare(self) -> list[Array]:
        a, b = self.inputs
        _require(a == b, _INPUTS)
        return [Array(a.shape, _CODES["bool"])]

    def select(self) -> list[Array]:
        condition, a, b = self.inputs
        _require(a == b and condition == Array(a.shape, _CODES["bool"]), _INPUTS)
        return [a]

    def convert(self) -> list[Array]:
        return [Array(self.x.shape, self.state)]

    def view(self) -> list[Array]:
        x, size = self.x, self.state[1]
        *others, last = x.shape
        _require(size > 0 and last * x.dtype[1] % size == 0, _STATE)
        return [Array((*others, last * x.dtype[1] // size), self.state)]

    def arange(self) -> list[Array]:
        start, stop, step = self.state
        _require(not self.inputs and all(map(math.isfinite, self.state)) and step != 0, _STATE)
        length = max(0, math.ceil((stop - start) / step))
        (output,) = self.primitive.outputs.values()
        return [Array((length,), output.dtype)]

    def broadcast(self) -> list[Array]:
        x, (shape,) = self.x, self.state
        last = shape[len(shape) - len(x.shape) :]
        _require(
            len(shape) >= len(x.shape)
            and all(n in (1, wide) for n, wide in zip(x.shape, last, strict=True)),
            _STATE,
        )
        return [Array(shape, x.dtype)]

    def reshape(self) -> list[Array]:
        x, (shape,) = self.x, self.state
        if -1 in shape:
            place, others = shape.index(-1), math.prod(n for n in shape if n != -1)
            _require(others > 0, _STATE)
            shape = (*shape[:place], math.prod(x.shape) // others, *shape[place + 1 :])
        _require(min(shape, default=0) >= 0 and math.prod(shape) == math.prod(x.shape), _STATE)
        return [Array(shape, x.dtype)]

    def expand(self) -> list[Array]:
        x, (places,) = self.x, self.state
        _ascending(places, len(x.shape) + len(places))
        shape = list(x.shape)
        for place in places:
            shape.insert(place, 1)
        return [Array(tuple(shape), x.dtype)]

    def squeeze(self) -> list[Array]:
        x, (places,) = self.x, self.state
        _ascending(places, len(x.shape))
        _require(all(x.shape[place] == 1 for place in places), _STATE)
        shape = tuple(n for place, n in enumerate(x.shape) if place not in places)
        return [Array(shape, x.dtype)]

    def flatten(self) -> list[Array]:
        x, (first, last) = self.x, self.state
        _require(0 <= first < last < len(x.shape), _STATE)
        flat = math.prod(x.shape[first : last + 1])
        return [Array((*x.shape[:first], flat, *x.shape[last + 1 :]), x.dtype)]

    def unflatten(self) -> list[Array]:
        x, (place, shape) = self.x, self.state
        _require(0 <= place < len(x.shape) and len(shape) > 0, _STATE)
        _require(min(shape) >= 0 and math.prod(shape) == x.shape[place], _STATE)
        return [Array((*x.shape[:place], *shape, *x.shape[place + 1 :]), x.dtype)]

    def transpose(self) -> list[Array]:
        x, (places,) = self.x, self.state
        _require(sorted(places) == list(range(len(x.shape))), _STATE)
        return [Array(tuple(x.shape[place] for place in places), x.dtype)]

    def slice(self) -> list[Array]:
        x, (starts, stops, steps) = self.x, self.state
        shape = []
        for n, start, stop, step in zip(x.shape, starts, stops, steps, strict=True):
            _require(0 <= start <= stop <= n and step >= 1, "it reads outside of its input")
            shape.append(-(-(stop - start) // step))
            _require(step == 1 or shape[-1] != 1, _STATE)
        return [Array(tuple(shape), x.dtype)]

    def split(self) -> list[Array]:
        x, (indices, place) = self.x, self.state
        _require(0 <= place < len(x.shape) and 0 < len(indices) < 10, _STATE)
        ends = [0, *indices, x.shape[place]]
        _require(ends == sorted(ends), "it reads outside of its input")
        before, after = x.shape[:place], x.shape[place + 1 :]
        sizes = [stop - start for start, stop in pairwise(ends)]
        return [Array((*before, size, *after), x.dtype) for size in sizes]

    def concatenate(self) -> list[Array]:
        first, (place,) = self.inputs[0], self.state
        _require(0 <= place < len(first.shape) and len(self.inputs) > 1, _STATE)

        def others(array: Array) -> tuple:
            return array.dtype, len(array.shape), array.shape[:place], array.shape[place + 1 :]

        _require(all(others(each) == others(first) for each in self.inputs), _INPUTS)
        size = sum(each.shape[place] for each in self.inputs)
        return [Array((*first.shape[:place], size, *first.shape[place + 1 :]), first.dtype)]

    def depends(self) -> list[Array]:
        count = len(self.primitive.outputs)
        _require(len(self.inputs) >= count, "a wrong number of inputs")
        return self.inputs[:count]

    def gather(self) -> list[Array]:
        x, indices = self.inputs
        (place,), sizes = self.state
        _require(0 <= place < len(x.shape) == len(sizes), _STATE)
        _require(all(0 <= size <= n for size, n in zip(sizes, x.shape, strict=True)), _STATE)
        _require(sizes[place] == 1, _STATE)
        return [Array((*indices.shape, *sizes), x.dtype)]

    def reduce(self) -> list[Array]:
        x, (_, places) = self.x, self.state
        _ascending(places, len(x.shape))
        _require(len(places) > 0, _STATE)
        shape = tuple(1 if place in places else n for place, n in enumerate(x.shape))
        return [Array(shape, x.dtype)]

    def scan(self) -> list[Array]:
        _require(0 <= self.state[1] < len(self.x.shape), _STATE)
        return [self.x]

    def softmax(self) -> list[Array]:
        _require(len(self.x.shape) > 0, _INPUTS)
        return [self.x]

    def norm(self) -> list[Array]:
        x, weight = self.inputs
        _require(len(x.shape) > 0 and weight == Array(x.shape[-1:], x.dtype), _INPUTS)
        return [x]

    def product(self) -> list[Array]:
        a, b, *added = self.inputs
        (*batch, m, k), (*same, inner, n) = a.shape, b.shape
        _require((batch, k, a.dtype) == (same, inner, b.dtype), _INPUTS)
        output = Array((*batch, m, n), a.dtype)
        _require(added == [output] * (self.primitive.name == "AddMM"), _INPUTS)
        return [output]

    def quantized(self) -> list[Array]:
        x, w, *scales = self.inputs
        group, bits, mode, transposed = self.state
        _require((group, bits, mode) in _QUANTIZATIONS and transposed, _STATE)
        (*others, k), (n, _) = x.shape, w.shape
        _require(k % group == 0, _INPUTS)
        _require(w == Array((n, k * bits // 32), _CODES["uint32"]), _INPUTS)
        of_scales = Array((n, k // group), x.dtype if mode == 0 else _CODES["uint8"])
        _require(scales == [of_scales] * (2 if mode == 0 else 1), _INPUTS)
        return [Array((*others, n), x.dtype)]

    def rope(self) -> list[Array]:
        x, offset, periods = self.inputs
        turned = self.state[0]
        _require(len(x.shape) == 4 and turned % 2 == 0 and 2 <= turned <= x.shape[3], _STATE)
        _require(offset == Array((), _CODES["int32"]), _INPUTS)
        _require(periods == Array((turned // 2,), _CODES["float32"]), _INPUTS)
        return [x]

    def attention(self) -> list[Array]:
        q, k, v, *masks = self.inputs
        _, causal, sinks, logarithms, forced = self.state
        (batch, heads, length, size), (of_batch, kv, keys, _) = q.shape, k.shape
        _require(not sinks and not logarithms and not forced, _STATE)
        _require(
            k == v == Array((batch, kv, keys, size), q.dtype)
            and of_batch == batch
            and heads % kv == 0
            and length <= keys
            and has_attention(heads, kv, length, size),
            _INPUTS,
        )
        mask = Array((batch, heads, length, keys), _CODES["bool"])
        _require(masks == [mask] * (not causal), _INPUTS)
        return [q]
