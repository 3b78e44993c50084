"""Reads the header of a GGUF file: its metadata, and the places of its tensors.

The gguf package's reader is not used, because it trusts the counts in the file and is slow.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize

from mesp.errors import MespError
from mesp.folders import check_disk
from mesp.source_model.gguf.blocks import numbers

VERSIONS = (2, 3)
ENTRIES = 1 << 16
ITEMS = 1 << 22
DIMENSION = 1 << 31
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_KINDS = {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
_Q2_0 = 42  # the type number of Q2_0 in llama.cpp, and of PQ2_0 in some files of PrismML
_OF_BOTH = [("Q2_0", 64, 18), ("PQ2_0", 128, 34)]
_KINDS |= {_Q2_0: _OF_BOTH[0], 142: _OF_BOTH[1], 143: ("PTQ1_0", 128, 28)}


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file.

    `type` is the name of the block type, and `number` the type's number in the file. `shape` is in
    NumPy's order, such as [rows, columns]. `data` [rows, bytes] has the bytes of each row.
    """

    type: str
    shape: tuple[int, ...]
    data: np.ndarray | None
    number: int


@dataclass(frozen=True)
class GGUF:
    """The metadata and tensors of a memory-mapped file, by key and by name.

    `keys` are the file's first bytes, up to the end of the metadata.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    keys: memoryview
    alignment: int

    def text(self, key: str, default: str = "") -> str:
        value = self.metadata.get(key, default)
        return value if isinstance(value, str) else ""

    @classmethod
    def read(cls, path: Path) -> GGUF:
        """Raises MespError if the file cannot be read or is not a whole GGUF file."""
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise ValueError("it is not a regular file")
            if not os.path.getsize(path):
                raise ValueError("it is empty")
            return _read(path, np.memmap(path, mode="r"))
        except OSError as error:
            raise MespError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise MespError(
                f"{path} cannot be used as a GGUF file ({error}); download it again."
            ) from error


def copy(
    file: GGUF,
    path: Path,
    changed: Mapping[str, Callable[[np.ndarray], np.ndarray]],
    kind: GGMLQuantizationType,
) -> None:
    """Copies the file. The tensors in `changed` are replaced by new ones of type `kind`.

    `changed` has a function for each of these tensors, from the old float32 numbers to the new
    ones. Raises OSError if the file cannot be written, or the disk has less space than it takes,
    and MespError if a new number is not finite.
    """
    block, size = GGML_QUANT_SIZES[kind]
    counts = {
        name: math.prod(tensor.shape) // block * size if name in changed else tensor.data.size
        for name, tensor in file.tensors.items()
    }
    check_disk(path.parent, len(file.keys) + sum(counts.values()))
    with open(path, "xb") as out:
        out.write(file.keys)
        offset = 0
        for name, tensor in file.tensors.items():
            number, count = kind if name in changed else tensor.number, counts[name]
            text, dimensions = name.encode(), len(tensor.shape)
            out.write(struct.pack("<Q", len(text)) + text)
            out.write(struct.pack(f"<I{dimensions}Q", dimensions, *tensor.shape[::-1]))
            out.write(struct.pack("<IQ", number, offset))
            offset += math.ceil(count / file.alignment) * file.alignment
        for name, tensor in file.tensors.items():
            out.write(bytes(-out.tell() % file.alignment))
            data = tensor.data
            if name in changed:
                with np.errstate(over="ignore", invalid="ignore"):
                    data = quantize(changed[name](numbers(tensor.type, data)), kind)
                    is_finite = np.isfinite(numbers(kind.name, data)).all()
                if not is_finite:
                    raise MespError(
                        f"With the adapters in it, {name} has numbers that are not finite in "
                        f"{kind.name}; train them again."
                    )
            out.write(np.ascontiguousarray(data))
        out.write(bytes(-out.tell() % file.alignment))


class _Cursor:
    def __init__(self, data: np.ndarray):
        self.data, self.at = memoryview(data), 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise ValueError("it ends within its header")
        self.at += size
        return self.data[self.at - size : self.at]

    def count(self, code: str = "Q") -> int:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        return str(self.take(self.count()), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.numbers(kind, 1).tolist()[0]
        kind, size = self.count("I"), self.count()
        if size > ITEMS:
            raise ValueError(f"an array has {size:,} items")
        return [self.text() for _ in range(size)] if kind == _STRING else self.numbers(kind, size)

    def numbers(self, kind: int, size: int) -> np.ndarray:
        if kind not in _NUMBERS:
            raise ValueError(f"a value has the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        if kind == 7:  # bytes other than 0 and 1 must not be read as bool
            return np.frombuffer(self.take(size), "u1") != 0
        return np.frombuffer(self.take(size * dtype.itemsize), dtype)


def _read(path: Path, file: np.ndarray) -> GGUF:
    cursor = _Cursor(file)
    if bytes(cursor.take(4)) != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = cursor.count("I")
    if version not in VERSIONS:
        raise ValueError(f"it has version {version}, where 2 and 3 are read")
    tensor_count, key_count = cursor.count(), cursor.count()
    if max(tensor_count, key_count) > ENTRIES:
        raise ValueError(f"it has {max(tensor_count, key_count):,} entries")
    metadata = {}
    for _ in range(key_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.count("I"))
    keys = cursor.data[: cursor.at]
    found = []
    for _ in range(tensor_count):
        name, dimensions = cursor.text(), cursor.count("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"a tensor has {dimensions:,} dimensions")
        shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
        if not all(0 < size < DIMENSION for size in shape):
            raise ValueError(f"a tensor has the shape {list(shape)}")
        found.append((name, shape, cursor.count("I"), cursor.count()))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 16:
        raise ValueError("its general.alignment cannot be used")
    start = math.ceil(cursor.at / alignment) * alignment
    kinds = _KINDS | _kind_of_q2_0(found, len(file) - start, alignment)
    tensors = {name: _tensor(file[start:], kinds, *entry) for name, *entry in found}
    if len(tensors) != tensor_count:
        raise ValueError("two tensors have one name")
    return GGUF(path, metadata, tensors, keys, alignment)


def _kind_of_q2_0(
    found: list[tuple[str, tuple[int, ...], int, int]], length: int, alignment: int
) -> dict[int, tuple[str, int, int]]:
    """Returns the type that number 42 means in a file: Q2_0 or PQ2_0.

    Blocks of the right type fill the space of each tensor up to the padding. Raises ValueError if
    the file has tensors with this number, and both types fit or neither does.
    """
    ends = sorted({*(offset for *_, offset in found), length})
    rooms = [
        (math.prod(shape), ends[bisect(ends, offset)] - offset)
        for _, shape, number, offset in found
        if number == _Q2_0 and offset < length
    ]
    fitting = [
        kind
        for kind in _OF_BOTH
        if all(0 <= room - size * kind[2] // kind[1] < alignment for size, room in rooms)
    ]
    if rooms and len(fitting) != 1:
        raise ValueError("its tensors fit neither or both sizes of Q2_0 blocks, 64 and 128")
    return {_Q2_0: fitting[0]}


def _tensor(
    data: np.ndarray, kinds: dict[int, tuple[str, int, int]], shape: tuple[int, ...], number: int,
    offset: int,
) -> Tensor:  # fmt: skip
    if number not in kinds:
        return Tensor(f"number {number}", shape, None, number)
    kind, block, size = kinds[number]
    columns, rows = shape[-1], math.prod(shape[:-1])
    if columns % block:
        raise ValueError(f"a tensor's rows of {columns} are not whole blocks of {block}")
    width = columns // block * size
    if offset + rows * width > len(data):
        raise ValueError("it ends within a tensor")
    return Tensor(kind, shape, data[offset : offset + rows * width].reshape(rows, width), number)
