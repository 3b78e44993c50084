import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from helpers import openblas  # noqa: F401, before MLX

# isort: split
import pytest
from hypothesis import settings

from helpers.commands import call
from helpers.damage import CASES
from helpers.models import TEXT, TINY, write_model
from helpers.phones import Phones
from mesp.bundle import export
from mesp.errors import MespError

# Tests run with Python's default handlers of SIGINT and SIGHUP. A shell that starts the tests in
# the background makes them ignore SIGINT, and nohup makes them ignore SIGHUP. The processes that
# tests start would ignore these signals too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Exports in the tests' process store scales, biases and norms in float32, so that bundles can be
# compared with their models exactly.
export.DTYPE = "float32"

settings.register_profile("mesp", CASES)
settings.load_profile("mesp")

# The marks of tests that take long or need a large package, and the subjects of these tests. Such a
# test runs only if -m names its mark, as in `make test-slow`.
ON_REQUEST = {
    "calls": "the calls from a step to a product, which gdb reads",
    "federate": "federated rounds in Flower",
    "harness": "the tasks of lm-evaluation-harness",
    "growth": "the footprint of a run of 2,000 steps",
    "llama": "models and adapters in llama.cpp",
    "mission": "a real model to a phone and back",
    "peft": "adapters in PEFT and private steps in Opacus, on PyTorch",
    "phone": "the MLX of phones beside today's",
    "quantizer": "the loss of real models in 4 bits",
    "transformers": "models that transformers saves, and fused ones that it reads",
    "trl": "conversations in the chat templates that TRL knows",
    "wheel": "the commands as a wheel installs them",
}


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in ON_REQUEST.items():
        config.addinivalue_line("markers", f"{name}: {meaning}; runs with -m {name} alone")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked_for = set(re.findall(r"\w+", config.getoption("markexpr")))
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ON_REQUEST.keys() - asked_for:
                reason = f"takes long ({ON_REQUEST[mark.name]}): ask for it with -m {mark.name}"
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demo") / "demo.mesp"
    call("export", "--model", "demo", "--out", out, "--seq-len", 64)
    return out


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return _real_model("SMOLLM2")


@pytest.fixture(scope="session")
def gemma_gguf() -> Path:
    return _real_model("GEMMA")


def _real_model(name: str) -> Path:
    from studies import real_models

    try:
        return real_models.gguf_file(getattr(real_models, name))
    except MespError as error:
        pytest.skip(error.message)


@pytest.fixture
def stores_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes exports in the tests' process store bfloat16, as in a user's process."""
    monkeypatch.setattr(export, "DTYPE", "bfloat16")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def phones(tmp_path: Path) -> Phones:
    return Phones(tmp_path)


@pytest.fixture(scope="session")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _library("faults", tmp_path_factory)


@pytest.fixture(scope="session")
def clock_set_back(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return os.environ | {"LD_PRELOAD": str(_library("clock", tmp_path_factory))}


def _library(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("clang")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("it takes Linux and a C compiler")
    library = tmp_path_factory.mktemp(name) / f"{name}.so"
    source = Path(__file__).parent / "helpers" / f"{name}.c"
    line = [compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library), "-ldl"]
    subprocess.run(line, check=True)
    return library
