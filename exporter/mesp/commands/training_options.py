"""The options of training, made of the settings as they are declared."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesp.commands.command import several
from mesp.commands.config import read_config
from mesp.engine.settings import Setting, Settings, flag
from mesp.errors import MespError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Number(click.FloatRange):
    """A finite number in a range: click's own comparisons let `nan` through."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        converted = super().convert(value, param, ctx)
        if not math.isfinite(converted):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return converted


class SomeOf(click.ParamType[list[str]]):
    """Some of a setting's choices, as in `q,v` or `qkv,gate_up`; a list in the engine's order."""

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


def type_of(declared: Setting) -> click.ParamType[Any]:
    """The value of an option from its text."""
    if declared.kind is list:
        return SomeOf(declared.choices or ())
    if declared.choices is not None:
        return click.Choice(declared.choices)
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


def _numbers(option: click.Option, given: list[str]) -> dict[str, float]:
    """A dictionary of several NAME=NUMBER."""
    try:
        return {key: float(value) for key, value in (pair.split("=") for pair in given)}
    except ValueError as error:
        raise MespError(
            f"{option.opts[0]} takes NAME=NUMBER, as in eta=0.01, and not {' '.join(given)}."
        ) from error


def _whole(bound: float | None) -> int | None:
    return None if bound is None else int(bound)


def options_of(
    kind: type[Settings], defaults: Mapping[str, Any] | None = None, names: Collection[str] = ()
) -> Decorator:
    """A decorator that adds an option for each setting that a dataclass declares, or for those with
    these `names`. `defaults` are other than the declared ones."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for each in reversed(fields(kind)):
            if not names or each.name in names:
                default = (defaults or {}).get(each.name, each.default)
                command = _option(each.name, each.metadata["setting"], default)(command)
        return command

    return decorate


def _option(name: str, declared: Setting, default: Any) -> Decorator:
    typed, key = flag(name), declared.key or name
    help = declared.help
    if declared.kind is bool:
        names = f"{typed}/--no-{typed[2:]}" if declared.can_be_refused else typed
        return click.option(names, key, is_flag=True, default=default, help=help)
    if declared.kind is dict:
        return several(typed, key, metavar=declared.metavar, then=_numbers, help=help)
    is_required = default is MISSING
    metavar = declared.metavar or {list: "NAME,...", int: "N", float: "NUMBER"}.get(declared.kind)
    return click.option(
        typed, key, type=type_of(declared),
        default=None if is_required else default,
        show_default=declared.default_text or True,
        metavar=None if declared.choices and declared.kind is str else metavar,
        help=f"{help}  [required]" if is_required else help,
    )  # fmt: skip


def given(context: click.Context, kind: type[Settings]) -> dict[str, Any]:
    """The settings that were typed, or that --config has."""
    found = {}
    for each in fields(kind):
        key = each.metadata["setting"].key or each.name
        if context.get_parameter_source(key) not in (None, ParameterSource.DEFAULT):
            found[each.name] = context.params[key]
    return found


def require(context: click.Context, *names: str) -> None:
    """Raises click's own error for the first parameter that has no value."""
    for parameter in context.command.params:
        if parameter.name in names and context.params[parameter.name] is None:
            raise click.MissingParameter(ctx=context, param=parameter)


def refuse(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """The callback of what other trainers have and a MeSP block can't."""
    why = {
        "dropout": "LoRA dropout needs a random mask at each projection's input",
        "dora": "DoRA needs the length of each column of W + s A B",
        "fine_tune_type": "--fine-tune-type {} is not LoRA",
    }
    if value and value != "lora":
        raise MespError(
            f"{why[str(parameter.name)].format(value)}, and the block function, exported as "
            "y = x Wᵀ + s (x A) B, has no place for it: leave it out."
        )


config_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=read_config,
    help="YAML file with any of these options by name, as in `seq_len: 128`, and `bundle`; "
    "options on the command line override it.",
)
paper_option = click.option("--paper", is_flag=True, help="Update as the paper does: SGD at 1e-4.")


def refused_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what other trainers have and a MeSP block cannot: it is refused in a sentence."""
    hidden: dict[str, Any] = {"hidden": True, "expose_value": False, "callback": refuse}
    for option in (
        click.option("--dropout", "--lora-dropout", type=float, **hidden),
        click.option("--dora", "--use-dora", is_flag=True, **hidden),
        click.option("--fine-tune-type", **hidden),
    ):
        command = option(command)
    return command
