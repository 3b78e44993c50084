"""Reads a run's log, `metrics.jsonl`, which has one JSON object per line.

Sizes are in bytes and durations in seconds. Losses are in nats per token, except in runs with an
objective or rewards.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mesp.errors import MespError, plain_os_errors
from mesp.files import parse_json, read_bytes
from mesp.formatting import decimal

if TYPE_CHECKING:
    import pandas

LOG_NAME = "metrics.jsonl"
SIZE = 1 << 28  # maximum size of a log in bytes
LINE = 1 << 20  # maximum size of a line in bytes; the record of a step has about 500 bytes

# A run without an end record counts as running for this time after its last record.
SILENCE = timedelta(minutes=10)

FIELDS: dict[str, dict[str, type]] = {
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
    "strength": {
        "strength": float,
        "loss_before": float,
        "loss_after": float,
        "general_before": float,
        "general_after": float,
    },
    "end": {"reason": str, "step": int, "seconds": float, "footprint_peak_bytes": int},
}
OPTIONAL: dict[str, dict[str, type]] = {
    "start": {"host": str, "settings": dict, "model": dict},
    "plan": {"predicted_peak_bytes": int, "examples": int},
    "step": {
        "input_tokens": int,
        "sampled_tokens": int,
        "reward": float,
        "sampling_seconds": float,
        "forward_seconds": float,
        "loss_seconds": float,
        "backward_seconds": float,
    },
    "eval": {"split": str, "accuracy": float},
    "strength": {"general_kl": float},
    "event": {"event": str, "message": str},
}

Record = dict[str, Any]


def is_record(value: object) -> bool:
    """Returns whether a value is a record with the fields of its kind.

    In a record of an unknown kind, only the fields `type` and `time` are checked.
    """
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return False
    needed, optional = FIELDS.get(value["type"], {}), OPTIONAL.get(value["type"], {})
    return all(is_a(kind, value.get(name)) for name, kind in needed.items()) and all(
        is_a(kind, value[name]) for name, kind in {"time": str, **optional}.items() if name in value
    )


def is_a(kind: type, value: object) -> bool:
    """Returns whether a JSON value is of a kind: `str` for text, `dict` for an object, `int` for a
    non-negative integer below 2⁶³, `float` for a number below 1e300 in absolute value.
    """
    if kind in (str, dict):
        return isinstance(value, kind)
    if isinstance(value, bool):
        return False
    if kind is int:
        return isinstance(value, int) and 0 <= value < 1 << 63
    return isinstance(value, int | float) and abs(value) < 1e300


class Speed(NamedTuple):
    tokens: float | None
    in_loss: float | None

    @classmethod
    def of(cls, steps: Iterable[Record]) -> Speed:
        """Returns the speed over some steps, from their records."""
        steps = list(steps)
        seconds = sum(step["seconds"] for step in steps)
        if not seconds:
            return cls(None, None)
        read = sum({"input_tokens": step["tokens"], **step}["input_tokens"] for step in steps)
        return cls(read / seconds, sum(step["tokens"] for step in steps) / seconds)

    def words(self, unit: str) -> str:
        said = f"{decimal(self.tokens, 0)} {unit}"
        if self.tokens == self.in_loss:
            return said
        return f"{said} ({decimal(self.in_loss, 0)} in the loss)"


@dataclass(frozen=True)
class RunLog:
    """A run, as far as its log describes it: the records by kind.

    `stopped_by` is the number of the signal that asked `mesp.train` to end the run, or None.
    """

    start: Record = field(default_factory=dict)
    plan: Record = field(default_factory=dict)
    steps: tuple[Record, ...] = ()
    evals: tuple[Record, ...] = ()
    events: tuple[Record, ...] = ()
    strength: Record = field(default_factory=dict)
    end: Record = field(default_factory=dict)
    last_time: str | None = None
    folder: Path | None = None
    stopped_by: int | None = None

    @classmethod
    def of(cls, records: Iterable[Record], folder: Path | None = None) -> RunLog:
        """Returns the run with these records. Of records of unknown kinds, only the times are
        used."""
        found: dict[str, Any] = {}
        several: dict[str, list[Record]] = {"step": [], "eval": [], "event": []}
        last_time = None
        for record in records:
            kind = record.get("type", "")
            if kind in ("start", "plan", "strength", "end"):
                found[kind] = record
            elif kind in several:
                several[kind].append(record)
            last_time = record.get("time", last_time)
        found |= {f"{kind}s": tuple(each) for kind, each in several.items()}
        return cls(**found, last_time=last_time, folder=folder)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> RunLog:
        """Reads the log in a run's folder, also while the run continues.

        Raises MespError if there is no log, or if another line is not a record.
        """
        path = Path(folder) / LOG_NAME
        with plain_os_errors(f"Cannot read the log {path}"):
            try:
                data = read_bytes(path, SIZE)
            except ValueError as error:
                raise MespError(f"{error}; name the folder of a run.") from error
        return cls.of(_records(path, data), Path(folder))

    @property
    def settings(self) -> Record:
        return dict(self.start.get("settings", {}))

    @property
    def model(self) -> str:
        return str(self.start.get("model", {}).get("name", "?"))

    @property
    def last_step(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def adapters(self) -> Path:
        """The folder of the last saved adapters, in mlx-lm's format.

        Raises MespError if no adapters have been saved.
        """
        folder = None if self.folder is None else self.folder / "adapters"
        if folder is None or not (folder / "adapters.safetensors").exists():
            raise MespError(f"{self.folder or 'The run'} has no adapters: none have been saved.")
        return folder

    def to_pandas(self) -> pandas.DataFrame:
        """Returns the records of the steps, one row per step. Needs pandas."""
        import pandas

        if not self.steps:
            return pandas.DataFrame(index=pandas.Index([], name="step"))
        return pandas.DataFrame(list(self.steps)).drop(columns="type").set_index("step")

    @property
    def speed(self) -> Speed:
        return Speed.of(self.steps)

    @property
    def peak_bytes(self) -> int | None:
        """The highest memory footprint of the run in bytes, or None if it is unknown."""
        peaks = [step["footprint_peak_bytes"] for step in self.steps]
        return max([*peaks, self.end.get("footprint_peak_bytes") or 0]) or None

    def evals_of(self, split: str) -> list[Record]:
        return [record for record in self.evals if record.get("split", "valid") == split]

    @property
    def best(self) -> Record | None:
        """The evaluation with the lowest held-out loss after a step, or None if there was none."""
        after = [record for record in self.evals_of("valid") if record["step"] > 0]
        return min(after, key=lambda record: record["loss"], default=None)

    @property
    def test(self) -> float | None:
        return self.evals_of("test")[-1]["loss"] if self.evals_of("test") else None

    def describe_strength(self) -> str | None:
        """Returns a sentence on the strength of the adapters, or None if the run did not choose a
        strength.
        """
        if not self.strength:
            return None
        record = self.strength
        if not record["strength"]:
            return "Kept no adapters: none lower held-out loss and stay within --max-forgetting."
        change = math.expm1(min(record["general_after"] - record["general_before"], 700))
        kl = record.get("general_kl")
        kl = "" if kl is None else f", KL divergence {decimal(kl, 3)} nats a token"
        return (
            f"Kept the adapters at {record['strength']:.2f} of their strength: held-out loss "
            f"{decimal(record['loss_after'], 3)}, perplexity on general text {change:+.1%}{kl}."
        )

    @property
    def held_out(self) -> tuple[float | None, float | None]:
        evals = self.evals_of("valid")
        before = [record["loss"] for record in evals if record["step"] == 0]
        after = [record["loss"] for record in evals if record["step"] > 0]
        return (before[0] if before else None, after[-1] if after else None)

    def state(self, now: datetime | None = None) -> str:
        """Returns the reason in the end record or, without an end record, `running` or `killed`."""
        if self.end:
            return str(self.end.get("reason", "?"))
        if self.last_time is None:
            return "killed"
        now = now or datetime.now(UTC)
        try:
            last = datetime.fromisoformat(self.last_time)
            if last.tzinfo is None:
                last = last.replace(tzinfo=UTC)
            # The last record may have a later time than now, if clocks differ.
            return "running" if abs(now - last) < SILENCE else "killed"
        except (ValueError, OverflowError):  # not a time, or one that datetime cannot represent
            return "killed"


def _records(path: Path, data: bytes) -> Iterator[Record]:
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line.decode("utf-8", "replace")) if len(line) <= LINE else None
        except ValueError:
            record = None
        if record is not None and is_record(record):
            yield record
        elif line.endswith(b"\n"):
            raise MespError(f"Line {number} of {path} is not a log record.")


def find_runs(root: Path) -> list[Path]:
    """Returns the sorted folders at or below `root` that contain a log. Follows no links."""
    folders, found = [root], []
    for folder in folders:
        with suppress(OSError):
            entries = list(os.scandir(folder))
            found += [folder for each in entries if each.name == LOG_NAME]
            inner = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
            folders += [folder / name for name in inner]
    return sorted(found)
