"""The commands and tools as programs; what they do is tested in the tests' own process."""

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

TOOLS = ROOT / "tools"
COMMANDS = ("mesp", "mesp-export", "mesp-train")
TOOL_NAMES = ("bench", "collect", "first_hour", "long_run", "push")


@pytest.mark.parametrize("name", [*COMMANDS, *TOOL_NAMES])
def test_a_program_says_what_it_is_for(name: str):
    command = [Path(sys.executable).with_name(name)]
    if name in TOOL_NAMES:
        command = [sys.executable, TOOLS / f"{name}.py"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")
