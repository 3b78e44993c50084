"""mesp-export through its command line."""

import errno
import hashlib
import http.server
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from click.testing import CliRunner, Result
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from helpers.commands import run
from helpers.models import (
    FAMILIES,
    TEXT,
    TINY,
    mlx_lm_model,
    published,
    random_tensors,
    write_mixed_model,
    write_model,
    write_tokenizer,
)
from mesp import reference
from mesp.block_function import mlxfn
from mesp.bundle import rewriter
from mesp.bundle.manifest import ModelName, read_manifest
from mesp.bundle.reader import Bundle
from mesp.commands.export import main
from mesp.evaluation.evaluate import MAX_LENGTH, context_of
from mesp.models.quantization import Quantization

NEAREST = ("--quantize", "nearest", "--head-bits", 4)  # as `nn.quantize` makes it
COMMAND = str(Path(sys.executable).with_name("mesp-export"))


def export(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def exported(*arguments: object) -> Bundle:
    """Exports to ``out.mesp`` in the working folder."""
    result = export(*arguments, "--out", "out.mesp", "--overwrite")
    assert result.exit_code == 0, result.output
    bundle = Bundle("out.mesp")
    bundle.verify()
    return bundle


def refused(*arguments: object) -> str:
    """The one sentence that an export is refused with, having left nothing behind."""
    before = sorted(Path().rglob("*"))
    result = export(*arguments)
    assert result.exit_code == 2, result.output
    assert sorted(Path().rglob("*")) == before
    assert result.stdout == ""
    *_, line = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


@pytest.fixture(autouse=True)
def working_folder(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("work")
    monkeypatch.chdir(folder)
    return folder


def test_bundle_computes_what_mlx_lm_computes(tiny, text):
    """Embedding, every block's function and the head give the logits of the quantized model."""
    bundle = exported("--model", tiny, "--data", text, "--seq-len", 24, "--rank", 4, *NEAREST)
    model, _ = load_model(tiny)
    nn.quantize(model, 64, 4)
    tokens = mx.array(bundle.tokens("train")[:24])
    expected = model(tokens[None])

    arch = bundle.architecture
    rows = {name: a[tokens] for name, a in bundle.embedding().items() if name != "norm"}
    x = reference.dequantize(rows, "", arch.hidden_size)[None]
    function = bundle.function(24)
    lora = mx.zeros(arch.blocks[0].lora_size(4))
    for i in range(arch.num_hidden_layers):
        x = function(x, lora, mx.array(1.0), bundle.block_words(i))[0]
    head = bundle.head()
    x = reference.rms_norm(x, head["norm"], arch.rms_norm_eps)
    logits = x @ reference.dequantize(head, "", arch.hidden_size).T
    assert mx.linalg.norm(logits - expected) <= 1e-5 * mx.linalg.norm(expected)


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
    assert (
        Path("tiny.mesp", "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()
    )
    bundle = Bundle("tiny.mesp")
    for plain in (False, True):
        for rank in (2, 4):
            lora = mx.zeros(bundle.architecture.blocks[0].lora_size(rank))
            for seq_len in (8, 16):
                function = bundle.function(seq_len, plain=plain)
                x = mx.ones((1, seq_len, 128))
                y = function(x, lora, mx.array(1.0), bundle.block_words(0))[0]
                assert mx.isfinite(y).all()


def test_sources_of_one_model_give_one_bundle():
    """Whatever the file's dtype, sharded, or quantized before by mlx-lm."""
    tensors = {k: v.astype(mx.bfloat16) for k, v in random_tensors(TINY).items()}
    halves = {k: v.astype(mx.float16).astype(mx.bfloat16) for k, v in tensors.items()}
    # Values that float16 and bfloat16 both hold.
    tensors = {k: mx.where(halves[k] == v, v, 0) for k, v in tensors.items()}
    wide = {k: v.astype(mx.float32) for k, v in tensors.items()}
    sources = {
        "float32": write_model(Path("float32"), TINY, wide),
        "bfloat16": write_model(Path("bfloat16"), TINY, tensors),
        "float16": write_model(
            Path("float16"), TINY, {k: v.astype(mx.float16) for k, v in tensors.items()}
        ),
        "sharded": write_model(Path("sharded"), TINY, tensors, shards=3),
    }
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


def test_other_quantization(tiny):
    how = ("--bits", 8, "--group-size", 32, "--quantize", "nearest")
    bundle = exported("--model", tiny, *how, "--seq-len", 8)
    name = "model.layers.1.self_attn.o_proj.weight"
    expected = mx.quantize(random_tensors(TINY)[name], 32, 8)
    for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(bundle.block(1)[f"self_attn.o_proj.{part}"], array)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_modes_of_mlx(tiny, mode):
    bundle = exported("--model", tiny, "--mode", mode, "--seq-len", 8)
    name = "model.layers.1.mlp.down_proj.weight"
    weight, scales = mx.quantize(random_tensors(TINY)[name], mode=mode)
    block = bundle.block(1)
    assert mx.array_equal(block["mlp.down_proj.weight"], weight)
    assert mx.array_equal(block["mlp.down_proj.scales"], scales)
    assert "mlp.down_proj.biases" not in block and "biases" not in bundle.head()
    quantization = bundle.manifest.quantization
    assert quantization.mode == mode
    assert f"{mode}, {quantization.bits} bits" in export("--model", tiny, "--mode", mode).stdout
    assert "leave out" in refused("--model", tiny, "--mode", mode, "--group-size", 64)


# A model as mlx-lm quantizes it, by its name.
QUANTIZED = {
    **{recipe: recipe for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")},
    **{f"{bits} bits": Quantization(bits, 64) for bits in (2, 3, 5, 6, 8)},
    "nvfp4": Quantization(4, 16, "nvfp4"),
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints_are_taken_as_they_are(name):
    """Every mode, width and mixture of mlx-lm's, with a head of its own."""
    config = {**TINY, "tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128}
    folder = Path("checkpoint")
    how = QUANTIZED[name]
    if isinstance(how, str):
        write_mixed_model(folder, config, how)
    else:
        model = mlx_lm_model(config, lambda _: how)
        tensors = dict(tree_flatten(model.parameters()))
        write_model(folder, {**config, "quantization": asdict(how)}, tensors)
    expected = mx.load(str(folder / "model.safetensors"))

    bundle = exported("--model", folder, "--seq-len", 8)
    found = dict(tree_flatten(bundle.to_mlx_lm().parameters()))
    assert found.keys() == expected.keys()
    for array in expected:
        assert mx.array_equal(found[array], expected[array]), array
    again = json.loads(Path("out.mesp/config.json").read_text())["quantization"]
    assert again == json.loads((folder / "config.json").read_text())["quantization"]
    assert len(bundle.manifest.blocks) == (2 if isinstance(how, str) else 1)
    other = "some matrices otherwise" in export("--model", folder, "--out", "b.mesp").stdout
    assert other == isinstance(how, str)


def test_gemma_3_with_a_head_of_its_own():
    """Older versions of mlx-lm wrote the embedding a second time, quantized too."""
    config = {**FAMILIES["gemma3_text"], "tie_word_embeddings": True}
    tensors = random_tensors(config)
    model = mlx_lm_model(config, lambda _: Quantization(4, 32))
    tensors = dict(tree_flatten(model.parameters()))
    wide = mx.quantize(random_tensors(config)["model.embed_tokens.weight"], 32, 8)
    for part, array in zip(("weight", "scales", "biases"), wide, strict=True):
        tensors[f"lm_head.{part}"] = array
    quantization = {"bits": 4, "group_size": 32, "lm_head": {"bits": 8, "group_size": 32}}
    write_model(Path("gemma"), {**config, "quantization": quantization}, tensors)
    bundle = exported("--model", "gemma", "--seq-len", 8)
    assert bundle.head()["weight"].shape == (320, 16) and bundle.embedding()["weight"].shape == (
        320,
        8,
    )
    tokens = mx.array([[1, 2, 3]])
    expected, _ = load_model(Path("gemma"))
    assert mx.array_equal(bundle.to_mlx_lm()(tokens), expected(tokens))


def test_bfloat16(tiny):
    bundle = exported("--model", tiny, "--dtype", "bfloat16", "--seq-len", 8, *NEAREST)
    name = "model.layers.1.mlp.up_proj.weight"
    weight, scales, _ = mx.quantize(random_tensors(TINY)[name], 64, 4)
    block = bundle.block(1)
    assert mx.array_equal(block["mlp.up_proj.weight"], weight)
    assert mx.array_equal(block["mlp.up_proj.scales"], scales.astype(mx.bfloat16))
    x = mx.ones((1, 8, 128), mx.bfloat16)
    lora = mx.zeros(bundle.architecture.blocks[0].lora_size(8))
    function = bundle.function(8)
    assert function(x, lora, mx.array(1.0), bundle.block_words(0))[0].dtype == mx.bfloat16


def test_head_that_is_not_the_embedding():
    config = {**TINY, "num_hidden_layers": 1, "tie_word_embeddings": False}
    bundle = exported("--model", write_model(Path("untied"), config), "--seq-len", 8, *NEAREST)
    tensors = random_tensors(config)
    for table, name in ((bundle.embedding(), "model.embed_tokens"), (bundle.head(), "lm_head")):
        assert mx.array_equal(table["weight"], mx.quantize(tensors[name + ".weight"], 64, 4)[0])
    assert "norm" in bundle.head() and "norm" not in bundle.embedding()


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
        "--out", "out.mesp",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    arch = Bundle("out.mesp").architecture
    assert (arch.hidden_size, arch.vocab_size, arch.num_hidden_layers) == (896, 151936, 1)


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a GPU")
def test_auto_device_is_the_cpu_where_there_is_no_gpu(tiny):
    assert exported("--model", tiny, "--seq-len", 8).manifest.device == "cpu"


def test_a_bundle_for_the_gpu_is_written_on_every_machine(tiny):
    """Its functions are for a GPU, the rest is as for the CPU; without a GPU it is not run."""
    options = ("--model", tiny, "--seq-len", 8, "--dtype", "float32")
    cpu = exported(*options, "--device", "cpu").manifest
    done = export(*options, "--device", "gpu", "--out", "gpu.mesp")
    assert done.exit_code == 0, done.output
    assert "float32 on the GPU" in done.stdout
    gpu = read_manifest(Path("gpu.mesp"), to_run=False)
    functions = {f for f in content(Path("gpu.mesp")) if f.endswith(".mlxfn")}
    names = {"block.8.mlxfn", "block.plain.8.mlxfn"}
    assert functions == names | {f"mlx-0.32.2/{name}" for name in names}
    cpu, gpu = (
        replace(each, files=tuple(f for f in each.files if f.path not in functions))
        for each in (cpu, gpu)
    )
    (of_gpu,) = gpu.blocks
    assert of_gpu.plain_functions == {"8": "block.plain.8.mlxfn"}
    blocks = (replace(of_gpu, plain_functions={"8": "block.8.mlxfn"}),)
    assert replace(gpu, blocks=blocks) == replace(cpu, device="gpu")
    for name in functions:
        file = Path("gpu.mesp", name).read_bytes()
        assert mlxfn.on_device(file, "gpu") == file != mlxfn.on_device(file, "cpu")
        assert (b"RMSNorm" in file) == ("plain" not in name)
    if not mx.metal.is_available():
        trained = run("train", "gpu.mesp", "--steps", 1, "--out", "run")
        assert trained.returncode == 2
        [sentence] = trained.stderr.splitlines()
        assert sentence.endswith(
            "gpu.mesp was exported for a GPU, and this machine has none that MLX can use; "
            "write it anew with mesp-export --from and --device cpu."
        )


def test_functions_for_the_gpu_are_of_the_mlx_whose_files_are_known(tiny, monkeypatch):
    monkeypatch.setattr(mx, "__version__", "0.33.0")
    said = refused("--model", tiny, "--device", "gpu")
    assert "The layout of the functions of MLX '0.33.0' is not known; install an mlx" in said
    assert exported("--model", tiny, "--device", "cpu").manifest.device == "cpu"


# A bundle written anew


def renumbered(file: bytes, monkeypatch) -> bytes:
    """A file of one trace with its arrays numbered as they come: their ids are addresses."""
    places: list[int] = []

    class Reader(mlxfn._Reader):
        def take(self, codes: str) -> tuple:
            if ids := re.fullmatch(r"(\d+)Q|Q\?", codes):
                places.extend(self.at + 8 * i for i in range(int(ids[1] or 1)))
            return super().take(codes)

    with monkeypatch.context() as patch:
        patch.setattr(mlxfn, "_Reader", Reader)
        mlxfn.primitives(file)
    numbers: dict[bytes, bytes] = {}
    out = bytearray(file)
    for at in places:
        out[at : at + 8] = numbers.setdefault(file[at : at + 8], len(numbers).to_bytes(8, "little"))
    return bytes(out)


OLD = ("--seq-len", "3,9", "--rank", 3, "--device", "cpu")
GEMMA = {"num_hidden_layers": 4, "layer_types": None}


@pytest.mark.parametrize(
    "changes",
    [
        ("--device", "cpu", "--dtype", "float32"),
        ("--device", "gpu", "--dtype", "float32"),
        ("--device", "gpu", "--dtype", "bfloat16"),
    ],
)
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "phi3"])
def test_a_bundle_written_anew_is_that_of_an_export(name, changes, text, monkeypatch):
    """Manifest, weights and data to the byte, and functions but for the ids of their arrays."""
    config = {**FAMILIES[name], **(GEMMA if name == "gemma3_text" else {})}
    options = ("--model", write_model(Path("model"), config), "--data", text, "--group-size", 32)
    options += NEAREST  # which rounds scales to bfloat16 last, as writing a bundle anew does
    lengths = ("--seq-len", "9,4", "--rank", 2)
    for arguments in (
        (*options, *OLD, "--out", "old.mesp"),
        (*options, *lengths, *changes, "--out", "model.mesp"),
        ("--from", "old.mesp", *lengths, *changes, "--out", "anew.mesp"),
    ):
        done = export(*arguments)
        assert done.exit_code == 0, done.output
    assert "Wrote anew.mesp" in done.stdout
    fresh, anew = (read_manifest(Path(p), to_run=False) for p in ("model.mesp", "anew.mesp"))
    Bundle("anew.mesp", to_run=False).verify()
    functions = 0
    listed = []
    for of_fresh, of_anew in zip(fresh.files, anew.files, strict=True):
        if of_fresh.path.endswith(".mlxfn"):
            files = [Path(p, of_fresh.path).read_bytes() for p in ("model.mesp", "anew.mesp")]
            assert renumbered(files[0], monkeypatch) == renumbered(files[1], monkeypatch)
            of_anew = replace(of_anew, sha256=of_fresh.sha256)
            functions += 1
        listed.append(of_anew)
    assert functions >= (4 if "gpu" in changes else 2)
    assert replace(anew, files=tuple(listed)) == replace(fresh, name="model")


@pytest.fixture
def old(tiny, text) -> Path:
    """A bundle, whose lengths are 8 and 16."""
    done = export("--model", tiny, "--data", text, "--seq-len", "8,16", "--out", "old.mesp")
    assert done.exit_code == 0, done.output
    return Path("old.mesp")


def content(bundle: Path) -> dict[str, bytes]:
    return {str(f.relative_to(bundle)): f.read_bytes() for f in bundle.rglob("*") if f.is_file()}


def test_a_bundle_written_anew_in_place_keeps_its_weights_and_data(old):
    """They are the same files; only functions are others."""
    before = {path: (old / path).stat().st_ino for path in content(old)}
    options = ("--seq-len", 24, "--rank", "2,4", "--overwrite")
    assert export("--from", old, *options).exit_code == 0
    bundle = Bundle(old)
    bundle.verify()
    assert (bundle.manifest.seq_lens, bundle.manifest.ranks) == ((24,), (2, 4))
    for rank in (2, 4):
        lora = mx.zeros(bundle.architecture.blocks[0].lora_size(rank))
        x = mx.ones((1, 24, 128))
        y = bundle.function(24)(x, lora, mx.array(1.0), bundle.block_words(0))[0]
        assert mx.isfinite(y).all()
    functions = {"block.24.mlxfn", "mlx-0.32.2/block.24.mlxfn"}
    assert content(old).keys() - before.keys() == functions
    gone = {"block.8.mlxfn", "block.16.mlxfn"}
    assert before.keys() - content(old).keys() == gone | {f"mlx-0.32.2/{name}" for name in gone}
    for path in content(old).keys() - functions - {"manifest.json"}:
        assert (old / path).stat().st_ino == before[path]
    assert [p.name for p in Path().iterdir() if "mesp" in p.name] == [old.name]


def test_a_bundle_written_anew_where_links_cannot_be_has_copies(old, monkeypatch):
    def no_links(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    assert export("--from", old, "--out", "anew.mesp").exit_code == 0
    Bundle("anew.mesp").verify()
    weights = Path("blocks", "00.bin")
    assert (old / weights).stat().st_ino != Path("anew.mesp", weights).stat().st_ino


def test_a_bundle_in_bfloat16_written_anew_in_float32_keeps_its_numbers(tiny):
    """They are those of bfloat16, not of the model."""
    options = ("--model", tiny, "--seq-len", 8, "--out", "old.mesp", "--dtype", "bfloat16")
    assert export(*options, "--device", "gpu").exit_code == 0
    rewritten = ("--from", "old.mesp", "--overwrite", "--dtype", "float32", "--device", "cpu")
    rounded = Bundle("old.mesp", to_run=False)
    before = [{n: a.astype(mx.float32) for n, a in rounded.block(i).items()} for i in range(3)]
    assert export(*rewritten).exit_code == 0
    bundle = Bundle("old.mesp")
    for i, arrays in enumerate(before):
        for name, array in bundle.block(i).items():
            assert mx.array_equal(array.astype(mx.float32), arrays[name]), name
    assert bundle.block(0)["input_layernorm.weight"].dtype == mx.float32


def edit(bundle: Path, **changes: object) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_bundle_of_another_mlx_is_written_anew_for_this_one(old):
    edit(old, mlx_version="0.0.1", layouts={})
    trained = run("train", old, "--steps", 1, "--out", "run")
    assert trained.returncode == 2 and "mesp-export --from" in trained.stderr
    assert export("--from", old, "--overwrite").exit_code == 0
    bundle = Bundle(old)
    assert bundle.manifest.seq_lens == (8, 16)
    bundle.function(16)


def test_layouts_that_a_bundle_lacks_are_added_without_a_trace(old, monkeypatch):
    """To a bundle of a version that knew only the first."""
    both = content(old)
    shutil.rmtree(old / "mlx-0.32.2")
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["layouts"]
    edit(old, layouts={}, files=[f for f in manifest["files"] if "mlx-" not in f["path"]])
    Bundle(old, to_run=False).verify()

    def no_trace(*_: object) -> None:
        raise AssertionError("a function is traced")

    with monkeypatch.context() as patch:
        patch.setattr(rewriter, "write_functions", no_trace)
        assert export("--from", old, "--overwrite").exit_code == 0
    assert content(old) == both
    Bundle(old).verify()
    Bundle(old).function(16)


def test_a_file_that_is_no_function_is_not_put_in_a_layout(old):
    manifest = json.loads((old / "manifest.json").read_text())
    (old / "block.8.mlxfn").write_bytes(b"nothing")
    entry = {"path": "block.8.mlxfn", "size": 7, "sha256": hashlib.sha256(b"nothing").hexdigest()}
    others = [
        f for f in manifest["files"] if "mlx-" not in f["path"] and f["path"] != entry["path"]
    ]
    edit(old, layouts={}, files=[entry, *others])
    before = content(old)
    assert "block.8.mlxfn is no function of mesp-export's" in refused("--from", old, "--overwrite")
    assert content(old) == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--out"),
        (["--out", "old.mesp"], "old.mesp exists"),
        (["--overwrite", "--model", "demo"], "--model"),
        (["--overwrite", "--data", "text.txt", "--no-pack"], "--data, --pack"),
        (["--overwrite", "--bits", 4, "--layers", 1], "--bits, --layers"),
        (["--overwrite", "--seq-len", "8,100000"], "100000"),
    ],
)
def test_what_cannot_be_written_anew_is_refused(old, arguments, named):
    before = content(old)
    assert named in refused("--from", old, *arguments)
    assert content(old) == before


def test_only_a_sound_bundle_of_this_format_is_written_anew(old, tiny):
    assert "is not a bundle" in refused("--from", tiny, "--overwrite")
    weights = old / "blocks" / "01.bin"
    sound = weights.read_bytes()
    weights.write_bytes(sound[:5000] + b"?" + sound[5001:])
    assert "01.bin is damaged" in refused("--from", old, "--overwrite")
    weights.write_bytes(sound)
    edit(old, device="tpu")
    assert "manifest.json is damaged" in refused("--from", old, "--overwrite")
    edit(old, device="cpu", format=1)
    assert "bundle format 1" in refused("--from", old, "--overwrite")


def test_a_bundle_whose_rewriting_fails_stays(old, monkeypatch):
    before = content(old)

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rewriter, "write_functions", full_disk)
    assert "disk is full" in refused("--from", old, "--overwrite")
    assert "disk is full" in refused("--from", old, "--out", "anew.mesp")
    assert content(old) == before


# The Hub


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves one model and one dataset as the Hugging Face Hub does."""

    repositories: dict[str, dict[str, bytes]]  # files by name, by the repository's path
    revision = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self):
        path = self.path.split("?")[0]
        # /api/models/org/model/revision/main, /datasets/org/data/resolve/REVISION/train.jsonl
        asked = re.fullmatch(r"(/api)?/(?:(models|datasets)/)?(org/\w+)(/.*)?", path)
        api, kind, name, rest = asked.groups() if asked else (None, None, None, None)
        files = self.repositories.get(f"{kind or 'models'}/{name}")
        if name == "org/gated" and not api:
            self.reply(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif files is None:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif api and "/tree/" in (rest or ""):
            tree = [
                {"type": "file", "path": path, "size": len(content), "oid": path}
                for path, content in files.items()
            ]
            self.reply(200, json.dumps(tree).encode())
        elif api:
            siblings = [{"rfilename": path} for path in files]
            info = {"_id": "0", "id": name, "sha": self.revision, "siblings": siblings}
            self.reply(200, json.dumps(info).encode())
        else:
            file = rest.split("/", 3)[3]
            headers = {"ETag": f'"{name}/{file}"', "X-Repo-Commit": self.revision}
            if file in files:
                self.reply(200, files[file], headers)
            else:
                self.reply(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None):
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def export_from_hub(endpoint: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(Path("hub").absolute())}
    command = [COMMAND, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def hub(tiny):
    model = {p.name: p.read_bytes() for p in tiny.iterdir()}
    model["README.md"] = b"---\nlicense: apache-2.0\n---\n# A model\n"
    model["model.gguf"] = b"not wanted"
    lines = "\n".join(json.dumps({"text": line}) for line in TEXT.splitlines() if line).encode()
    texts = {f"data/{split}.jsonl": lines for split in ("train", "valid", "test")}
    Hub.repositories = {
        "models/org/model": model,
        "models/org/gated": model,
        "datasets/org/texts": {**texts, "data/train.parquet": b"not wanted"},
        "datasets/org/tables": {"data/train.parquet": b"not wanted"},
    }
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_model_from_the_hub(hub, tiny):
    result = export_from_hub(hub, "--model", "org/model", "--seq-len", 8, *NEAREST)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    bundle = Bundle("model.mesp")
    assert bundle.manifest.model == ModelName("org/model", Hub.revision, "apache-2.0")
    assert not list(Path("hub").rglob("*.gguf"))
    here = exported("--model", tiny, "--seq-len", 8, *NEAREST)
    assert mx.array_equal(bundle.block_words(2), here.block_words(2))


def test_model_that_the_hub_does_not_have(hub):
    result = export_from_hub(hub, "--model", "org/nothing")
    assert result.returncode == 2
    assert "no model org/nothing on the Hugging Face Hub" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_model_whose_terms_are_not_accepted(hub):
    result = export_from_hub(hub, "--model", "org/gated")
    assert result.returncode == 2
    assert "accept them on https://huggingface.co/org/gated" in result.stderr
    assert "`hf auth login`" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_data_from_the_hub(hub, tiny):
    arguments = ("--model", tiny, "--seq-len", 8, "--out", "out.mesp")
    result = export_from_hub(hub, *arguments, "--data", "org/texts")
    assert result.returncode == 0, result.stderr
    assert list(Bundle("out.mesp").manifest.data) == ["train", "valid", "test"]
    assert not list(Path("hub").rglob("*.parquet"))
    result = export_from_hub(hub, *arguments, "--overwrite", "--data", "org/tables")
    assert result.returncode == 2
    assert "The datasets library cannot read org/tables: " in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = export_from_hub(hub, *arguments, "--overwrite", "--data", "org/nothing")
    assert result.returncode == 2
    assert "no dataset org/nothing on the Hugging Face Hub" in result.stderr


def test_no_network():
    result = export_from_hub("http://127.0.0.1:9", "--model", "Qwen2.5-0.5B")
    assert result.returncode == 2
    assert "check the network" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(Path().glob("*.mesp"))


# Writing


def test_existing_folder_is_kept(tiny):
    exported("--model", tiny, "--seq-len", 8)
    assert "--overwrite" in refused("--model", tiny, "--out", "out.mesp")
    Path("folder").mkdir()
    Path("folder/precious").touch()
    assert "exists" in refused("--model", tiny, "--out", "folder")
    assert "not a bundle" in refused("--model", tiny, "--out", "folder", "--overwrite")


def test_failed_overwrite_keeps_the_old_bundle(tiny):
    exported("--model", tiny, "--seq-len", 8)
    refused("--model", tiny, "--data", "nothing.txt", "--out", "out.mesp", "--overwrite")
    Bundle("out.mesp").verify()
    assert exported("--model", tiny, "--seq-len", 16).manifest.seq_lens == (16,)
    assert [path.name for path in Path().iterdir()] == ["out.mesp"]


def test_killed_export_leaves_no_bundle(tiny):
    """Killed while it writes, it leaves nothing under the final name; the next one cleans up."""
    config = {**TINY, "vocab_size": 400_000}
    Path("large").mkdir()
    Path("large/config.json").write_text(json.dumps(config))
    command = ["--model", "large", "--random-weights", "--seq-len", "8", "--out", "out.mesp"]
    process = subprocess.Popen([COMMAND, *command])
    deadline = time.monotonic() + 120
    while not Path(".out.mesp.partial/embedding.bin").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)  # so that it neither writes on nor ends meanwhile
    assert "Another mesp-export is writing" in refused("--model", tiny, "--out", "out.mesp")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("out.mesp").exists()
    exported("--model", tiny, "--seq-len", 8)
    assert not Path(".out.mesp.partial").exists()


def test_interrupted_export_leaves_nothing(tiny, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mesp.bundle.writer.describe_files", interrupt)
    assert export("--model", tiny, "--out", "a/b/out.mesp").exit_code == 130
    assert not list(Path().iterdir())


def test_disk_without_room(tiny, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "it takes 0 MB" in refused("--model", tiny)


@pytest.mark.parametrize("limit", [50_000, 8_000])
def test_disk_that_becomes_full(tiny, limit):
    """As seen through a limit on the size of files: in a block's file, or in the function's."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        assert "disk" in refused("--model", tiny, "--seq-len", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_in_the_middle(tiny, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("mesp.bundle.writer.copy_texts", full)
    assert "the disk is full" in refused("--model", tiny)


def test_output_that_cannot_be_written(tiny):
    Path("file").touch()
    assert "Cannot write file/out.mesp" in refused("--model", tiny, "--out", "file/out.mesp")
    assert "exists" in refused("--model", tiny, "--out", "file")


# Bad input


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--model"),
        (["--model", "nothing"], "There is no model nothing"),
        (["--model", "./no/folder"], "There is no model ./no/folder"),
        (["--model", "Qwen2.5-9B"], "Qwen2.5-0.5B"),
        (["--model", "TINY", "--rank", "0"], "--rank"),
        (["--model", "TINY", "--rank", "8,x"], "--rank"),
        (["--model", "TINY", "--seq-len", "0"], "--seq-len"),
        (["--model", "TINY", "--seq-len", "8", "-1"], "-1"),
        (["--model", "TINY", "--layers", "0"], "--layers"),
        (["--model", "TINY", "--bits", "3"], "--bits"),
        (["--model", "TINY", "--group-size", "48"], "--group-size"),
        (["--model", "TINY", "--group-size", "128"], "rows of 320"),
        (["--model", "TINY", "--dtype", "float16"], "--dtype"),
        (["--model", "TINY", "--data", "nothing.txt"], "nothing.txt"),
        (["--model", "TINY", "stray"], "stray"),
        (["--model", "Qwen2.5-0.5B", "--random-weights", "--data", "python-docs"], "tokenizer"),
    ],
)
def test_bad_arguments(tiny, arguments, named):
    assert named in refused(*(str(tiny) if a == "TINY" else a for a in arguments))


