import json
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.commands import wait_for
from helpers.exports import COMMAND, export, exported, refused
from helpers.models import TINY
from mesp.bundle.reader import Bundle

pytestmark = pytest.mark.usefixtures("working_folder")


def test_existing_folder_is_kept(tiny):
    exported("--model", tiny, "--seq-len", 8)
    assert "--overwrite" in refused("--model", tiny, "--out", "out.mesp")
    Path("folder").mkdir()
    Path("folder/precious").touch()
    assert "exists" in refused("--model", tiny, "--out", "folder")
    assert "not a bundle" in refused("--model", tiny, "--out", "folder", "--overwrite")


def test_failed_overwrite_keeps_the_old_bundle(tiny):
    exported("--model", tiny, "--seq-len", 8)
    refused("--model", tiny, "--data", "nothing.txt", "--out", "out.mesp", "--overwrite")
    Bundle("out.mesp").verify()
    assert exported("--model", tiny, "--seq-len", 16).manifest.seq_lens == (16,)
    assert [path.name for path in Path().iterdir()] == ["out.mesp"]


def test_killed_export_leaves_no_bundle(tiny):
    config = {**TINY, "vocab_size": 400_000}
    Path("large").mkdir()
    Path("large/config.json").write_text(json.dumps(config))
    command = ["--model", "large", "--random-weights", "--seq-len", "8", "--out", "out.mesp"]
    process = subprocess.Popen([COMMAND, *command])
    wait_for(Path(".out.mesp.partial/embedding.bin").exists, process)
    process.send_signal(signal.SIGSTOP)
    assert "Another mesp-export is writing" in refused("--model", tiny, "--out", "out.mesp")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("out.mesp").exists()
    exported("--model", tiny, "--seq-len", 8)
    assert not Path(".out.mesp.partial").exists()


def test_interrupted_export_leaves_nothing(tiny, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mesp.bundle.writer.describe_files", interrupt)
    assert export("--model", tiny, "--out", "a/b/out.mesp").exit_code == 130
    assert not list(Path().iterdir())


def test_disk_without_room(tiny, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "it takes 1 MB, and its disk has 0 MB free" in refused("--model", tiny)


@pytest.mark.parametrize("limit", [50_000, 8_000])
def test_disk_that_becomes_full(tiny, limit):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        assert "disk" in refused("--model", tiny, "--seq-len", 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_output_that_cannot_be_written(tiny):
    Path("file").touch()
    assert "Cannot write file/out.mesp" in refused("--model", tiny, "--out", "file/out.mesp")
    assert "exists" in refused("--model", tiny, "--out", "file")
