import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.commands import run
from helpers.exports import content, export, refused
from helpers.models import FAMILIES, TEXT, write_model
from mesp.block_function import mlxfn
from mesp.bundle import rewriter
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle

pytestmark = pytest.mark.usefixtures("working_folder")


def renumbered(file: bytes, monkeypatch) -> bytes:
    """The ids in the file are addresses, which differ from trace to trace."""
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


OLD = ("--seq-len", "3,9", "--rank", 3)
GEMMA = {"num_hidden_layers": 4, "layer_types": None}


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "phi3"])
def test_a_bundle_written_again_is_that_of_an_export(name, text, monkeypatch):
    config = {**FAMILIES[name], **(GEMMA if name == "gemma3_text" else {})}
    options = ("--model", write_model(Path("model"), config), "--data", text, "--group-size", 32)
    lengths = ("--seq-len", "9,4", "--rank", 2)
    for arguments in (
        (*options, *OLD, "--out", "old.mesp"),
        (*options, *lengths, "--out", "model.mesp"),
        ("--from", "old.mesp", *lengths, "--out", "again.mesp"),
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
    assert functions >= 4
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
    functions = {"block.24.mlxfn", "block.plain.24.mlxfn"}
    assert content(old).keys() - before.keys() == functions
    removed = {f"block.{kind}{length}.mlxfn" for kind in ("", "plain.") for length in (8, 16)}
    assert before.keys() - content(old).keys() == removed
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


def edit(bundle: Path, **changes: object) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("gpu", "bfloat16")])
def test_a_bundle_of_format_6_is_written_again_with_its_weights_and_data(old, device, dtype):
    sound = content(old)
    blocks = json.loads((old / "manifest.json").read_text())["blocks"]
    if device == "cpu":
        for group in blocks:
            group["plain_functions"] = group["functions"]
    edit(old, format=6, device=device, dtype=dtype, blocks=blocks)
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
    Bundle(old).function(8, plain=True)


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
    edit(old, format=5)
    assert "bundle format 5" in refused("--from", old, "--overwrite")
    edit(old, format=1)
    assert "bundle format 1" in refused("--from", old, "--overwrite")


def test_a_bundle_whose_rewriting_fails_stays(old, monkeypatch):
    before = content(old)

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(rewriter, "write_functions", full_disk)
    assert "disk is full" in refused("--from", old, "--overwrite")
    assert "disk is full" in refused("--from", old, "--out", "again.mesp")
    assert content(old) == before