def test_bad_data(tiny):
    for name, content, named in (
        ("empty.txt", "", "no text"),
        ("short.txt", "A few words.", "too few to train on"),
        ("chat.jsonl", '{"messages": []}', "messages"),
    ):
        Path(name).write_text(content)
        assert named in refused("--model", tiny, "--data", name)


@pytest.fixture
def model():
    return write_model(Path("model"), TINY, shards=2)


def damage(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def test_missing_shard(model):
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refused("--model", model)


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -1])
def test_truncated_weights(model, keep):
    damage(model / "model-00001-of-00002.safetensors", keep)
    message = refused("--model", model)
    assert "model-00001-of-00002.safetensors are truncated" in message


def test_damaged_index(model):
    damage(model / "model.safetensors.index.json", 20)
    assert "model.safetensors.index.json cannot be read" in refused("--model", model)


def test_missing_tensor():
    tensors = random_tensors(TINY)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    folder = write_model(Path("model"), TINY, tensors)
    assert "lack model.layers.2.mlp.up_proj.weight" in refused("--model", folder)


def test_tensor_of_a_type_that_is_not_supported():
    tensors = random_tensors(TINY)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(mx.int8)
    folder = write_model(Path("model"), TINY, tensors)
    assert "model.norm.weight in model is of type I8" in refused("--model", folder)


