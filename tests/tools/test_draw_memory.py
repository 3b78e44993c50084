"""The README's picture of peak memory."""

import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return runpy.run_path(str(ROOT / "tools" / "draw_memory.py"))


def test_the_picture_shows_each_measured_peak(tool: dict, tmp_path: Path):
    picture = tmp_path / "memory.svg"
    result = CliRunner().invoke(tool["main"], ["--out", str(picture)])
    assert result.exit_code == 0, result.output
    drawn = picture.read_text(encoding="utf-8")
    assert all(f"<!-- {mb:,} MB -->" in drawn for mb in tool["peaks"]().values())


def test_a_picture_of_another_format_is_refused(tool: dict, tmp_path: Path):
    result = CliRunner().invoke(tool["main"], ["--out", str(tmp_path / "memory.txt")])
    assert result.exit_code == 2
    assert "must end in .png, .svg or .pdf" in result.output
