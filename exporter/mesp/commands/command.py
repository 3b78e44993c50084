from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import click

import mesp
from mesp.errors import EngineError, Interrupted, MespError, exit_at_signals
from mesp.formatting import printable


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        click.echo(printable(record.getMessage()), err=True)


class Failed(click.ClickException):
    """An error of the package, printed as ``Error: <sentence>``.

    The exit code is 2 for an error that the user can fix, 1 for a failure of mesp-engine, and 128
    plus the first signal's number if a second signal has ended the command.
    """

    def __init__(self, error: MespError) -> None:
        super().__init__(error.message)
        code = 1 if isinstance(error, EngineError) else 2
        code = 128 + error.number if isinstance(error, Interrupted) else code
        self.exit_code = code  # type: ignore[misc]

    def format_message(self) -> str:
        # Names and values in the message may come from an untrusted file.
        return printable(self.message)


class Command(click.Command):
    """A command that prints a MespError, or an OSError about a file, as one sentence."""

    def __init__(self, *args: Any, **options: Any) -> None:
        settings = {"show_default": True, "help_option_names": ["-h", "--help"]}
        options["context_settings"] = settings | (options.get("context_settings") or {})
        super().__init__(*args, **options)
        click.version_option(mesp.__version__, message="mesp %(version)s")(self)
        for parameter in self.params:
            if isinstance(parameter, click.Option) and parameter.metavar is None:
                parameter.metavar = _METAVARS.get(type(parameter.type))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except MespError as error:
            raise Failed(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        notes, logger = _Notes(logging.WARNING), logging.getLogger("mesp")
        logger.addHandler(notes)
        try:
            with exit_at_signals():
                return super().invoke(ctx)
        except MespError as error:
            raise Failed(error) from error
        except OSError as error:
            if error.filename is None:  # for example a closed pipe, which click handles
                raise
            said = f"{error.filename!s:.200} cannot be used: {error.strerror}."
            raise Failed(MespError(said)) from error
        except RuntimeError as error:  # raised by Path.resolve before Python 3.13
            if not str(error).startswith("Symlink loop"):
                raise
            raise Failed(MespError(f"{error}; name another path.")) from error
        finally:
            logger.removeHandler(notes)


_METAVARS: dict[type, str] = {
    type(click.INT): "N",
    click.IntRange: "N",
    type(click.FLOAT): "NUMBER",
    click.FloatRange: "NUMBER",
    click.Path: "PATH",
    type(click.STRING): "TEXT",
}


class Several(click.ParamType[list[Any]]):
    name = "list"

    def __init__(self, kind: click.ParamType[Any] = click.STRING, comma: str = ",") -> None:
        self.kind, self.comma = kind, comma

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[Any]:
        if isinstance(value, list):
            return value
        parts = [part for part in map(str.strip, re.split(self.comma, str(value))) if part]
        if not parts and param is not None:  # for example from an unset shell variable
            raise MespError(f"{param.opts[0]} has no value; give one, or leave it out.")
        return [self.kind.convert(part, param, ctx) for part in parts]


def several(
    *names: str,
    kind: click.ParamType[Any] = click.STRING,
    comma: str = ",",
    then: Callable[[click.Option, list[Any]], Any] = lambda _, values: tuple(values),
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns an option that takes several values, separated by commas or given by repeating the
    option.
    """

    def flat(_: click.Context, option: click.Parameter, given: tuple[list[Any], ...]) -> Any:
        assert isinstance(option, click.Option)
        return then(option, [value for values in given for value in values])

    return click.option(*names, multiple=True, type=Several(kind, comma), callback=flat, **options)


def pairs(keys: tuple[str, ...]) -> Callable[[click.Option, list[str]], dict[str, str]]:
    def made(option: click.Option, given: list[str]) -> dict[str, str]:
        found = dict(pair.partition("=")[::2] for pair in given)
        for key, value in found.items():
            if key not in keys or not value:
                wanted = (option.metavar or "").removesuffix(",...")
                raise MespError(
                    f"{option.opts[0]} takes {wanted}, with {wanted.split('=')[0]} one of "
                    f"{', '.join(keys)}, and not {key}{'=' if value else ''}{value}."
                )
        return found

    return made
