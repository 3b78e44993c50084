"""Reads and writes ``.mlxfn`` files in the little-endian layout of MLX 0.32.2's export.cpp.

    file      version (text), traces i32, shapeless u8, metadata (text), and each trace
    trace     names of keyword inputs (list of text), inputs' ids, inputs (list of array),
              outputs' ids, tape (list of nodes)
    node      id u64, computed u8, and:
              computed: inputs' ids, stream, primitive (text), state, siblings u64, and array,
              or with siblings the ids, shapes and dtypes of all outputs
              not computed: constant u8 and, where a constant first occurs, array and its data
    stream    index i32, type of device i32 (0 is the CPU, 1 the GPU), device i32
    array     shape, dtype; a shape is a list of i32, a dtype i32 and the element size u8

A list is its length u64 and its items.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mesp.errors import MespError
from mesp.files import read_object

ALLOWED = read_object(Path(__file__).with_name("allowed_primitives.json"))
# The first supported version of MLX.
MLX = ALLOWED["mlx"]
DEVICES = {"cpu": 0, "gpu": 1}
# MLX's dtypes, in the order of their codes.
DTYPES = (
    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
    *(mx.float16, mx.float32, mx.float64, mx.bfloat16, mx.complex64),
)

STREAM = "<iii"
SHAPE = "S"
STATES = {name: each["state"] for name, each in ALLOWED["primitives"].items()}


def has_layout(version: str) -> bool:
    """Returns whether this code accepts files of MLX `version`: 0.32.2 or a later 0.32. Other
    versions can crash on a file."""
    release = re.fullmatch(r"0\.32\.(\d{1,9})", version)
    return release is not None and int(release[1]) >= 2


def check_mlx() -> None:
    if not has_layout(mx.__version__):
        raise MespError(
            f"The layout of the functions of MLX {mx.__version__!r:.40} is not known; "
            f"install mlx {MLX} or later, below 0.33."
        )


def one_primitive(
    name: str, state: tuple, inputs: list[mx.array], shape: tuple[int, ...], dtype: mx.Dtype
) -> bytes:
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
    return _header(1) + trace


def on_device(file: bytes, device: str) -> bytes:
    moved = bytearray(file)
    for primitive in primitives(file):
        struct.pack_into(STREAM, moved, primitive.stream, 0, DEVICES[device], 0)
    return bytes(moved)


def _header(traces: int) -> bytes:
    return _text(MLX) + _pack("i?", traces, False) + _text("")


def _pack(codes: str, *values: Any) -> bytes:
    return struct.pack("<" + codes, *values)


def _list(items: list[bytes]) -> bytes:
    return _pack("Q", len(items)) + b"".join(items)


def _text(text: str) -> bytes:
    return _pack("Q", len(text)) + text.encode()


def _array(shape: tuple[int, ...], dtype: mx.Dtype) -> bytes:
    return _list([_pack("i", n) for n in shape]) + _pack("iB", DTYPES.index(dtype), dtype.size)


@dataclass(frozen=True)
class Array:
    """`dtype` is MLX's code of the dtype and the element size in bytes."""

    shape: tuple[int, ...]
    dtype: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype[1]


@dataclass(frozen=True)
class Primitive:
    """`stream` is the byte offset of its stream."""

    stream: int
    device: int
    name: str
    state: tuple  # a shape takes one item, a dtype two
    inputs: tuple[int, ...]  # ids
    outputs: dict[int, Array]


@dataclass(frozen=True)
class Function:
    """A trace: the names of its keyword inputs, the inputs and constants by id, the primitives in
    order of computation, and the outputs' ids.
    """

    keywords: list[str]
    inputs: dict[int, Array]
    constants: dict[int, tuple[Array, bytes]]
    primitives: list[Primitive]
    outputs: tuple[int, ...]


class _Reader:
    def __init__(self, file: bytes):
        self.file, self.at = file, 0

    def header(self) -> int:
        if not has_layout(self.text()):
            raise ValueError(f"it is not in the layout of MLX {MLX}")
        traces, shapeless = self.take("i?")
        if shapeless:
            raise ValueError("its shapes are left open")
        if self.text():
            raise ValueError("it has metadata")
        return traces

    def take(self, codes: str) -> tuple:
        codes = "<" + codes
        values = struct.unpack_from(codes, self.file, self.at)
        end = self.at + struct.calcsize(codes)
        if "?" in codes and struct.pack(codes, *values) != self.file[self.at : end]:
            raise ValueError("a bool is neither 0 nor 1")
        self.at = end
        return values

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

    def array(self) -> Array:
        return self.array_of(self.shape(), self.take("iB"))

    def array_of(self, shape: tuple[int, ...], dtype: tuple[int, int]) -> Array:
        if min(shape, default=0) < 0:
            raise ValueError("a dimension is below 0")
        return Array(shape, dtype)

    def state(self, name: str) -> tuple:
        return tuple(self.shape() if code == SHAPE else self.one(code) for code in STATES[name])

    def with_ids(self, ids: tuple[int, ...], arrays: list[Array]) -> dict[int, Array]:
        if len(set(ids)) != len(arrays) or len(ids) != len(arrays):
            raise ValueError("arrays and their ids differ in number, or two have one id")
        return dict(zip(ids, arrays, strict=True))


def functions(file: bytes) -> list[Function]:
    """Raises ValueError if the file is not valid, and KeyError for a primitive that
    `STATES` lacks.
    """
    reader = _Reader(file)
    # Shared by all traces, because MLX writes each constant once.
    constants: dict[int, tuple[Array, bytes]] = {}

    def function() -> Function:
        keywords = reader.list(reader.text)
        ids = reader.ids()
        inputs = reader.with_ids(ids, reader.list(reader.array))
        found = Function(keywords, inputs, {}, [], reader.ids())
        for _ in range(reader.one("Q")):
            node(found)
        return found

    def node(function: Function) -> None:
        id, computed = reader.take("Q?")
        if computed:
            taken, stream = reader.ids(), reader.at
            _, device, number = reader.take(STREAM[1:])
            if number != 0:
                raise ValueError("a device is not the first")
            name = reader.text()
            state = reader.state(name)
            if siblings := reader.one("Q"):
                ids, shapes = reader.ids(), reader.list(reader.shape)
                types = reader.list(lambda: reader.take("iB"))
                arrays = [*map(reader.array_of, shapes, types)]
                if id not in ids or not len(ids) == len(shapes) == len(types) == siblings + 1:
                    raise ValueError("a primitive's outputs differ in number")
                outputs = reader.with_ids(ids, arrays)
            else:
                outputs = {id: reader.array()}
            function.primitives.append(Primitive(stream, device, name, state, taken, outputs))
        elif reader.one("?"):
            if id not in constants:
                array = reader.array()
                constants[id] = (array, reader.one(f"{array.nbytes}s"))
            function.constants[id] = constants[id]
        elif id not in function.inputs:
            raise ValueError("an input is missing")

    try:
        found = [function() for _ in range(reader.header())]
    except (struct.error, ValueError, OverflowError) as error:
        raise ValueError(f"this is not a file of functions ({error})") from error
    if reader.at != len(file):
        raise ValueError("the file of functions goes on after its end")
    return found


def primitives(file: bytes) -> list[Primitive]:
    return [each for function in functions(file) for each in function.primitives]
