from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

MODES = {"affine": None, "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
AFFINE = {2, 3, 4, 5, 6, 8}, {32, 64, 128}  # bits and group sizes of the affine mode
# MLX on phones has no 1-bit format. A bundle stores 1-bit codes with 2 bits.
ONE_BIT = 1


class Arrays(Protocol):
    def __getitem__(self, name: str, /) -> Any: ...

    def __contains__(self, name: object, /) -> bool: ...


@dataclass(frozen=True)
class Quantization:
    """One of MLX's quantization formats.

    Each weight has `bits` bits, and each group of `group_size` weights has a scale. In ``affine``,
    each group also has a bias. In the other modes, weights are floating-point numbers of few bits,
    and scales are `uint8`.
    """

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"

    @classmethod
    def of(cls, arrays: Arrays, prefix: str, columns: int) -> Quantization:
        """Returns the quantization of a matrix, or of stacked matrices, with this many columns.

        The quantization follows from the shapes of the arrays `prefix`weight and `prefix`scales,
        and from whether `prefix`biases exists. Raises ValueError if the shapes fit no format.
        """
        weight, scales = (arrays[prefix + part].shape[-1] for part in ("weight", "scales"))
        bits, group_size = 32 * weight // columns, columns // scales
        if (32 * weight, columns) == (bits * columns, group_size * scales):
            for mode in MODES:
                found = cls(bits, group_size, mode)
                if found.is_of_mlx and (mode == "affine") == (prefix + "biases" in arrays):
                    return found
        raise ValueError(f"{prefix}weight has {bits} bits in groups of {group_size}")

    @property
    def is_of_mlx(self) -> bool:
        if self.mode == "affine":
            return self.bits in AFFINE[0] and self.group_size in AFFINE[1]
        return MODES.get(self.mode) == (self.bits, self.group_size)

    @property
    def in_bundle(self) -> Quantization:
        """The matrix's quantization in a bundle: 2 bits instead of 1 bit, otherwise unchanged."""
        return replace(self, bits=2) if self.bits == ONE_BIT else self

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", "scales", "biases")[: 3 if self.mode == "affine" else 2]

    def arrays(self, prefix: str, rows: int, columns: int, dtype: str) -> list:
        """Returns (name, shape, dtype) of the arrays of a quantized [rows, columns] matrix."""
        groups = (rows, columns // self.group_size)
        kinds = [
            ((rows, columns * self.bits // 32), "uint32"),
            (groups, dtype if self.mode == "affine" else "uint8"),
            (groups, dtype),
        ]
        return [(prefix + part, *kind) for part, kind in zip(self.parts, kinds, strict=False)]


def describe_quantization(quantization: Quantization) -> str:
    mode = "" if quantization.mode == "affine" else f"{quantization.mode}, "
    unit = "bit" if quantization.bits == ONE_BIT else "bits"
    return f"{mode}{quantization.bits} {unit} in groups of {quantization.group_size}"
