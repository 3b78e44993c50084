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
