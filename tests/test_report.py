"""tools/report.py as a user runs it."""

import base64
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from test_collect import write_run

pytest.importorskip("matplotlib")
REPORT = Path(__file__).parent.parent / "tools" / "report.py"


def report(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, REPORT, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )


def image_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def test_a_picture_of_one_run(tmp_path: Path):
    done = report(write_run(tmp_path / "a", steps=200), "--out", tmp_path / "new" / "report.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'new' / 'report.png'}\n"
    assert image_size((tmp_path / "new" / "report.png").read_bytes()) == (1200, 1050)


def test_a_page_of_several_runs_stands_alone(tmp_path: Path):
    write_run(tmp_path / "runs" / "a<b>")
    write_run(tmp_path / "runs" / "unfinished", steps=1, end=None)
    begun = write_run(tmp_path / "elsewhere" / "unfinished", steps=0, end=None)
    done = report(tmp_path / "runs", begun, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text()
    assert "<td>a&lt;b&gt;</td><td>Qwen2.5-0.5B</td><td>mesp</td>" in page
    assert "<td>4.51 → 3.77</td><td>512</td><td>61.2</td><td>finished</td>" in page
    assert "<td>unfinished</td>" in page and "<td>unfinished (2)</td>" in page
    (image,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    image_size(base64.b64decode(image))
    assert "http" not in page, "nothing is loaded from elsewhere"


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        ("report.pdf", "--out {tmp}/report.pdf must end in .html or .png."),
        ("report.png", "There is no run in {tmp}/empty."),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, out: str, sentence: str):
    (tmp_path / "empty").mkdir()
    done = report(tmp_path / "empty", "--out", tmp_path / out)
    assert (done.returncode, done.stderr) == (2, f"Error: {sentence.format(tmp=tmp_path)}\n")
