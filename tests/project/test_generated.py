import dataclasses
import json
import re
from pathlib import Path

import pytest

import generate
from helpers.paths import ROOT
from mesp.block_function.attention import FUSED_HEADS
from mesp.settings.declaration import Setting
from mesp.settings.optimizer_defaults import PAPER
from mesp.settings.train_settings import TrainSettings

LISTED = r'```json\n(\{"bundle": "DIR", "data": null, "output".*?\})\n```'


@pytest.mark.parametrize("path", generate.write_all(), ids=lambda path: path.name)
def test_what_is_checked_in_is_what_is_generated(path: Path):
    said = f"{path.name} is not what Python declares: run `make generated`."
    assert path.read_text("utf-8") == generate.write_all()[path], said


def test_pages_get_the_repositorys_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    project = tmp_path / "pyproject.toml"
    project.write_text('[project.urls]\nPaper = "https://example.org"\n', "utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("none", "utf-8")
    page = tmp_path / "README.md"
    page.write_text("git clone <this repository> mesp", "utf-8")
    assert generate.write_pages() == {page: page.read_text("utf-8")}
    project.write_text('[project.urls]\nSource = "https://example.org/mesp"\n', "utf-8")
    assert generate.write_pages() == {page: "git clone https://example.org/mesp mesp"}


def changed(name: str, monkeypatch: pytest.MonkeyPatch, **others: object) -> str:
    (declared,) = [each for each in dataclasses.fields(TrainSettings) if each.name == name]
    default = others.pop("default", declared.default)
    setting: Setting = dataclasses.replace(declared.metadata["setting"], **others)
    monkeypatch.setattr(declared, "metadata", {"setting": setting})
    monkeypatch.setattr(declared, "default", default)
    return generate.write_settings()


@pytest.mark.parametrize(
    ("name", "others", "line"),
    [
        ("val_batches", {"default": 26}, "package var valBatches: Int = 26"),
        ("group_size", {"most": 9}, 'requireRange("group_size", groupSize, least: 2, most: 9)'),
        ("warmup", {"key": "warm_up"}, "package var warmUp: Int = 0"),
        ("alpha", {"kind": int}, "package var alpha: Int = 16"),
        ("dp_clip", {"may_change": True}, "dpClip = other.dpClip"),
        ("dr_grpo", {"federated": True}, '"dr_grpo"'),
        ("schedule", {"choices": {"constant": "", "step": "In steps."}}, "case step\n"),
    ],
)
def test_another_declaration_is_another_file(
    name: str, others: dict, line: str, monkeypatch: pytest.MonkeyPatch
):
    assert line not in generate.write_settings()
    assert line in changed(name, monkeypatch, **others)


def test_the_document_lists_every_setting_with_its_default():
    defaults = {
        each.key: "DIR" if each.is_needed else each.default for each in generate.list_properties()
    }
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")]
    (listed,) = [found[1] for page in pages if (found := re.search(LISTED, page, re.DOTALL))]
    assert json.loads(listed) == json.loads(json.dumps(defaults | PAPER))


def test_the_widths_of_fused_attention_are_those_of_the_block_function():
    processor = (ROOT / "ios/MeSPTrainer/Core/Device/Processor.swift").read_text("utf-8")
    (widths,) = re.findall(r"var fusedHeads = \[(.*)\]", processor)
    assert tuple(map(int, widths.split(","))) == FUSED_HEADS
