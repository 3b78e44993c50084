import math
import re

import numpy as np
import pytest

from mesp.errors import MespError
from mesp.evaluation.metrics import Metric, compare, exponential
from mesp.exact_match import canonical_json, extract, f1


def test_a_metric_is_weighted():
    metric = Metric.of("perplexity", [6.0, 2.0], [3, 1], final=exponential)
    assert metric.value == pytest.approx(math.exp(8 / 4))
    assert Metric.of("acc", [1, 0, 1, 1]).value == 0.75
    with pytest.raises(MespError, match="the loss is 1e\\+06 nats a token"):
        exponential(1e6)


def test_the_interval_of_a_mean_is_the_normal_distributions():
    sums = np.random.default_rng(1).normal(3, 2, 400)
    ((estimate, difference),) = compare([Metric.of("x", sums)])
    half = 1.96 * sums.std() / math.sqrt(len(sums))
    assert difference is None
    assert estimate.value == pytest.approx(sums.mean())
    # 1,000 draws find the bounds to about a tenth of the standard error.
    assert estimate.low == pytest.approx(sums.mean() - half, abs=half / 5)
    assert estimate.high == pytest.approx(sums.mean() + half, abs=half / 5)


def test_differences_are_paired():
    base = np.random.default_rng(2).normal(0, 10, 50)
    models = [Metric.of("x", base), Metric.of("x", base + 1), Metric.of("x", base)]
    (first, none), (_, better), (_, same) = compare(models)
    assert none is None and first.high - first.low > 3
    assert (better.low, better.value, better.high) == pytest.approx((1, 1, 1))
    assert (same.low, same.value, same.high) == (0, 0, 0)
    assert compare(models) == compare(models)


def test_no_interval_where_a_model_has_no_figures_to_draw_from():
    known, unknown = Metric.of("perplexity", [1, 2]), Metric("perplexity", float("nan"))
    for pair in ((known, unknown), (unknown, known)):
        (first, _), (second, difference) = compare(pair)
        assert first.low is second.low is difference.low is None


@pytest.mark.parametrize("metric", [Metric("bleu", 12.5), Metric.of("acc", [1])])
def test_no_interval_where_there_is_nothing_to_draw(metric: Metric):
    (_, (estimate, difference)) = compare([metric, metric])
    assert (estimate.value, estimate.low, estimate.high) == (metric.value, None, None)
    assert (difference.value, difference.low) == (0, None)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("The cat sat.", "a cat sat", 1),
        ("the big cat", "cat", 2 / 3),
        ("cat cat", "cat", 2 / 3),
        ("dog", "cat", 0),
        ("", "", 1),
        ("", "cat", 0),
        ("U.S.A.", "usa", 1),
    ],
)
def test_f1_is_squads(answer: str, reference: str, expected: float):
    assert f1(answer, reference) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (None, "  all of it\n", "all of it"),
        (r"#### (-?\d+)", "so\n#### 72", "72"),
        (r"\d+", "between 3 and 5", "3"),
        (r"\d+", "none", None),
        (r"(a)|b", "b", ""),
    ],
)
def test_what_is_extracted(pattern: str | None, text: str, expected: str | None):
    assert extract(pattern and re.compile(pattern), text) == expected


def test_equal_values_are_equal_json():
    assert canonical_json('{"b": 1, "a": [true]}') == canonical_json('{"a":[true],"b":1}')
    assert canonical_json('{"a": 1}') != canonical_json('{"a": true}')
    assert canonical_json("[1.0, 2.5, 1e400]") == canonical_json("[1, 2.50, 1e400]")
    assert [canonical_json(text) for text in ("{'a': 1}", "NaN", "", "{} x", "[" * 100000)] == [
        None
    ] * 5
