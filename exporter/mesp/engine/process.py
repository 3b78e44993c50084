from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mesp.adapters.weighted import WeightedAdapters
from mesp.engine.build import find_counter, find_engine
from mesp.errors import EngineError, MespError, plain_os_errors
from mesp.models.layout import DTYPE_OF
from mesp.settings.declaration import is_held

log = logging.getLogger(__name__)
LINE = 1 << 26
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAMPLING = {"max_tokens": 256, "temperature": 0.0, "top_p": 1.0, "seed": 0}
Settings = Mapping[str, Any]
Record = dict[str, Any]


@dataclass
class Engine:
    process: subprocess.Popen[str]
    last: Record = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)
    said: str = ""
    is_waiting: bool = False

    def __iter__(self) -> Iterator[Record]:
        stdout = self.process.stdout
        assert stdout is not None
        for line in iter(lambda: stdout.readline(LINE), ""):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                log.warning("%.1000s", line.rstrip("\n"))
                continue
            self.last = record
            yield record

    def ask(self, request: Any) -> Record:
        self.send(request)
        return self.receive()

    def send(self, answer: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(answer) + "\n")
        self.process.stdin.flush()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Lets the signal that kills the engine also raise KeyboardInterrupt in this context."""
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False

    def receive(self) -> Record:
        for record in self:
            return record
        raise BrokenPipeError  # `check` then raises an error with the reason

    def check(self) -> None:
        """Raises MespError if the engine refused the request, and EngineError if the engine failed
        otherwise.
        """
        status = self.process.returncode
        if status != 0 or self.last.get("type") != "end":
            raise failure(status, self.said)


def _as_json(settings: Settings) -> str:
    for name, value in settings.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_held(value):
            raise MespError(f"{name} is {value!r:.40}, which is too large or too small a number.")
    return json.dumps(dict(settings))


@contextmanager
def running(
    command: Sequence[str],
    settings: Settings | Path,
    *,
    stdin: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
    engine: Path | None = None,
    interruptible: bool = False,
    timeout: float | None = None,
) -> Iterator[Engine]:
    """Runs `mesp-engine COMMAND SETTINGS` or mesp-count. The program ends with the context.

    With `interruptible`, ending signals are forwarded to the engine, which then stops cleanly.
    Raises MespError if the engine cannot be started, or takes more than `timeout` seconds.
    """
    program = engine or find_engine()
    with ExitStack() as stack:
        if isinstance(settings, Path):
            name = str(settings)
        else:
            file = stack.enter_context(
                tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8")
            )
            file.write(_as_json(settings))
            file.flush()
            name = file.name
        errors = stack.enter_context(
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        )
        with plain_os_errors(f"Cannot start {program}"), _held_signals():
            process = subprocess.Popen(
                [program, *command, name],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, **(environment or {})},
                start_new_session=interruptible,
            )
            stack.callback(_kill, process)
        started = Engine(process)
        timer = threading.Timer(timeout or 0, process.kill)
        try:
            if timeout is not None:
                timer.start()
            with _forwarded_signals(started) if interruptible else nullcontext():
                yield started
                process.wait()
        except BrokenPipeError:
            process.wait()
        finally:
            was_in_time = timeout is None or timer.is_alive()
            timer.cancel()
            _kill(process)
            for pipe in (process.stdout, process.stdin):
                with suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()
            errors.seek(0)
            started.said = errors.read().strip()
        if not was_in_time:
            raise MespError(f"The run took more than {timeout:g} s.")


def _kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


@contextmanager
def _held_signals() -> Iterator[None]:
    came: list[int] = []
    try:
        with _handling(dict.fromkeys(ENDING, lambda number, _: came.append(number))):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[[int, Any], None]]) -> Iterator[None]:
    """Handles signals in the main thread. In other threads, does nothing.

    Signals that are ignored, for example under nohup, stay ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()
    previous = {
        number: signal.signal(number, handler)
        for number, handler in handlers.items()
        if is_main and signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _forwarded_signals(engine: Engine) -> Iterator[None]:
    """Forwards signals to the engine, and records those that ask for an end.

    A second signal that asks for an end kills the engine.
    """
    process = engine.process

    def end(number: int, _: object) -> None:
        engine.signals.append(number)
        if len(engine.signals) > 1:
            process.kill()
            if engine.is_waiting:
                raise KeyboardInterrupt
        else:
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def suspend(_number: int, _frame: object) -> None:
        process.send_signal(signal.SIGSTOP)
        signal.raise_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGCONT)

    with _handling({**dict.fromkeys(ENDING, end), signal.SIGTSTP: suspend}):
        yield


def failure(status: int, said: str, after: str = "", program: str = "mesp-engine") -> MespError:
    if status > 0 and said:
        return MespError(said)
    if status > 0:
        return EngineError(f"{program} failed with exit status {status}.")
    if status == 0:
        return EngineError(f"{program} ended without finishing its log.")
    reason = f"{program} was ended by {signal.Signals(-status).name}{after}."
    if said:
        reason = f"{said}\n{reason}"
    if -status == signal.SIGKILL:
        reason += " The system ends a program with this signal when memory runs out."
    return EngineError(reason)


