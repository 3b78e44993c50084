from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesp.errors import MespError
from mesp.formatting import perplexity

RESAMPLES = 1000


def mean(value: float) -> float:
    return value


def exponential(loss: float) -> float:
    """Returns `perplexity(loss)`. Raises MespError if it is above every number."""
    found = perplexity(loss)
    if found is None:
        raise MespError(
            f"The perplexity is above every number, because the loss is {loss:g} nats a token: "
            "train the adapters again."
        )
    return found


def bootstrap(sums: np.ndarray, weights: np.ndarray, resamples: int, seed: int = 0) -> np.ndarray:
    """Returns Σ sums / Σ weights over n rows drawn with replacement, for each of `resamples` draws.

    The draws depend only on n and `seed`, so two metrics of n rows have the same draws.
    """
    n, random = len(sums), np.random.default_rng(seed)
    draws = (random.integers(n, size=n) for _ in range(resamples))
    return np.array([sums[rows].sum() / weights[rows].sum() for rows in draws])


def interval(drawn: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
    return low, high


@dataclass(frozen=True)
class Metric:
    """A metric of n records: `final`(Σ sums / Σ weights)."""

    name: str
    value: float
    sums: np.ndarray | None = None
    weights: np.ndarray | None = None
    final: Callable[[float], float] = mean
    higher_is_better: bool = True
    task: str | None = None

    @classmethod
    def of(
        cls, name: str, sums: Sequence[float], weights: Sequence[float] | None = None, **others: Any
    ) -> Metric:
        given = np.asarray(sums, float), np.asarray([1] * len(sums) if weights is None else weights)
        metric = cls(name, math.nan, *given, **others)
        return replace(metric, value=metric.final(float(given[0].sum() / given[1].sum())))

    def resampled(self) -> np.ndarray:
        """Returns the metric for each bootstrap draw, float [RESAMPLES]."""
        assert self.sums is not None and self.weights is not None
        return np.array([*map(self.final, bootstrap(self.sums, self.weights, RESAMPLES).tolist())])


@dataclass(frozen=True)
class Estimate:
    value: float
    low: float | None = None
    high: float | None = None


def compare(metrics: Sequence[Metric]) -> list[tuple[Estimate, Estimate | None]]:
    """Returns each model's metric and, from the second model on, its difference from the first
    model.

    The bootstrap is paired: all models are measured on the same draws of records.
    """
    first = metrics[0]
    n = 0 if first.sums is None else len(first.sums)
    bounds: list[Any] = [(None, None)] * (2 * len(metrics))
    if n >= 2 and all(metric.sums is not None for metric in metrics):
        drawn = [metric.resampled() for metric in metrics]
        bounds = [interval(each) for each in drawn + [each - drawn[0] for each in drawn]]
    return [
        (
            Estimate(metric.value, *bounds[i]),
            Estimate(metric.value - first.value, *bounds[len(metrics) + i]) if i else None,
        )
        for i, metric in enumerate(metrics)
    ]
