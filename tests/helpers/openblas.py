"""Import this module before MLX. If a `cblas_sgemm` is loaded globally, libmlx calls it instead of
its own BLAS. The library built here maps `cblas_sgemm` to `scipy_cblas_sgemm` of the wheel
scipy-openblas32.
"""

import ctypes
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "ios" / "HostMLX" / "Sources" / "CHostMLX"
SOURCES = [FOLDER / "OpenBLAS.cpp", FOLDER / "Pool.cpp"]
LIBRARY = ROOT / ".build" / "openblas.so"


def load() -> None:
    """Does nothing without the wheel scipy-openblas32 or without a C++ compiler."""
    spec = importlib.util.find_spec("scipy_openblas32")
    compiler = shutil.which("clang++") or shutil.which("c++")
    if spec is None or compiler is None:
        return
    folder = Path(spec.origin).parent / "lib"
    newest = max(source.stat().st_mtime for source in SOURCES)
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
        LIBRARY.parent.mkdir(exist_ok=True)
        built = LIBRARY.with_suffix(f".{os.getpid()}")
        command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-DHOST_OPENBLAS", "-pthread"]
        command += [*SOURCES, "-o", built]
        command += [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lscipy_openblas"]
        subprocess.run(command, check=True)
        built.replace(LIBRARY)  # atomic, as several processes may build it
    ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)


load()
