from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesp.errors import MespError
from mesp.settings.declaration import Setting, Settings, name_option

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """The type of an option that is a finite number in a range. Unlike click.FloatRange, it refuses
    `nan`.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(value, param, ctx)
        if not math.isfinite(converted):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return converted


class SomeOf(click.ParamType[list[str]]):
    """The type of an option that takes a list of a setting's choices, such as `q,v`."""

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
    if declared.kind is int:
        return click.IntRange(_whole(declared.least), _whole(declared.most))
    if declared.kind is float:
        return Number(
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


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def add_options(
    kind: type[Settings], defaults: Mapping[str, Any] | None = None, names: Collection[str] = ()
) -> Decorator:
    """Returns a decorator that adds an option for each setting of a dataclass.

    If `names` is not empty, only these settings get an option. `defaults` replace declared
    defaults.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(fields(kind)):
            if not names or each.name in names:
                default = (defaults or {}).get(each.name, each.default)
                command = _option(each.name, each.metadata["setting"], default)(command)
        return command

    return decorate


def _option(name: str, declared: Setting, default: Any) -> Decorator:
    typed, key = name_option(name), declared.key or name
    help = declared.help
    if declared.kind is bool:
        names = f"{typed}/--no-{typed[2:]}" if declared.can_be_refused else typed
        return click.option(names, *declared.aliases, key, is_flag=True, default=default, help=help)
    if declared.kind is dict:
        return click.option(
            typed, key, multiple=True, callback=_read_numbers, metavar=declared.metavar, help=help
        )
    is_required = default is MISSING
    metavar = declared.metavar or {list: "NAME,...", int: "N", float: "NUMBER"}.get(declared.kind)
    return click.option(
        typed, *declared.aliases, key, type=make_type(declared),
        default=None if is_required else default,
        show_default=declared.default_text or True,
        metavar=None if declared.choices and declared.kind is str else metavar,
        help=f"{help}  [required]" if is_required else help,
    )  # fmt: skip


def find_given(context: click.Context, kind: type[Settings]) -> dict[str, Any]:
    found = {}
    for each in fields(kind):
        key = each.metadata["setting"].key or each.name
        if context.get_parameter_source(key) not in (None, ParameterSource.DEFAULT):
            found[each.name] = context.params[key]
    return found


def require_values(context: click.Context, *names: str) -> None:
    for parameter in context.command.params:
        if parameter.name in names and context.params[parameter.name] is None:
            raise click.MissingParameter(ctx=context, param=parameter)


paper_option = click.option("--paper", is_flag=True, help="Update as the paper does: SGD at 1e-4.")