def test_weights_that_do_not_fit_the_config(model):
    config = {**TINY, "intermediate_size": 384}
    (model / "config.json").write_text(json.dumps(config))
    assert "mlp.gate_proj.weight is [320, 128], not [384, 128]" in refused("--model", model)


Q4 = {"bits": 4, "group_size": 64}


def quantized(**quantization: object) -> str:
    return json.dumps({**TINY, "quantization": quantization})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "config.json cannot be read"),
        ("[]", "config.json cannot be read"),
        (json.dumps({**TINY, "model_type": "gemma3n"}), "gemma3n"),
        (json.dumps({**TINY, "quantization_config": {"quant_method": "gptq"}}), "gptq"),
        (json.dumps({**TINY, "quantization_config": "x"}), "its quantization_config cannot"),
        (json.dumps({**TINY, "quantization": "4bit"}), "config.json is not in order"),
        (json.dumps({**TINY, "quantization": [1]}), "config.json is not in order"),
        (quantized(**Q4, mode=[]), "its quantization cannot be used"),
        (quantized(bits=[4], group_size=64), "its quantization cannot be used"),
        (quantized(bits=7, group_size=64), "7 bits in groups of 64, which MLX does not have"),
        (quantized(bits=4, group_size=64, mode="mxfp4"), "mxfp4, 4 bits in groups of 64, which"),
        (quantized(bits=4, group_size=32, mode="int4"), "int4, 4 bits in groups of 32, which MLX"),
        (quantized(**{**Q4, "model.layers.1.mlp.up_proj": {"bits": 1}}), "1 bits in groups of 64"),
        (quantized(**{**Q4, "model.layers.1.mlp.up_proj": False}), "layers.1.mlp.up_proj is not"),
        (quantized(**Q4), "model.layers.0.self_attn.q_proj is not quantized, unlike the rest"),
    ],
)
def test_bad_config(model, config, named):
    (model / "config.json").write_text(config)
    assert named in refused("--model", model)


