"""LoRA dropout: the masks that drop inputs of LoRA layers in training.

A mask is a function of the dropout's probability, the seed, and the place of use, such as the step
and the layer. So masks are recomputed and not stored.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mesp.models.architecture import Block
from mesp.reference.pieces import scattered

Masks = dict[str, mx.array]  # M [T, in] of a LoRA layer, or [experts, T, in] of stacked experts


class Dropout(NamedTuple):
    p: float
    seed: int
    step: int
    sequence: int = 0

    def masks(self, block: int, described: Block, T: int) -> Masks:
        """Returns the masks of a block's linear layers that can have an adapter, by name.

        The mask of an expert has a row for every token of the sequence.
        """
        masks = {}
        for layer, (name, (*stack, _, in_size)) in enumerate(described.adapted().items()):
            key = self.key(block, layer)
            keys = [key] if not stack else [scattered(key + 1 + e) for e in range(stack[0])]
            each = [dropout_mask(key, self.p, T, in_size) for key in keys]
            masks[name] = mx.stack(each) if stack else each[0]
        return masks

    def key(self, block: int, layer: int) -> int:
        """Returns the 64-bit key of a LoRA layer's mask.

        key = s(s(s(s(s(seed) + step) + sequence) + block) + layer),    s = `scattered`
        """
        key = scattered(self.seed)
        for number in (self.step, self.sequence, block, layer):
            key = scattered(key + number)
        return key


def dropout_mask(key: int, p: float, T: int, in_size: int) -> mx.array:
    """Returns M [T, in]. An entry is 0 with probability p, and 1 / (1 - p) otherwise.

        r_t = hash(t + low half of key)        c_j = hash(j + high half of key) | 1
        M_tj = 0 where r_t c_j < ⌊p 2³²⌋

    The integers are unsigned, have 32 bits and wrap. Multiply-shift hashing needs an odd c_j
    (Dietzfelbinger et al. 1997). p is rounded to float32, as in the trainer.
    """
    p = np.float32(p)
    r = hash_32(mx.arange(T, dtype=mx.uint32) + _uint32(key & 0xFFFFFFFF))
    c = hash_32(mx.arange(in_size, dtype=mx.uint32) + _uint32(key >> 32)) | _uint32(1)
    limit = _uint32(int(float(p) * 2**32))
    return mx.where(
        r[:, None] * c >= limit, mx.array(np.float32(1) / (np.float32(1) - p)), mx.array(0.0)
    )


def hash_32(x: mx.array) -> mx.array:
    """Returns a bijective hash of uint32."""
    x = (x ^ (x >> 16)) * _uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * _uint32(0x846CA68B)
    return x ^ (x >> 16)


def _uint32(number: int) -> mx.array:
    return mx.array(number, dtype=mx.uint32)
