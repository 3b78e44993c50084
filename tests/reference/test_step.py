"""Compares the clipping of gradients and the schedules of the learning rate with their formulas, at
the edges of float32: 0, 1, huge and tiny numbers.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers.schedules import learning_rate, of_mlx
from mesp import reference
from mesp.federate.exchange import MOST, clip_update
from mesp.settings.train_settings import SCHEDULES

LARGEST, LEAST = float(np.finfo(np.float32).max), 2.0**-149  # the least is subnormal


EDGES = (0.0, LEAST, 1e-40, 1e-10, 1e-7, 1e-6, 1.0, 1e10, 1e19, 1e25, LARGEST)
EDGES += (-1.0, -1e-30, -LARGEST)


def numbers(most: float = LARGEST, least: float | None = None) -> st.SearchStrategy[float]:
    least = -most if least is None else least
    edges = [float(np.float32(edge)) for edge in EDGES if least <= edge <= most]
    return st.sampled_from(edges) | st.floats(least, most, width=32)


def positive(most: float = LARGEST) -> st.SearchStrategy[float]:
    return numbers(most, LEAST)


def blocks(most: float = LARGEST) -> st.SearchStrategy[list[list[float]]]:
    return st.tuples(*(st.lists(numbers(most), min_size=n, max_size=n) for n in (3, 1))).map(list)


def arrays(gradient: list[list[float]]) -> list[mx.array]:
    return [mx.array(block) for block in gradient]


@given(gradient=blocks(), clip=positive())
@example(gradient=[[0.0] * 3, [0.0]], clip=1.0)
@example(gradient=[[LARGEST] * 3, [LARGEST]], clip=1.0)
def test_the_factor_of_a_clipped_gradient(gradient: list[list[float]], clip: float):
    norm = math.hypot(*(number for block in gradient for number in block))
    found = reference.clip_factor(arrays(gradient), clip)
    assert found == pytest.approx(min(1, clip / (norm + 1e-6)), rel=1e-6, abs=0)
    assert 0 < found <= 1


@given(
    gradients=st.lists(blocks(), max_size=3),
    clip=positive(1e10),
    multiplier=st.just(0.0) | positive(1e10),
)
def test_a_private_gradient(gradients: list[list[list[float]]], clip: float, multiplier: float):
    noise = [[1.0, -1.0, 0.0], [0.5]]
    given = [arrays(gradient) for gradient in gradients]
    found = reference.private_gradient(given, arrays(noise), clip, multiplier, expected=2)
    expected, rounding = [], LEAST
    for place, each in enumerate(noise):
        total = multiplier * clip * np.array(each)
        rounding += 1e-6 * multiplier * clip
        for gradient in gradients:
            norm = math.hypot(*(number for block in gradient for number in block))
            total += min(1, clip / (norm + 1e-6)) * np.array(gradient[place])
            # A factor below float32's normal numbers is rounded to a multiple of the least number.
            rounding += 1e-6 * clip + LEAST * norm
        expected.append(total / 2)
    for a, b in zip(found, expected, strict=True):
        assert mx.isfinite(a).all() and np.abs(np.array(a) - b).max() <= rounding


@given(start=blocks(MOST), end=blocks(MOST), clip=positive())
def test_the_change_of_a_client(start: list[list[float]], end: list[list[float]], clip: float):
    before, after = (
        {str(n): np.array(block, np.float32) for n, block in enumerate(each)}
        for each in (start, end)
    )
    found = clip_update(after, before, clip)
    change = {name: after[name].astype(float) - before[name] for name in before}
    norm = math.hypot(*(number for each in change.values() for number in each))
    for name, each in change.items():
        expected = before[name] + each * (min(1, clip / norm) if norm else 1)
        rounding = np.spacing(np.abs(found[name])) + 1e-14 * (abs(before[name]) + abs(each))
        assert np.isfinite(found[name]).all()
        assert (np.abs(found[name] - expected) <= rounding).all()


@given(
    rate=positive(LARGEST / 2),
    schedule=st.sampled_from([*SCHEDULES]),
    steps=st.sampled_from([1, 2, 3, 1000, 1 << 24]),
    data=st.data(),
)
def test_a_schedule(rate: float, schedule: str, steps: int, data: st.DataObject):
    warmup = data.draw(st.sampled_from([n for n in (0, 1, 2, 999, steps - 1) if n < steps]))
    own = of_mlx(rate, schedule, steps, warmup)
    for step in {0, 1, warmup, warmup + 1, steps // 2, steps - 1}:
        expected = learning_rate(rate, schedule, steps, warmup, step)
        # mlx.optimizers computes in float32, also the change of each step, which may be subnormal.
        rounding = 2e-6 * rate + LEAST * step
        assert 0 <= expected <= rate
        assert abs(own(mx.array(step)).item() - expected) <= rounding, (warmup, step)
