"""Runs mesp-engine on a settings file, shows what it reports, and says how it ended."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mesp.errors import MespError, plain_os_errors
from mesp.log import LOG_NAME, Run, decimal, megabytes, perplexity, read_run

# Steps over which the displayed loss and speed are averaged.
SMOOTHING = 10


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
            with Display(method, steps) as display, forward_signals(process, display) as received:
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
def forward_signals(process: subprocess.Popen, display: Display) -> Iterator[list[int]]:
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


class Display:
    """Shows records on standard error: a live bar on a terminal, elsewhere ten lines a run."""

    def __init__(self, method: str, steps: int) -> None:
        self.steps = steps
        self.recent: deque[dict] = deque(maxlen=SMOOTHING)
        self.console = Console(stderr=True, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed}/{task.total}  {task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.progress.add_task(method, total=steps, figures="")
        (self.task,) = self.progress.tasks

    def __enter__(self) -> Display:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def stopping(self) -> None:
        """Called by a signal handler, so it only sets a field that the next refresh reads."""
        self.task.description = "stopping"

    def show(self, record: dict) -> None:
        kind = record.get("type")
        if kind == "step":
            self.show_step(record)
        elif kind == "eval":
            what = "test" if record.get("split") == "test" else "held-out"
            self.console.print(
                f"step {record['step']}: {what} loss {decimal(record['loss'], 3)}, "
                f"perplexity {decimal(perplexity(record['loss']))}",
                soft_wrap=True,
            )
        elif (
            kind == "event" and record.get("event") != "error"
        ):  # an error ends the run, and is said then
            self.console.print(
                f"{record.get('event')}: {record.get('message')}", markup=False, soft_wrap=True
            )

    def show_step(self, record: dict) -> None:
        self.recent.append(record)
        step = record["step"]
        loss = sum(each["loss"] for each in self.recent) / len(self.recent)
        seconds = sum(each["seconds"] for each in self.recent)
        speed = sum(each["tokens"] for each in self.recent) / seconds if seconds else None
        footprint = megabytes(record["footprint_bytes"])
        figures = f"loss {decimal(loss, 3)}  {decimal(speed, 0)} tok/s  {footprint} MB"
        self.progress.update(self.task.id, completed=step, figures=figures)
        if not self.console.is_terminal and step * 10 // self.steps > (step - 1) * 10 // self.steps:
            left = seconds / len(self.recent) * (self.steps - step)
            self.console.print(
                f"step {step}/{self.steps}  {figures}  {duration(left)} left", soft_wrap=True
            )


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min"
        if hours
        else f"{minutes} min {seconds} s"
        if minutes
        else f"{seconds} s"
    )


def summary(run: Run, output: Path) -> str:
    """What a run came to, in a few lines."""
    done = "Finished" if run.end["reason"] == "finished" else "Stopped"
    lines = [
        f"{done} after {run.last_step} steps in {duration(run.end['seconds'])}: "
        f"{decimal(run.tokens_per_second, 0)} tokens/s, "
        f"peak footprint {megabytes(run.peak_footprint)} MB."
    ]
    before, after = run.held_out
    if before is not None and after is not None:
        lines.append(
            f"Held-out loss {decimal(before, 3)} before, {decimal(after, 3)} after (nats a token)."
        )
    if run.test is not None:
        lines.append(
            f"Test loss {decimal(run.test, 3)}, perplexity {decimal(perplexity(run.test))}."
        )
    lines += [f"Adapters: {output / 'adapters'}"]
    if run.best and (output / "best").exists():
        step, loss = run.best["step"], decimal(run.best["loss"], 3)
        lines += [f"Best:     {output / 'best'} (step {step}, held-out loss {loss})"]
    return "\n".join([*lines, f"Log:      {output / LOG_NAME}"])


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
