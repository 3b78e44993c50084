"""Generates with mesp-engine, which takes token ids and prints a record a token."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mesp.engine.build import find_engine
from mesp.errors import MespError, plain_os_errors


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
    engine = find_engine()
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        json.dump(settings, file)
        file.flush()
        with plain_os_errors(f"Cannot start {engine}"):
            process = subprocess.Popen(
                [engine, "generate", file.name],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
            )
        # Typed, a Ctrl-C arrives at the engine too, where a second one changes nothing.
        previous = signal.signal(signal.SIGINT, lambda number, _: process.send_signal(number))
        record = {}
        try:
            for line in process.stdout:
                record = json.loads(line)
                yield record
            process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if process.returncode != 0 or record.get("type") != "end":
            errors.seek(0)
            said = errors.read().strip()
            raise MespError(said or f"mesp-engine failed with exit status {process.returncode}.")
