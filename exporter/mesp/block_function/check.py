"""Checks a file of functions against `allowed_primitives.json`, before MLX reads it.

MLX does not check output shapes or `Gather` indices in a file. A function that passes the check
here reads and writes only within its arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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

Shape = tuple[int, ...]
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
    if function.keywords:
        raise ValueError("it has inputs with names")
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
    expected = _RULES[allowed["rule"]](primitive, inputs)
    if allowed["rule"] == "depends":
        expected = expected[: len(outputs)]
    _require(outputs == expected, "its outputs have other shapes or types than its inputs make")
    if allowed.get("changes"):
        _require(outputs != inputs[:1], "it changes nothing")
    kinds = {_TYPES[each.dtype] for each in (inputs or outputs)[:1]}
    if allowed["rule"] == "select":
        kinds = {_TYPES[inputs[1].dtype]}
    _require(kinds <= set(allowed["types"]), "an unsupported type")


def _one(inputs: Sequence[Array]) -> Array:
    _require(len(inputs) == 1, "a wrong number of inputs")
    return inputs[0]


def _ascending(places: Shape, stop: int) -> None:
    _require(
        list(places) == sorted(set(places)) and all(0 <= place < stop for place in places), _STATE
    )


def _elementwise(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    _require(all(each == inputs[0] for each in inputs), _INPUTS)
    return [inputs[0]]


def _compare(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    a, b = inputs
    _require(a == b, _INPUTS)
    return [Array(a.shape, _CODES["bool"])]


def _select(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    condition, a, b = inputs
    _require(a == b and condition == Array(a.shape, _CODES["bool"]), _INPUTS)
    return [a]


def _convert(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    return [Array(_one(inputs).shape, primitive.state)]


def _view(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, size = _one(inputs), primitive.state[1]
    *others, last = x.shape
    _require(size > 0 and last * x.dtype[1] % size == 0, _STATE)
    return [Array((*others, last * x.dtype[1] // size), primitive.state)]


def _arange(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    start, stop, step = primitive.state
    _require(not inputs and all(map(math.isfinite, primitive.state)) and step != 0, _STATE)
    length = max(0, math.ceil((stop - start) / step))
    (output,) = primitive.outputs.values()
    return [Array((length,), output.dtype)]


def _broadcast(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (shape,) = _one(inputs), primitive.state
    last = shape[len(shape) - len(x.shape) :]
    _require(
        len(shape) >= len(x.shape)
        and all(n in (1, wide) for n, wide in zip(x.shape, last, strict=True)),
        _STATE,
    )
    return [Array(shape, x.dtype)]


def _reshape(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (shape,) = _one(inputs), primitive.state
    if -1 in shape:
        place, others = shape.index(-1), math.prod(n for n in shape if n != -1)
        _require(others > 0, _STATE)
        shape = (*shape[:place], math.prod(x.shape) // others, *shape[place + 1 :])
    _require(min(shape, default=0) >= 0 and math.prod(shape) == math.prod(x.shape), _STATE)
    return [Array(shape, x.dtype)]


def _expand(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (places,) = _one(inputs), primitive.state
    _ascending(places, len(x.shape) + len(places))
    shape = list(x.shape)
    for place in places:
        shape.insert(place, 1)
    return [Array(tuple(shape), x.dtype)]


def _squeeze(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (places,) = _one(inputs), primitive.state
    _ascending(places, len(x.shape))
    _require(all(x.shape[place] == 1 for place in places), _STATE)
    shape = tuple(n for place, n in enumerate(x.shape) if place not in places)
    return [Array(shape, x.dtype)]


def _flatten(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (first, last) = _one(inputs), primitive.state
    _require(0 <= first < last < len(x.shape), _STATE)
    flat = math.prod(x.shape[first : last + 1])
    return [Array((*x.shape[:first], flat, *x.shape[last + 1 :]), x.dtype)]


def _unflatten(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (place, shape) = _one(inputs), primitive.state
    _require(0 <= place < len(x.shape) and len(shape) > 0, _STATE)
    _require(min(shape) >= 0 and math.prod(shape) == x.shape[place], _STATE)
    return [Array((*x.shape[:place], *shape, *x.shape[place + 1 :]), x.dtype)]


def _transpose(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (places,) = _one(inputs), primitive.state
    _require(sorted(places) == list(range(len(x.shape))), _STATE)
    return [Array(tuple(x.shape[place] for place in places), x.dtype)]


def _slice(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (starts, stops, steps) = _one(inputs), primitive.state
    shape = []
    for n, start, stop, step in zip(x.shape, starts, stops, steps, strict=True):
        _require(0 <= start <= stop <= n and step >= 1, "it reads outside of its input")
        shape.append(-(-(stop - start) // step))
        _require(step == 1 or shape[-1] != 1, _STATE)
    return [Array(tuple(shape), x.dtype)]


def _split(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (indices, place) = _one(inputs), primitive.state
    _require(0 <= place < len(x.shape) and 0 < len(indices) < 10, _STATE)
    ends = [0, *indices, x.shape[place]]
    _require(ends == sorted(ends), "it reads outside of its input")
    before, after = x.shape[:place], x.shape[place + 1 :]
    sizes = [stop - start for start, stop in pairwise(ends)]
    return [Array((*before, size, *after), x.dtype) for size in sizes]


def _concatenate(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    first, (place,) = inputs[0], primitive.state
    _require(0 <= place < len(first.shape) and len(inputs) > 1, _STATE)

    def others(array: Array) -> tuple:
        return array.dtype, array.shape[:place], array.shape[place + 1 :]

    _require(
        all(
            others(each) == others(first) and len(each.shape) == len(first.shape) for each in inputs
        ),
        _INPUTS,
    )
    size = sum(each.shape[place] for each in inputs)
    return [Array((*first.shape[:place], size, *first.shape[place + 1 :]), first.dtype)]


def _depends(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    _require(len(inputs) >= len(primitive.outputs), "a wrong number of inputs")
    return inputs


def _gather(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, indices = inputs
    (place,), sizes = primitive.state
    _require(0 <= place < len(x.shape) == len(sizes), _STATE)
    _require(all(0 <= size <= n for size, n in zip(sizes, x.shape, strict=True)), _STATE)
    _require(sizes[place] == 1, _STATE)
    return [Array((*indices.shape, *sizes), x.dtype)]


def _check_indices(primitive: Primitive, inputs: list[Array], greatest: dict[int, int]) -> None:
    (place,), _ = primitive.state
    size, kind = inputs[0].shape[place], _TYPES[inputs[1].dtype]
    top = greatest.get(primitive.inputs[1], 255 if kind == "uint8" else None)
    _require(top is not None and top < size, "its indices may be out of bounds")


def _greatest(function: Function, id: int) -> int | None:
    array, data = function.constants[id]
    kind = _TYPES[array.dtype]
    if not data or "int" not in kind:
        return None
    values = np.frombuffer(data, np.dtype(kind).newbyteorder("<"))
    return int(values.max()) if values.min() >= 0 else None


def _reduce(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, (_, places) = _one(inputs), primitive.state
    _ascending(places, len(x.shape))
    _require(len(places) > 0, _STATE)
    shape = tuple(1 if place in places else n for place, n in enumerate(x.shape))
    return [Array(shape, x.dtype)]


def _scan(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x = _one(inputs)
    _require(0 <= primitive.state[1] < len(x.shape), _STATE)
    return [x]


def _softmax(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x = _one(inputs)
    _require(len(x.shape) > 0, _INPUTS)
    return [x]


def _norm(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, weight = inputs
    _require(len(x.shape) > 0 and weight == Array(x.shape[-1:], x.dtype), _INPUTS)
    return [x]


def _product(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    a, b, *added = inputs
    (*batch, m, k), (*same, inner, n) = a.shape, b.shape
    _require((batch, k, a.dtype) == (same, inner, b.dtype), _INPUTS)
    output = Array((*batch, m, n), a.dtype)
    _require(added == [output] * (primitive.name == "AddMM"), _INPUTS)
    return [output]


def _quantized(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, w, *scales = inputs
    group, bits, mode, transposed = primitive.state
    _require((group, bits, mode) in _QUANTIZATIONS and transposed, _STATE)
    (*others, k), (n, _) = x.shape, w.shape
    _require(k % group == 0, _INPUTS)
    _require(w == Array((n, k * bits // 32), _CODES["uint32"]), _INPUTS)
    of_scales = Array((n, k // group), x.dtype if mode == 0 else _CODES["uint8"])
    _require(scales == [of_scales] * (2 if mode == 0 else 1), _INPUTS)
    return [Array((*others, n), x.dtype)]


def _rope(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    x, offset, periods = inputs
    turned = primitive.state[0]
    _require(len(x.shape) == 4 and turned % 2 == 0 and 2 <= turned <= x.shape[3], _STATE)
    _require(offset == Array((), _CODES["int32"]), _INPUTS)
    _require(periods == Array((turned // 2,), _CODES["float32"]), _INPUTS)
    return [x]


def _attention(primitive: Primitive, inputs: list[Array]) -> list[Array]:
    q, k, v, *masks = inputs
    _, causal, sinks, logarithms, forced = primitive.state
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


def has_attention(heads: int, kv_heads: int, length: int, head_dim: int) -> bool:
    kernels = ALLOWED["attention"]
    if length > kernels["short"]:
        return head_dim in kernels["long_dims"]
    rows = length * (heads // kv_heads)
    return head_dim in kernels["short_dims"] and rows <= kernels["short_rows"]


_RULES: dict[str, Callable[[Primitive, list[Array]], list[Array]]] = {
    "arange": _arange,
    "attention": _attention,
    "broadcast": _broadcast,
    "compare": _compare,
    "concatenate": _concatenate,
    "convert": _convert,
    "depends": _depends,
    "elementwise": _elementwise,
    "expand": _expand,
    "flatten": _flatten,
    "gather": _gather,
    "norm": _norm,
    "product": _product,
    "quantized": _quantized,
    "reduce": _reduce,
    "reshape": _reshape,
    "rope": _rope,
    "scan": _scan,
    "select": _select,
    "slice": _slice,
    "softmax": _softmax,
    "split": _split,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "unflatten": _unflatten,
    "view": _view,
}
