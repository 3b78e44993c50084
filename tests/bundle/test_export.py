import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from helpers.commands import run
from helpers.exports import NEAREST, export, exported, refused
from helpers.models import FAMILIES, TINY, random_tensors, write_model
from mesp import reference
from mesp.block_function import mlxfn
from mesp.block_function.check import check_functions
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.errors import MespError

pytestmark = pytest.mark.usefixtures("working_folder")


def test_summary_and_manifest(tiny, text):
    result = export(
        "--model", tiny, "--data", text, "--seq-len", "16,8", "--rank", "4,2", "--rank", 4
    )  # fmt: skip
    assert result.exit_code == 0 and result.stderr == ""
    manifest = Bundle("tiny.mesp").manifest
    assert (manifest.seq_lens, manifest.ranks) == ((8, 16), (2, 4))
    assert manifest.name == manifest.model.id == "tiny"
    for part in ("Wrote tiny.mesp", "3 blocks", "8 or 16 tokens", "rank 4: 26,880 parameters"):
        assert part in result.stdout
    for split, entry in manifest.data.items():
        assert f"{entry.tokens:,} {split}" in result.stdout
    written, given = (folder / "tokenizer.json" for folder in (Path("tiny.mesp"), tiny))
    assert written.read_bytes() == given.read_bytes()


def test_sources_of_one_model_give_one_bundle():
    tensors = {k: v.astype(mx.bfloat16) for k, v in random_tensors(TINY).items()}
    halves = {k: v.astype(mx.float16).astype(mx.bfloat16) for k, v in tensors.items()}
    tensors = {k: mx.where(halves[k] == v, v, 0) for k, v in tensors.items()}
    wide = {k: v.astype(mx.float32) for k, v in tensors.items()}
    small = {k: v.astype(mx.float16) for k, v in tensors.items()}
    sources = {
        name: write_model(Path(name), TINY, arrays)
        for name, arrays in {"float32": wide, "bfloat16": tensors, "float16": small}.items()
    }
    sources["sharded"] = write_model(Path("sharded"), TINY, tensors, shards=3)
    model, _ = load_model(sources["float32"])
    nn.quantize(model, 64, 4)
    quantized = dict(tree_flatten(model.parameters()))
    config = {**TINY, "quantization": {"bits": 4, "group_size": 64}}
    sources["quantized"] = write_model(Path("quantized"), config, quantized)

    digests = {}
    for name, folder in sources.items():
        how = () if name == "quantized" else NEAREST
        bundle = exported("--model", folder, "--seq-len", 8, *how)
        digests[name] = {f.path: f.sha256 for f in bundle.manifest.files if f.path.endswith(".bin")}
    assert len(digests["float32"]) == 4
    for name, files in digests.items():
        assert files == digests["float32"], name


@pytest.mark.usefixtures("stores_bfloat16")
def test_a_model_that_is_not_quantized_gets_scales_in_bfloat16(tiny):
    out = ("--out", "out.mesp", *NEAREST)
    assert run("export", "--model", tiny, "--seq-len", 8, *out).returncode == 0
    bundle = Bundle("out.mesp")
    name = "model.layers.1.mlp.up_proj.weight"
    weight, scales, _ = mx.quantize(random_tensors(TINY)[name], 64, 4)
    block = bundle.block(1)
    assert mx.array_equal(block["mlp.up_proj.weight"], weight)
    assert mx.array_equal(block["mlp.up_proj.scales"], scales.astype(mx.bfloat16))
    x, lora = mx.ones((1, 8, 128)), mx.zeros(bundle.architecture.blocks[0].lora_size(8))
    function = bundle.function(8, plain=True)
    assert function(x, lora, mx.array(1.0), bundle.block_words(0))[0].dtype == mx.float32


def test_first_layers_only(tiny):
    bundle = exported("--model", tiny, "--layers", 2, "--seq-len", 8)
    assert bundle.architecture.num_hidden_layers == 2
    assert json.loads(Path("out.mesp/config.json").read_text())["num_hidden_layers"] == 2
    assert not Path("out.mesp/blocks/02.bin").exists()
    assert "has 3 blocks" in refused("--model", tiny, "--layers", 4)
    folder = write_model(Path("smollm3"), FAMILIES["smollm3"])
    bundle = exported("--model", folder, "--layers", 1, "--seq-len", 8)
    assert len(bundle.architecture.mixers) == 1
    assert len(bundle.to_mlx_lm().layers) == 1


def test_model_without_data_has_none(tiny):
    result = export("--model", tiny, "--seq-len", 8)
    assert result.exit_code == 0 and "--data" in result.stdout
    assert Bundle("tiny.mesp").manifest.data == {}


