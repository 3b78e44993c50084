import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from mesp.files import write_whole


@pytest.mark.parametrize("refused", [False, True])
def test_a_file_is_on_the_disk_before_its_name_and_then_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
):
    done: list[tuple[str, object]] = []
    fsync, replace = os.fsync, os.replace

    def kept_fsync(file: int) -> None:
        done.append(("fsync", os.fstat(file).st_ino))
        fsync(file)

    def kept_fcntl(file: int, command: int) -> None:
        done.append((command, os.fstat(file).st_ino))
        if refused:
            raise OSError

    def kept_replace(old: Path, new: Path) -> None:
        done.append(("replace", os.stat(old).st_ino))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", kept_fsync)
    monkeypatch.setattr(os, "replace", kept_replace)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", "full", raising=False)
    monkeypatch.setattr(fcntl, "fcntl", kept_fcntl)
    path = tmp_path / "file"
    write_whole(path, b"all of it")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert path.read_bytes() == b"all of it"
    assert done == [
        *(("fsync", file), ("full", file)),
        ("replace", file),
        *(("fsync", folder), ("full", folder)),
    ]


def test_a_folder_that_cannot_be_synchronized_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Some network file systems cannot synchronize a folder, and this is ignored."""
    fsync = os.fsync

    def no_folders(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(file)

    def nothing(file: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", no_folders)
    write_whole(tmp_path / "file", b"all of it")
    assert (tmp_path / "file").read_bytes() == b"all of it"
    monkeypatch.setattr(os, "fsync", nothing)
    with pytest.raises(OSError, match="Invalid argument"):
        write_whole(tmp_path / "file", b"something else")
    assert (tmp_path / "file").read_bytes() == b"all of it"
