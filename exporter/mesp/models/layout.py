"""The layout of the arrays of a weight file (docs/architecture.md has the format)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx

from mesp.models.architecture import PER_LAYER_PROJECTION, Architecture, Block
from mesp.models.quantization import Quantization

PAGE = 16384  # bytes: the page of Apple's processors; weight files are whole pages, to be mapped
ALIGNMENT = 16  # words: every array starts on a 64-byte boundary
DTYPES = {
    "uint32": mx.uint32,
    "uint8": mx.uint8,
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
}
DTYPE_OF = {"cpu": "float32", "gpu": "bfloat16"}  # of a bundle, by device, where none is asked for

# float32 whatever the bundle's dtype: the exponential of A_log counts, and Δ and D are by head.
KEPT_WIDE = ("linear_attn.A_log", "mamba.A_log", "mamba.dt_bias", "mamba.D")


@dataclass(frozen=True)
class ArraySpec:
    """The place of an array in a weight file: `offset` in 32-bit words."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def words(self) -> int:
        return math.ceil(math.prod(self.shape) * DTYPES[self.dtype].size / 4)


@dataclass(frozen=True)
class Layout:
    """The arrays of a weight file and its length in 32-bit words."""

    words: int
    arrays: tuple[ArraySpec, ...]

    @classmethod
    def of(cls, arrays: Iterable[tuple[str, tuple[int, ...], str]]) -> Layout:
        """Lays (name, shape, dtype) out one after another."""
        specs, offset = [], 0
        for name, shape, dtype in arrays:
            spec = ArraySpec(name, offset, tuple(shape), dtype)
            specs.append(spec)
            offset += math.ceil(spec.words / ALIGNMENT) * ALIGNMENT
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
        return {"words": self.words, "arrays": [asdict(a) for a in self.arrays]}

    def unpack(self, words: mx.array) -> dict[str, mx.array]:
        """The arrays in `words` (uint32 [self.words]), as views of the same memory."""
        arrays = {}
        for spec in self.arrays:
            dtype = DTYPES[spec.dtype]
            flat = words[spec.offset : spec.offset + spec.words].view(dtype)
            # An array of 8 or 16 bits may be padded to a whole word.
            arrays[spec.name] = flat[: math.prod(spec.shape)].reshape(spec.shape)
        return arrays


def block_layout(block: Block, quantizations: Mapping[str, Quantization], dtype: str) -> Layout:
    """The layout of a block whose modules are quantized so; docs/architecture.md has the names."""
    arrays: list = [(name, (size,), dtype) for name, size in block.norms().items()]
    arrays += [
        (name, shape, "float32" if name in KEPT_WIDE else dtype)
        for name, shape in block.vectors().items()
    ]
    for name, (rows, columns) in block.sizes().items():
        arrays += quantizations[name].arrays(name + ".", rows, columns, dtype)
        if name in block.arch.biases:
            arrays.append((name + ".bias", (rows,), dtype))
    return Layout.of(arrays)


def table_layout(arch: Architecture, quantization: Quantization, dtype: str, norm: bool) -> Layout:
    """The layout of ``embedding.bin`` or ``head.bin``; the one used as head has the `norm`."""
    arrays = quantization.arrays("", arch.vocab_size, arch.hidden_size, dtype)
    if norm:
        arrays.append(("norm", (arch.hidden_size,), dtype))
    return Layout.of(arrays)


def per_layer_layout(
    arch: Architecture, name: str, quantization: Quantization, dtype: str
) -> Layout:
    """The layout of the file of one of the matrices that embeddings for each layer are made with;
    behind the projection it has the norm of what that gives."""
    arrays = quantization.arrays("", *arch.per_layer_shapes[name], dtype)
    if arch.per_layer and name == PER_LAYER_PROJECTION:
        arrays.append(("norm", (arch.per_layer.size,), dtype))
    return Layout.of(arrays)


Piece = tuple[str, int, mx.array]  # an array of the layout, a row of it, the rows from there on
