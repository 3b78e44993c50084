"""Runs one of the engine's commands, and takes the records that it prints."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from mesp.engine.build import find_engine
from mesp.errors import MespError, plain_os_errors


def records(command: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What `mesp-engine COMMAND` prints with these settings, as it comes; an ``end`` record last.

    SIGINT goes on to the engine. Raises MespError where the engine fails.
    """
    engine = find_engine()
    with (
        tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
    ):
        json.dump(settings, file)
        file.flush()
        with plain_os_errors(f"Cannot start {engine}"):
            process = subprocess.Popen(
                [engine, command, file.name],
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
