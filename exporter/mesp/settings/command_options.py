from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesp.errors import MespError
from mesp.settings.declaration import Setting, Settings, list_settings, name_option

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """Unlike click.FloatRange, it refuses `nan`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(value, param, ctx)
        if not math.isfinite(converted):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return converted


class SomeOf(click.ParamType[list[str]]):
    """A list of a setting's choices, such as `q,v`."""

    name = "list"

    def __init__(self, choices: Collection[str]) -> None:
        self.choices = choices

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[str]:
        wanted = value if isinstance(value, list) else [part.strip() for part in value.split(",")]
        for each in wanted:
            if each not in self.choices:
                self.fail(f"{each!r} is not one of {', '.join(self.choices)}.", param, ctx)
        return [each for each in self.choices if each in wanted]


def make_type(declared: Setting) -> click.ParamType[Any]:
    if declared.kind is list:
        return SomeOf(declared.choices or ())
    if declared.choices is not None:
        return click.Choice(tuple(declared.choices))
    if declared.kind in (int, float):
        number: Callable[..., click.ParamType[Any]] = Number
        if declared.kind is int:
            number = click.IntRange
        return number(
            declared.above if declared.least is None else declared.least,
            declared.below if declared.most is None else declared.most,
            min_open=declared.above is not None,
            max_open=declared.below is not None,
        )
    if declared.kind is bool:
        return click.BOOL
    if declared.kind is Path:
        return click.Path(path_type=Path, exists=True, file_okay=False)
    return click.STRING


def _read_numbers(
    _: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> dict[str, float]:
    parts = [part.strip() for text in given for part in text.split(",") if part.strip()]
    try:
        return {key: float(value) for key, value in (pair.split("=") for pair in parts)}
    except ValueError as error:
        raise MespError(
            f"{option.opts[0]} takes NAME=NUMBER, as in eta=0.01, and not {' '.join(parts)}."
        ) from error


def add_options(
    kind: type[Settings], defaults: Mapping[str, Any] | None = None, names: Collection[str] = ()
) -> Decorator:
    """Returns a decorator that adds an option for each setting of a dataclass.

    If `names` is not empty, only these settings get an option. `defaults` replace declared
    defaults.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        declared = list_settings(kind)
        for each in reversed(fields(kind)):
            if not names or each.name in names:
                default = (defaults or {}).get(each.name, each.default)
                command = _option(name_option(each.name), declared[each.name], default)(command)
        return command

    return decorate


def _option(typed: str, declared: Setting, default: Any) -> Decorator:
    names, help = (*declared.aliases, declared.key), declared.help
    if declared.kind is bool:
        typed += f"/--no-{typed[2:]}" if declared.can_be_refused else ""
        return click.option(typed, *names, is_flag=True, default=default, help=help)
    if declared.kind is dict:
        return click.option(
            typed, *names, multiple=True, callback=_read_numbers, metavar=declared.metavar,
            help=help,
        )  # fmt: skip
    if default is MISSING:
        default, help = None, f"{help}  [required]"
    metavar = declared.metavar or {list: "NAME,...", int: "N", float: "NUMBER"}.get(declared.kind)
    return click.option(
        typed, *names, type=make_type(declared), default=default, help=help,
        show_default=declared.default_text or True,
        metavar=None if declared.choices and declared.kind is str else metavar,
    )  # fmt: skip


def find_given(context: click.Context, kind: type[Settings]) -> dict[str, Any]:
    keys = {name: declared.key for name, declared in list_settings(kind).items()}
    return {name: context.params[key] for name, key in keys.items() if is_given(context, key)}


def is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def require_values(context: click.Context, *names: str) -> None:
    for parameter in context.command.params:
        if parameter.name in names and context.params[parameter.name] is None:
            raise click.MissingParameter(ctx=context, param=parameter)


paper_option = click.option("--paper", is_flag=True, help="Update as the paper does: SGD at 1e-4.")
