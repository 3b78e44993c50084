"""A source model's weights, wherever they come from."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from mesp.models.architecture import Architecture


class Weights(Protocol):
    """The tensors of a model, by their names in Hugging Face's checkpoints.

    A matrix is named without the `.weight` behind it.
    """

    @property
    def has_float16_scales(self) -> bool:
        """Whether some matrix comes quantized with float16 scales."""

    @property
    def is_converted(self) -> bool:
        """Whether norms and convolutions are what is computed with, as mlx-lm and llama.cpp
        convert them."""

    def is_quantized(self, name: str) -> bool:
        """Returns whether the matrix comes quantized, as MLX packs it."""

    def is_stored_unquantized(self, name: str) -> bool:
        """Returns whether a file holds the matrix as it is."""

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        """Returns some rows of the tensor `name`, with its suffix, in the dtype that it comes in.

        Raises MespError unless it is there, in this `shape`.
        """


def read_norm(weights: Weights, name: str, shape: tuple[int, ...], arch: Architecture) -> mx.array:
    """Returns the weight of an RMSNorm, with its offset, float32."""
    offset = 0 if weights.is_converted else arch.norm_offset
    return weights.rows(name, shape, slice(0, *shape)).astype(mx.float32) + offset
