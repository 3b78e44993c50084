import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

import click
from click.testing import CliRunner

from helpers.paths import ROOT


def command(module: str, *arguments: object) -> list[str]:
    program = f"from mesp.commands.{module} import main; main(prog_name='mesp-{module}')"
    return [sys.executable, "-c", program, *map(str, arguments)]


def run(module: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    return invoke(
        import_module(f"mesp.commands.{module}").main, f"mesp-{module}", *arguments, **options
    )


def call(module: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    return succeeded(run(module, *arguments, **options))


def succeeded(done: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    assert done.returncode == 0, done.stderr + done.stdout
    return done


# Seconds after which a process is taken for one that hangs. A busy machine takes far less.
HANG = 900


def finish(line: Iterable[object], **options: object) -> subprocess.CompletedProcess:
    words = [str(each) for each in line]
    return subprocess.run(words, capture_output=True, text=True, timeout=HANG, **options)


def wait_for(
    condition: Callable[[], bool], process: subprocess.Popen | None = None, pause: float = 0.02
) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < HANG
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(pause)


def without_privileges() -> None:
    """Removes root's capabilities to read, write and search anywhere (CAP_DAC_OVERRIDE and
    CAP_DAC_READ_SEARCH) and to raise limits (CAP_SYS_RESOURCE) from the programs that this process
    executes next.
    """
    if os.geteuid() == 0:
        for capability in (1, 2, 24):
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def run_tool(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    line = [sys.executable, ROOT / "tools" / name, *map(str, arguments)]
    return subprocess.run(line, env=os.environ | environment, capture_output=True, text=True)


def invoke(
    main: click.Command, name: str, *arguments: object, cwd: Path | None = None, **options: object
) -> subprocess.CompletedProcess:
    before = Path.cwd()
    os.chdir(cwd or before)
    try:
        result = CliRunner().invoke(main, list(map(str, arguments)), prog_name=name, **options)
    finally:
        os.chdir(before)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(
        [name, *arguments], result.exit_code, result.stdout, result.stderr
    )


def refused(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("Error: ").rstrip()
