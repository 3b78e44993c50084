import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from helpers.commands import call
from helpers.models import (
    FAMILIES,
    TEXT,
    TINY,
    published,
    random_tensors,
    write_model,
    write_model_in_5_bits,
)
from mesp.engine.process import find_count
from mesp.runs.log import RunLog

LENGTH = 256


def exported(folder: Path, *options: object) -> Path:
    bundle = folder / "bundle.mesp"
    call("export", "--out", bundle, "--seq-len", LENGTH, *options)
    return bundle


def exported_with_text(folder: Path, model: Path, length: int, *options: object) -> Path:
    text = folder / "text.txt"
    text.write_text(TEXT * (1 + 16 * length // len(TEXT)))
    bundle, data = folder / "bundle.mesp", ("--data", text, "--seq-len", length)
    call("export", "--model", model, "--out", bundle, *data, *options)
    return bundle


def peaks(bundle: Path, output: Path, *options: object) -> tuple[int, int]:
    """Returns the predicted and the measured peak."""
    call("train", bundle, "--val-batches", 0, *options, "--out", output)
    run = RunLog.load(output)
    return run.plan["predicted_peak_bytes"], run.end["footprint_peak_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["SmolLM2-135M", "Gemma-3-270m", "Qwen2.5-0.5B"])
def test_a_run_takes_what_was_predicted(model: str, tmp_path: Path, monkeypatch):
    """Models have their true widths and vocabulary, in float32 on the CPU.

    Only one thread computes. On a busy machine further threads may never run, so their memory
    varies.
    """
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    options = ("--random-weights", "--layers", 4, "--quantize", "nearest")
    bundle = exported(tmp_path, "--model", model, *options, "--seq-len", f"{LENGTH},1024")
    kinds = [("--seq-len", LENGTH, "--offload", "all" if model == "Gemma-3-270m" else "none")]
    if model == "Gemma-3-270m":
        kinds += [("--seq-len", 1024, "--projections", "q,v")]
    if model == "SmolLM2-135M":
        others = [("--offload", "all"), ("--projections", "q,v"), ("--freeze-a",)]
        kinds += [("--seq-len", LENGTH, *other) for other in others]
    for kind in kinds:
        # Gaps in the heap make the peaks of two runs differ by up to 1 MB in 16. So a prediction
        # may fit only the second or third run.
        for attempt in range(3):
            output = tmp_path / f"{attempt}{''.join(map(str, kind))}"
            predicted, measured = peaks(bundle, output, "--steps", 2, *kind)
            if measured == pytest.approx(predicted, rel=0.08):
                break
        assert measured == pytest.approx(predicted, rel=0.08), kind


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "granite-mamba"])
def test_a_long_sequence_takes_no_more_than_predicted(family: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    long, config = 8192, FAMILIES[family] | {"max_position_embeddings": 8192}
    source = write_model(tmp_path / "model", config)
    bundle = exported_with_text(tmp_path, source, long, "--seq-len", LENGTH)
    options = ("--seq-len", long, "--steps", 1, "--offload", "all")
    predicted, measured = peaks(bundle, tmp_path / "run", *options)
    # A tiny model's widths are not realistic, so the prediction is less exact here.
    assert 0.5 * predicted < measured < 1.08 * predicted


@pytest.mark.slow
@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_moe", "qwen3_5_moe"])
def test_a_mixture_takes_no_more_than_predicted(family: str, tmp_path: Path, monkeypatch):
    """All tokens choose the same experts."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    length = 1024
    config = FAMILIES[family] | {"hidden_size": 768, "moe_intermediate_size": 512}
    config |= {"max_position_embeddings": length}
    tensors = random_tensors(config)
    for name in tensors:
        if name.endswith((".gate.weight", ".expert_bias")):
            tensors[name] = mx.zeros(tensors[name].shape)
    source = write_model(tmp_path / "model", *published(config, tensors))
    bundle = exported_with_text(tmp_path, source, length, "--quantize", "nearest")
    for offload in ("none", "all"):
        options = ("--steps", 2, "--offload", offload)
        predicted, measured = peaks(bundle, tmp_path / offload, *options)
        assert measured < 1.08 * predicted, offload


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="a ledger is recorded on Linux only")
def test_a_gpu_takes_as_many_kernels_for_any_bits(tmp_path: Path):
    counts = []
    for name, write in (("four", write_model), ("five", write_model_in_5_bits)):
        source = write(tmp_path / name / "model", TINY)
        options = ("--group-size", 32) if name == "four" else ()
        bundle = exported(tmp_path / name, "--model", source, *options)
        settings = {"bundle": str(bundle), "seq_len": LENGTH, "rank": 8}
        counts.append(find_count(settings))
    for figure in ("evals", "kernels", "tflop"):
        assert counts[0][figure] == counts[1][figure] > 0


def test_a_run_that_goes_on_has_a_plan(bundle: Path, tmp_path: Path):
    call("train", bundle, "--steps", 1, "--out", tmp_path / "run")
    planned = call("train", "--resume", "--steps", 2, "--dry-run", "--out", tmp_path / "run")
    assert planned.stdout == call("train", bundle, "--steps", 2, "--dry-run").stdout


@pytest.mark.growth
def test_the_footprint_does_not_grow(bundle: Path, tmp_path: Path):
    """A line is fitted after the first 5% of 2,000 steps. It rises by more in a memory leak."""
    call("train", bundle, "--steps", 2000, "--eval-every", 200, "--out", tmp_path / "run")
    steps = RunLog.load(tmp_path / "run").steps[100:]
    numbers, footprints = ([each[name] for each in steps] for name in ("step", "footprint_bytes"))
    assert 2000 * np.polyfit(numbers, footprints, 1)[0] <= 1e6
