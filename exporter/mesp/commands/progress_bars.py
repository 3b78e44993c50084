from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from mesp.engine.plan import describe_kept
from mesp.formatting import decimal, duration, megabytes, printable, quality
from mesp.progress import Progress, ProgressCallback
from mesp.runs.log import Speed

SMOOTHING = 10


class TrainingProgress:
    def __init__(self, method: str, steps: int) -> None:
        self.steps = steps
        self.begin = time.monotonic()
        self.next_line = self.begin
        self.recent: deque[dict[str, Any]] = deque(maxlen=SMOOTHING)
        self.console = Console(stderr=True, highlight=False)
        self.progress = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            TextColumn("{task.completed}/{task.total}  {task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )
        self.progress.add_task(method, total=steps, figures="")
        (self.task,) = self.progress.tasks

    def __enter__(self) -> TrainingProgress:
        if self.console.is_terminal:
            self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self.progress.stop()

    def show(self, record: dict[str, Any]) -> None:
        kind = record.get("type")
        if kind == "step":
            self.show_step(record)
        elif kind == "stopping":
            self.task.description = "stopping"
        elif kind == "plan" and not self.recent:
            # The first evaluation can take as long as many steps, so the plan is printed first.
            peak = megabytes(record.get("predicted_peak_bytes"))
            self.say(f"started, with a predicted peak of {peak} MB")
            if kept := describe_kept(record):
                self.say(kept)
        elif kind == "eval":
            what = "test" if record.get("split") == "test" else "held-out"
            loss = decimal(record["loss"], 3)
            self.say(f"step {record['step']}: {what} loss {loss}, {quality(record)}")
        # an error is printed at the end of the run
        elif kind == "event" and record.get("event") != "error":
            self.say(printable(f"{record.get('event')}: {record.get('message')}"))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def show_step(self, record: dict[str, Any]) -> None:
        self.recent.append(record)
        step = record["step"]
        # Replayed texts are left out of the mean loss, because their loss does not fall.
        learning = [each["loss"] for each in self.recent if not each.get("replayed")]
        loss = sum(learning) / len(learning) if learning else record["loss"]
        speed = Speed.of(self.recent).words("tok/s")
        footprint = megabytes(record["footprint_bytes"])
        figures = f"loss {decimal(loss, 3)}  {speed}  {footprint} MB"
        self.progress.update(self.task.id, completed=step, figures=figures)
        now = time.monotonic()
        if not self.console.is_terminal and (now >= self.next_line or step == self.steps):
            self.next_line = now + min(max((now - self.begin) / 10, 10), 30)
            seconds = sum(each["seconds"] for each in self.recent) / len(self.recent)
            left = duration(seconds * (self.steps - step))
            self.say(f"step {step}/{self.steps}  {figures}  {left} left")


@contextmanager
def _bars(*columns: ProgressColumn) -> Iterator[ProgressCallback]:
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Bars(
        TextColumn("{task.description}", markup=False), BarColumn(), *columns,
        TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bars:  # fmt: skip

        def report(progress: Progress) -> None:
            if progress.task not in tasks:
                # A bundle's name may come from an untrusted source.
                task = bars.add_task(printable(progress.task), total=progress.total)
                tasks[progress.task] = task
            bars.update(tasks[progress.task], completed=progress.done)

        yield report


def export_progress() -> AbstractContextManager[ProgressCallback]:
    return _bars(DownloadColumn())


def evaluation_progress() -> AbstractContextManager[ProgressCallback]:
    return _bars(MofNCompleteColumn())
