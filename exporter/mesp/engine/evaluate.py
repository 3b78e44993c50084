"""Scores and generates with mesp-engine, which answers one request after the other."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mesp.engine.records import Records, running


class Score(NamedTuple):
    """How likely a continuation is: in nats, and whether greedy choice would write it."""

    log_likelihood: float
    is_greedy: bool


class Evaluator:
    """A running engine with a bundle's model. What is asked of it is in token ids."""

    def __init__(self, records: Records) -> None:
        self._records = iter(records)
        self._stdin = records.process.stdin

    def choices(self, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> list[Score]:
        """How likely each of the `choices` is after the `prompt`, which is computed once."""
        request = {"type": "choices", "prompt": list(prompt), "choices": [*map(list, choices)]}
        record = self._ask(request)
        return [*map(Score, record["log_likelihoods"], record["greedy"])]

    def text(self, tokens: Sequence[int], window: int) -> float:
        """The log-likelihood in nats of all `tokens` but the first, in windows of so many."""
        request = {"type": "text", "tokens": list(tokens), "window": window}
        return self._ask(request)["log_likelihood"]

    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Sequence[int],
        go_on: Callable[[int], bool],
    ) -> None:
        """Gives each of the likeliest tokens after the `prompt` to `go_on`, until that is false or
        a token of `stop` comes, which is not given."""
        request = {"type": "generate", "prompt": list(prompt), "max_tokens": max_tokens}
        request |= {"temperature": 0, "top_p": 1, "seed": 0, "stop": list(stop)}
        record = self._ask(request)
        while record["type"] == "token":
            record = self._ask(go_on(record["token"]))

    def _ask(self, request: Any) -> dict[str, Any]:
        self._stdin.write(json.dumps(request) + "\n")
        self._stdin.flush()
        for record in self._records:
            return record
        raise BrokenPipeError  # `running` says why


@contextmanager
def evaluator(bundle: Path, adapters: Path | None) -> Iterator[Evaluator]:
    """An engine with the model of `bundle` and `adapters`. Raises MespError where it fails."""
    settings = {
        "bundle": str(bundle.resolve()),
        "adapters": None if adapters is None else str(adapters.resolve()),
    }
    with running("evaluate", settings, subprocess.PIPE) as records:
        try:
            yield Evaluator(records)
        finally:
            with suppress(BrokenPipeError):
                records.process.stdin.close()
        for _ in records:
            pass
