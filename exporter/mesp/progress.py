from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The progress of a `task`: `done` of `total` units. If the number of units is unknown,
    `total` is None.
    """

    task: str
    done: int = 0
    total: int | None = None


ProgressCallback = Callable[[Progress], None]


class Task:
    def __init__(
        self, report: ProgressCallback | None, name: str, total: int | None = None
    ) -> None:
        self._report, self._name, self._total, self._done = report, name, total, 0
        self.advance(0)

    def advance(self, count: int = 1) -> None:
        self._done += count
        if self._report is not None:
            self._report(Progress(self._name, self._done, self._total))
