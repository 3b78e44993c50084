"""Options that other trainers have and a MeSP block cannot have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mesp.errors import MespError


def refuse(context: click.Context, parameter: click.Parameter, value: object) -> None:
    """Refuses an option that other trainers have and a MeSP block cannot have."""
    if value and value != "lora":
        raise MespError(
            f"--fine-tune-type {value} is not LoRA, and the block function, exported as "
            "y = x Wᵀ + s (x A) B, has no place for it: leave it out."
        )


def refused_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what other trainers have and a MeSP block cannot: it is refused in a sentence."""
    hidden: dict[str, Any] = {"hidden": True, "expose_value": False, "callback": refuse}
    return click.option("--fine-tune-type", **hidden)(command)
