"""Second moments of the inputs of a source model's matrices, by channel."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mesp.models.architecture import Architecture
from mesp.models.config_json import complete
from mesp.source_model.find import Source
from mesp.source_model.forward_pass import SourceModel

SEQUENCES, LENGTH = 4, 128  # that the model reads; more of both change little


def random_tokens(vocab_size: int) -> np.ndarray:
    """Ids that are all as likely: without any text, moments are taken of these."""
    return np.random.default_rng(0).integers(vocab_size, size=SEQUENCES * LENGTH)


def excerpts(
    tokens: np.ndarray, source: Source, arch: Architecture, count: int = SEQUENCES,
    length: int = LENGTH,
) -> list[list[int]]:  # fmt: skip
    """Sequences of tokens from places spread over a text, each after the id that begins one."""
    count = min(count, max(len(tokens) // length, 1))
    starts = np.linspace(0, max(len(tokens) - length, 0), count, dtype=int)
    begin = complete(source.config).get("bos_token_id")
    before = [begin] if type(begin) is int and 0 <= begin < arch.vocab_size else []
    return [[*before, *tokens[start : start + length].tolist()] for start in starts]


class Moments:
    """Of what each matrix of a model multiplies while it reads `sequences`: squares, summed by
    channel.

    Blocks are run in their order, each as it is asked for: only what goes into the next is kept.
    """

    def __init__(self, model: SourceModel, sequences: Sequence[Sequence[int]]):
        self.model = model
        self.sequences = sequences
        self.done = 0
        self.xs: list[mx.array] = []  # what goes into the next block

    def of_block(self, index: int) -> dict[str, mx.array]:
        """By the block's modules. Raises ValueError where it is not the next one's turn."""
        if index != self.done:
            raise ValueError(f"block {self.done} comes before block {index}")
        found: dict[str, mx.array] = {}

        def seen(module: str, x: mx.array) -> None:
            sums = mx.square(x[0].astype(mx.float32)).sum(axis=0)
            found[module] = found[module] + sums if module in found else sums

        if index == 0:
            self.xs = [self.model.embed(tokens) for tokens in self.sequences]
        for i, x in enumerate(self.xs):
            self.xs[i] = self.model.block(index, x, seen)
        self.done += 1
        mx.eval(found)
        return found

    def of_head(self) -> mx.array:
        """Of what the head multiplies, after all blocks."""
        return sum(mx.square(self.model.final(x)[0]).sum(axis=0) for x in self.xs)
