"""Reads files from untrusted sources, and writes files safely in folders with untrusted content."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import yaml

# The default limit of a file's size in bytes. Manifests of the known models have at most 0.4 MB.
SIZE = 4 << 20
DEPTH = 64


def open_regular(path: Path, root: Path | None = None) -> BinaryIO:
    """Opens a regular file for reading.

    If `root` is given, a link must not lead out of this folder (see `root_of`). Raises OSError if
    the file cannot be read. Raises ValueError if a link leads out of `root`, or if the file is not
    regular.
    """
    if root is not None and not Path(os.path.realpath(path)).is_relative_to(root):
        raise ValueError(f"{path} is a link that leads out of its folder")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path} is not a regular file")
    return file


def read_bytes(path: Path, size: int = SIZE) -> bytes:
    """Raises what `open_regular` raises, and ValueError if the file is larger."""
    with open_regular(path) as file:
        data = file.read(size + 1)
    if len(data) > size:
        raise ValueError(f"{path} has more than {size >> 20} MiB")
    return data


def read_json(path: Path, size: int = SIZE) -> Any:
    return parse_json(read_bytes(path, size))


def read_object(path: Path, size: int = SIZE) -> dict[str, Any]:
    value = read_json(path, size)
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def read_settings(path: Path) -> dict[str, Any]:
    settings = read_object(path)
    if any("\0" in value for value in settings.values() if isinstance(value, str)):
        raise ValueError(f"{path} has a null character")
    return settings


class UnclearError(ValueError):
    """A JSON text that parsers interpret differently. The message has the reason and the remedy."""


def parse_json(text: str | bytes, strict: bool = False) -> Any:
    """Raises ValueError if the text is not valid JSON, is nested more than `DEPTH` deep, or has a
    number that is too large for a float or a string that UTF-8 cannot encode. With `strict`, also
    raises UnclearError for the words NaN, Infinity and -Infinity, and for repeated keys.
    """
    hooks: dict[str, Any] = {"parse_float": _finite}
    if strict:
        hooks |= {"object_pairs_hook": _object, "parse_constant": _no_number}
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, **hooks)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    _check(value, "\\u" in text)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise UnclearError(f"has {text:.40}, which is too large a number; leave it out")
    return number


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise UnclearError(f'has the key "{twice:.200}" twice in one object; keep one')
    return made


def _no_number(name: str) -> None:
    raise UnclearError(f"has {name}, which is not a JSON number; leave it out")


class _Loader(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, "it refers to another part, which is not supported", event.start_mark
            )
        return super().compose_node(parent, index)


def parse_yaml(text: bytes) -> Any:
    """Raises yaml.YAMLError or ValueError if the text is not valid YAML, has aliases, is nested
    more than `DEPTH` deep, or has a string that UTF-8 cannot encode.
    """
    try:
        value = yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError("a value is not what its tag says") from error
    _check(value, True)
    return value


def _check(value: Any, has_escapes: bool) -> None:
    """Raises ValueError if a value is nested too deep, or has a lone surrogate.

    In JSON, only an escape can write a lone surrogate. So strings are checked only with
    `has_escapes`.
    """
    level = [value]
    for _ in range(DEPTH):
        inner = []
        for part in level:
            if isinstance(part, dict):
                inner += [*part, *part.values()]
            elif isinstance(part, list | tuple | set):
                inner += part
            elif has_escapes and isinstance(part, str):
                part.encode()
        level = inner
        if not level:
            return
    raise ValueError("it is nested too deep")


def inside(folder: Path, name: str) -> Path:
    """Raises ValueError if the name is invalid or leads out of the folder, or if a part of the path
    is a symbolic link.
    """
    parts = name.split("/")
    if "\0" in name or len(name) > 255 or {"", ".", ".."}.intersection(parts):
        raise ValueError(f"{name!r} is not a name within a folder")
    path = folder
    for part in parts:
        path = path / part
        try:
            is_link = path.is_symlink()
        except OSError as error:  # the name is too long
            raise ValueError(f"{name!r} is not a name of a file") from error
        if is_link:
            raise ValueError(f"{name!r} is a symbolic link")
    return path


def root_of(folder: Path) -> Path:
    """Returns the folder that symbolic links in `folder` may lead into.

    The files of a snapshot in Hugging Face's cache are links into the repository's folder, so that
    folder is returned.
    """
    root = folder.resolve()
    return root.parents[1] if root.parent.name == "snapshots" else root


def remove_link(path: Path) -> None:
    if path.is_symlink():
        path.unlink()


def create(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)
    return open(path, "xb")


def partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically. Even after a power loss, the file has `data` or its previous
    content.

    On return, the file is on the disk.
    """
    partial = partial_of(path)
    try:
        with create(partial) as file:
            file.write(data)
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
                raise
        if hasattr(fcntl, "F_FULLFSYNC"):
            # macOS's fsync leaves data in the disk's cache. F_FULLFSYNC flushes the cache, but some
            # file systems lack it.
            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)
