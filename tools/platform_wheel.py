"""Makes a wheel for this platform from the sdist in dist/ and a mesp-engine that it builds.

`make dist` makes the sdist first. On Linux, the engine contains Swift's libraries, and the wheel
has the platform tag of MLX's wheel. No Linux wheel is made if the engine needs a library that
EXPECTED does not match, or a newer version of GLIBC's, GLIBCXX's or CXXABI's symbols than MLX's
library needs.
"""

import logging
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

import mesp
from mesp.engine.build import CHECKOUT, ENGINE, build_program, mlx_folder
from mesp.errors import MespError

BUILT = CHECKOUT / "build" / "programs"
# The platform tag of the wheel for macOS. Package.swift requires macOS 14.
MACOS = "macosx_14_0_arm64"
EXPECTED = re.compile(r"(ld-linux-|lib(c|m|dl|pthread|gcc_s|stdc\+\+|mlx|scipy_openblas)\.so)")


def readelf(option: str, file: Path) -> str:
    try:
        command = ["readelf", "--wide", option, file]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise MespError("readelf is missing: on Debian, apt install binutils.") from None


def needed_symbols(file: Path) -> dict[str, tuple[int, ...]]:
    newest: dict[str, tuple[int, ...]] = {}
    versions = r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+)"
    for name, version in re.findall(versions, readelf("--version-info", file)):
        newest[name] = max(newest.get(name, ()), tuple(map(int, version.split("."))))
    return newest


def excess(engine: Path, mlx: Path) -> list[str]:
    """Returns the libraries that the engine needs and EXPECTED does not match, and the symbol
    versions that it needs and that are newer than those that MLX's library needs. GCC's symbol
    versions are not compared.
    """
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", engine))
    libraries = [name for name in needed if not EXPECTED.match(name)]
    there = needed_symbols(mlx)
    return libraries + [
        f"{name}_{'.'.join(map(str, version))}"
        for name, version in needed_symbols(engine).items()
        if version > there.get(name, ())
    ]


def linux_tag() -> str:
    said = metadata.distribution("mlx").read_text("WHEEL") or ""
    tags = re.findall(r"^Tag: \S+-(manylinux_\d+_\d+_\w+)$", said, re.M)
    if not tags:
        raise MespError("The mlx package is not from PyPI's wheel, so nobody knows where it runs.")
    return str(tags[0])


def build_engine() -> tuple[Path, str]:
    """Returns the folder of the files that the wheel gets, and the platform tag."""
    engine = build_program(scratch=BUILT / "build", for_wheel=True)
    if sys.platform == "linux":
        tag = linux_tag()
        if more := excess(engine, mlx_folder() / "lib" / "libmlx.so"):
            raise MespError(f"{engine} needs more than {tag} has: {', '.join(more)}.")
    elif platform.machine() == "arm64":
        tag = MACOS
    else:
        raise MespError("MLX has no wheels for Intel Macs.")
    folder = BUILT / tag
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(engine, folder / ENGINE.name)
    shutil.copy(Path(__file__).with_name("platform_wheel_notice.txt"), folder / "NOTICE.txt")
    (folder / "mlx-version").write_text(metadata.version("mlx") + "\n", encoding="utf-8")
    return folder, tag


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist = CHECKOUT / "dist"
    sdist = dist / f"mesp-{mesp.__version__}.tar.gz"
    try:
        programs, tag = build_engine()
    except MespError as error:
        sys.exit(f"Error: {error.message}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        options = [f"--programs={programs}", f"--plat-name={tag}"]
        done = subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--outdir", dist]
            + [f"--config-setting=--build-option={option}" for option in options]
            + [Path(folder, sdist.name.removesuffix(".tar.gz"))]
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
