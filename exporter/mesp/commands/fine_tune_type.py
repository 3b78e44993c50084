from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mesp.errors import MespError

Command = Callable[..., Any]


def fine_tune_type_option(command: Command) -> Command:
    return click.option("--fine-tune-type", hidden=True, callback=_check)(command)


def no_dora_options(command: Command) -> Command:
    """Adds the options that ask for DoRA to a command that cannot train it. Asking for DoRA raises
    MespError.
    """
    hidden: dict[str, Any] = {"hidden": True, "expose_value": False, "callback": _refuse_dora}
    for names in (["--dora", "--use-dora"], ["--fine-tune-type"]):
        command = click.option(*names, is_flag="--dora" in names, **hidden)(command)
    return command


def _check(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value not in (None, "lora", "dora"):
        raise MespError(
            f"--fine-tune-type {value} is neither lora nor dora, and a bundle's weights are "
            "frozen: leave it out."
        )
    return value


def _refuse_dora(context: click.Context, option: click.Parameter, value: Any) -> None:
    if value is True or _check(context, option, value or None) == "dora":
        raise MespError("A federation averages A and B, and no magnitudes of DoRA: leave it out.")
