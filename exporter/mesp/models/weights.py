from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mesp.models.architecture import Architecture


class Weights(Protocol):
    """The tensors of a source model, by MeSP's names.

    The names of matrices omit the suffix `.weight`.
    """

    @property
    def dtype(self) -> str | None:
        """The smallest dtype that holds all stored scales, biases, norms and other vectors exactly.
        None if the source is not quantized.
        """

    @property
    def is_converted(self) -> bool:
        """Whether the norms' weights in the source already include the family's offset."""

    def is_quantized(self, name: str) -> bool:
        """Returns whether `rows` returns the matrix as quantized arrays in MLX's format."""

    def is_stored_unquantized(self, name: str) -> bool:
        """Returns whether the source stores the matrix unquantized."""

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        """Returns some rows of the tensor `name` in its stored dtype. Here `name` includes the
        suffix.

        Raises MespError unless the tensor exists with this `shape`.
        """


def read_norm(weights: Weights, name: str, shape: tuple[int, ...], arch: Architecture) -> mx.array:
    offset = 0 if weights.is_converted else arch.norm_offset
    return weights.rows(name, shape, slice(0, *shape)).astype(mx.float32) + offset
