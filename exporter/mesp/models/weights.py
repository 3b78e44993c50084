"""The weights of a source model, in any format."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mesp.models.architecture import Architecture


class Weights(Protocol):
    """The tensors of a model, by their names in Hugging Face's checkpoints.

    A matrix is named without the suffix `.weight`.
    """

    @property
    def has_float16_scales(self) -> bool:
        """Whether some matrix is quantized with float16 scales."""

    @property
    def is_converted(self) -> bool:
        """Whether norms and convolutions are stored as the formulas use them. This is so in models
        that mlx-lm or llama.cpp converted.
        """

    def is_quantized(self, name: str) -> bool:
        """Returns whether the source has the matrix quantized, in MLX's format."""

    def is_stored_unquantized(self, name: str) -> bool:
        """Returns whether a file holds the matrix unquantized."""

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        """Returns some rows of the tensor `name`, which includes the suffix, in the dtype that is
        stored.

        Raises MespError unless the tensor is there, in this `shape`.
        """


def read_norm(weights: Weights, name: str, shape: tuple[int, ...], arch: Architecture) -> mx.array:
    """Returns the weight of an RMSNorm, float32, with the family's offset added."""
    offset = 0 if weights.is_converted else arch.norm_offset
    return weights.rows(name, shape, slice(0, *shape)).astype(mx.float32) + offset
