from __future__ import annotations

import re

from helpers.paths import ROOT


def test_values_leave_mlx_only_where_errors_are_checked():
    trainer = ROOT / "ios" / "MeSPTrainer"
    found = {
        str(path.relative_to(trainer))
        for path in trainer.rglob("*.swift")
        if "Tests" not in path.parts
        and re.search(r"\.(item|asArray|asData)\(", path.read_text(encoding="utf-8"))
    }
    assert found == {"Bundle/MLXErrors.swift"}
