import json
from pathlib import Path

import pytest

import measure_import
from helpers.commands import invoke, refused, succeeded
from mesp.models.short_names import KNOWN

pytestmark = pytest.mark.slow
SMALL = KNOWN["SmolLM2-135M"][2] | {"num_hidden_layers": 2, "vocab_size": 2000}


@pytest.mark.parametrize("scales", ["bfloat16", "float16"])
def test_a_row_of_the_table(scales: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(measure_import.KNOWN, "Small", ("owner/small", "5f0b02c7", SMALL))
    monkeypatch.setattr(measure_import, "SHARD", 1 << 20)
    options = ("--scales", scales, "--json", tmp_path / "rows.json", "--work", tmp_path / "work")
    done = succeeded(invoke(measure_import.main, "measure_import", "--model", "Small", *options))
    assert "Small" in done.stdout.splitlines()[-1]
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert 0 <= row["beside"] < row["footprint"] < 50e6
    if row["read"] is not None:
        assert row["weights"] <= row["read"] and row["weights"] <= row["written"] < 2e7
    assert not list((tmp_path / "work").iterdir())


def test_a_model_without_a_short_name_is_refused(tmp_path: Path):
    done = invoke(measure_import.main, "measure_import", "--model", "x/y", "--work", tmp_path)
    assert "There is no x/y" in refused(done)
