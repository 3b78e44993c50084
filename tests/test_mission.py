"""Tests the whole path of a real model (`make test-slow`)."""

import json
import os
import subprocess
from pathlib import Path

import mlx_lm
import pytest

import collect
import push
from demo import write_data
from helpers.commands import call, invoke, succeeded
from helpers.paths import ROOT
from helpers.phones import Phones
from mesp.engine.build import mlx_folder
from mesp.runs.log import RunLog
from studies.benchmarks.in_python.mlx_lm_trainer import multiply_dequantized
from studies.tasks import spoken_notes

pytestmark = pytest.mark.mission

STEPS, HELD_OUT = 40, 8


def test_a_model_goes_to_the_phone_and_what_it_learned_comes_back(
    smollm2_gguf: Path, phones: Phones, tmp_path: Path
):
    data, bundle = tmp_path / "notes", tmp_path / "notes.mesp"
    train = spoken_notes.cases(STEPS, seed=0, held_out=False)
    write_data(data, train=train, valid=spoken_notes.cases(HELD_OUT, seed=0, held_out=True))
    size = ("--seq-len", 112, "--seq-len", 128)
    call("export", "--model", smollm2_gguf, "--data", data, *size, "--out", bundle)

    documents = phones.add("Phone").parent
    succeeded(invoke(push.main, "push.py", bundle, env=phones.environment()))
    bundle.rename(tmp_path / "here.mesp")
    bundle = tmp_path / "here.mesp"
    train_in_the_app(documents)
    collected = tmp_path / "collected"
    table = succeeded(
        invoke(collect.main, "collect.py", "--out", collected, env=phones.environment())
    )
    assert "finished" in table.stdout
    (folder,) = collected.iterdir()

    log = RunLog.load(folder)
    before, after = log.held_out
    assert log.last_step == STEPS and after < 0.5 * before

    adapters, fused = folder / "adapters", tmp_path / "fused"
    figures = tmp_path / "figures.json"
    options = ("--json", "--extract", r"\{[^}]*\}", "--max-tokens", 64, "--out", figures)
    call("evaluate", bundle, data / "valid.jsonl", "--adapters", adapters, *options)
    base, tuned = (
        [sample["f1"] for sample in each] for each in json.loads(figures.read_text())["samples"]
    )
    assert sum(tuned) > sum(base) + 0.2 * HELD_OUT

    call("fuse", bundle, "--adapters", adapters, "--out", fused, "--val-batches", 0)
    prompt = spoken_notes.cases(1, seed=1, held_out=True)[0].prompt
    ours = call("generate", bundle, "--adapters", adapters, "--prompt", prompt).stdout
    assert json.loads(in_mlx_lm(fused, prompt)).keys() == json.loads(ours).keys()


def train_in_the_app(documents: Path) -> None:
    # The Makefile builds the tests with the same options.
    command = ["swift", "test", "--configuration", "release", "-Xswiftc", "-enable-testing"]
    command += ["--no-parallel", "--filter", "MissionTests"]
    environment = {"MESP_HOST_MLX": str(mlx_folder()), "MESP_STEPS": str(STEPS)}
    environment |= {"MESP_DOCUMENTS": str(documents)}
    process = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr


def in_mlx_lm(model: Path, prompt: str) -> str:
    multiply_dequantized()
    network, tokenizer = mlx_lm.load(str(model))
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return mlx_lm.generate(network, tokenizer, ids, max_tokens=64)
