from pathlib import Path

from click.testing import CliRunner

from studies import draw_memory


def test_the_picture_shows_each_measured_peak(tmp_path: Path):
    picture = tmp_path / "memory.svg"
    result = CliRunner().invoke(draw_memory.main, ["--out", str(picture)])
    assert result.exit_code == 0, result.output
    drawn = picture.read_text(encoding="utf-8")
    assert all(f"<!-- {mb:,} MB -->" in drawn for mb in draw_memory.peaks().values())


def test_a_picture_of_another_format_is_refused(tmp_path: Path):
    result = CliRunner().invoke(draw_memory.main, ["--out", str(tmp_path / "memory.txt")])
    assert result.exit_code == 2
    assert "must end in .png, .svg or .pdf" in result.output
