from __future__ import annotations

import zlib

import mlx.core as mx
import numpy as np


class RandomWeights:
    """Weights that are drawn at random when they are read, except those of norms and
    `layer_scalar`.
    """

    dtype = None
    is_converted = False

    def __init__(self, seed: int, norm: float = 1.0):
        """`norm` is the value of `layer_scalar` and of the norms' weights outside linear
        attention."""
        self.seed, self.norm = seed, norm
        self.generators: dict[str, np.random.Generator] = {}

    def is_quantized(self, name: str) -> bool:
        return False

    def is_stored_unquantized(self, name: str) -> bool:
        return False

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        size = (rows.stop - rows.start, *shape[1:])
        if "norm" in name or name.endswith("layer_scalar"):
            return mx.full(size, 1.0 if "linear_attn" in name else self.norm)
        seed = (self.seed, zlib.crc32(name.encode()))
        generator = self.generators.setdefault(name, np.random.default_rng(seed))
        return mx.array(0.02 * generator.standard_normal(size, dtype=np.float32))
