"""Gradients of a sequence of 4,096 tokens, against automatic differentiation of the whole model."""

from pathlib import Path

import mlx.optimizers as optim
import pytest

from helpers.commands import call
from helpers.models import FAMILIES, TEXT, write_model
from helpers.oracle import Oracle, Recipe, distance, saved
from mesp.runs.log import Run

LENGTH = 4096
RATE = 0.1
STEPS = 2  # the second step's gradient of A is not 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite-mamba"])
def test_steps_of_a_long_sequence(family: str, tmp_path: Path):
    """In blocks of attention, and of each other mixer."""
    source, text, bundle = (tmp_path / name for name in ("model", "text.txt", "b.mesp"))
    config = FAMILIES[family] | {"max_position_embeddings": LENGTH}
    write_model(source, config)
    text.write_text(TEXT * (1 + 16 * LENGTH // len(TEXT)))
    call("export", "--model", source, "--data", text, "--out", bundle, "--seq-len", LENGTH)
    oracle = Oracle.of(bundle, LENGTH)
    modules = {name.split(".")[1] for block in oracle.model.arch.blocks for name in block.sizes()}
    projections = tuple(name.removesuffix("_proj") for name in modules)
    expected = oracle.train(Recipe(optim.SGD(RATE), projections=projections), STEPS)
    moved = distance(expected.start, expected.end)

    for offload in ("none", "all"):
        output = tmp_path / offload
        options = ("--steps", STEPS, "--optimizer", "sgd", "--learning-rate", RATE)
        call("train", bundle, "--out", output, "--val-batches", 0, "--offload", offload, *options)
        assert Run.load(output).losses == pytest.approx(expected.losses, rel=1e-5)
        assert distance(saved(output), expected.end) < 1e-4 * moved
