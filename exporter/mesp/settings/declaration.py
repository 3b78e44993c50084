from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from mesp.errors import MespError


@dataclass(frozen=True)
class Setting:
    kind: type
    help: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    choices: Collection[str] | None = None
    default_text: str | None = None  # describes the default if it is None
    key: str = ""
    metavar: str | None = None
    aliases: Collection[str] = ()  # other trainers' names of the option
    federated: bool = False  # whether a federation's server may set it
    may_change: bool = False
    can_be_refused: bool = False  # whether the option also has a --no- form
    # Another setting that this one needs, and the values that it must have. None: any value.
    only_with: tuple[str, Collection[str] | None] | None = None

    def applies(self, settings: Mapping[str, Any]) -> bool:
        if self.only_with is None:
            return True
        other, values = self.only_with
        return settings[other] is not None if values is None else settings[other] in values

    def find_problem(self, value: Any) -> str | None:
        if self.kind is list:
            choices = self.choices or ()
            names = value if isinstance(value, list) else [None]
            is_some = all(name in choices for name in names)
            return None if is_some else f"a list of some of {', '.join(choices)}"
        if self.choices is not None:
            known = isinstance(value, str) and value in self.choices
            return None if known else f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return None if isinstance(value, bool) else "true or false"
        if self.kind in (str, Path):
            return None if isinstance(value, str) else "a text"
        if self.kind is dict:
            are_numbers = isinstance(value, dict) and all(
                type(each) in (int, float) and is_held(each) for each in value.values()
            )
            return None if are_numbers else "an object of numbers"
        noun = "a whole number" if self.kind is int else "a finite number"
        kinds = (int,) if self.kind is int else (int, float)
        if type(value) not in kinds:
            return noun
        if not is_held(value):
            return noun + " of 64 bits" if self.kind is int else noun + " of 32 bits"
        if self.least is not None and value < self.least:
            return f"{noun} at least {self.least:g}"
        if self.above is not None and value <= self.above:
            return f"{noun} above {self.above:g}"
        if self.most is not None and value > self.most:
            return f"{noun} at most {self.most:.10g}"
        if self.below is not None and value >= self.below:
            return f"{noun} below {self.below:.10g}"
        return None


def is_held(value: object) -> bool:
    """Returns whether mesp-engine can represent a number.

    The engine has 64-bit integers and float32. A float must be finite in float32, and a nonzero
    float must not become 0.
    """
    if type(value) is int:
        return abs(value) < 1 << 63
    try:
        rounded = struct.unpack("<f", struct.pack("<f", value))[0]
    except (OverflowError, struct.error):
        return False
    return math.isfinite(rounded) and bool(rounded) == bool(value)


def setting(kind: type, default: Any, help: str = "", **others: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(kind, help, **others)})


def list_settings(kind: type[Settings]) -> dict[str, Setting]:
    declared = {each.name: each.metadata["setting"] for each in fields(kind)}
    return {name: replace(each, key=each.key or name) for name, each in declared.items()}


@dataclass(frozen=True, kw_only=True)
class Settings:
    def __post_init__(self) -> None:
        for each in fields(self):
            value, declared = getattr(self, each.name), each.metadata["setting"]
            if value is None and each.default is None:
                continue
            if problem := declared.find_problem(value):
                raise MespError(f"{each.name} is {value!r:.200}, and must be {problem}.")

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> Self:
        """Returns the settings in the object of a `settings.json`.

        Raises TypeError or MespError if the object is invalid.
        """
        keys = {name: declared.key for name, declared in list_settings(cls).items()}
        return cls(**{name: entries[key] for name, key in keys.items() if key in entries})

    def to_json(self) -> dict[str, Any]:
        declared = list_settings(type(self))
        return {each.key: getattr(self, name) for name, each in declared.items()}


def name_option(name: str) -> str:
    return "--" + name.replace("_", "-")


def refuse_changes(
    before: Settings, given: Mapping[str, Any], declared: Mapping[str, Setting]
) -> None:
    """Raises MespError if `given` changes a setting that a resumed run must keep."""
    for name, value in given.items():
        was = getattr(before, name)
        if not declared[name].may_change and value != was:
            raise MespError(
                f"A resumed run keeps its settings: {name_option(name)} is "
                f"{'not set' if was is None else was} and cannot become {value}."
            )
