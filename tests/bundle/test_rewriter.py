"""Tests rewriting a bundle with `mesp-export --from`."""

import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from helpers.commands import run
from helpers.exports import NEAREST, content, export, exported, refused
from helpers.models import FAMILIES, TEXT, write_model
from mesp.block_function import mlxfn
from mesp.bundle import rewriter
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle

pytestmark = pytest.mark.usefixtures("working_folder")


def renumbered(file: bytes, monkeypatch) -> bytes:
    """Returns the file of a function with its array ids numbered in order. The ids in the file are
    addresses, which differ from trace to trace.
    """
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
    ("name", "changes"),
    [
        ("qwen2", ("--device", "cpu", "--dtype", "float32")),
        ("qwen2", ("--device", "gpu", "--dtype", "float32")),
        ("qwen2", ("--device", "gpu", "--dtype", "bfloat16")),
        ("gemma3_text", ("--device", "gpu", "--dtype", "bfloat16")),
        ("phi3", ("--device", "gpu", "--dtype", "bfloat16")),
    ],
)
def test_a_bundle_written_again_is_that_of_an_export(name, changes, text, monkeypatch):
    config = {**FAMILIES[name], **(GEMMA if name == "gemma3_text" else {})}
    options = ("--model", write_model(Path("model"), config), "--data", text, "--group-size", 32)
    # With these options, an export rounds scales to bfloat16 last, as rewriting does.
    options += NEAREST
    lengths = ("--seq-len", "9,4", "--rank", 2)
    for arguments in (
        (*options, *OLD, "--out", "old.mesp"),
        (*options, *lengths, *changes, "--out", "model.mesp"),
        ("--from", "old.mesp", *lengths, *changes, "--out", "again.mesp"),
    ):
        done = export(*arguments)
        assert done.exit_code == 0, done.output
    assert "Wrote again.mesp" in done.stdout
    fresh, again = (read_manifest(Path(p)) for p in ("model.mesp", "again.mesp"))
    Bundle("again.mesp").verify()
    functions = 0
    listed = []
    for of_fresh, of_again in zip(fresh.files, again.files, strict=True):
        if of_fresh.path.endswith(".mlxfn"):
            files = [Path(p, of_fresh.path).read_bytes() for p in ("model.mesp", "again.mesp")]
            assert renumbered(files[0], monkeypatch) == renumbered(files[1], monkeypatch)
            of_again = replace(of_again, sha256=of_fresh.sha256)
            functions += 1
        listed.append(of_again)
    assert functions >= (4 if "gpu" in changes else 2)
    assert replace(again, files=tuple(listed)) == replace(fresh, name="model")


