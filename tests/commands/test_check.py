"""`mesp check`: a bundle's files, and the engine's checks of training with it."""

import json
import shutil
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

import mesp
from helpers.commands import invoke
from helpers.paths import DEMO_BUNDLE
from mesp.__main__ import main
from mesp.commands.check import CHECKS
from mesp.engine.build import find_engine


def engine_that_finds(folder: Path, **verdicts: str) -> dict[str, str]:
    """The environment with an engine that prints these checks' verdicts."""
    found = [{"type": "start"}]
    for name, verdict in verdicts.items():
        found.append({"type": "check", "name": name, "verdict": verdict, "sentence": "It says so."})
    lines = "\n".join(map(json.dumps, [*found, {"type": "end"}]))
    engine = folder / "engine"
    version = f"mesp-engine {mesp.__version__} with MLX {version_of('mlx')}"
    start = f"#!/bin/sh\n[ $1 = --version ] && echo {version} && exit\n"
    engine.write_text(f"{start}cat <<'END'\n{lines}\nEND\n")
    engine.chmod(0o755)
    return {"MESP_ENGINE": str(engine)}


def test_a_bundle_that_trains_as_it_should(tmp_path: Path):
    engine = engine_that_finds(tmp_path, gradients="pass", time="note", metal="skipped")
    done = invoke(main, "mesp", "check", DEMO_BUNDLE, env=engine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The files of {DEMO_BUNDLE} are whole; none of 3 checks failed.\n"


def test_each_failure_is_a_sentence(tmp_path: Path):
    engine = engine_that_finds(tmp_path, gradients="fail", time="note", peaks="fail")
    done = invoke(main, "mesp", "check", DEMO_BUNDLE, env=engine)
    assert done.returncode == 1
    assert done.stdout == "gradients: It says so.\npeaks: It says so.\n"
    assert done.stderr == f"Error: 2 of 3 checks of {DEMO_BUNDLE} failed.\n"


@pytest.mark.parametrize("options", [(), ("--files",)])
def test_a_file_that_was_changed_is_named(tmp_path: Path, options: tuple[str, ...]):
    bundle = shutil.copytree(DEMO_BUNDLE, tmp_path / "demo.mesp")
    file = bundle / "blocks" / "01.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    done = invoke(main, "mesp", "check", bundle, *options, env=engine_that_finds(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {file} is damaged")


def test_files_alone_need_no_engine(tmp_path: Path):
    nowhere = {"MESP_ENGINE": str(tmp_path / "none")}
    done = invoke(main, "mesp", "check", DEMO_BUNDLE, "--files", env=nowhere)
    assert (done.returncode, done.stdout) == (0, f"The files of {DEMO_BUNDLE} are whole.\n")


def test_what_is_no_bundle_is_said(tmp_path: Path):
    done = invoke(main, "mesp", "check", tmp_path)
    assert done.returncode == 2 and "is not a bundle" in done.stderr


@pytest.mark.slow
def test_the_engine_knows_the_checks():
    """Of a bundle that comes with the repository, by the engine that was built."""
    find_engine()
    done = invoke(main, "mesp", "check", DEMO_BUNDLE)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (
        0,
        f"The files of {DEMO_BUNDLE} are whole; none of {len(CHECKS)} checks failed.",
    )
