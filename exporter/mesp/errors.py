"""The one kind of error that a user sees."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mesp.formatting import printable

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class MespError(click.ClickException):
    """Something the user can mend: one plain sentence naming the thing and the remedy.

    A command that lets it through prints ``Error: <sentence>`` and exits with code 2.
    """

    exit_code = 2

    def format_message(self) -> str:
        # Names and values in it may be a stranger's.
        return printable(self.message)


class Command(click.Command):
    """A command that says in a sentence where the system refuses a path: one that is too long, or a
    symbolic link to itself."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if error.filename is None:  # of a pipe, for one, which click sees to
                raise
            raise MespError(f"{error.filename!s:.200} cannot be used: {error.strerror}.") from error
        except RuntimeError as error:  # of Path.resolve, before Python 3.13
            if not str(error).startswith("Symlink loop"):
                raise
            raise MespError(f"{error}; name another path.") from error


@contextmanager
def plain_os_errors(doing: str) -> Iterator[None]:
    """Turns an OSError into a sentence that begins with what failed, as in "Cannot write x"."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL_DISK:
            raise MespError(f"{doing}: the disk is full; free some space and try again.") from error
        raise MespError(f"{doing}: {error.strerror or error}.") from error
