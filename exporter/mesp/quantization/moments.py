"""What goes into the matrices of a source model: its mean squares, by channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mesp.source_model.forward_pass import SourceModel

TOKENS = 512  # that the model reads; twice as many change little
EXCERPT = 128  # tokens of a text that are taken at a place


def random_tokens(config: dict[str, Any], vocab_size: int, seed: int = 0) -> list[int]:
    """Random ids after the one that begins a text: without any text, moments are taken of these."""
    ids = np.random.default_rng(seed).integers(vocab_size, size=TOKENS)
    begin = config.get("bos_token_id")
    if isinstance(begin, int) and 0 <= begin < vocab_size:
        ids[0] = begin
    return ids.tolist()


def excerpts(tokens: np.ndarray) -> list[int]:
    """`TOKENS` of a text, from places spread over it; all of a shorter one."""
    if len(tokens) <= TOKENS:
        return tokens.tolist()
    starts = np.linspace(0, len(tokens) - EXCERPT, TOKENS // EXCERPT, dtype=int)
    return np.concatenate([tokens[start : start + EXCERPT] for start in starts]).tolist()


class Moments:
    """The mean squares of what each matrix of a model multiplies, while the model reads `tokens`.

    Blocks are run in their order, each as it is asked for: only what goes into the next is kept.
    """

    def __init__(self, model: SourceModel, tokens: Sequence[int]):
        self.model = model
        self.tokens = tokens
        self.done = 0
        self.x: mx.array | None = None

    def of_block(self, index: int) -> dict[str, mx.array]:
        """By the block's modules. Raises ValueError where it is not the next one's turn."""
        if index != self.done:
            raise ValueError(f"block {self.done} comes before block {index}")
        found: dict[str, mx.array] = {}

        def seen(module: str, x: mx.array) -> None:
            found[module] = mx.mean(mx.square(x[0].astype(mx.float32)), axis=0)

        x = self.model.embed(self.tokens) if self.x is None else self.x
        self.x = self.model.block(index, x, seen)
        self.done += 1
        mx.eval(found)
        return found

    def of_head(self) -> mx.array:
        """Of what the head multiplies, after all blocks."""
        return mx.mean(mx.square(self.model.final(self.x)[0]), axis=0)
