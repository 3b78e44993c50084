"""The one kind of error that a user sees."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import click

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MespError(click.ClickException):
    """Something the user can mend: one plain sentence naming the thing and the remedy.

    A command that lets it through prints ``Error: <sentence>`` and exits with code 2.
    """

    exit_code = 2


@contextmanager
def plain_os_errors(doing: str) -> Iterator[None]:
    """Turns an OSError into a sentence that begins with what failed, as in "Cannot write x"."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise MespError(f"{doing}: the disk is full; free some space and try again.") from error
        raise MespError(f"{doing}: {error.strerror or error}.") from error
