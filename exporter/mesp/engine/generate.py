"""Generates with mesp-engine, which takes token ids and prints a record a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mesp.engine.records import records


def generate(
    bundle: Path,
    prompt: Sequence[int],
    *,
    adapters: Path | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] = (),
) -> Iterator[dict]:
    """The engine's records as they come: ``token`` records, then one ``end`` record.

    SIGINT ends the text early, with reason "stopped". Raises MespError where the engine fails.
    """
    settings = {
        "bundle": str(bundle.resolve()),
        "adapters": None if adapters is None else str(adapters.resolve()),
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "stop": list(stop),
    }
    return records("generate", settings)
