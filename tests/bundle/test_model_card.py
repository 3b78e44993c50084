import os
import shutil
from pathlib import Path

import pytest

from helpers.commands import call
from helpers.exports import NEAREST, exported, refused
from helpers.gguf_files import write_gguf
from mesp import hub_download
from mesp.bundle.manifest import ModelName
from mesp.bundle.model_card import write_terms_of_run
from mesp.bundle.reader import Bundle
from mesp.license import LICENSE_PATTERNS, License, is_terms
from mesp.source_model import find

pytestmark = pytest.mark.usefixtures("working_folder")

TERMS = (
    "LICENSE", "LICENSE.txt", "licence.md", "License-2.PDF", "MODEL_LICENSE", "COPYING",
    "Notice", "NOTICE.txt", "THIRD_PARTY_NOTICES.md", "USE_POLICY.md", "Acceptable_Use_Policy.txt",
    "GEMMA_TERMS_OF_USE.md", "Prohibited_use_policy.md",
)  # fmt: skip
OTHERS = (
    "LICENSE.py", "LICENSE.html", "README.md", "data/LICENSE", "modeling.py", "notes.txt",
    "LICENSE\n", "model.safetensors",
)  # fmt: skip
CARD = """---
license: other
license_name: own
license_link: LICENSE
---
# A model
"""


@pytest.fixture
def model(tiny: Path) -> Path:
    folder = Path(shutil.copytree(tiny, "model"))
    for name in TERMS:
        (folder / name).write_text(f"Text of {name}")
    for name in ("LICENSE.py", "notes.txt"):
        (folder / name).touch()
    (folder / "NOTICE_FILES").mkdir()
    (folder / "README.md").write_text(CARD)
    return folder


def terms_in(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name.upper() in UPPER}


UPPER = {name.upper() for name in (*TERMS, "LICENSE.py", "notes.txt", "NOTICE_FILES")}
TEXTS = {name: f"Text of {name}" for name in TERMS}


def test_names_of_terms():
    assert all(map(is_terms, TERMS))
    assert not any(map(is_terms, OTHERS))


def test_terms_go_from_a_model_to_its_bundles(model: Path):
    bundle = exported("--model", model, "--seq-len", 8, *NEAREST)
    assert terms_in(bundle.path) == TEXTS
    assert bundle.manifest.model == ModelName("model", None, "other", "own", "LICENSE")
    again = exported("--from", bundle.path, "--seq-len", 4)
    assert terms_in(again.path) == TEXTS
    assert again.manifest.model == bundle.manifest.model
    shutil.copytree(again.path, "copy.mesp")
    assert {*TERMS} < {file.path for file in Bundle("copy.mesp").manifest.files}


def test_terms_that_are_elsewhere_are_refused(tiny: Path):
    folder = Path(shutil.copytree(tiny, "model"))
    Path("secret").write_text("secret")
    (folder / "NOTICE").symlink_to(Path("secret").absolute())
    assert "NOTICE is a link that leads out of its folder" in refused("--model", folder)


def test_terms_go_from_the_folder_of_a_gguf_file():
    file = write_gguf(Path("model.gguf"), "qwen2")
    Path("NOTICE").write_text("They made it.")
    Path("README.md").write_text(CARD)
    source = find.find_source(str(file), False)
    assert source.folder is not None
    assert (source.folder / "NOTICE").read_text() == "They made it."
    assert source.license == License("other", "own", "LICENSE")


def test_terms_are_downloaded_with_a_gguf_file(monkeypatch: pytest.MonkeyPatch):
    folder = Path("snapshots", "0123")
    (folder / "sub").mkdir(parents=True)
    write_gguf(Path("tiny.gguf"), "qwen2").rename(folder / "sub" / "m.gguf")
    (folder / "USE_POLICY.md").write_text("Do no harm.")
    asked: list[str] = []

    def download(kind: str, repo: str, patterns: list[str]) -> Path:
        asked.extend(patterns)
        return folder

    monkeypatch.setattr(hub_download, "download", download)
    source = find.find_source("o/m/sub/m.gguf", False)
    assert source.folder is not None and (source.folder / "USE_POLICY.md").exists()
    assert asked == ["sub/m.gguf", "README.md", *LICENSE_PATTERNS]


def test_terms_are_beside_trained_adapters(model: Path, text: Path):
    exported("--model", model, "--seq-len", 8, "--rank", 2, "--data", text, *NEAREST)
    call("train", "out.mesp", "--steps", 1, "--rank", 2, "--val-batches", 0, "--out", "run")
    for folder in ("run/adapters", "run/adapters/peft"):
        assert terms_in(Path(folder)) == TEXTS
        assert Path(folder, "README.md").read_text().startswith("---\nlicense: other\n")


def test_terms_are_put_beside_the_adapters_of_a_run(model: Path):
    bundle = exported("--model", model, "--seq-len", 8, *NEAREST)
    run = Path("run")
    (run / "adapters" / "peft").mkdir(parents=True)
    Path("precious").write_text("precious")
    (run / "adapters" / "LICENSE").symlink_to(Path("precious").absolute())
    (run / "adapters" / "peft" / "README.md").write_text("My own.")
    write_terms_of_run(bundle.path, bundle.manifest, run)
    for folder in (run / "adapters", run / "adapters" / "peft"):
        assert terms_in(folder) == TEXTS
    assert Path("precious").read_text() == "precious"
    card = (run / "adapters" / "README.md").read_text()
    assert card.startswith(CARD.removesuffix("# A model\n"))
    assert (run / "adapters" / "peft" / "README.md").read_text() == "My own."
    assert os.listdir(run) == ["adapters"]
