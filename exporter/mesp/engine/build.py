"""Finds mesp-engine, the trainer, and builds it where it is missing."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import mesp
from mesp.errors import MespError, plain_os_errors

log = logging.getLogger(__name__)

# Installed editable, the package lies in exporter/ of the checkout it came from.
CHECKOUT = Path(__file__).resolve().parents[3]
# The folder into which `setup.py` puts the Swift package, laid out as in a checkout.
SOURCES = Path(__file__).with_name("sources")


def find_engine(checkout: Path = CHECKOUT, sources: Path = SOURCES) -> Path:
    """A ready engine: MESP_ENGINE, the checkout's, or the one in the user's cache.

    The last two are built first where they are missing or old. Raises MespError where that fails.
    """
    if named := os.environ.get("MESP_ENGINE"):
        engine = Path(named)
        if not os.access(engine, os.X_OK) or engine.is_dir():
            raise MespError(f"MESP_ENGINE names {named}, which is not a program.")
        if (said := version_of(engine)) != expected_version():
            raise MespError(
                f"MESP_ENGINE names {named}, which is not {expected_version()}: it says "
                f"{said or 'nothing'}. Build it again, or unset MESP_ENGINE."
            )
        return engine
    if not has_sources(checkout):
        return ready_in_cache(sources)
    engine = built_engine(checkout)
    if not engine.exists():
        return build_engine(checkout)
    if shutil.which("swift") and is_older_than_sources(engine, checkout):
        return build_engine(checkout)
    return engine


def engine_path() -> Path:
    """The path of the engine, which `find_engine` builds."""
    if named := os.environ.get("MESP_ENGINE"):
        return Path(named)
    return built_engine(CHECKOUT) if has_sources(CHECKOUT) else cached_engine(SOURCES, mlx_folder())


def has_sources(folder: Path) -> bool:
    """Whether what the engine is built from lies there, as in a checkout."""
    return (folder / "Package.swift").is_file()


def built_engine(checkout: Path) -> Path:
    """The path of a checkout's engine."""
    return checkout / ".build" / "release" / "mesp-engine"


def is_older_than_sources(engine: Path, checkout: Path) -> bool:
    """Whether a Swift source of the checkout was written after the engine."""
    built = engine.stat().st_mtime
    sources = [checkout / "Package.swift"]
    for folder, folders, files in os.walk(checkout / "ios"):
        folders[:] = [name for name in folders if name != ".build"]  # of tests that run beside
        sources += [Path(folder, name) for name in files]
    return any(source.stat().st_mtime > built for source in sources)


def expected_version() -> str:
    """The output of `mesp-engine --version` for this package's engine."""
    return f"mesp-engine {mesp.__version__} with MLX {metadata.version('mlx')}"


