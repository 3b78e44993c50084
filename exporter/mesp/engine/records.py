"""Runs one of the engine's commands, and takes the records that it prints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mesp.engine.build import find_engine
from mesp.errors import MespError, plain_os_errors


class Records:
    """What a running `mesp-engine COMMAND` prints: a record a line, an ``end`` record last."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.last: dict[str, Any] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.process.stdout:
            self.last = json.loads(line)
            yield self.last


@contextmanager
def running(
    command: str, settings: dict[str, Any], stdin: int, environment: dict[str, str] | None = None
) -> Iterator[Records]:
    """`mesp-engine COMMAND` with these settings, which is ended where it has not ended itself.

    `environment` is added to this process's.

    Raises MespError where it fails, or has not printed an ``end`` record.
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
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env={**os.environ, **(environment or {})},
            )
        read = Records(process)
        try:
            yield read
            process.wait()
        except BrokenPipeError:
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if process.returncode != 0 or read.last.get("type") != "end":
            errors.seek(0)
            said = errors.read().strip()
            raise MespError(said or f"mesp-engine failed with exit status {process.returncode}.")


def records(
    command: str, settings: dict[str, Any], environment: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """What `mesp-engine COMMAND` prints with these settings, as it comes; an ``end`` record last.

    SIGINT goes on to the engine. Raises MespError where the engine fails.
    """
    with running(command, settings, subprocess.DEVNULL, environment) as read:
        # Typed, a Ctrl-C arrives at the engine too, where a second one changes nothing.
        previous = signal.signal(signal.SIGINT, lambda number, _: read.process.send_signal(number))
        try:
            yield from read
            read.process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)
