from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mesp.block_function.tiles import cut
from mesp.source_model.forward_pass import SideInputs, SourceModel

TILE = 1 << 20


@dataclass(frozen=True)
class QuantizationLoss:
    """The distance of a model's predictions from its source's, over the positions of sequences.

    `kl` [n] is the Kullback-Leibler divergence Σ p ln(p / q) at each position. p are the source's
    probabilities, and q the model's. `source` and `model` [m] are -ln p and -ln q of the next
    tokens.
    """

    kl: np.ndarray
    source: np.ndarray
    model: np.ndarray

    @classmethod
    def of(cls, parts: Iterable[QuantizationLoss]) -> QuantizationLoss:
        return cls(*map(np.concatenate, zip(*(vars(p).values() for p in parts), strict=True)))

    @property
    def perplexities(self) -> tuple[float, float]:
        return math.exp(self.source.mean()), math.exp(self.model.mean())


def compute_head_inputs(model: SourceModel, sequences: Sequence[Sequence[int]]) -> list[mx.array]:
    """Returns the inputs of the head, float32 [T, hidden] for each sequence."""
    xs = [model.embed(tokens) for tokens in sequences]
    side_inputs = list(map(SideInputs, sequences, xs))
    for index in range(model.arch.num_hidden_layers):
        xs = [model.block(index, x, side) for x, side in zip(xs, side_inputs, strict=True)]
    return [model.final(x)[0] for x in xs]


def measure_loss(
    source: SourceModel,
    model: SourceModel,
    sequences: Sequence[Sequence[int]],
    of_source: list[mx.array] | None = None,
    of_model: list[mx.array] | None = None,
) -> QuantizationLoss:
    """Returns the distance of `model` from `source`.

    `of_source` and `of_model` may give the results of `compute_head_inputs`.
    """
    xs = of_source or compute_head_inputs(source, sequences)
    ys = of_model or compute_head_inputs(model, sequences)
    return QuantizationLoss.of(
        _compare(source, model, x, y, tokens)
        for x, y, tokens in zip(xs, ys, sequences, strict=True)
    )


class _Distribution:
    """Sums of exp(z - top) and of exp(z - top) · value over the logits z at each position,
    accumulated over tiles. `top` is the highest logit so far.
    """

    def __init__(self, length: int):
        self.top = mx.full((length,), -mx.inf)
        self.sum = mx.zeros(length)
        self.weighted = mx.zeros(length)  # Σ exp(z - top) · value
        self.target = mx.zeros(length - 1)

    def add(self, z: mx.array, value: mx.array, targets: mx.array) -> None:
        top = mx.maximum(self.top, z.max(axis=-1))
        decay, weights = mx.exp(self.top - top), mx.exp(z - top[:, None])
        self.sum = self.sum * decay + weights.sum(axis=-1)
        self.weighted = self.weighted * decay + (weights * value).sum(axis=-1)
        self.top = top
        here = (targets >= 0) & (targets < z.shape[1])
        found = mx.take_along_axis(z[:-1], mx.where(here, targets, 0)[:, None], axis=1)[:, 0]
        self.target = mx.where(here, found, self.target)
        mx.eval(self.top, self.sum, self.weighted, self.target)

    @property
    def log_sum(self) -> mx.array:
        return self.top + mx.log(self.sum)


def _compare(
    source: SourceModel, model: SourceModel, x: mx.array, y: mx.array, tokens: Sequence[int]
) -> QuantizationLoss:
    p, q = _Distribution(len(tokens)), _Distribution(len(tokens))
    for rows in cut(source.arch.vocab_size, max(TILE // len(tokens), 1)):
        zp, zq = source.logits(x, rows), model.logits(y, rows)
        targets = mx.array(tokens[1:]) - rows.start
        p.add(zp, zp - zq, targets)
        q.add(zq, mx.array(0.0), targets)
    kl = p.weighted / p.sum - p.log_sum + q.log_sum
    losses = (each.log_sum[:-1] - each.target for each in (p, q))
    return QuantizationLoss(*map(np.array, (kl, *losses)))