@pytest.fixture(scope="module")
def exported_once(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    text, out = folder / "text.txt", folder / "old.mesp"
    text.write_text(TEXT)
    done = export("--model", tiny, "--data", text, "--seq-len", "8,16", "--out", out)
    assert done.exit_code == 0, done.output
    return out


@pytest.fixture
def old(exported_once) -> Path:
    return Path(shutil.copytree(exported_once, "old.mesp"))


def test_a_bundle_written_again_in_place_keeps_its_weights_and_data(old):
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
    functions = {"block.24.mlxfn"}
    assert content(old).keys() - before.keys() == functions
    assert before.keys() - content(old).keys() == {"block.8.mlxfn", "block.16.mlxfn"}
    for path in content(old).keys() - functions - {"manifest.json"}:
        assert (old / path).stat().st_ino == before[path]
    assert [p.name for p in Path().iterdir() if "mesp" in p.name] == [old.name]


def test_a_bundle_written_again_where_links_cannot_be_has_copies(old, monkeypatch):
    def no_links(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    assert export("--from", old, "--out", "again.mesp").exit_code == 0
    Bundle("again.mesp").verify()
    weights = Path("blocks", "00.bin")
    assert (old / weights).stat().st_ino != Path("again.mesp", weights).stat().st_ino


def test_a_bundle_in_bfloat16_written_again_in_float32_keeps_its_numbers(tiny):
    options = ("--model", tiny, "--seq-len", 8, "--out", "old.mesp", "--dtype", "bfloat16")
    assert export(*options, "--device", "gpu").exit_code == 0
    rewritten = ("--from", "old.mesp", "--overwrite", "--dtype", "float32", "--device", "cpu")
    rounded = Bundle("old.mesp")
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


def test_a_bundle_of_format_5_is_written_again_with_its_weights_and_data(old):
    """In format 5, a bundle has functions in its folder, and may have others in subfolders."""
    sound = content(old)
    name, later = "block.8.mlxfn", "mlx-0.32.2/block.8.mlxfn"
    (old / "mlx-0.32.2").mkdir()
    for path in (name, later):
        (old / path).write_bytes(b"of 5")
    files = json.loads((old / "manifest.json").read_text())["files"]
    of_5 = {"size": 4, "sha256": hashlib.sha256(b"of 5").hexdigest()}
    files = [entry | (of_5 if entry["path"] == name else {}) for entry in files]
    layouts = {"mlx_version": "0.31.1", "layouts": {"0.32.2": "mlx-0.32.2"}}
    edit(old, format=5, files=[*files, {"path": later, **of_5}], **layouts)
    trained = run("train", old, "--steps", 1, "--out", "run")
    command = f"mesp-export --from {old.resolve()} --overwrite"
    assert trained.returncode == 2 and f"write it again with {command}." in trained.stderr
    assert export(*command.split()[1:]).exit_code == 0
    again = content(old)
    assert again.keys() == sound.keys()
    others = {path for path in sound if path.endswith((".mlxfn", "manifest.json"))}
    assert {p: again[p] for p in again.keys() - others} == {
        p: sound[p] for p in sound.keys() - others
    }
    Bundle(old).verify()
    Bundle(old).function(8)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--out"),
        (["--out", "old.mesp"], "old.mesp exists"),
        (["--overwrite", "--model", "demo"], "--model"),
        (["--overwrite", "--data", "text.txt", "--no-pack"], "--data, --pack"),
        (["--overwrite", "--bits", 4, "--layers", 1], "--bits, --layers"),
        (["--overwrite", "--seq-len", "8,100000"], "100000"),
        (["--overwrite", "--rank", "4096"], "have at most rank 128, and --rank names 4,096;"),
    ],
)
def test_what_cannot_be_written_again_is_refused(old, arguments, named):
    before = content(old)
    assert named in refused("--from", old, *arguments)
    assert content(old) == before


def test_only_a_sound_bundle_of_this_format_is_written_again(old, tiny):
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
    assert "disk is full" in refused("--from", old, "--out", "again.mesp")
    assert content(old) == before


def test_the_decays_of_a_bundle_keep_their_digits():
    folder = write_model(Path("model"), FAMILIES["qwen3_5"])
    first = exported("--model", folder, "--seq-len", 8, "--dtype", "bfloat16").block(0)
    assert export("--from", "out.mesp", "--overwrite", "--dtype", "float32").exit_code == 0
    second = Bundle("out.mesp").block(0)
    name = "linear_attn.A_log"
    assert first[name].dtype == mx.float32 and mx.array_equal(first[name], second[name])
    assert first["linear_attn.dt_bias"].dtype == mx.bfloat16
    assert second["linear_attn.dt_bias"].dtype == mx.float32


def test_what_bfloat16_rounds_is_said(tiny):
    options = ("--model", tiny, "--seq-len", 8, "--out", "old.mesp", "--dtype", "float32")
    assert export(*options).exit_code == 0
    for dtype, noted in (("float32", False), ("bfloat16", True)):
        done = export("--from", "old.mesp", "--out", f"{dtype}.mesp", "--dtype", dtype)
        assert done.exit_code == 0, done.output
        assert ("are rounded to bfloat16, by up to 0.4%" in done.stderr) == noted