def test_random_weights_of_a_folder_need_no_weights(tiny):
    Path("geometry").mkdir()
    shutil.copy(tiny / "config.json", "geometry")
    bundles = []
    for seed in (0, 0, 1):
        exported("--model", "geometry", "--random-weights", "--seq-len", 16, "--seed", seed)
        bundles.append(Path("out.mesp/blocks/01.bin").read_bytes())
    assert bundles[0] == bundles[1] != bundles[2]
    bundle = Bundle("out.mesp")
    weight = reference.dequantize(bundle.block(0), "mlp.up_proj.", 128)
    assert 0.018 < mx.std(weight).item() < 0.022
    for split in ("train", "valid"):
        assert (len(bundle.tokens(split)) - 1) // 16 >= 64


@pytest.mark.slow
def test_random_weights_of_a_known_model_need_no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = export(
        "--model", "Qwen2.5-0.5B", "--random-weights", "--layers", 1, "--seq-len", 8,
        "--quantize", "nearest", "--out", "out.mesp",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    arch = Bundle("out.mesp").architecture
    assert (arch.hidden_size, arch.vocab_size, arch.num_hidden_layers) == (896, 151936, 1)


def test_a_bundle_has_functions_for_a_gpu_and_plain_ones(tiny):
    bundle = exported("--model", tiny, "--seq-len", 8)
    (blocks,) = bundle.manifest.blocks
    assert (blocks.functions, blocks.plain_functions, blocks.packed_functions) == (
        {"8": "block.8.mlxfn"}, {"8": "block.plain.8.mlxfn"}, {},
    )  # fmt: skip
    for name, device in (("block.8.mlxfn", "gpu"), ("block.plain.8.mlxfn", "cpu")):
        file = Path("out.mesp", name).read_bytes()
        (function,) = check_functions(file, device)
        x, *_ = function.inputs.values()
        assert mlxfn.DTYPES[x.dtype[0]] == (mx.bfloat16 if device == "gpu" else mx.float32)
        assert (b"RMSNorm" in file) == (device == "gpu")


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_missing_is_named(tiny, text):
    exported("--model", tiny, "--seq-len", 8, "--data", text)
    said = "Error: MLX can use no GPU on this machine; leave out --device gpu.\n"
    for command in (
        ("train", "out.mesp", "--steps", 1, "--out", "run"),
        ("generate", "out.mesp", "--prompt", "a"),
        ("evaluate", "out.mesp", text),
        ("check", "out.mesp"),
    ):
        done = run(*command, "--device", "gpu")
        assert (done.returncode, done.stderr) == (2, said), command
    assert not Path("run").exists()


def test_functions_for_packed_records_come_with_such_data(tiny):
    records = [{"prompt": "one two", "completion": " three"} for _ in range(20)]
    Path("pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    files = ("--model", tiny, "--data", "pairs.jsonl", "--seq-len", 16)

    def functions(*options: str) -> dict[str, str]:
        assert export(*files, "--out", "out.mesp", "--overwrite", *options).exit_code == 0
        (blocks,) = read_manifest(Path("out.mesp")).blocks
        return blocks.packed_functions

    assert functions("--pack") == {"16": "block.packed.16.mlxfn"}
    bundle = Bundle(Path("out.mesp"))
    assert bundle.function_files() == {f"block.{k}16.mlxfn" for k in ("", "plain.", "packed.")}
    rewritten = ("--from", "out.mesp", "--out", "longer.mesp", "--seq-len", 24)
    assert run("export", *rewritten).returncode == 0
    (blocks,) = read_manifest(Path("longer.mesp")).blocks
    assert blocks.packed_functions == {"24": "block.packed.24.mlxfn"}

    assert functions() == {}
    bundle = Bundle(Path("out.mesp"))
    with pytest.raises(MespError, match="has no such function for 16 tokens; add one with"):
        bundle.function(16, packed=True)
    with pytest.raises(MespError, match="has no such function for 24 tokens; add one with"):
        bundle.function(24)
    for more in (("--pack",), ()):
        assert run("data", "out.mesp", "--data", "pairs.jsonl", *more).returncode == 0


def test_random_weights_of_a_hybrid_model_count():
    """No vector of the random weights contains 0, so that every mixer changes the logits."""
    for name in ("qwen3_5", "lfm2", "granite-mamba"):
        folder = write_model(Path(name), FAMILIES[name], {}, tokenizer=False)
        bundle = exported("--model", folder, "--random-weights", "--seq-len", 8)
        for i, block in enumerate(bundle.architecture.blocks):
            for array, _ in block.vectors().items():
                assert mx.all(bundle.block(i)[array] != 0), array
