"""Figures over records, and how sure they are."""

from __future__ import annotations

import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 1000


def mean(value: float) -> float:
    return value


def exponential(value: float) -> float:
    """exp, infinite where it is too large for a float."""
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True)
class Metric:
    """A figure of n records: `final` of Σ sums / Σ weights. Without sums only `value` is known."""

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
        """With the value that its records give; the weights are 1 if there are none."""
        given = np.asarray(sums, float), np.asarray([1] * len(sums) if weights is None else weights)
        metric = cls(name, math.nan, *given, **others)
        return cls(name, metric.of_rows(np.arange(len(sums))), *given, **others)

    def of_rows(self, rows: np.ndarray) -> float:
        assert self.sums is not None and self.weights is not None
        return self.final(float(self.sums[rows].sum() / self.weights[rows].sum()))


@dataclass(frozen=True)
class Estimate:
    """A figure, and between what bounds 95% of its bootstrap's are; None without a bootstrap."""

    value: float
    low: float | None = None
    high: float | None = None


def compare(metrics: Sequence[Metric]) -> list[tuple[Estimate, Estimate | None]]:
    """Of one metric of several models on the same records: each with its interval, and from the
    second on its difference from the first's.

    The bootstrap is paired: all models are measured on the same draws of records. Percentiles of
    1,000 draws with replacement; the same records give the same intervals again.
    """
    first = metrics[0]
    n = 0 if first.sums is None else len(first.sums)
    bounds: list[Any] = [(None, None)] * (2 * len(metrics))
    if n < 2 or any(metric.sums is None for metric in metrics):
        pass
    else:
        random = np.random.default_rng(0)
        drawn = []
        for _ in range(RESAMPLES):
            rows = random.integers(n, size=n)
            values = [metric.of_rows(rows) for metric in metrics]
            drawn.append(values + [value - values[0] for value in values])
        bounds = np.percentile(drawn, [2.5, 97.5], axis=0).T.tolist()
    return [
        (
            Estimate(metric.value, *bounds[i]),
            Estimate(metric.value - first.value, *bounds[len(metrics) + i]) if i else None,
        )
        for i, metric in enumerate(metrics)
    ]


# Answers


def extract(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """The first match of `pattern`, its group where it has one; the text without a pattern."""
    if pattern is None:
        return text.strip()
    found = pattern.search(text)
    return None if found is None else (found[1 if pattern.groups else 0] or "").strip()


def exact_match(answer: str | None, reference: str, is_json: bool = False) -> bool:
    """Whether an answer is the reference to the letter; of JSON, whether it is the same value.

    `answer` is None where the text has none.
    """
    if not is_json:
        return answer == reference
    value = canonical_json(answer or "")
    return value is not None and value == canonical_json(reference)


def f1(answer: str, reference: str) -> float:
    """SQuAD's F1 of words, without case, punctuation and articles."""
    ours, theirs = (_words(text) for text in (answer, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    text = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def canonical_json(text: str) -> str | None:
    """JSON with its keys in order, so that equal values are equal texts; None for invalid JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> int | float:
    """JSON has one kind of number: 1.0 is 1."""
    value = float(text)
    return int(value) if value.is_integer() else value
