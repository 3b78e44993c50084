from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx

from mesp.models.architecture import PER_LAYER_PROJECTION, Architecture, Block
from mesp.models.quantization_formats import Quantization

# The page size of Apple's processors, in bytes. Memory-mapped files consist of whole pages.
PAGE = 16384
ALIGNMENT = 16  # words: every array starts on a 64-byte boundary
DTYPES = {name: getattr(mx, name) for name in ("uint32", "uint8", "float32", "float16", "bfloat16")}
DTYPE_OF = {"cpu": "float32", "gpu": "bfloat16"}  # the dtype in which a device computes

Array = tuple[str, tuple[int, ...], str]  # name, shape and dtype of an array

# Arrays that are float32 in every bundle. A_log is exponentiated, which enlarges rounding errors.
# Rounding the experts' bias may change which experts are chosen.
KEPT_WIDE = (
    "linear_attn.A_log", "mamba.A_log", "mamba.dt_bias", "mamba.D", "feed_forward.expert_bias",
)  # fmt: skip


@dataclass(frozen=True)
class ArraySpec:
    """An array's name, place, shape and dtype in a weight file.

    `stride` is the distance between the starts of two successive stacked matrices.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    stride: int | None = None

    @property
    def words(self) -> int:
        shape = self.shape if self.stride is None else self.shape[1:]
        return math.ceil(math.prod(shape) * DTYPES[self.dtype].size / 4)

    def is_within(self, words: int) -> bool:
        if self.stride is None:
            return self.offset + self.words <= words
        apart = type(self.stride) is int and self.words <= self.stride
        return apart and self.offset + (self.shape[0] - 1) * self.stride + self.words <= words

    def place(self, row: int) -> int:
        """Returns the byte offset in the file at which a row begins.

        Row numbers continue from one stacked matrix to the next.
        """
        shape, start = self.shape, 4 * self.offset
        if self.stride is not None:
            number, row = divmod(row, self.shape[1])
            shape, start = self.shape[1:], start + 4 * number * self.stride
        return start + row * math.prod(shape[1:]) * DTYPES[self.dtype].size

    def view(self, words: mx.array) -> mx.array:
        """Returns the array in `words` (uint32 [n]), as a view of the same memory."""
        dtype = DTYPES[self.dtype]
        if self.stride is None:
            # An array of 8 or 16 bits may be padded to a whole word.
            flat = words[self.offset : self.offset + self.words].view(dtype)
            return flat[: math.prod(self.shape)].reshape(self.shape)
        each = (self.shape[0], self.words)
        stacked = mx.as_strided(words, each, (self.stride, 1), self.offset).view(dtype)
        return stacked[:, : math.prod(self.shape[1:])].reshape(self.shape)

    def pieces(self, words: mx.array) -> Iterator[Piece]:
        array = self.view(words)
        if self.stride is None:
            yield self.name, 0, array
        else:
            for number in range(self.shape[0]):
                yield self.name, number * self.shape[1], array[number]

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Layout:
    words: int
    arrays: tuple[ArraySpec, ...]

    @classmethod
    def of(cls, arrays: Iterable[Array], stacked: Iterable[Array] = (), count: int = 0) -> Layout:
        specs, offset = [], 0

        def add(arrays: Iterable[Array]) -> Iterator[ArraySpec]:
            nonlocal offset
            for name, shape, dtype in arrays:
                spec = ArraySpec(name, offset, tuple(shape), dtype)
                offset += math.ceil(spec.words / ALIGNMENT) * ALIGNMENT
                yield spec

        specs += add(arrays)
        start, first = offset, [*add(stacked)]
        stride = offset - start
        specs += [replace(a, shape=(count, *a.shape), stride=stride) for a in first]
        offset = start + count * stride
        return cls(math.ceil(offset * 4 / PAGE) * PAGE // 4, tuple(specs))

    def __getitem__(self, name: str) -> ArraySpec:
        for spec in self.arrays:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(spec.name == name for spec in self.arrays)

    @classmethod
    def of_json(cls, entry: dict[str, Any]) -> Layout:
        arrays = (ArraySpec(**{**a, "shape": tuple(a["shape"])}) for a in entry["arrays"])
        return cls(entry["words"], tuple(arrays))

    def to_json(self) -> dict[str, Any]:
        return {"words": self.words, "arrays": [a.to_json() for a in self.arrays]}

    def unpack(self, words: mx.array) -> dict[str, mx.array]:
        return {spec.name: spec.view(words) for spec in self.arrays}


def norm_dtype(arch: Architecture, dtype: str) -> str:
    """Returns the dtype of the norms' weights: a sum with the offset of the family may need more
    digits than the weights of the source.
    """
    return "float32" if arch.norm_offset else dtype


def block_layout(block: Block, quantizations: Mapping[str, Quantization], dtype: str) -> Layout:
    of_norms = norm_dtype(block.arch, dtype)
    arrays: list = [(name, (size,), of_norms) for name, size in block.norms().items()]
    arrays += [
        (name, shape, "float32" if name in KEPT_WIDE else dtype)
        for name, shape in block.vectors().items()
    ]
    for name, (rows, columns) in (block.sizes() | block.frozen()).items():
        arrays += quantizations[name].arrays(name + ".", rows, columns, dtype)
        if name in block.arch.biases:
            arrays.append((name + ".bias", (rows,), dtype))
    stacked = [
        array
        for name, (rows, columns) in block.stacked().items()
        for array in quantizations[name].arrays(name + ".", rows, columns, dtype)
    ]
    return Layout.of(arrays, stacked, block.num_experts)


def table_layout(arch: Architecture, quantization: Quantization, dtype: str, norm: bool) -> Layout:
    """Returns the layout of ``embedding.bin`` or ``head.bin``. With `norm`, the layout ends with
    the final norm's weight.
    """
    arrays = quantization.arrays("", arch.vocab_size, arch.hidden_size, dtype)
    if norm:
        final = "float32" if arch.logits_scaling != 1 else norm_dtype(arch, dtype)
        arrays.append(("norm", (arch.hidden_size,), final))
    return Layout.of(arrays)


def per_layer_layout(
    arch: Architecture, name: str, quantization: Quantization, dtype: str
) -> Layout:
    """Returns the layout of the file of the matrix `name` of the per-layer embeddings.

    The projection's file ends with the weight of the norm of the projection's output.
    """
    arrays = quantization.arrays("", *arch.per_layer_shapes[name], dtype)
    if arch.per_layer and name == PER_LAYER_PROJECTION:
        arrays.append(("norm", (arch.per_layer.size,), norm_dtype(arch, dtype)))
    return Layout.of(arrays)


# (array name, index of the first row, rows).
Piece = tuple[str, int, mx.array]
