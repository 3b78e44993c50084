"""tools/parity.py: MeSP against mlx-lm's trainer, and how differences are judged."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mesp.engine.build import find_engine
from studies.scores import Scores, paired

TOOL = Path(__file__).parents[1] / "tools" / "parity.py"


def scores(losses: np.ndarray, exact: np.ndarray) -> Scores:
    return Scores(losses, np.full(len(losses), 2.0), exact.astype(np.float64))


def test_an_interval_is_that_of_paired_means():
    draw = np.random.default_rng(0)
    base, exact = draw.normal(5, 3, 400), draw.random(400) < 0.5
    noise = draw.normal(0, 0.2, 400)
    baseline = scores(base, exact)
    assert paired([baseline], [baseline], what="loss") == (0, 0, 0)
    # Nats a token: of two targets each. The sequences' own spread, much larger, is not in it.
    other = scores(base + 0.1 + noise, exact)
    difference = paired([other], [baseline], what="loss")
    half = 1.96 * noise.std() / 2 / np.sqrt(400)
    assert difference.mean == pytest.approx(0.05 + noise.mean() / 2)
    # The ends are themselves drawn: 10,000 resamples find them to a few hundredths of the half.
    assert difference.high - difference.mean == pytest.approx(half, rel=0.1)
    assert difference.mean - difference.low == pytest.approx(half, rel=0.1)
    assert not difference.is_within(0.01) and difference.is_within(0.1)


def test_what_is_right_counts_by_the_sequence():
    exact = np.arange(100) < 50
    better = scores(np.ones(100), np.arange(100) < 60)
    difference = paired([better] * 3, [scores(np.ones(100), exact)] * 3, what="exact")
    assert difference.mean == pytest.approx(0.1)
    # Three seeds that agree say no more than one: the sequences are what is drawn.
    assert difference.low == pytest.approx(0.1 - 1.96 * 0.03, abs=0.01)


@pytest.mark.slow
def test_mesp_is_equivalent_to_mlx_lms_trainer(tmp_path: Path):
    find_engine()
    quick = [sys.executable, TOOL, "--quick", "--out", tmp_path / "parity"]
    done = subprocess.run([*map(str, quick)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    apart = re.findall(r"^\| MeSP \|.*\| (\S+) \| [^|]+ \| [^|]+ \| yes \|$", done.stdout, re.M)
    # float32 on both sides, 8 steps: 2e-6 of a loss near 5 when this was written. AdamW divides by
    # the gradient's own size, and so makes differences of small ones large.
    assert len(apart) == 2 and all(float(each) < 1e-3 for each in apart)
    untrained, trained = (
        float(re.search(rf"^\| {row} \|[^|]*\| ([\d.]+) \|", done.stdout, re.M)[1])
        for row in ("none", "MeSP")
    )
    assert trained < untrained - 1
