from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import mlx.core as mx

from mesp.block_function.projection import Projection


@dataclass(frozen=True)
class Parts:
    p: dict[str, Projection]
    arrays: dict[str, mx.array]
    eps: float
    dtype: mx.Dtype
    # The module with the fused primitives.
    fast: ModuleType | None
    # The position at which each token's record begins, int32 [T]. None without packed records.
    starts: mx.array | None = None
    # The tokens' embeddings for this layer [1, T, size].
    per_layer: mx.array | None = None
    # The keys (after norm and RoPE) and values of another block, [1, kv_heads, T, D] each.
    shared: tuple[mx.array, mx.array] | None = None
    # Returns an expert's gate, up and down projections.
    expert: Callable[[int], Sequence[Projection]] | None = None

    @property
    def plain(self) -> bool:
        return self.fast is None

    def norm(self, name: str, x: mx.array, eps: float | None = None) -> mx.array:
        """Returns the RMSNorm `name` of x, in x's dtype. `eps` replaces the block's ε."""
        function = rms_norm if self.fast is None else self.fast.rms_norm
        return function(x, self.arrays[f"{name}.weight"].astype(x.dtype), eps or self.eps)

    def vector(self, name: str) -> mx.array:
        return self.arrays[name].astype(mx.float32)

    def project(
        self, name: str, x: mx.array, after: mx.array | None = None, plus: mx.array | None = None
    ) -> mx.array:
        """Returns the projection `name` of x in float32, plus `plus` if given.

        Unless `plain` is set, the projection is computed after the array `after`.
        """
        projection = self.p[name]
        if after is not None and not self.plain:
            projection = projection.after(after)
        return projection(x, plus)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Returns RMSNorm(x) in plain operations, normalized in float32 and multiplied by `weight` in
    x's dtype.
    """
    wide = x.astype(mx.float32)
    wide = wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight
