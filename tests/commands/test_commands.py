import subprocess
import sys
from pathlib import Path

import pytest

import mesp
from helpers.commands import invoke
from mesp.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_and_a_version(name: str):
    listed = invoke(main, "mesp", "-h").stdout.partition("Commands:\n")[2]
    lines = dict(line.split(maxsplit=1) for line in listed.splitlines())
    assert list(lines) == list(COMMANDS) and lines[name].endswith(".")
    help = invoke(main, "mesp", name, "-h")
    assert help.returncode == 0 and help.stdout.startswith(f"Usage: mesp {name} ")
    for word in ("RANGE", "--output"):
        assert word not in help.stdout
    assert invoke(main, "mesp", name, "--version").stdout == f"mesp {mesp.__version__}\n"


def modules_of(*arguments: str) -> list[str]:
    program = "import sys\nfrom mesp.__main__ import main\n"
    program += f"try: main({[*arguments, '--help']}, prog_name='mesp')\n"
    program += "finally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith(f"Usage: {' '.join(['mesp', *arguments])} [OPTIONS] ")
    return done.stdout.splitlines()[-1].split()


def test_the_help_is_there_at_once():
    assert not {"mlx", "rich", "numpy", "yaml"}.intersection(modules_of())


def test_a_commands_errors_are_its_own(tmp_path: Path):
    done = invoke(main, "mesp", "train", tmp_path, "--steps", 1)
    assert done.returncode == 2 and done.stderr.startswith(f"Error: {tmp_path} is not a bundle")
    config = tmp_path / "train.yaml"
    config.write_text("stepz: 1\n")
    done = invoke(main, "mesp", "train", "--config", config)
    assert done.returncode == 2 and "`mesp train --help` lists" in done.stderr
    assert invoke(main, "mesp", "tarin").returncode == 2


def test_ctrl_c_while_a_command_is_imported_is_silent(monkeypatch: pytest.MonkeyPatch):
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mesp.__main__.import_module", stop)
    done = invoke(main, "mesp", "train", "x")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_one_command_imports_no_other():
    modules = modules_of("data")
    assert "mesp.commands.data" in modules and "mesp.commands.train" not in modules


def test_the_version_is_said():
    assert invoke(main, "mesp", "--version").stdout == f"mesp {mesp.__version__}\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("mesp ", [*COMMANDS]),
        ("mesp tr", ["train"]),
        ("mesp train --offl", ["--offload"]),
        ("mesp train --offload ", ["none", "inputs", "all"]),
        ("mesp export --list-models --rank 4,8 --mod", ["--mode", "--model"]),
    ],
)
def test_a_shell_completes(typed: str, offered: list[str]):
    asked = {"_MESP_COMPLETE": "bash_complete", "COMP_WORDS": typed}
    asked["COMP_CWORD"] = str(len(typed.split(" ")) - 1)
    lines = invoke(main, "mesp", env=asked).stdout.splitlines()
    assert sorted(line.split(",")[1] for line in lines) == sorted(offered)
