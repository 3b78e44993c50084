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
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import mesp
from mesp.errors import MespError, plain_os_errors

log = logging.getLogger(__name__)

CHECKOUT = Path(__file__).resolve().parents[3]
SOURCES = Path(__file__).with_name("sources")
# The folder with a wheel's built engine. Its file `mlx-version` has the version of MLX that the
# engine needs.
CARRIED = Path(__file__).with_name("programs")
MLX_FROM_CARRIED = f"{'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}/../../../mlx"

VERSION_SECONDS = 60.0
SECONDS_BETWEEN_LINES = 15.0


class Program(NamedTuple):
    name: str
    package: str


ENGINE = Program("mesp-engine", ".")
# A program that counts the kernels of a step on a phone's GPU. It is built only on Linux.
COUNTER = Program("mesp-count", "ios/HostMLXLedger")


def find_engine(
    checkout: Path = CHECKOUT, sources: Path = SOURCES, carried: Path = CARRIED
) -> Path:
    """Returns an engine that is ready to run.

    The engine is the one that MESP_ENGINE names, the checkout's, the wheel's, or the one in the
    user's cache, in this order. The checkout's and the cache's engines are built if they are
    missing. Raises MespError if an engine is needed but cannot be built, or if MESP_ENGINE names a
    wrong engine.
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
    if not has_sources(checkout) and has_engine(carried):
        if not (reason := misfit(carried)):
            return carried / ENGINE.name
        if shutil.which("swift") is None:
            raise MespError(
                f"The mesp-engine that came with this package {reason}: install the package again, "
                "into an environment of its own, or install Swift 6.1 from "
                "https://swift.org/install to build another."
            )
    return _find(ENGINE, checkout, sources)


def has_engine(carried: Path) -> bool:
    return (carried / ENGINE.name).is_file()


def misfit(carried: Path) -> str:
    """Returns why the wheel's engine cannot be used here, or an empty string.

    The engine works only with the version of MLX that it was compiled with.
    """
    wanted = (carried / "mlx-version").read_text(encoding="utf-8").strip()
    if wanted != (installed := metadata.version("mlx")):
        return f"runs with MLX {wanted}, and {installed} is installed"
    said = version_of(carried / ENGINE.name)
    return "" if said == expected_version() else f"does not start (it says {said or 'nothing'})"


def find_counter(checkout: Path = CHECKOUT, sources: Path = SOURCES) -> Path:
    """Returns a mesp-count that is ready to run.

    The program is the one beside the engine that MESP_ENGINE names.
    """
    if sys.platform != "linux":
        raise MespError("mesp-count counts on Linux only.")
    if named := os.environ.get("MESP_ENGINE"):
        counter = Path(named).with_name(COUNTER.name)
        if version_of(counter) == expected_version(COUNTER):
            return counter
    return _find(COUNTER, checkout, sources)


def _find(program: Program, checkout: Path, sources: Path) -> Path:
    if not has_sources(checkout):
        return ready_in_cache(sources, program)
    built = built_program(checkout, program)
    if built.exists() and not (shutil.which("swift") and is_older_than_sources(built, checkout)):
        return built
    return build_program(checkout, program=program)


def engine_path() -> Path:
    if named := os.environ.get("MESP_ENGINE"):
        return Path(named)
    if has_sources(CHECKOUT):
        return built_program(CHECKOUT)
    if has_engine(CARRIED) and not misfit(CARRIED):
        return CARRIED / ENGINE.name
    return cached_program(SOURCES)


def has_sources(folder: Path) -> bool:
    return (folder / "Package.swift").is_file()


def built_program(checkout: Path, program: Program = ENGINE) -> Path:
    return checkout / ".build" / "release" / program.name


def is_older_than_sources(program: Path, checkout: Path) -> bool:
    built = program.stat().st_mtime
    sources = [checkout / "Package.swift"]
    for folder, folders, files in os.walk(checkout / "ios"):
        # Folders of compiled files may change at the same time.
        folders[:] = [name for name in folders if name != ".build"]
        sources += [Path(folder, name) for name in files]
    return any(source.stat().st_mtime > built for source in sources)


def expected_version(program: Program = ENGINE) -> str:
    return f"{program.name} {mesp.__version__} with MLX {metadata.version('mlx')}"


def version_of(program: Path) -> str:
    """Returns the last line that `PROGRAM --version` prints, of at most 200 characters.

    A program that prints much or does not end is killed.
    """
    try:
        with subprocess.Popen(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            timer = threading.Timer(VERSION_SECONDS, process.kill)
            timer.start()
            assert process.stdout is not None
            said = process.stdout.read(1 << 16).decode(errors="replace")
            timer.cancel()
            process.kill()
    except OSError as error:
        return str(error.strerror)
    return (said.strip().splitlines() or [""])[-1][:200]


def ready_in_cache(sources: Path, program: Program = ENGINE) -> Path:
    if not has_sources(sources):
        raise MespError(
            f"{program.name}'s sources have not been installed with this package: install MeSP "
            f"from its wheel or its checkout, or {_set_engine(program)}."
        )
    cached = cached_program(sources, program)
    for path in (user_cache(), cached.parent, cached):
        _require_own(path)

    def is_ready() -> bool:
        return cached.exists() and version_of(cached) == expected_version(program)

    if is_ready():
        return cached
    with lock_folder(cached.parent):
        if not is_ready():
            scratch = cached.with_name(f"build-{program.name}")
            built = build_program(sources, scratch, program)
            with plain_os_errors(f"Cannot write {cached}"):
                built.replace(cached)
            shutil.rmtree(scratch, ignore_errors=True)
            prune(cached.parent)
    return cached


def _set_engine(program: Program) -> str:
    beside = " with mesp-count beside it" if program == COUNTER else ""
    return f"set MESP_ENGINE to a built mesp-engine{beside}"


def _require_own(path: Path) -> None:
    """Raises MespError if `path` belongs to a user other than this one and root, or if everybody
    may write to it.
    """
    # A missing `path` is fine.
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.stat()
        if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
            raise MespError(
                f"{path} is another user's, or everybody may write it, so no program in it is run: "
                "remove it, or name a folder of yours in XDG_CACHE_HOME."
            )


def user_cache() -> Path:
    own = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / own) / "mesp"


def cached_program(sources: Path, program: Program = ENGINE) -> Path:
    """The program contains the path of MLX's library, so each Python environment has its own
    program.
    """
    digest = hashlib.sha256(str(mlx_folder()).encode())
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        digest.update(path.relative_to(sources).as_posix().encode() + b"\0" + path.read_bytes())
    versions = f"{mesp.__version__}-mlx-{metadata.version('mlx')}"
    return user_cache() / f"engine-{versions}-{digest.hexdigest()[:12]}" / program.name


def prune(newest: Path) -> None:
    """Removes the cached folders beside `newest` whose `mlx` package no longer exists.

    A folder's file `mlx` has the path of the `mlx` package that its programs need.
    """
    (newest / "mlx").write_text(str(mlx_folder()))
    for folder in newest.parent.glob("engine-*"):
        with suppress(OSError):
            if folder != newest and not Path((folder / "mlx").read_text()).is_dir():
                shutil.rmtree(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Creates a folder, and locks it for this process while the context lasts.

    The operating system releases the lock when the process ends.
    """
    with plain_os_errors(f"Cannot keep the engine in {folder} (XDG_CACHE_HOME moves it)"):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "wb")  # noqa: SIM115, closed below
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("Another process builds MeSP's programs; waiting for it.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def mlx_folder() -> Path:
    spec = importlib.util.find_spec("mlx.core")
    if spec is None or spec.origin is None:
        raise MespError("The Python package mlx is missing: install MeSP with its dependencies.")
    return Path(spec.origin).parent


def build_program(
    checkout: Path = CHECKOUT,
    scratch: Path | None = None,
    program: Program = ENGINE,
    *,
    for_wheel: bool = False,
) -> Path:
    """`scratch` is the build folder, by default .build in `checkout`. With `for_wheel`, the program
    runs without an installed Swift, and finds MLX relative to the folder CARRIED.
    """
    swift = shutil.which("swift")
    if swift is None:
        raise MespError(
            f"{program.name} has not been built, and there is no Swift compiler on PATH to build "
            f"it with: install Swift 6.1 from https://swift.org/install, or {_set_engine(program)}."
        )
    folder = scratch or checkout / ".build"
    built = folder / "release" / program.name
    if not built.exists():
        place = folder.parent if scratch else folder
        log.warning("Building %s in %s, once; some minutes.", program.name, place)
    command = [swift, "build", "-c", "release", "--product", program.name]
    command += ["--package-path", str(checkout / program.package)]
    # Packages that share a folder share what is compiled, but not SwiftPM's cached plan.
    command += ["--scratch-path", str(folder), "--disable-build-manifest-caching"]
    if not scratch or program == COUNTER:
        # The tests in `make` use this option too, so they share the compiled files. mesp-count
        # needs the option to use internals of the trainer's package.
        command += ["-Xswiftc", "-enable-testing"]
    # SwiftPM does not compile Metal shaders, so MLX comes from the Python wheel on macOS too.
    environment = {"MESP_HOST_MLX": str(mlx_folder()), **os.environ}
    if for_wheel:
        environment["MESP_WHEEL"] = MLX_FROM_CARRIED
        # Removes the build machine's paths from error messages in MLX's headers.
        command += ["-Xcxx", f"-ffile-prefix-map={environment['MESP_HOST_MLX']}=mlx"]
        if sys.platform == "linux":  # macOS includes Swift's libraries
            command += ["--static-swift-stdlib", "-Xlinker", "-s"]
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
            said_at = time.monotonic()
            for line in process.stdout or ():
                tail.append(line.rstrip())
                # SwiftPM says "[12/34] Compiling MeSPCore Block.swift".
                if line.startswith("[") and time.monotonic() > said_at + SECONDS_BETWEEN_LINES:
                    said_at = time.monotonic()
                    log.warning("Building %s: %s", program.name, line.strip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        log.error("%s", "\n".join(tail))
        raise MespError(f"{program.name} could not be built; the compiler's last lines are above.")
    built.touch()
    return built
