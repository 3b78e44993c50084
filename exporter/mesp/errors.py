import errno
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MespError(Exception):
    """An error of this package. Its message tells the problem and, where possible, the remedy.

    A command prints `message` after ``Error:`` and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return name_arguments(self.message)


_TYPED = re.compile(
    r"(?P<command>\b(?:mesp[ -][a-z]+|lm-eval|llama-gguf-split) (?:(?![;:,]|\. ).)*)"
    r"|(?<![\w./-])--(?P<no>no-)?(?P<option>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)"
)
_RENAMED = {"json": "is_json"}  # options whose argument has another name


def name_arguments(sentence: str) -> str:
    """Returns a sentence with Python's arguments in place of options.

    Whole commands stay unchanged.
    """

    def name(found: re.Match[str]) -> str:
        if found["command"]:
            return found["command"]
        argument = _RENAMED.get(found["option"], found["option"].replace("-", "_"))
        return f"`{argument}=False`" if found["no"] else f"`{argument}`"

    return _TYPED.sub(name, sentence)


class EngineError(MespError):
    """A failure of mesp-engine, or of a check that it made. A command exits with code 1."""


class Interrupted(MespError):
    """A second signal, such as another Ctrl-C, which ends the work immediately."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Ended(KeyboardInterrupt):
    """A signal that asks for an end, such as SIGTERM."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def exit_at_signals() -> Iterator[None]:
    """Lets SIGINT, SIGTERM and SIGHUP end the process by an exception, so `finally` blocks run."""

    def end(number: int, _: object) -> None:
        raise Ended(number)

    is_main = threading.current_thread() is threading.main_thread()
    taken = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    except Ended as ended:
        raise SystemExit(128 + ended.number) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def plain_os_errors(doing: str) -> Iterator[None]:
    """Turns an OSError into a MespError that begins with `doing`, such as "Cannot write x"."""
    try:
        yield
    except OSError as error:
        # NumPy's error for a file that cannot be written whole has no number.
        if error.errno in FULL_DISK or " requested and " in str(error):
            raise MespError(f"{doing}: the disk is full; free some space and try again.") from error
        raise MespError(f"{doing}: {error.strerror or error}.") from error


@contextmanager
def plain_errors(failed: str) -> Iterator[None]:
    """Turns an error that is no MespError, for example of a tokenizer, into a MespError that begins
    with `failed`."""
    try:
        yield
    except MespError:
        raise
    except BaseException as error:
        # A panic in Rust code raises PanicException, which is not a subclass of Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MespError(f"{failed}: {reason}") from error
