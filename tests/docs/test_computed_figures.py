from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
    table_lines,
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


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("page", sorted({table.page for table in DOCUMENTED}))
def test_tables_state_what_is_computed(page: str, bundles: Bundles):
    tables = tuple(t for t in DOCUMENTED if t.page == page and not t.is_counted)
    assert list(compare_tables(bundles, tables, ROOT, write=False)) == []


@pytest.mark.slow
@needs_engine
def test_sentences_state_what_is_computed(bundles: Bundles):
    assert list(compare_sentences(bundles, ROOT, has_counts=False, write=False)) == []


@pytest.mark.slow
@needs_engine
@needs_counter
def test_documents_state_what_is_counted(bundles: Bundles):
    tables = tuple(table for table in DOCUMENTED if table.is_counted)
    assert list(compare_tables(bundles, tables, ROOT, write=False)) == []
    assert list(compare_sentences(bundles, ROOT, has_counts=True, write=False)) == []


@pytest.mark.parametrize("table", DOCUMENTED, ids=lambda table: table.heading)
def test_each_table_exists(table: Table):
    lines = (ROOT / table.page).read_text(encoding="utf-8").split("\n")
    assert table_lines(lines, table)


def test_another_figure_is_found_and_written(tmp_path: Path):
    page = tmp_path / "page.md"
    whole = "## Peaks\n\n| | MB |\n|---|---|\n| a | 1,024 |\n| b |   7.5 |\n"
    page.write_text(whole.replace("7.5", "7.6"), encoding="utf-8")
    peaks = {"a": 1024.2, "b": 7.45}
    table = Table("page.md", "Peaks", lambda bundles, row: {1: [peaks[row[0]]]})
    [found] = compare_tables(cast("Bundles", None), (table,), tmp_path, write=True)
    assert found == "page.md, Peaks, b, 7.6, column 2: 7.6 is 7.5"
    assert page.read_text(encoding="utf-8") == whole


def test_a_sentence_follows_its_entry(tmp_path: Path):
    (tmp_path / "docs").mkdir()
    entry = {
        "name": "weights", "value": 162_815, "unit": "MB", "command": "none",
        "computed": {"figure": "mapped_bytes", "model": "demo"},
        "stated": {"page.md": ["has {} MB"]},
    }  # fmt: skip
    file, page = tmp_path / "docs" / "measurements.json", tmp_path / "page.md"
    file.write_text(json.dumps([entry]), encoding="utf-8")
    page.write_text("It has\n162,815 MB, not 162,815.", encoding="utf-8")

    def plan(size: Any, threads: int) -> dict[str, float]:
        return {"mapped_bytes": 162_816e6}

    bundles = cast("Bundles", SimpleNamespace(plan=plan))
    [found] = compare_sentences(bundles, tmp_path, has_counts=False, write=True)
    assert found == "docs/measurements.json, weights: 162,815 is 162,816"
    assert page.read_text(encoding="utf-8") == "It has\n162,816 MB, not 162,815."
    assert json.loads(file.read_text(encoding="utf-8"))[0]["value"] == 162_816


@pytest.mark.parametrize(
    ("cell", "values", "after"),
    [
        ("44.8", [45.06], "45.1"),
        ("1,024", [2047.6], "2,048"),
        ("\u2013 / \u2013 / 71", [1.0, 2.0, 70.4], "\u2013 / \u2013 / 70"),
        ("494 M", [495.2], "495 M"),
    ],
)
def test_a_cell_keeps_its_form(cell: str, values: list[float], after: str):
    assert rewritten(cell, values) == after
