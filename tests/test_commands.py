"""`mesp COMMAND`: the commands under one name, and what a shell completes of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mesp
from conftest import invoke
from mesp.__main__ import NAMES, main

SCRIPTS = re.findall(
    r'^mesp-(\w+) = "mesp\.commands\.(\w+):main"',
    (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"),
    re.M,
)


def test_every_script_is_a_command_too():
    assert all(script == module for script, module in SCRIPTS)
    assert sorted(NAMES) == sorted(script for script, _ in SCRIPTS)
    listed = invoke(main, "mesp", "--help").stdout.partition("Commands:\n")[2]
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert [name for name, _ in lines] == list(NAMES)
    assert all(help.endswith(".") and "..." not in help for _, help in lines)


def test_a_commands_errors_are_its_own(tmp_path: Path):
    done = invoke(main, "mesp", "train", tmp_path, "--steps", 1)
    assert done.returncode == 2 and done.stderr.startswith(f"Error: {tmp_path} is not a bundle")
    config = tmp_path / "train.yaml"
    config.write_text("stepz: 1\n")
    done = invoke(main, "mesp", "train", "--config", config)
    assert done.returncode == 2 and "`mesp train --help` lists" in done.stderr
    assert invoke(main, "mesp", "tarin").returncode == 2


def test_one_command_imports_no_other():
    program = "import sys\nfrom mesp.__main__ import main\n"
    program += "try: main(['data', '--help'], prog_name='mesp')\n"
    program += "finally: print([m for m in sys.modules if m.startswith('mesp.commands.')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "Usage: mesp data" in done.stdout
    assert "mesp.commands.data" in done.stdout and "mesp.commands.train" not in done.stdout


def test_the_version_is_said():
    assert invoke(main, "mesp", "--version").stdout == f"mesp {mesp.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mesp ", [*NAMES]),
        ("mesp tr", ["train"]),
        ("mesp train --offl", ["--offload"]),
        ("mesp train --offload ", ["none", "inputs", "all"]),
        ("mesp export --list-models --rank 4 8 --mod", ["--mode", "--model"]),
    ],
)
def test_a_shell_completes(typed: str, offered: list[str]):
    """As bash asks click: the words so far, and the number of the one that is typed."""
    asked = {"_MESP_COMPLETE": "bash_complete", "COMP_WORDS": typed}
    asked["COMP_CWORD"] = str(len(typed.split(" ")) - 1)
    lines = invoke(main, "mesp", env=asked).stdout.splitlines()
    assert sorted(line.split(",")[1] for line in lines) == sorted(offered)
