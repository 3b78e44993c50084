"""Where a package that was not installed from a checkout keeps the engine that it builds."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import mesp
from mesp.errors import plain_os_errors

# What `setup.py` puts there: the package of SwiftPM, as in a checkout.
SOURCES = Path(__file__).with_name("sources")


def user_cache() -> Path:
    """The user's folder of what can be made again: the XDG Base Directory's, on a Mac Apple's."""
    own = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / own) / "mesp"


def cached_engine(sources: Path, mlx: Path) -> Path:
    """Where the engine is that is built of these sources with this `mlx` package, once it is.

    The engine finds MLX's library by its path: another environment's is another engine.
    """
    digest = hashlib.sha256(str(mlx).encode())
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    versions = f"{mesp.__version__}-mlx-{metadata.version('mlx')}"
    return user_cache() / f"engine-{versions}-{digest.hexdigest()[:12]}" / "mesp-engine"


@contextmanager
def alone(folder: Path, tell: Callable[[], object]) -> Iterator[None]:
    """Makes the folder, and lets one process in at a time; `tell` is called before a wait.

    A process that ends, however it does, lets the next one in.
    """
    with plain_os_errors(f"Cannot keep the engine in {folder} (XDG_CACHE_HOME moves it)"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "wb")  # noqa: SIM115, closed below
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
