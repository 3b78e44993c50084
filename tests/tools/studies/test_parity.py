import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from helpers.commands import call, invoke, succeeded
from helpers.paths import ROOT
from mesp.engine.build import find_engine
from mesp.errors import MespError
from studies import parity
from studies.comparison import trainers
from studies.comparison.plans import plans
from studies.comparison.scores import Scores, paired
from studies.comparison.trainers import with_mesp
from studies.tasks import bundles
from studies.tasks.bundles import CLASSIFICATION, export


def scores(losses: np.ndarray, exact: np.ndarray) -> Scores:
    return Scores(losses, np.full(len(losses), 2.0), exact.astype(np.float64))


def test_an_interval_is_that_of_paired_means():
    draw = np.random.default_rng(0)
    base, exact = draw.normal(5, 3, 400), draw.random(400) < 0.5
    noise = draw.normal(0, 0.2, 400)
    baseline = scores(base, exact)
    assert paired([baseline], [baseline], what="loss") == (0, 0, 0)
    # The difference is in nats per token, with two targets per sequence. The sequences' own
    # variation cancels.
    other = scores(base + 0.1 + noise, exact)
    difference = paired([other], [baseline], what="loss")
    half = 1.96 * noise.std() / 2 / np.sqrt(400)
    assert difference.mean == pytest.approx(0.05 + noise.mean() / 2)
    # The bounds come from random resamples, so they are tested within 10%.
    assert difference.high - difference.mean == pytest.approx(half, rel=0.1)
    assert difference.mean - difference.low == pytest.approx(half, rel=0.1)
    assert not difference.is_within(0.01) and difference.is_within(0.1)


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    def command(module: str, *arguments: object) -> None:
        call(module.rpartition(".")[2], *arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (parity, bundles, trainers):
            patch.setattr(module, "command", command)
        yield


def test_a_trainer_that_is_not_there_is_refused():
    with pytest.raises(MespError, match="There is no trainer SVM here; name one of MeSP; "):
        parity.choose(parity.TRAINERS, "sgd", ("SVM",))


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    for owner, name in ((nn.QuantizedLinear, "__call__"), (nn.QuantizedEmbedding, "as_linear")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(mx, "set_default_device", lambda device: None)
    other = tmp_path / "other.txt"
    other.write_text((ROOT / "README.md").read_text(encoding="utf-8")[:3000])
    few = ("--held-out", 6, "--text", other, "--out", tmp_path / "parity")

    def run(*options: object) -> str:
        done = succeeded(invoke(parity.main, "parity.py", *options, *few))
        return done.stdout

    return run


@pytest.mark.slow
def test_packed_records_train_as_many_a_step(study: Callable[..., str]):
    small = ("--task", "classification", "--steps", 3, "--seeds", 1, "--optimizer", "sgd")
    printed = study("--packed", *small)
    rows = [line.split(" | ") for line in printed.splitlines() if "MeSP" in line]
    assert [row[0] for row in rows[:2]] == ["| MeSP, one record a step", "| MeSP, packed"]


@pytest.mark.slow
def test_every_plan_trains_the_same(tmp_path: Path):
    find_engine()
    task = dataclasses.replace(CLASSIFICATION, steps=2, batch_size=2)
    bundle = export(task, "demo", tmp_path)
    options = plans(bundle, task, "adamw")
    places = [name.rpartition(", ")[0] for name in options]
    assert places == [
        p for p in ("nothing on disk", "inputs on disk", "all on disk") for _ in "abc"
    ]
    kept = [int(name.split()[-2]) for name in options]
    assert kept[::3] == [0] * 3 and kept[2::3] == [6] * 3 and all(0 < k < 6 for k in kept[1::3])
    first, *others = (
        with_mesp(bundle, task, "adamw", 0, tmp_path / str(number), each)
        for number, each in enumerate(options.values())
    )
    for each in others:
        assert np.abs(np.subtract(each.losses, first.losses)).max() <= parity.PLAN_MARGIN


@pytest.mark.slow
def test_mesp_is_equivalent_to_mlx_lms_trainer(study: Callable[..., str]):
    find_engine()
    printed = study("--quick")
    apart = re.findall(r"^\| MeSP \|.*\| (\S+) \| [^|]+ \| [^|]+ \| yes \|$", printed, re.M)
    # After 8 steps in float32, losses near 5 differed by 2e-6. AdamW enlarges differences of small
    # gradients, so the bound is larger.
    assert len(apart) == 2 and all(float(each) < 1e-3 for each in apart)
    untrained, trained = (
        float(re.search(rf"^\| {row} \|[^|]*\| ([\d.]+) \|", printed, re.M)[1])
        for row in ("none", "MeSP")
    )
    assert trained < untrained - 1
    header, _, none, *_ = printed.split("\n\n")[1].splitlines()
    other = header.split("|").index(" other text ")
    assert 20 < float(none.split("|")[other]) < 2000