def test_float16_scales_in_bfloat16_are_noted():
    tensors = dict(tree_flatten(mlx_lm_model(TINY, lambda _: Quantization()).parameters()))
    tensors = {n: a.astype(mx.float16) if "scales" in n else a for n, a in tensors.items()}
    write_model(Path("half"), {**TINY, "quantization": Q4}, tensors)
    for dtype, noted in (("bfloat16", True), ("float32", False)):
        done = export("--model", "half", "--dtype", dtype, "--seq-len", 8, "--out", dtype)
        assert done.exit_code == 0, done.output
        assert ("Note: the model's scales are float16" in done.stderr) == noted


def test_part_of_a_multimodal_model():
    tensors = {f"language_model.{name}": a for name, a in random_tensors(TINY).items()}
    write_model(Path("part"), TINY, tensors)
    assert "multimodal model; take a text-only one" in refused("--model", "part")


def test_quantized_model_stays_as_it_is(model):
    config = {**TINY, "quantization": {"bits": 4, "group_size": 64}}
    (model / "config.json").write_text(json.dumps(config))
    for option in (("--bits", 8), ("--group-size", 32), ("--mode", "nvfp4")):
        assert "leave out --mode, --bits, --head-bits and --group-size" in refused(
            "--model", model, *option
        )


