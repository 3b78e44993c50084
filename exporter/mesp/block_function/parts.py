"""The operands of the formulas of a block's forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx

from mesp.block_function.projection import Projection


@dataclass(frozen=True)
class Parts:
    """A block's projections and vectors, and how they are computed with."""

    p: dict[str, Projection]
    arrays: dict[str, mx.array]
    eps: float
    dtype: mx.Dtype
    plain: bool
    fast: ModuleType
    # Of each token of packed records the position at which its record begins: int32 [T].
    starts: mx.array | None = None
    # Its layer's part of the tokens' embeddings [1, T, size], where the model has such.
    per_layer: mx.array | None = None
    # Keys, after norm and RoPE, and values [1, kv_heads, T, D] of another block, where it has none.
    shared: tuple[mx.array, mx.array] | None = None
    # Gate, up and down of an expert, by its number, where there are some.
    expert: Callable[[int], Sequence[Projection]] | None = None

    def norm(self, name: str, x: mx.array, eps: float | None = None) -> mx.array:
        """RMSNorm by the norm `name`, with the blocks' ε or its own; x's dtype."""
        function = rms_norm if self.plain else self.fast.rms_norm
        return function(x, self.arrays[f"{name}.weight"], eps or self.eps)

    def vector(self, name: str) -> mx.array:
        """Returns a weight that no linear layer has, float32."""
        return self.arrays[name].astype(mx.float32)

    def project(
        self, name: str, x: mx.array, after: mx.array | None = None, plus: mx.array | None = None
    ) -> mx.array:
        """Returns the projection `name` of x, or that + plus, float32; not computed before `after`
        is.

        (In plain operations, MLX chooses the order.)
        """
        projection = self.p[name]
        if after is not None and not self.plain:
            projection = projection.after(after)
        return projection(x, plus)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`mx.fast.rms_norm` in plain operations: computed in float32, x's dtype."""
    wide = x.astype(mx.float32)
    wide = wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight
