import json
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from helpers.commands import call, invoke
from helpers.exports import content
from helpers.models import FAMILIES, TEXT, write_model
from helpers.paths import DEMO_BUNDLE
from mesp.__main__ import main
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.engine.process import find_count
from mesp.errors import MespError
from studies.benchmarks.cells import without_functions

LENGTH = 24
KINDS = ("functions", "plain_functions", "packed_functions")


@pytest.fixture
def bare(tiny: Path, text: Path, tmp_path: Path) -> Path:
    options = ("--data", text, "--seq-len", LENGTH, "--rank", 4)
    call("export", "--model", tiny, "--out", tmp_path / "whole.mesp", *options)
    return without_functions(tmp_path / "whole.mesp", tmp_path / "bare.mesp")


def test_it_needs_no_known_layout_of_functions(bare: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mx, "__version__", "0.33.0")
    bundle = Bundle(bare)
    bundle.verify()
    assert bundle.function_files() == set()
    said = "Block 2 of .* has no function; add one with mesp-export --from"
    with pytest.raises(MespError, match=said):
        bundle.function(LENGTH, 2)
    with pytest.raises(MespError, match="The layout of the functions of MLX"):
        Bundle(bare.with_name("whole.mesp")).function(LENGTH)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_blocks_has_all_functions_or_none(bare: Path, kind: str):
    manifest = json.loads((bare / "manifest.json").read_text())
    manifest["blocks"][0][kind] = {str(LENGTH): "config.json"}
    (bare / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MespError, match="is damaged"):
        Bundle(bare)


def test_written_again_it_has_functions(bare: Path):
    whole, again = bare.with_name("whole.mesp"), bare.with_name("again.mesp")
    wanted = read_manifest(whole)
    call("export", "--from", bare, "--out", again)
    Bundle(again).verify()
    # The ids of a function's arrays differ from one trace to the next.
    assert replace(read_manifest(again), files=()) == replace(wanted, files=())
    assert content(again).keys() == content(whole).keys()


def test_a_gpu_packs_records_without_functions(bare: Path, tmp_path: Path):
    records = [{"prompt": "one two", "completion": " three"} for _ in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    options = ("--data", tmp_path / "pairs.jsonl", "--pack")
    call("data", bare, *options)
    call("export", "--from", bare, "--overwrite")
    (blocks,) = read_manifest(bare).blocks
    assert blocks.packed_functions.keys() == {str(LENGTH)}


def test_every_command_takes_it(tmp_path: Path):
    bare = without_functions(DEMO_BUNDLE, tmp_path / "bare.mesp")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    said = []
    for bundle in (DEMO_BUNDLE, bare):
        output = tmp_path / bundle.stem
        options = ("--steps", 2, "--val-batches", 2, "--seq-len", 128, "--out", output)
        call("train", bundle, *options)
        records = list(map(json.loads, (output / "metrics.jsonl").read_text().splitlines()))
        losses = [each["loss"] for each in records if each["type"] in ("step", "eval")]
        prompt = ("--prompt", "def ", "--max-tokens", 12, "--temperature", 0)
        written = call("generate", bundle, *prompt, "--adapters", output / "adapters")
        measured = call("evaluate", bundle, text, "--adapters", output / "adapters")
        call("fuse", bundle, "--adapters", output / "adapters", "--out", output / "fused")
        fused = (output / "fused" / "model.safetensors").read_bytes()
        assert len(losses) == 4
        said.append((losses, written.stdout, measured.stdout.replace(str(output), ""), fused))
    assert said[0] == said[1]
    checked = invoke(main, "mesp", "check", bare)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout == f"The files of {bare} are whole; none of 5 checks failed.\n"

    call("train", bare, "--steps", 1, "--method", "mebp", "--out", tmp_path / "mebp")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5", "lfm2", "qwen3_moe"])
def test_losses_of_other_families_are_the_same(family: str, tmp_path: Path):
    source = write_model(tmp_path / "model", FAMILIES[family])
    (tmp_path / "text.txt").write_text(TEXT)
    options = ("--data", tmp_path / "text.txt", "--seq-len", LENGTH)
    whole = tmp_path / "whole.mesp"
    call("export", "--model", source, "--out", whole, *options)
    losses = []
    for bundle in (whole, without_functions(whole, tmp_path / "bare.mesp")):
        output = tmp_path / bundle.stem
        call("train", bundle, "--steps", 2, "--val-batches", 0, "--out", output)
        records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        losses.append([each["loss"] for each in records if each["type"] == "step"])
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="a ledger is recorded on Linux only")
@pytest.mark.parametrize("limit", [None, 400])
@pytest.mark.usefixtures("stores_bfloat16")
def test_a_gpu_takes_no_more_memory_than_predicted(limit: int | None, tmp_path: Path):
    """The model is as wide as a real one, so its MLP is cut into tiles of tokens."""
    model = ("--model", "Qwen2.5-0.5B", "--random-weights", "--layers", 2)
    whole = tmp_path / "whole.mesp"
    call("export", *model, "--out", whole, "--seq-len", 1024)
    bare = without_functions(whole, tmp_path / "bare.mesp")
    settings = {"seq_len": 1024, "rank": 8, "memory_limit_mb": limit}
    with_functions, without = (find_count({"bundle": str(b), **settings}) for b in (whole, bare))
    for rules in ("fast", "strict", "slow"):
        count = without[rules]
        assert count["ledger_peak_bytes"] <= count["predicted_peak_bytes"], rules
        assert count["predicted_peak_bytes"] == with_functions[rules]["predicted_peak_bytes"]
    assert without["kernels"] > with_functions["kernels"]