def test_folder_that_holds_no_model():
    Path("folder").mkdir()
    assert "no config.json" in refused("--model", "folder")
    Path("folder/config.json").write_text(json.dumps(TINY))
    assert "no weights" in refused("--model", "folder")


def test_model_without_tokenizer():
    folder = write_model(Path("model"), TINY, tokenizer=False)
    assert "has no tokenizer" in refused("--model", folder, "--data", "python-docs")


def test_damaged_tokenizer(model):
    damage(model / "tokenizer.json", 100)
    message = refused("--model", model, "--data", "python-docs")
    assert "tokenizer in model cannot be loaded" in message


def test_tokenizer_of_another_model():
    folder = write_model(Path("model"), {**TINY, "vocab_size": 100}, tokenizer=False)
    write_tokenizer(folder, 512)
    assert "do not belong together" in refused("--model", folder, "--data", "python-docs")


def of_several_modalities(folder: Path) -> Path:
    """A Qwen3.5 as it is published: its text beside vision, and layers that predict further."""
    text = FAMILIES["qwen3_5"]
    tensors = random_tensors(text)
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    tensors |= {f"{name}.weight": mx.ones((4, 4)) for name in ("model.visual.blocks.0", "mtp.fc")}
    whole = {"model_type": "qwen3_5", "vision_config": {"depth": 2, "hidden_size": 32}}
    whole["text_config"] = {**text, "model_type": "qwen3_5_text"}
    write_model(folder, whole, tensors, tokenizer=False)
    write_tokenizer(folder, text["vocab_size"])
    return folder


