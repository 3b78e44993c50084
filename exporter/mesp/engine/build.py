"""Finds mesp-engine, the trainer, and builds it where a checkout has none."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections import deque
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from mesp.errors import MespError

# Installed editable, the package lies in exporter/ of the checkout it came from.
CHECKOUT = Path(__file__).resolve().parents[3]


def find_engine(checkout: Path = CHECKOUT) -> Path:
    """A ready engine: MESP_ENGINE, or the checkout's, built first where missing or old."""
    if named := os.environ.get("MESP_ENGINE"):
        engine = Path(named)
        if not os.access(engine, os.X_OK) or engine.is_dir():
            raise MespError(f"MESP_ENGINE names {named}, which is not a program.")
        return engine
    if not (checkout / "Package.swift").is_file():
        raise MespError(
            "mesp-engine is built from a checkout of MeSP, and this package is not installed from "
            "one: set MESP_ENGINE to a built mesp-engine, or `pip install -e` a checkout."
        )
    engine = built_engine(checkout)
    if not engine.exists():
        return build_engine(checkout)
    if shutil.which("swift") and is_older_than_sources(engine, checkout):
        return build_engine(checkout)
    return engine


def engine_path() -> Path:
    """Where the engine is, or would be: as `find_engine`, which builds it."""
    return Path(os.environ.get("MESP_ENGINE") or built_engine(CHECKOUT))


def built_engine(checkout: Path) -> Path:
    """Where a checkout's engine is, once it is built."""
    return checkout / ".build" / "release" / "mesp-engine"


def is_older_than_sources(engine: Path, checkout: Path) -> bool:
    """Whether a Swift source of the checkout was written after the engine."""
    built = engine.stat().st_mtime
    sources = [checkout / "Package.swift"]
    for folder, folders, files in os.walk(checkout / "ios"):
        folders[:] = [name for name in folders if name != ".build"]  # of tests that run beside
        sources += [Path(folder, name) for name in files]
    return any(source.stat().st_mtime > built for source in sources)


def mlx_folder() -> Path:
    """The installed `mlx` package, whose headers and library the engine is built with."""
    spec = importlib.util.find_spec("mlx.core")
    if spec is None or spec.origin is None:
        raise MespError("The Python package mlx is not installed: run `make setup`.")
    return Path(spec.origin).parent


def build_engine(checkout: Path = CHECKOUT) -> Path:
    """Builds the engine for release and returns its path. Only what has changed is compiled."""
    swift = shutil.which("swift")
    if swift is None:
        raise MespError(
            "mesp-engine has not been built, and there is no Swift compiler on PATH to build it "
            "with: install Swift 6 from https://swift.org/install, or set MESP_ENGINE to a built "
            "mesp-engine."
        )
    command = [
        swift,
        "build",
        "-c",
        "release",
        "--product",
        "mesp-engine",
        "--package-path",
        str(checkout),
    ]
    # On macOS too: SwiftPM does not compile Metal shaders, and the wheel brings them compiled.
    environment = {"MESP_HOST_MLX": str(mlx_folder()), **os.environ}
    console = Console(stderr=True)
    tail: deque[str] = deque(maxlen=40)
    with (
        console.status("Building mesp-engine") as status,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout:
            tail.append(line.rstrip())
            status.update("Building mesp-engine " + escape(line.strip()[: console.width - 25]))
    if process.returncode != 0:
        click.echo("\n".join(tail), err=True)
        raise MespError("mesp-engine could not be built; the compiler's last lines are above.")
    engine = built_engine(checkout)
    engine.touch()  # where no source needed compiling, the program keeps its old date
    return engine
