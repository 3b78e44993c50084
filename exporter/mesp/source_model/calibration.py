from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mesp.models.architecture import Architecture
from mesp.models.config_json import complete
from mesp.source_model.find import Source
from mesp.source_model.forward_pass import SideInputs, SourceModel, product

# More or longer ones change little.
SEQUENCES, LENGTH = 4, 128
# Their estimates need more tokens.
CALIBRATION_SEQUENCES = 16
# The maximum number of inputs of a matrix for which products are computed. The products of 4096
# inputs take 67.1 MB.
WIDEST = 4096


def draw_tokens(vocab_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(vocab_size, size=SEQUENCES * LENGTH)


def choose_excerpts(
    tokens: np.ndarray, source: Source, arch: Architecture, count: int = SEQUENCES,
    length: int = LENGTH,
) -> list[list[int]]:  # fmt: skip
    count = min(count, max(len(tokens) // length, 1))
    starts = np.linspace(0, max(len(tokens) - length, 0), count, dtype=int)
    begin = complete(source.config).get("bos_token_id")
    before = [begin] if type(begin) is int and 0 <= begin < arch.vocab_size else []
    return [[*before, *tokens[start : start + length].tolist()] for start in starts]


class Moments:
    """The second moments of the inputs of a model's matrices over `sequences`.

    The moments are sums of x² over the tokens or, `with_products`, sums of x xᵀ. `of_block` must be
    called for the blocks in order.
    """

    def __init__(
        self, model: SourceModel, sequences: Sequence[Sequence[int]], with_products: bool = False
    ):
        self.model = model
        self.sequences = sequences
        self.with_products = with_products
        self.done = 0
        self.xs: list[mx.array] = []  # the inputs of the next block
        self.side_inputs: list[SideInputs] = []

    def of_block(self, index: int) -> dict[str, mx.array]:
        """Returns the moments [in] of a block's modules, by name.

        With products, the moments of modules with at most WIDEST inputs are [in, in]. Raises
        ValueError unless the block is the next one.
        """
        if index != self.done:
            raise ValueError(f"block {self.done} comes before block {index}")
        found: dict[str, mx.array] = {}
        # Several modules have the same input.
        last: tuple[mx.array, mx.array] | None = None

        def seen(module: str, x: mx.array) -> None:
            nonlocal last
            if last is None or last[0] is not x:
                last = x, self._sums(x[0].astype(mx.float32))
            found[module] = found[module] + last[1] if module in found else last[1]
            mx.eval(found[module])

        if index == 0:
            self.xs = [self.model.embed(tokens) for tokens in self.sequences]
            self.side_inputs = list(map(SideInputs, self.sequences, self.xs))
        for i, x in enumerate(self.xs):
            self.xs[i] = self.model.block(index, x, self.side_inputs[i], seen)
        self.done += 1
        return found

    def _sums(self, x: mx.array) -> mx.array:
        if self.with_products and x.shape[1] <= WIDEST:
            return product(x.T, x.T)
        return mx.square(x).sum(axis=0)

    def of_head(self) -> mx.array:
        """Returns the sums [hidden] of x² over the inputs x of the head."""
        return sum(mx.square(self.model.final(x)[0]).sum(axis=0) for x in self.xs)
