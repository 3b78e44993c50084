"""mesp-train: fine-tunes a bundle with mesp-engine.

The engine reads one settings file and prints a record a line (docs/architecture.md). This command
checks the options, writes that file, starts the engine, and shows what it reports.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mesp.bundle import read_manifest
from mesp.engine import find_engine
from mesp.errors import MespError, plain_os_errors
from mesp.log import LOG_NAME, Run, decimal, megabytes

# Steps over which the displayed loss and speed are averaged.
SMOOTHING = 10
PREFERRED_SEQ_LEN = 256


class Positive(click.FloatRange):
    """A finite number above zero."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        converted = super().convert(value, param, ctx)
        if not math.isfinite(converted):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return converted


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--steps", type=click.IntRange(min=1), required=True, help="Training steps, one sequence each."
)
@click.option(
    "--method",
    type=click.Choice(["mesp", "mebp", "mezo"]),
    default="mesp",
    help="How gradients are found.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=1),
    help="Tokens a sequence.  [default: 256 or the bundle's longest]",
)
@click.option(
    "--rank", type=click.IntRange(min=1), help="LoRA rank.  [default: the bundle's first]"
)
@click.option("--alpha", type=Positive(), default=16.0, help="The adapters count alpha / rank.")
@click.option("--learning-rate", type=Positive(), default=1e-4)
@click.option("--optimizer", type=click.Choice(["sgd"]), default="sgd")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=0,
    help="Of the adapters' start and the data's order.",
)
@click.option(
    "--val-batches",
    type=click.IntRange(min=0),
    default=25,
    help="Held-out sequences an evaluation takes.",
)
@click.option(
    "--eval-every",
    type=click.IntRange(min=0),
    default=0,
    help="Steps between evaluations; 0: before and after.",
)
@click.option(
    "--save-every",
    type=click.IntRange(min=0),
    default=100,
    help="Steps between saves; 0: at the end only.",
)
@click.option("--mezo-epsilon", type=Positive(), default=1e-3, help="Size of MeZO's perturbation.")
@click.option(
    "--memory-limit",
    "memory_limit_mb",
    type=Positive(),
    metavar="MB",
    help="Peak footprint to stay below, in 10⁶ bytes; room to spare is used for speed.",
)
@click.option(
    "--offload/--no-offload",
    default=None,
    help="Keep block inputs in a file on disk.  [default: only where the limit asks for it]",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and its predicted memory, and end.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of the run.  [default: runs/BUNDLE-METHOD-TIME]",
)
def main(bundle: Path, output: Path | None, **options: object) -> None:
    """Fine-tune BUNDLE, a folder that mesp-export wrote, with LoRA.

    Ctrl-C stops the run soon, with its adapters saved; a second Ctrl-C ends it at once.
    """
    manifest = read_manifest(bundle)
    options["seq_len"] = choose(
        manifest["seq_lens"], options["seq_len"], "sequence length", PREFERRED_SEQ_LEN
    )
    options["rank"] = choose(manifest["ranks"], options["rank"], "rank", manifest["ranks"][0])
    if output is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        output = Path("runs") / f"{manifest['name']}-{options['method']}-{stamp}"
    if (output / LOG_NAME).exists():
        raise MespError(f"{output} already holds a run: name another folder with --output.")
    settings = {
        "bundle": str(bundle.resolve()),
        "output": str(output.resolve()),
        **options,
    }

    engine = find_engine()
    if options["dry_run"]:
        click.echo(dry_run(engine, settings))
        return
    with settings_file(output, settings) as path:
        run, status = drive(engine, path, options["method"], options["steps"])
    click.echo(summary(run, output))
    raise SystemExit(status)


def choose(available: list[int], wanted: int | None, what: str, preferred: int) -> int:
    """What was asked for, if the bundle has it; by default the preferred value or the largest."""
    if wanted is None:
        return preferred if preferred in available else max(available)
    if wanted not in available:
        listed = ", ".join(str(value) for value in available)
        raise MespError(f"The bundle has no {what} {wanted}; it was exported for {listed}.")
    return wanted


def dry_run(engine: Path, settings: dict) -> str:
    """The engine's plan for these settings, in words. Nothing is written."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(settings, file)
        file.flush()
        done = subprocess.run([engine, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise MespError(done.stderr.strip() or f"mesp-engine failed ({done.returncode}).")
    plan = json.loads(done.stdout)
    where = "a file on disk" if plan["offload"] else "memory"
    return "\n".join(
        [
            f"Predicted peak footprint: {megabytes(plan['predicted_peak_bytes'])} MB "
            f"(the lowest --memory-limit: {megabytes(plan['least_peak_bytes'])} MB).",
            f"Tiles of {plan['tile_bytes'] // 1024} KiB; block inputs in {where}; "
            f"intermediates of {plan['kept_blocks']} blocks kept.",
            f"Mapped weights: {megabytes(plan['mapped_bytes'])} MB, not in the footprint.",
        ]
    )


@contextmanager
def settings_file(output: Path, settings: dict) -> Iterator[Path]:
    """Writes OUTPUT/settings.json. A run that fails before it has a log leaves nothing behind."""
    path = output / "settings.json"
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        with plain_os_errors(f"Cannot write the run to {output}"):
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        yield path
    except BaseException:
        if not (output / LOG_NAME).exists():
            path.unlink(missing_ok=True)
            for folder in missing:
                try:
                    folder.rmdir()
                except OSError:
                    break
        raise


def drive(engine: Path, settings: Path, method: str, steps: int) -> tuple[Run, int]:
    """Runs the engine, showing its records; returns them and this command's exit status."""
    run = Run()
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
                    run.add(record)
                    display.show(record)
                process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        said = errors.read().strip()

    if process.returncode == 0 and run.end:
        if said:
            click.echo(said, err=True)
        return run, 128 + received[0] if received and run.end.get("reason") == "stopped" else 0
    raise MespError(
        failure(process.returncode, said, run, settings.parent, killed=len(received) > 1)
    )


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
            self.console.print(
                f"step {record['step']}: held-out loss {decimal(record['loss'], 3)}", soft_wrap=True
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
    return "\n".join([*lines, f"Adapters: {output / 'adapters'}", f"Log:      {output / LOG_NAME}"])


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
