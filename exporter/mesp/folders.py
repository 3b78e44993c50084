from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from mesp.errors import MespError
from mesp.files import remove_link, sync


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    if overwrite and path.exists() and not (path / "manifest.json").is_file():
        raise MespError(f"{path} is not a bundle, so it is not replaced; name another --out.")
    if not overwrite and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MespError(f"{path} exists; name another --out, or replace it with --overwrite.")
    old = f"mesp-export or mesp data is writing to {path}"
    with (
        locked(path, old) if path.exists() else nullcontext(),
        replacing(path, f"mesp-export is writing {path}") as folder,
    ):
        yield folder


@contextmanager
def replacing(path: Path, doing: str) -> Iterator[Path]:
    """Yields a new folder beside `path`, which becomes `path` if no error occurs.

    After an error, the new folder is removed. A killed process leaves the folder, and the next call
    for `path` empties it. Raises MespError if another process is writing to the folder.
    """
    parents = [parent for parent in path.parents if not parent.exists()]
    unfinished = path.parent / f".{path.name}.partial"
    remove_link(unfinished)
    is_new = not unfinished.exists()
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with locked(unfinished, doing):
            try:
                for left in unfinished.iterdir():
                    is_folder = left.is_dir() and not left.is_symlink()
                    shutil.rmtree(left) if is_folder else left.unlink()
                yield unfinished
                for written in (*unfinished.rglob("*"), unfinished):
                    sync(written)
                put_in_place(unfinished, path)
                sync(path.parent)
                shutil.rmtree(unfinished, ignore_errors=True)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
    except BaseException:
        # A signal may come before `unfinished` is locked, so new folders are removed here too.
        for made in (*([unfinished] if is_new else []), *parents):
            with suppress(OSError):
                made.rmdir()
        raise


def check_disk(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(
            f"it takes {-(-size // 10**6):,} MB, and its disk has {free // 10**6:,} MB free; free "
            "some space, or name another place"
        )


def put_in_place(new: Path, path: Path) -> None:
    """Renames the folder `new` to `path`. A previous folder `path` that is not empty is renamed to
    `new`.
    """
    if not path.exists() or not any(path.iterdir()):
        os.rename(new, path)
    elif not _exchange(new, path):
        old = path.with_name(f".{path.name}.replaced")
        os.rename(path, old)
        os.rename(new, path)
        os.rename(old, new)


def _exchange(a: Path, b: Path) -> bool:
    """Returns False if the system cannot do this."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(a), os.fsencode(b)
    if sys.platform == "darwin":
        return bool(library.renamex_np(*names, 2) == 0)  # RENAME_SWAP
    if not hasattr(library, "renameat2"):
        return False
    at = -100  # AT_FDCWD
    return bool(library.renameat2(at, names[0], at, names[1], 2) == 0)  # RENAME_EXCHANGE


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """The lock also ends with the process."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MespError(f"Another {doing}{_holder(lock)}; wait for it.") from error
        yield
    finally:
        os.close(lock)


def _holder(lock: int) -> str:
    with suppress(OSError):
        inode = os.fstat(lock).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[-3].split(":")[-1] == str(inode):
                return f" (process {fields[fields.index('FLOCK') + 3]} on {socket.gethostname()})"
    return ""


def refuse_linked_folders(folder: Path) -> None:
    """Raises MespError if a run's folder contains a symbolic link to a folder.

    Through such a link, files would be read or written elsewhere.
    """
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and path.is_dir():
            raise MespError(
                f"{path} is a symbolic link, and a run keeps to its own folder: put a folder in "
                "its place, or name another --out."
            )
