import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT

TOOLS = ROOT / "tools"
STUDIES = TOOLS / "studies"
COMMANDS = ("mesp", "mesp-export", "mesp-train")
TOOL_NAMES = ("bench", "collect", "first_hour", "push")


@pytest.mark.parametrize("name", [*COMMANDS, *TOOL_NAMES])
def test_a_program_says_what_it_is_for(name: str):
    if name in COMMANDS:
        command = [Path(sys.executable).with_name(name)]
    else:
        command = [sys.executable, TOOLS / f"{name}.py"]
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("folder", "pattern"), [(TOOLS, "*.py"), (STUDIES, "**/*.py")], ids=["tools", "studies"]
)
def test_the_page_of_a_folder_lists_its_programs_and_folders(folder: Path, pattern: str):
    page = (folder / "README.md").read_text(encoding="utf-8")
    programs = {
        path.relative_to(folder).as_posix()
        for path in folder.glob(pattern)
        if "\nif __name__ ==" in path.read_text(encoding="utf-8")
    }
    assert programs and programs == set(re.findall(r"^\| `([\w/]+\.py)` \|", page, re.M))
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert folders - set(re.findall(r"`(\w+/)`", page)) - {"studies/"} == set()
