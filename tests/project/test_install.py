"""The contents of a wheel and an image; test_wheel.py makes and uses a wheel."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from helpers.paths import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def test_a_wheel_has_every_target_of_the_package():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    manifest = (ROOT / "Package.swift").read_text(encoding="utf-8")
    # What follows is for apps.
    with_wheel, _ = manifest.split("if !hostMLX {")
    paths = re.findall(r'path: "(ios/MeSPTrainer/.+?)"', with_wheel)
    assert paths
    assert [path for path in paths if f'"{path}"' not in setup] == []


def test_a_wheel_has_every_kind_of_file_that_is_built():
    (listed,) = re.findall(r"SUFFIXES = \((.*)\)", (ROOT / "setup.py").read_text(encoding="utf-8"))
    command = [
        "git",
        "ls-files",
        "ios/HostMLX",
        "ios/HostMLXLedger",
        *("ios/MeSPTrainer/" + n for n in ("Bundle", "Core", "Engine")),
    ]
    files = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    files += re.findall(r'\.process\("(.+?)"\)', (ROOT / "Package.swift").read_text("utf-8"))
    kinds = {Path(file).suffix for file in files}
    assert kinds - {".md"} == set(re.findall(r'"(.+?)"', listed))


def test_the_dockerfile_has_no_known_fault():
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    linter = shutil.which("hadolint", path=found)
    assert linter, "hadolint is missing: run `make setup`"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_that_of_the_tests():
    """Named by its digest too: a tag can be moved."""
    image = re.search(r"^FROM (\S+)", DOCKERFILE.read_text(encoding="utf-8"), re.M)[1]
    assert re.fullmatch(r"swift:[\w.-]+@sha256:[0-9a-f]{64}", image)
    for workflow in ("ci", "nightly"):
        text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
        assert re.findall(r"container: (\S+)", text) == [image]
