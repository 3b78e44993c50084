from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.paths import ROOT
from mesp.engine.build import CHECKOUT, COUNTER, built_program
from studies.computed_figures import (
    DOCUMENTED,
    Bundles,
    Table,
    compare_sentences,
    compare_tables,
    rewritten,
)

ENGINE = Path(os.environ.get("MESP_ENGINE") or built_program(CHECKOUT))
needs_engine = pytest.mark.skipif(not ENGINE.exists(), reason="mesp-engine has not been built")
needs_counter = pytest.mark.skipif(
    sys.platform == "darwin" or not built_program(CHECKOUT, COUNTER).exists(),
    reason="mesp-count has not been built",
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundles]:
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mesp.bundle.export.DTYPE", "bfloat16")  # as in a user's process
        yield Bundles(tmp_path_factory.mktemp("hollow"))
    if threads is None:
        os.environ.pop("OPENBLAS_NUM_THREADS", None)
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = threads


def of(page: str, is_counted: bool = False) -> tuple[Table, ...]:
    return tuple(t for t in DOCUMENTED if t.page == page and t.is_counted == is_counted)


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("page", sorted({table.page for table in DOCUMENTED}))
def test_tables_state_what_is_computed(page: str, bundles: Bundles):
    assert list(compare_tables(bundles, of(page), ROOT, write=False)) == []


@pytest.mark.slow
@needs_engine
def test_sentences_state_what_is_computed(bundles: Bundles):
    assert list(compare_sentences(bundles, ROOT, has_counts=False, write=False)) == []


@pytest.mark.slow
@needs_engine
@needs_counter
def test_documents_state_what_is_counted(bundles: Bundles):
    tables = of("docs/performance.md", is_counted=True)
    assert list(compare_tables(bundles, tables, ROOT, write=False)) == []
    assert list(compare_sentences(bundles, ROOT, has_counts=True, write=False)) == []


@needs_engine
def test_another_figure_is_found_and_written(bundles: Bundles, tmp_path: Path):
    (tmp_path / "docs").mkdir()
    for name in ("quality.md", "privacy.md", "measurements.json"):
        shutil.copyfile(ROOT / "docs" / name, tmp_path / "docs" / name)
    quality = tmp_path / "docs" / "quality.md"
    whole = quality.read_text(encoding="utf-8")
    quality.write_text(whole.replace("| 173,184 |", "| 173,185 |"), encoding="utf-8")
    tables = of("docs/quality.md")
    [first, second] = compare_tables(bundles, tables, tmp_path, write=True)
    assert first == (
        "docs/quality.md, DoRA, demo, extraction, DoRA, rank 8, column 3: 173,185 is 173,184"
    )
    assert "demo, text" in second
    assert quality.read_text(encoding="utf-8") == whole
    assert list(compare_tables(bundles, tables, tmp_path, write=False)) == []


@needs_engine
def test_a_sentence_follows_its_entry(bundles: Bundles, tmp_path: Path):
    (tmp_path / "docs").mkdir()
    entry = {
        "name": "adapters", "value": 162_815, "unit": "parameters", "command": "none",
        "computed": {"figure": "parameters", "model": "demo"},
        "stated": {"page.md": ["has {} parameters"]},
    }  # fmt: skip
    file, page = tmp_path / "docs" / "measurements.json", tmp_path / "page.md"
    file.write_text(json.dumps([entry]), encoding="utf-8")
    page.write_text("It has\n162,815 parameters, not 162,815.", encoding="utf-8")
    [found] = compare_sentences(bundles, tmp_path, has_counts=False, write=True)
    assert found == "docs/measurements.json, adapters: 162815 is 162816"
    assert page.read_text(encoding="utf-8") == "It has\n162,816 parameters, not 162,815."
    assert json.loads(file.read_text(encoding="utf-8"))[0]["value"] == 162_816


@pytest.mark.parametrize(
    ("cell", "values", "after"),
    [
        ("44.8", [45.06], "45.1"),
        ("1,024", [2047.6], "2,048"),
        ("\u2013 / \u2013 / 71", [1.0, 2.0, 70.4], "\u2013 / \u2013 / 70"),
        ("53.1 / 52.4", [None, 50.55], "53.1 / 50.5"),
        ("494 M", [495.2], "495 M"),
    ],
)
def test_a_cell_keeps_its_form(cell: str, values: list[float | None], after: str):
    assert rewritten(cell, values) == after


@pytest.mark.parametrize("page", ["performance.md", "quality.md"])
def test_measured_tables_name_their_day(page: str):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    undated = {"The paper's figures"} | {t.heading for t in DOCUMENTED if t.is_counted}
    sections = {part.splitlines()[0]: part for part in text.split("\n## ")[1:]}
    assert [
        heading
        for heading, part in sections.items()
        if "\n|" in part and heading not in undated and not re.search(r"\d+ November", part)
    ] == []
