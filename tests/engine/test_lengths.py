from pathlib import Path

import mlx.optimizers as optim
import pytest

from helpers.commands import call
from helpers.models import FAMILIES, TEXT, write_model
from helpers.oracle import Oracle, Recipe, distance, saved
from mesp.runs.log import RunLog

LONG = 2304
RATE = 0.1
MAMBA = "granite-mamba"
STEPS = 2  # A's gradient is 0 in the first step


@pytest.mark.parametrize(
    ("family", "length"),
    [
        *(pytest.param(each, LONG, marks=pytest.mark.slow) for each in ("qwen3_5", "lfm2", MAMBA)),
        *((each, 1) for each in ("lfm3", "gemma3", MAMBA)),
    ],
)
def test_steps_are_those_of_automatic_differentiation(family: str, length: int, tmp_path: Path):
    source, text, bundle = (tmp_path / name for name in ("model", "text.txt", "b.mesp"))
    config = FAMILIES[family] | {"max_position_embeddings": LONG}
    write_model(source, config)
    text.write_text(TEXT * (1 + 16 * length // len(TEXT)))
    call("export", "--model", source, "--data", text, "--out", bundle, "--seq-len", length)
    oracle = Oracle.of(bundle, length)
    modules = {name.split(".")[1] for block in oracle.model.arch.blocks for name in block.sizes()}
    projections = tuple(name.removesuffix("_proj") for name in modules)
    expected = oracle.train(Recipe(optim.SGD(RATE), projections=projections), STEPS)
    moved = distance(expected.start, expected.end)

    for offload in ("none", "all"):
        output = tmp_path / offload
        options = ("--steps", STEPS, "--optimizer", "sgd", "--learning-rate", RATE)
        call("train", bundle, "--out", output, "--val-batches", 0, "--offload", offload, *options)
        assert RunLog.load(output).losses == pytest.approx(expected.losses, rel=1e-5)
        assert distance(saved(output), expected.end) < 1e-4 * moved
