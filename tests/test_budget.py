"""tools/budget.py: one task by several ways of training, what each takes and comes to."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mesp.engine.build import find_engine

TOOL = Path(__file__).parents[1] / "tools" / "budget.py"


@pytest.mark.slow
def test_each_way_is_trained_and_compared(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="what it draws with is an extra")
    find_engine()
    rows_file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    names = ["MeSP", "half of the layers", "shorter"]
    line = [sys.executable, TOOL, "--steps", 2, "--out", tmp_path / "out"]
    line += ["--json", rows_file, "--plot", plot]
    line += [word for name in names for word in ("--variant", name)]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(rows_file.read_text())["rows"]}
    assert [*rows] == ["untrained", *names]
    assert all(f"| {name} " in done.stdout for name in rows)
    assert plot.read_bytes().startswith(b"\x89PNG")

    untrained, default = rows["untrained"], rows["MeSP"]
    assert len({row["other_loss"] for row in rows.values()}) == len(rows)
    assert all(rows[name]["held_out_loss"] < untrained["held_out_loss"] for name in names)
    assert rows["half of the layers"]["settings"]["num_layers"] == 3
    # The same examples, whole, in sequences with less padding: only the order of sums differs.
    assert rows["shorter"]["seq_len"] < default["seq_len"]
    assert rows["shorter"]["held_out_loss"] == pytest.approx(default["held_out_loss"], rel=1e-4)
