import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx import nn
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import load_adapters

from helpers.commands import call, invoke, run, succeeded
from helpers.paths import DEMO_BUNDLE, DEMO_MODEL
from mesp.bundle.reader import Bundle
from mesp.commands.train import main
from mesp.engine.build import find_engine
from mesp.engine.process import find_plan
from mesp.errors import MespError
from mesp.reference import step_example

pytestmark = pytest.mark.slow
SEQ_LEN = 64
VAL_BATCHES = 8


def train(bundle: Path, output: Path, *options: object) -> subprocess.CompletedProcess:
    settings = ("--val-batches", VAL_BATCHES, "--optimizer", "sgd", "--out", output)
    return run("train", bundle, "--steps", 20, *settings, *options)


def records(output: Path, kind: str) -> list[dict]:
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == kind]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "demo.mesp"
    how = ("--quantize", "nearest", "--head-bits", 4)  # mlx-lm's quantization
    call("export", "--model", "demo", "--out", path, "--seq-len", SEQ_LEN, *how)
    return path


@pytest.fixture(scope="module")
def trained(bundle: Path) -> Path:
    output = bundle.parent / "run"
    succeeded(train(bundle, output))
    return output


def test_the_defaults_learn(bundle: Path, tmp_path: Path):
    losses = {}
    for name, options in {"default": (), "paper": ("--paper",)}.items():
        output = tmp_path / name
        steps = ("--steps", 60, "--val-batches", VAL_BATCHES)
        call("train", bundle, *steps, "--out", output, *options)
        losses[name] = [record["loss"] for record in records(output, "eval")]
    before, after = losses["default"]
    assert after < before - 0.4
    assert losses["paper"] == pytest.approx([before, before], abs=0.01)


def quantized_demo_model() -> nn.Module:
    model, _ = mlx_lm.load(str(DEMO_MODEL))
    model.set_dtype(mx.float32)
    nn.quantize(model, group_size=64, bits=4)
    return model


def held_out_loss(model: nn.Module, bundle: Path) -> float:
    tokens = mx.array(Bundle(bundle).tokens("valid"))
    windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(VAL_BATCHES)]
    lengths = mx.array([[0, SEQ_LEN]])
    losses = [default_loss(model, w[None].astype(mx.int32), lengths)[0] for w in windows]
    return mx.mean(mx.stack(losses)).item()


def test_a_bundle_without_held_out_data_trains(bundle: Path, tmp_path: Path):
    copy = shutil.copytree(bundle, tmp_path / "one.mesp")
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"prompt": "What is it?", "completion": " It is a test."}))
    refused = run("data", copy, "--data", data)
    assert refused.returncode == 2 and "--hold-out 0" in refused.stderr
    done = call("data", copy, "--data", data, "--hold-out", 0)
    assert "1 train example of" in done.stdout and "valid" not in done.stdout
    replay = ("--replay", 0.5, "--replay-data", data)
    call("train", copy, "--steps", 8, "--out", tmp_path / "run", *replay)
    first, *_, last = (record["loss"] for record in records(tmp_path / "run", "step"))
    assert last < first
    assert not records(tmp_path / "run", "eval")
    call("generate", copy, "--adapters", tmp_path / "run" / "adapters", "--prompt", "a")


def test_the_adapters_give_the_same_loss_in_mlx_lm(bundle: Path, trained: Path):
    model = quantized_demo_model()
    before, after = (record["loss"] for record in records(trained, "eval"))
    assert held_out_loss(model, bundle) == pytest.approx(before, abs=1e-3)
    load_adapters(model, str(trained / "adapters"))
    model.eval()
    assert held_out_loss(model, bundle) == pytest.approx(after, abs=1e-3)


def test_a_bundle_written_again_trains_alike(bundle: Path, trained: Path, tmp_path: Path):
    other = tmp_path / "other.mesp"
    for options in (("--seq-len", 32, "--rank", 4), ("--seq-len", f"{SEQ_LEN},32", "--rank", 8)):
        source = other if other.exists() else bundle
        call("export", "--from", source, "--out", other, "--overwrite", *options)
    succeeded(train(other, tmp_path / "run", "--seq-len", SEQ_LEN))
    losses = [[r["loss"] for r in records(o, "step")] for o in (trained, tmp_path / "run")]
    assert len(losses[0]) == 20 and losses[0] == losses[1]


