"""The exceptions that this package raises."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MespError(Exception):
    """Something that the caller can mend: one plain sentence that names the thing and the remedy.

    A command prints it as ``Error: <sentence>`` and exits with code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EngineError(MespError):
    """mesp-engine failed: it crashed, or the system ended it. A command exits with code 1."""


class Interrupted(MespError):
    """A second Ctrl-C has ended what the first asked to end. A command exits with code 130."""


@contextmanager
def plain_os_errors(doing: str) -> Iterator[None]:
    """Turns an OSError into a sentence that begins with what failed, as in "Cannot write x"."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise MespError(f"{doing}: the disk is full; free some space and try again.") from error
        raise MespError(f"{doing}: {error.strerror or error}.") from error


@contextmanager
def plain_errors(failed: str) -> Iterator[None]:
    """Raises MespError, which begins with what `failed`, for whatever a tokenizer or a chat
    template raises."""
    try:
        yield
    except MespError:
        raise
    except BaseException as error:
        # A panic in Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MespError(f"{failed}: {reason}") from error
