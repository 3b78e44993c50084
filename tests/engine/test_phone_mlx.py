"""Tests that the phones' version of MLX reads this environment's exports and computes the same."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers import openblas  # noqa: F401, before MLX, as conftest.py does

# isort: split
import mlx.core as mx
import pytest

import mesp
from helpers.models import FAMILIES, write_model
from helpers.paths import DEMO_BUNDLE, ROOT
from mesp.block_function import mlxfn
from mesp.bundle.reader import Bundle
from mesp.engine.build import build_program, find_engine

PHONE = ROOT / ".venv" / "phone-mlx"  # `make test-slow` installs it there
LENGTH = 24
Arrays = dict[str, mx.array]


def export_families(folder: Path) -> Arrays:
    found = {}
    for name, config in FAMILIES.items():
        model, out = write_model(folder / name, config), folder / f"{name}.mesp"
        options = {"seq_len": LENGTH, "group_size": 32, "rank": 4}
        bundle = mesp.export(model, out=out, **options)
        found |= {f"{name} {file}": bundle.words(file) for file in bundle.weight_files()}
    return found


def functions(folder: Path) -> Arrays:
    found = {}
    for name in FAMILIES:
        bundle = Bundle(folder / f"{name}.mesp")
        for i, block in enumerate(bundle.architecture.blocks):
            if not bundle.group(i).functions:
                continue
            mx.random.seed(i)
            x = mx.random.normal((1, LENGTH, bundle.architecture.hidden_size))
            lora = 0.1 * mx.random.normal((block.lora_size(4),))
            given = map(mx.random.normal, block.given_shapes(LENGTH))
            inputs = (x, lora, mx.array(2.0), bundle.block_words(i), *given)
            outputs = bundle.function(LENGTH, i, plain=True)(*inputs)
            found |= {f"{name}, block {i}, output {n}": each for n, each in enumerate(outputs)}
    return found


def train(engine: Path, out: Path) -> Arrays:
    options = ["--steps", "20", "--optimizer", "adamw", "--out", out]
    command = [sys.executable, "-m", "mesp", "train", DEMO_BUNDLE, *options]
    subprocess.run(command, env=os.environ | {"MESP_ENGINE": str(engine)}, check=True)
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["type"] == "step"]
    adapters = mx.load(str(out / "adapters" / "adapters.safetensors"))
    return {"losses": mx.array(losses), **adapters}


def bits(array: mx.array) -> mx.array:
    return mx.contiguous(array).reshape(-1).view(mx.uint8)


@pytest.mark.phone
def test_the_mlx_of_phones_computes_what_this_one_does(tmp_path: Path):
    ours = export_families(tmp_path / "ours") | functions(tmp_path / "ours")
    ours |= train(find_engine(), tmp_path / "run")
    environment = os.environ | {"PYTHONPATH": f"{PHONE}:{ROOT / 'tests'}"}
    subprocess.run([sys.executable, __file__, tmp_path], env=environment, check=True)
    theirs = mx.load(str(tmp_path / "theirs" / "computed.safetensors"))
    assert ours.keys() == theirs.keys()
    apart = [name for name in ours if not mx.array_equal(bits(ours[name]), bits(theirs[name]))]
    assert apart == []


def main(folder: Path) -> None:
    assert mx.__version__ == mlxfn.MLX
    theirs = folder / "theirs"
    computed = export_families(theirs) | functions(folder / "ours")
    computed |= train(build_program(ROOT, theirs / "build"), theirs / "run")
    mx.save_safetensors(str(theirs / "computed.safetensors"), computed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