def check_device(device: str | None) -> None:
    if device not in (None, *DTYPE_OF):
        raise MespError(f"device is {device!r:.40}, and must be one of {', '.join(DTYPE_OF)}.")
    if device == "gpu" and not mx.metal.is_available():
        raise MespError("MLX can use no GPU on this machine; leave out --device gpu.")


def find_count(settings: Settings) -> Record:
    """Returns the counts of a step, without `blocks_per_step`.

    Raises MespError if mesp-count cannot be built, if it fails, or if this system is not Linux.
    """
    whole = {**settings, "device": "gpu", "blocks_per_step": None}
    return find_plan(find_counter(), whole, "mesp-count")


def find_plan(program: Path, settings: Settings, name: str = "mesp-engine") -> Record:
    asked = {"output": "", **settings, "dry_run": True}
    with running([], asked, engine=program) as started:
        for _ in started:
            pass
    if started.process.returncode != 0 or not started.last:
        raise failure(started.process.returncode, started.said, program=name)
    return started.last


def stream_records(
    command: str, settings: Settings, environment: Mapping[str, str] | None = None
) -> Iterator[Record]:
    """Yields the records that `mesp-engine COMMAND` prints with these settings.

    If a signal asked the engine to end, the ``end`` record has that ``signal``.
    """
    with running([command], settings, environment=environment, interruptible=True) as started:
        for record in started:
            if record.get("type") == "end" and started.signals:
                record["signal"] = started.signals[0]
            yield record
    started.check()


def generate(
    bundle: Path,
    prompt: Sequence[int],
    *,
    adapters: Sequence[WeightedAdapters] = (),
    stop: Iterable[int] = (),
    device: str | None = None,
    images: dict[str, Any] | None = None,
    **sampling: float,
) -> Iterator[Record]:
    """Yields the engine's records. `sampling` replaces values of `SAMPLING`. `images` describes a
    file of rows. A token -1 - r stands for row r.
    """
    settings = _settings_of_model(bundle, adapters, device, images) | SAMPLING | sampling
    return stream_records("generate", settings | {"prompt": list(prompt), "stop": sorted(stop)})


def _settings_of_model(
    bundle: Path, adapters: Sequence[WeightedAdapters], device: str | None,
    images: dict[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    check_device(device)
    named = [{"folder": str(each.folder.resolve()), "weight": each.weight} for each in adapters]
    found = {"bundle": str(bundle.resolve()), "device": device, "adapters": named}
    return found | ({"images": images} if images else {})


class Score(NamedTuple):
    """The log-likelihood of a continuation in nats, and whether greedy decoding would write the
    continuation.
    """

    log_likelihood: float
    is_greedy: bool


@dataclass
class Evaluator:
    _engine: Engine

    def choices(self, prompt: Sequence[int], choices: Sequence[Sequence[int]]) -> list[Score]:
        """Returns the score of each choice after `prompt`. For all choices of up to 256 tokens, the
        prompt is computed once.
        """
        request = {"type": "choices", "prompt": list(prompt), "choices": [*map(list, choices)]}
        record = self._engine.ask(request)
        return [*map(Score, record["log_likelihoods"], record["greedy"])]

    def text(self, tokens: Sequence[int], window: int) -> float:
        """Returns the log-likelihood of `tokens[1:]` in nats, in windows of `window` tokens."""
        request = {"type": "text", "tokens": list(tokens), "window": window}
        return float(self._engine.ask(request)["log_likelihood"])

    def divergence(self, tokens: Sequence[int], window: int) -> float:
        """Returns the sum of KL(base ‖ model) over `tokens[1:]` in nats, in windows of `window`
        tokens. The base is the model without adapters.
        """
        request = {"type": "divergence", "tokens": list(tokens), "window": window}
        return float(self._engine.ask(request)["kl"])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        stop: Sequence[int],
        at_once: int,
        go_on: Callable[[int, int], bool],
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[int]:
        """Generates a text after each of the `prompts`, and calls `go_on` with the prompt's index
        and each token.

        A text ends after `max_tokens` tokens, when `go_on` returns false, or before a token of
        `stop`. At most `at_once` prompts, from 1 to 16, run together. Yields a prompt's index when
        its text has ended.
        """
        how = {"max_tokens": max_tokens, "temperature": temperature, "top_p": 1}
        requests = [
            {"prompt": list(each), **how, "seed": seed + index, "stop": list(stop)}
            for index, each in enumerate(prompts)
        ]
        if not requests:
            return
        record = self._engine.ask({"type": "generate", "at_once": at_once, "requests": requests})
        for left in range(len(requests) - 1, -1, -1):
            while record["type"] == "token":
                record = self._engine.ask(go_on(record["index"], record["token"]))
            yield record["index"]
            if left:
                record = self._engine.receive()


@contextmanager
def evaluator(
    bundle: Path, adapters: Sequence[WeightedAdapters] = (), device: str | None = None,
    images: dict[str, Any] | None = None,
) -> Iterator[Evaluator]:  # fmt: skip
    settings = _settings_of_model(bundle, adapters, device, images)
    with running(["evaluate"], settings, stdin=subprocess.PIPE) as started:
        try:
            yield Evaluator(started)
        finally:
            with suppress(BrokenPipeError):
                assert started.process.stdin is not None
                started.process.stdin.close()
        for _ in started:
            pass
    started.check()
