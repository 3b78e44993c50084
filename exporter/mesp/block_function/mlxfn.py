"""MLX's files of functions, ``.mlxfn``, as `VERSION` writes them (its export.cpp), little-endian.

    file      version (text), traces i32, shapeless u8, and each trace:
    trace     names of keyword inputs (list of text), inputs' ids, inputs (list of array),
              outputs' ids, tape (list of nodes)
    node      id u64, computed u8; computed: ids of what it takes, stream, primitive (text), state,
              siblings u64, array, or with siblings the ids, shapes and dtypes of all outputs;
              else: constant u8, and a constant that no trace before has: array, its data
    stream    index i32, type of device i32 (0 is the CPU, 1 the GPU), device i32
    array     shape, dtype; a shape is a list of i32, a dtype i32 and the bytes of an element u8

A list is its length u64 and its items, ids are a list of u64, a text a list of bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mesp.errors import MespError

VERSION = "0.31.1"
DEVICES = {"cpu": 0, "gpu": 1}
# In the order of MLX's codes.
DTYPES = (
    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.float16, mx.float32, mx.float64, mx.bfloat16, mx.complex64),
)

STREAM = "<iii"
SHAPE = "S"  # among the codes of `struct`
# The state of each primitive that a block function has.
STATES = {
    "Add": "",
    "AddMM": "ff",
    "Arange": "ddd",
    "AsType": "iB",
    "BitwiseBinary": "i",
    "Broadcast": SHAPE,
    "Concatenate": "i",
    "Cos": "",
    "Depends": "",
    "Divide": "",
    "Exp": "",
    "ExpandDims": SHAPE,
    "Flatten": "ii",
    "Full": "",
    "Gather": 2 * SHAPE,
    "Greater": "",
    "GreaterEqual": "",
    "Less": "",
    "LogAddExp": "",
    "Matmul": "",
    "Multiply": "",
    "Negative": "",
    "Power": "",
    "QuantizedMatmul": "iii?",
    "RMSNorm": "f",
    "Reduce": "i" + SHAPE,
    "Reshape": SHAPE,
    "RoPE": "i?ff?",
    "Scan": "ii??",
    "ScaledDotProductAttention": "f???",
    "Select": "",
    "Sigmoid": "",
    "Sin": "",
    "Slice": 3 * SHAPE,
    "Softmax": "?",
    "Split": SHAPE + "i",
    "Sqrt": "?",
    "Square": "",
    "Squeeze": SHAPE,
    "Subtract": "",
    "Tanh": "",
    "Transpose": SHAPE,
    "Unflatten": "i" + SHAPE,
    "View": "iB",
}


def one_primitive(
    name: str, state: tuple, inputs: list[mx.array], shape: tuple[int, ...], dtype: mx.Dtype
) -> bytes:
    """A file with one function: a primitive, on the CPU, of arrays like `inputs`.

    It gives one array. A primitive's state is what `STATES` says, without shapes. Raises MespError
    where this is another MLX than `VERSION`.
    """
    _check(mx.__version__)
    ids = [_pack("Q", i) for i in range(len(inputs) + 1)]
    *taken, result = ids
    tape = [i + _pack("??", False, False) for i in taken]
    stream = struct.pack(STREAM, 0, DEVICES["cpu"], 0)
    primitive = stream + _text(name) + _pack(STATES[name], *state)
    tape.append(
        result + _pack("?", True) + _list(taken) + primitive + _pack("Q", 0) + _array(shape, dtype)
    )
    arrays = [_array(x.shape, x.dtype) for x in inputs]
    trace = _list([]) + _list(taken) + _list(arrays) + _list([result]) + _list(tape)
    return _text(VERSION) + _pack("i?", 1, False) + trace


def on_device(file: bytes, device: str) -> bytes:
    """The same functions, with every primitive on the first stream of `device`, "cpu" or "gpu".

    Raises what `primitives` does.
    """
    moved = bytearray(file)
    for primitive in primitives(file):
        struct.pack_into(STREAM, moved, primitive.stream, 0, DEVICES[device], 0)
    return bytes(moved)


def _check(version: str) -> None:
    if version != VERSION:
        raise MespError(
            f"Functions for a GPU are written as MLX {VERSION} does, and this is MLX {version}; "
            f"install mlx=={VERSION}, or export with --device cpu."
        )


def _pack(codes: str, *values: Any) -> bytes:
    return struct.pack("<" + codes, *values)


def _list(items: list[bytes]) -> bytes:
    return _pack("Q", len(items)) + b"".join(items)


def _text(text: str) -> bytes:
    return _pack("Q", len(text)) + text.encode()


def _array(shape: tuple[int, ...], dtype: mx.Dtype) -> bytes:
    return _list([_pack("i", n) for n in shape]) + _pack("iB", DTYPES.index(dtype), dtype.size)


class _Reader:
    """Goes through a file. Raises struct.error where it is shorter than it says."""

    def __init__(self, file: bytes):
        self.file, self.at = file, 0

    def take(self, codes: str) -> tuple:
        values = struct.unpack_from("<" + codes, self.file, self.at)
        self.at += struct.calcsize("<" + codes)
        return values

    def skip(self, size: int) -> None:
        self.at += size

    def one(self, code: str) -> Any:
        return self.take(code)[0]

    def list(self, item: Callable[[], Any]) -> list[Any]:
        return [item() for _ in range(self.one("Q"))]

    def text(self) -> str:
        return self.one(f"{self.one('Q')}s").decode()

    def ids(self) -> tuple[int, ...]:
        return self.take(f"{self.one('Q')}Q")

    def shape(self) -> tuple[int, ...]:
        return self.take(f"{self.one('Q')}i")

    def array(self) -> int:
        """A shape and a dtype: the bytes of such an array."""
        shape, (_, size) = self.shape(), self.take("iB")
        return math.prod(shape) * size


@dataclass(frozen=True)
class Primitive:
    """A primitive in a file: where its stream is, in bytes from the start, and what it has."""

    stream: int
    name: str
    state: tuple  # a shape is one element, a dtype two


def primitives(file: bytes) -> list[Primitive]:
    """The primitives of all traces, in the file's order.

    Raises MespError where another MLX than `VERSION` wrote the file, ValueError where it is none,
    KeyError where it has a primitive that `STATES` lacks.
    """
    reader, found, constants = _Reader(file), [], set()

    def node() -> None:
        id, computed = reader.take("Q?")
        if computed:
            reader.ids()
            stream = reader.at
            reader.skip(struct.calcsize(STREAM))
            name = reader.text()
            state = tuple(
                reader.shape() if code == SHAPE else reader.one(code) for code in STATES[name]
            )
            found.append(Primitive(stream, name, state))
            if reader.one("Q") == 0:
                reader.array()
            else:
                reader.ids()
                reader.list(reader.shape)
                reader.list(lambda: reader.take("iB"))
        elif reader.one("?") and id not in constants:
            constants.add(id)
            reader.skip(reader.array())

    try:
        _check(reader.text())
        traces, _ = reader.take("i?")
        for _ in range(traces):
            reader.list(reader.text)
            reader.ids()
            reader.list(reader.array)
            reader.ids()
            reader.list(node)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError("This is no file of functions.") from error
    if reader.at != len(file):
        raise ValueError("The file of functions goes on after its end.")
    return found