def test_losses_of_masked_examples_are_mlx_lms(bundle: Path, tmp_path: Path):
    copy = shutil.copytree(bundle, tmp_path / "copy.mesp")
    records_of = {
        split: [{"prompt": f"What is {i}?", "completion": f"It is {i} times one."} for i in numbers]
        for split, numbers in (("train", range(40)), ("valid", range(100, 105)))
    }
    for split, lines in records_of.items():
        path = tmp_path / "data" / f"{split}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(map(json.dumps, lines)))
    call("data", copy, "--data", tmp_path / "data", "--mask-prompt")
    succeeded(train(copy, tmp_path / "run", "--batch-size", 2, "--steps", 1))

    model, opened = quantized_demo_model(), Bundle(copy)

    def loss(split: str, rows: list[tuple[int, int]]) -> tuple[float, int]:
        tokens, mask = opened.tokens(split), opened.mask(split)
        batch = [tokens[start : start + length].tolist() for start, length in rows]
        padded = mx.array([ids + [0] * (SEQ_LEN + 1 - len(ids)) for ids in batch])
        # `default_loss` takes the positions of the first and the last target, counted from 1.
        prompts = [np.argmax(mask[start : start + length]).item() for start, length in rows]
        lengths = [length - 1 for _, length in rows]
        ranges = mx.array(list(zip(prompts, lengths, strict=True)))
        loss, count = default_loss(model, padded, ranges)
        return loss.item(), count.item()

    first = records(tmp_path / "run", "eval")[0]
    expected, count = loss("valid", opened.examples("valid").tolist())
    assert first["tokens"] == count
    assert first["loss"] == pytest.approx(expected, rel=1e-4)
    examples = opened.examples("train").tolist()
    mask = opened.mask("train")
    taken = [step_example(sequence, 0, examples, mask, SEQ_LEN) for sequence in (0, 1)]
    expected, count = loss("train", taken)
    step = records(tmp_path / "run", "step")[0]
    assert (step["tokens"], step["loss"]) == (count, pytest.approx(expected, rel=1e-4))


@pytest.mark.parametrize(
    "options", [("--offload", "all"), ("--memory-limit", 30), ("--method", "mebp")]
)
def test_no_plan_changes_a_loss(bundle: Path, trained: Path, tmp_path: Path, options: tuple):
    succeeded(train(bundle, tmp_path / "run", *options))
    pairs = zip(records(trained, "step"), records(tmp_path / "run", "step"), strict=True)
    for expected, step in pairs:
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    plan = records(tmp_path / "run", "plan")[0]
    assert plan["offload"] == ("all" if "--offload" in options else "none")
    assert (step["written_bytes"] > 0) == (plan["offload"] == "all")


def test_dry_run_prints_the_plan_and_writes_nothing(bundle: Path, tmp_path: Path):
    done = succeeded(train(bundle, tmp_path / "run", "--dry-run"))
    assert "Predicted peak footprint" in done.stdout
    assert not (tmp_path / "run").exists()
    figures = re.findall(r"([\d.]+) MB with", done.stdout.splitlines()[-1])
    adamw, adamw8bit, sgd = map(float, figures)
    parameters = sum(block.lora_size(8) for block in Bundle(bundle).architecture.blocks)
    # the figures are rounded to 0.1 MB
    assert adamw - sgd == pytest.approx(8 * parameters / 1e6, abs=0.15)
    assert adamw8bit - sgd == pytest.approx(2 * parameters / 1e6, abs=0.15)


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac may have no GPU that MLX can use")
def test_a_gpu_has_a_plan_without_one(tmp_path: Path):
    settings = {"bundle": str(DEMO_BUNDLE), "output": str(tmp_path / "run"), "seq_len": 128}
    settings["device"] = "gpu"
    plan = find_plan(find_engine(), settings)
    assert plan["predicted_peak_bytes"] > plan["metal_bytes"] > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(sys.platform == "darwin", reason="a ledger is recorded on Linux only")
def test_dry_run_counts_a_step_on_a_gpu(tmp_path: Path):
    options = ("--seq-len", 128, "--device", "gpu", "--dry-run")
    done = succeeded(train(DEMO_BUNDLE, tmp_path / "run", *options))
    counted = "[0-9,]+ evals and [0-9,]+ kernels .*; MLX's arrays peak at ([0-9.]+) MB"
    assert float(re.search(counted, done.stdout.splitlines()[-1])[1]) > 0


def test_a_plan_stands_where_nothing_can_count_its_step(monkeypatch: pytest.MonkeyPatch):
    def find_no_counter() -> Path:
        raise MespError("mesp-count has not been built.")

    monkeypatch.setattr("mesp.engine.process.find_counter", find_no_counter)
    options = ("--steps", 1, "--device", "gpu", "--dry-run")
    done = invoke(main, "mesp-train", DEMO_BUNDLE, *options)
    assert done.returncode == 0 and "MB" in done.stdout and "kernels" not in done.stdout
    assert done.stderr == "A phone's work is not counted: mesp-count has not been built.\n"


def test_a_memory_limit_that_is_too_low_names_the_least(bundle: Path, tmp_path: Path):
    done = train(bundle, tmp_path / "run", "--memory-limit", 2)
    assert done.returncode == 2
    assert "at least" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "file", ["blocks/03.bin", "embedding.bin", f"block.{SEQ_LEN}.mlxfn", "data/train.bin"]
)
def test_a_flipped_byte_is_found(bundle: Path, tmp_path: Path, file: str):
    damaged = shutil.copytree(bundle, tmp_path / "damaged.mesp")
    data = bytearray((damaged / file).read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / file).write_bytes(data)
    done = train(damaged, tmp_path / "run")
    assert done.returncode == 2
    assert file in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