def assert_same_logits(bundle: Bundle, model: nn.Module) -> None:
    tokens = mx.arange(1, 13)[None]
    expected = model(tokens)
    error = mx.linalg.norm(bundle.to_mlx_lm()(tokens) - expected)
    assert error <= 1e-5 * mx.linalg.norm(expected)


def test_the_text_of_a_model_of_several_modalities():
    folder = of_several_modalities(Path("whole"))
    result = export("--model", folder, "--seq-len", 8, "--out", "out.mesp", *NEAREST)
    assert result.exit_code == 0, result.output
    assert "2 tensors are left out" in result.stderr and result.stderr.count("\n") == 1
    bundle = Bundle("out.mesp")
    arch = bundle.architecture
    assert (arch.mlx_prefix, arch.hf_prefix) == ("language_model.model", "model.language_model")
    assert [mixer.type for mixer in arch.mixers] == ["gated_delta_net", "attention"]
    model, _ = load_model(folder)
    nn.quantize(model, 64, 4)
    assert_same_logits(bundle, model)


def test_queries_that_would_be_scaled_are_refused():
    """The tiny Ministral 3 has 64 tokens before it scales them."""
    folder = write_model(Path("model"), FAMILIES["mistral3"])
    assert "From 64 tokens on" in refused("--model", folder, "--seq-len", "64,65")


