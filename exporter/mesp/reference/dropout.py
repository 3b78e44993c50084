"""LoRA dropout: which inputs of a LoRA layer a training step drops.

A mask follows from the seed, the step, the sequence, the block and the layer, and from the indices
of a token and an input. A mask is never stored, but recomputed wherever it is needed.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mesp.models.architecture import Block
from mesp.reference.pieces import scattered

Masks = dict[str, mx.array]  # M [T, in] of a LoRA layer; M [experts, T, in] of stacked experts


class Dropout(NamedTuple):
    """The dropout of a sequence in a step of training."""

    p: float  # probability that an input is dropped, 0 < p < 1
    seed: int
    step: int  # from 0
    sequence: int = 0  # index in the step, from 0

    def masks(self, block: int, described: Block, T: int) -> Masks:
        """Returns the masks of all linear layers of a block that can have an adapter, trained or
        not.

        Each expert has a mask with a row for every token. An expert uses only the rows of the
        tokens that chose it.
        """
        masks = {}
        for layer, (name, (*stack, _, in_size)) in enumerate(described.adapted().items()):
            key = self.key(block, layer)
            keys = [key] if not stack else [scattered(key + 1 + e) for e in range(stack[0])]
            each = [dropout_mask(key, self.p, T, in_size) for key in keys]
            masks[name] = mx.stack(each) if stack else each[0]
        return masks

    def key(self, block: int, layer: int) -> int:
        """Returns the key of a LoRA layer's mask, 64 bits.

        The key is s(s(s(s(s(seed) + step) + sequence) + block) + layer), where s is `scattered`.
        """
        key = scattered(self.seed)
        for number in (self.step, self.sequence, block, layer):
            key = scattered(key + number)
        return key


def dropout_mask(key: int, p: float, T: int, in_size: int) -> mx.array:
    """Returns M [T, in]: 0 with the probability p, and else 1 / (1 - p), so that the mean of M is
    1.

    r_t = hash(t + low half of key)        c_j = hash(j + high half of key) | 1

    M_tj = 0 where r_t c_j < p 2³²

    The integers are unsigned, have 32 bits and wrap. c_j is odd, so the products of a column are as
    uniform and independent as the r_t are: multiply-shift hashing (Dietzfelbinger et al. 1997). p
    is rounded to float32, as in the trainer.
    """
    p = np.float32(p)
    r = hash_32(mx.arange(T, dtype=mx.uint32) + _uint32(key & 0xFFFFFFFF))
    c = hash_32(mx.arange(in_size, dtype=mx.uint32) + _uint32(key >> 32)) | _uint32(1)
    limit = _uint32(int(float(p) * 2**32))
    return mx.where(
        r[:, None] * c >= limit, mx.array(np.float32(1) / (np.float32(1) - p)), mx.array(0.0)
    )


def hash_32(x: mx.array) -> mx.array:
    """Returns a bijective hash of uint32, in which each bit of x changes about half of the result's
    bits.
    """
    x = (x ^ (x >> 16)) * _uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * _uint32(0x846CA68B)
    return x ^ (x >> 16)


def _uint32(number: int) -> mx.array:
    return mx.array(number, dtype=mx.uint32)
