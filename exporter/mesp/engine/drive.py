"""Runs mesp-engine on a settings file, shows what it reports, and says how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from mesp.errors import MespError, plain_os_errors
from mesp.progress_bars import TrainingProgress
from mesp.runs.log import LOG_NAME, Run, read_run


def drive(engine: Path, settings: Path, method: str, steps: int) -> tuple[Run, int]:
    """Runs the engine, showing its records; returns the log and this command's exit status.

    Raises MespError where the run failed.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with plain_os_errors(f"Cannot start {engine}"):
            process = subprocess.Popen(
                [engine, settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        try:
            with (
                TrainingProgress(method, steps) as display,
                forward_signals(process, display) as received,
            ):
                for line in process.stdout:
                    try:
                        record = json.loads(line)
                    except ValueError:
                        click.echo(line, nl=False, err=True)
                        continue
                    display.show(record)
                process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        said = errors.read().strip()

    # The log, not what was printed: that of a run that goes on begins with what it had done before.
    output = settings.parent
    run = read_run(output) if (output / LOG_NAME).exists() else Run()
    if process.returncode == 0 and run.end:
        if said:
            click.echo(said, err=True)
        return run, 128 + received[0] if received and run.end.get("reason") == "stopped" else 0
    raise MespError(failure(process.returncode, said, run, output, killed=len(received) > 1))


@contextmanager
def forward_signals(process: subprocess.Popen, display: TrainingProgress) -> Iterator[list[int]]:
    """Passes signals on to the engine, and yields the list of those that asked for an end.

    The engine has a session of its own: a Ctrl-C, whether typed or sent to this process alone,
    arrives here only, and at the engine exactly once. The second one kills the engine.
    """
    received: list[int] = []

    def end(number: int, _: object) -> None:
        received.append(number)
        if len(received) > 1:
            process.kill()
        else:
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            display.stopping()

    def suspend(_number: int, _frame: object) -> None:
        process.send_signal(signal.SIGSTOP)
        signal.raise_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)

    handlers = {
        signal.SIGINT: end,
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        signal.SIGTSTP: suspend,
    }
    # What nohup, or a shell that starts this in the background, has set to be ignored stays so.
    previous = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def failure(status: int, said: str, run: Run, output: Path, killed: bool) -> str:
    """Why the engine ended as it did, and what of the run is left."""
    if killed:
        reason = "The run was ended at once."
    elif status < 0:
        name = signal.Signals(-status).name
        reason = f"mesp-engine was ended by {name} after step {run.last_step}."
        if said:
            reason = f"{said}\n{reason}"
        if -status == signal.SIGKILL:
            reason += " The system ends a program so when memory runs out."
    elif status == 0:
        reason = "mesp-engine ended without finishing its log."
    else:
        reason = said or f"mesp-engine failed with exit status {status}."
    if not (output / LOG_NAME).exists():
        return reason
    saved = (output / "adapters" / "adapters.safetensors").exists()
    left = (
        f"the adapters last saved are in {output / 'adapters'}"
        if saved
        else "no adapters had been saved"
    )
    return f"{reason} The log is in {output / LOG_NAME}; {left}."