def version_of(engine: Path) -> str:
    """The last line that `ENGINE --version` prints, on standard output or error."""
    try:
        done = subprocess.run(
            [engine, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except OSError as error:
        return str(error.strerror)
    return ((done.stdout or done.stderr).strip().splitlines() or [""])[-1]


def ready_in_cache(sources: Path) -> Path:
    """The user's engine, built first where it is missing, or where it no longer starts: it needs
    the libraries of the Swift that built it."""
    if not has_sources(sources):
        raise MespError(
            "mesp-engine's sources have not been installed with this package: install MeSP from "
            "its wheel or its checkout, or set MESP_ENGINE to a built mesp-engine."
        )
    engine = cached_engine(sources, mlx_folder())
    for path in (user_cache(), engine.parent, engine):
        _require_own(path)

    def is_ready() -> bool:
        return engine.exists() and version_of(engine) == expected_version()

    if is_ready():
        return engine
    with lock_folder(engine.parent):
        if not is_ready():
            scratch = engine.with_name("build")  # what a build that was killed left, serves
            built = build_engine(sources, scratch)
            with plain_os_errors(f"Cannot write {engine}"):
                built.replace(engine)
            shutil.rmtree(scratch, ignore_errors=True)
            prune(engine.parent)
    return engine


def _require_own(path: Path) -> None:
    """Raises MespError where somebody else could have put the program `path` there, or one into
    the folder `path`."""
    with suppress(FileNotFoundError, NotADirectoryError):  # `alone` says what cannot be made
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            raise MespError(
                f"{path} is another user's, or everybody may write it, so no program in it is run: "
                "remove it, or name a folder of yours in XDG_CACHE_HOME."
            )


def user_cache() -> Path:
    """The user's folder of what can be rebuilt: the XDG Base Directory's, on a Mac Apple's."""
    own = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / own) / "mesp"


def cached_engine(sources: Path, mlx: Path) -> Path:
    """The path of the engine of these sources and this `mlx` package.

    The engine finds MLX's library by its path: another environment's is another engine.
    """
    digest = hashlib.sha256(str(mlx).encode())
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    versions = f"{mesp.__version__}-mlx-{metadata.version('mlx')}"
    return user_cache() / f"engine-{versions}-{digest.hexdigest()[:12]}" / "mesp-engine"


def prune(newest: Path) -> None:
    """Removes cached engines beside the folder `newest` that can run no more: their `mlx` package,
    which the folder's file `mlx` names, is gone. Another environment's stay."""
    (newest / "mlx").write_text(str(mlx_folder()))
    for folder in newest.parent.glob("engine-*"):
        with suppress(OSError):
            if folder != newest and not Path((folder / "mlx").read_text()).is_dir():
                shutil.rmtree(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, and lets one process in at a time.

    A process that ends, however it does, lets the next one in.
    """
    with plain_os_errors(f"Cannot keep the engine in {folder} (XDG_CACHE_HOME moves it)"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "wb")  # noqa: SIM115, closed below
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("Another process builds mesp-engine; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def mlx_folder() -> Path:
    """The installed `mlx` package, whose headers and library the engine is built with."""
    spec = importlib.util.find_spec("mlx.core")
    if spec is None or spec.origin is None:
        raise MespError("The Python package mlx is missing: install MeSP with its dependencies.")
    return Path(spec.origin).parent


def build_engine(package: Path = CHECKOUT, scratch: Path | None = None) -> Path:
    """Builds the engine for release and returns its path. Only what has changed is compiled.

    `package`: the folder of Package.swift; `scratch`: of what the compiler writes, where that is
    not the package's .build.
    """
    swift = shutil.which("swift")
    if swift is None:
        raise MespError(
            "mesp-engine has not been built, and there is no Swift compiler on PATH to build it "
            "with: install Swift 6 from https://swift.org/install, or set MESP_ENGINE to a built "
            "mesp-engine."
        )
    if scratch is not None:
        log.warning("Building mesp-engine in %s, once; some minutes.", scratch.parent)
    command = [
        swift,
        "build",
        "-c",
        "release",
        "--product",
        "mesp-engine",
        "--package-path",
        str(package),
        # In a checkout as `make` compiles the tests, which then share what is compiled.
        *(["--scratch-path", str(scratch)] if scratch else ["-Xswiftc", "-enable-testing"]),
    ]
    # On macOS too: SwiftPM does not compile Metal shaders, and the wheel brings them compiled.
    environment = {"MESP_HOST_MLX": str(mlx_folder()), **os.environ}
    tail: deque[str] = deque(maxlen=40)
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            for line in process.stdout or ():
                tail.append(line.rstrip())
                log.info("Building mesp-engine %s", line.strip())  # commands show the last one
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        log.error("%s", "\n".join(tail))
        raise MespError("mesp-engine could not be built; the compiler's last lines are above.")
    engine = (scratch / "release" / "mesp-engine") if scratch else built_engine(package)
    engine.touch()  # where no source needed compiling, the program keeps its old date
    return engine