QWEN2_5_VL = {**FAMILIES["qwen2"], "model_type": "qwen2_5_vl"}
QWEN2_5_VL |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
QWEN3_VL = {**FAMILIES["qwen3"], "model_type": "qwen3_vl"}
QWEN3_VL |= {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
UNTIED_MISTRAL3 = {**FAMILIES["mistral3"], "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "text", "others"),
    [
        (FAMILIES["gemma3"], "language_model.model.", ("vision_tower", "multi_modal_projector")),
        (
            FAMILIES["gemma3"],
            "model.language_model.",
            ("model.vision_tower", "model.multi_modal_projector"),
        ),
        (UNTIED_MISTRAL3, "language_model.model.", ("vision_tower", "multi_modal_projector")),
        (QWEN2_5_VL, "model.", ("visual",)),
        (QWEN3_VL, "model.language_model.", ("model.visual",)),
    ],
    ids=["gemma3", "gemma3, newer", "mistral3", "qwen2_5_vl", "qwen3_vl"],
)
def test_the_text_by_the_names_that_it_is_published_under(config, text, others):
    tensors = {name.replace("model.", text, 1): a for name, a in random_tensors(config).items()}
    if "lm_head.weight" in tensors:
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    tensors |= {f"{name}.blocks.0.weight": mx.ones((4, 4)) for name in others}
    whole, _ = published(config, {})
    folder = write_model(Path("whole"), config if text == "model." else whole, tensors)
    result = export("--model", folder, "--seq-len", 8, "--out", "out.mesp", *NEAREST)
    assert result.exit_code == 0, result.output
    assert f"{len(others)} tensors are left out" in result.stderr
    bundle = Bundle("out.mesp")
    arch = bundle.architecture
    assert (arch.mlx_prefix, arch.hf_prefix) == ("language_model.model", "model.language_model")
    assert context_of(bundle.path) == config.get("max_position_embeddings", MAX_LENGTH)
    model = mlx_lm_model(config)
    nn.quantize(model, 64, 4)
    assert_same_logits(bundle, model)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_a_hybrid_model_that_mlx_lm_has_converted(family):
    """Its convolutions lie otherwise there, and Qwen3.5's norms are whole."""
    if family == "qwen3_5":
        folder = of_several_modalities(Path("whole"))
    else:
        folder = write_model(Path("whole"), FAMILIES[family])
    mlx_lm.convert(str(folder), "converted", quantize=True, dtype="float32")
    bundle = exported("--model", "converted", "--seq-len", 8)
    assert_same_logits(bundle, load_model(Path("converted"))[0])


def test_the_text_alone():
    """As `Qwen3_5ForCausalLM` is saved."""
    config = {**FAMILIES["qwen3_5"], "model_type": "qwen3_5_text"}
    bundle = exported("--model", write_model(Path("text"), config), "--seq-len", 8, *NEAREST)
    assert bundle.architecture.hf_prefix == "model"
    model = mlx_lm_model(FAMILIES["qwen3_5"])
    nn.quantize(model, 64, 4)
    assert_same_logits(bundle, model)


def test_the_decays_of_a_bundle_keep_their_digits():
    """Whatever dtype it is in, and was."""
    folder = write_model(Path("model"), FAMILIES["qwen3_5"])
    first = exported("--model", folder, "--seq-len", 8, "--dtype", "bfloat16").block(0)
    assert export("--from", "out.mesp", "--overwrite", "--dtype", "float32").exit_code == 0
    second = Bundle("out.mesp").block(0)
    name = "linear_attn.A_log"
    assert first[name].dtype == mx.float32 and mx.array_equal(first[name], second[name])
    assert first["linear_attn.dt_bias"].dtype == mx.bfloat16
    assert second["linear_attn.dt_bias"].dtype == mx.float32


def test_random_weights_of_a_hybrid_model_count():
    """No mixer is silent: without its state or its gates the logits would be others."""
    for name in ("qwen3_5", "lfm2"):
        folder = write_model(Path(name), FAMILIES[name], {}, tokenizer=False)
        bundle = exported("--model", folder, "--random-weights", "--seq-len", 8)
        for i, block in enumerate(bundle.architecture.blocks):
            for array, _ in block.vectors().items():
                assert mx.all(bundle.block(i)[array] != 0), array
