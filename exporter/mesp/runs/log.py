"""Reads a run's log, `metrics.jsonl`: one JSON object a line, described in docs/architecture.md.

Sizes are bytes, times seconds, losses nats a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from mesp.errors import MespError, plain_os_errors
from mesp.files import read_bytes
from mesp.formatting import decimal

LOG_NAME = "metrics.jsonl"
SIZE = 1 << 30  # bytes: a step has some 500

# A log without an end record is of a run that goes on, unless nothing was added for this long.
SILENCE = timedelta(minutes=10)

# The fields that are read without asking whether they are there, by the kind of record.
FIELDS = {
    "start": {},
    "step": {
        "step": int,
        "loss": float,
        "seconds": float,
        "tokens": int,
        "footprint_bytes": int,
        "footprint_peak_bytes": int,
    },
    "eval": {"step": int, "loss": float},
    "end": {"reason": str, "step": int, "seconds": float, "footprint_peak_bytes": int},
}


def is_record(value: object) -> bool:
    """Whether a value is a record with what is read of its kind; other kinds may hold anything."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    if not isinstance(value.get("time", ""), str) or not all(
        isinstance(value.get(name, {}), dict) for name in ("settings", "model")
    ):
        return False
    if value["type"] == "step" and not is_a(int, value.get("input_tokens", 0)):
        return False
    return all(is_a(kind, value.get(name)) for name, kind in FIELDS.get(value["type"], {}).items())


def is_a(kind: type, value: object) -> bool:
    """Whether a JSON value is text, a count or a finite number."""
    if kind is str or isinstance(value, bool):
        return kind is str and isinstance(value, str)
    if kind is int:
        return isinstance(value, int) and 0 <= value < 1 << 63
    return isinstance(value, int | float) and abs(value) < 1e300


class Speed(NamedTuple):
    """Tokens a second: those that the model reads, and those of them that count in the loss; None
    where no time has passed."""

    tokens: float | None
    in_loss: float | None

    @classmethod
    def of(cls, steps: Iterable[dict]) -> Speed:
        """That of some steps' records. Old logs have no `input_tokens`."""
        steps = list(steps)
        seconds = sum(step["seconds"] for step in steps)
        if not seconds:
            return cls(None, None)
        read = sum(step.get("input_tokens", step["tokens"]) for step in steps)
        return cls(read / seconds, sum(step["tokens"] for step in steps) / seconds)

    def words(self, unit: str) -> str:
        """Both with their unit; one where they are equal, as of a packed text."""
        said = f"{decimal(self.tokens, 0)} {unit}"
        if self.tokens == self.in_loss:
            return said
        return f"{said} ({decimal(self.in_loss, 0)} in the loss)"


@dataclass
class Run:
    """What a log says so far, sorted by the kind of record."""

    start: dict = field(default_factory=dict)
    plan: dict = field(default_factory=dict)
    steps: list[dict] = field(default_factory=list)
    evals: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    end: dict = field(default_factory=dict)
    last_time: str | None = None

    def add(self, record: dict) -> None:
        """Takes the next record; kinds that this version does not know are passed over."""
        kind = record.get("type")
        if kind in ("start", "plan", "end"):
            setattr(self, kind, record)
        elif kind in ("step", "eval", "event"):
            getattr(self, kind + "s").append(record)
        self.last_time = record.get("time", self.last_time)

    @property
    def settings(self) -> dict:
        return self.start.get("settings", {})

    @property
    def model(self) -> str:
        return str(self.start.get("model", {}).get("name", "?"))

    @property
    def last_step(self) -> int:
        """The last finished step, counted from 1; 0 before the first."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def losses(self) -> list[float]:
        """Training loss of each step, nats a token."""
        return [step["loss"] for step in self.steps]

    @property
    def speed(self) -> Speed:
        return Speed.of(self.steps)

    @property
    def peak_footprint(self) -> int | None:
        """The highest footprint of the run, bytes."""
        peaks = [step["footprint_peak_bytes"] for step in self.steps]
        return max([*peaks, self.end.get("footprint_peak_bytes") or 0]) or None

    def evals_of(self, split: str) -> list[dict]:
        """The evaluations on `valid` or `test` data."""
        return [record for record in self.evals if record.get("split", "valid") == split]

    @property
    def best(self) -> dict | None:
        """The evaluation after a step with the lowest held-out loss."""
        after = [record for record in self.evals_of("valid") if record["step"] > 0]
        return min(after, key=lambda record: record["loss"], default=None)

    @property
    def test(self) -> float | None:
        """The loss on the test data at the end, nats a token."""
        return self.evals_of("test")[-1]["loss"] if self.evals_of("test") else None

    @property
    def held_out(self) -> tuple[float | None, float | None]:
        """Held-out loss before the first step and the latest one after it, nats a token."""
        evals = self.evals_of("valid")
        before = [record["loss"] for record in evals if record["step"] == 0]
        after = [record["loss"] for record in evals if record["step"] > 0]
        return (before[0] if before else None, after[-1] if after else None)

    def state(self, now: datetime | None = None) -> str:
        """How the run ended, says its end record; without one `running`, or `killed` if silent."""
        if self.end:
            return self.end.get("reason", "?")
        if self.last_time is None:
            return "killed"
        now = now or datetime.now(timezone.utc)
        try:
            last = datetime.fromisoformat(self.last_time.replace("Z", "+00:00"))
        except ValueError:
            return "killed"
        if last.tzinfo is None:
            last = last.replace(tzinfo=timezone.utc)
        return "running" if now - last < SILENCE else "killed"


def read_run(folder: Path) -> Run:
    """Reads the log in a run's folder.

    A last line that is cut off is left out: its writer was killed, or is writing it.
    """
    path = folder / LOG_NAME
    with plain_os_errors(f"Cannot read the log {path}"):
        try:
            data = read_bytes(path, SIZE)
        except ValueError as error:
            raise MespError(f"{error}; name the folder of a run.") from error
    lines = data.decode("utf-8", "replace").split("\n")
    run = Run()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not is_record(record):
                raise ValueError("not a record")
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise MespError(f"Line {number} of {path} is not a log record.") from None
        run.add(record)
    return run


def find_runs(root: Path) -> list[Path]:
    """Folders at or below `root` that hold a log, in order of name."""
    return sorted(path.parent for path in root.rglob(LOG_NAME))
