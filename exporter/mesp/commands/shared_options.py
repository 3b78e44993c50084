"""Options, and kinds of options, that several commands have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from mesp.data.load import DataOptions


class ListOptions(click.Command):
    """A command without positional arguments whose options may be given several values:

    ``--rank 4 8`` is ``--rank 4 --rank 8``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeatable = {o for p in self.params if getattr(p, "multiple", False) for o in p.opts}
        spelled, current = [], None
        for arg in args:
            if arg.startswith("-"):
                current = arg if arg in repeatable else None
            elif current and spelled[-1] != current:
                spelled.append(current)
            spelled.append(arg)
        return super().parse_args(ctx, spelled)


def data_options(function: Callable) -> Callable:
    """Adds the options of how data is taken to a command, which gets them as `data_options`."""

    @click.option(
        "--pack/--no-pack", default=None, show_default="--pack for text, --no-pack otherwise",
        help="Pack records into full sequences, or take one a sequence.",
    )  # fmt: skip
    @click.option(
        "--mask-prompt", is_flag=True,
        help="Leave the prompt, or all messages but the last, out of the loss.",
    )  # fmt: skip
    @click.option(
        "--long", type=click.Choice(["cut", "split"]), default="cut",
        help="What becomes of a record longer than the longest sequence, where none are packed.",
    )  # fmt: skip
    @functools.wraps(function)
    def command(*, pack: bool | None, mask_prompt: bool, long: str, **others: Any) -> None:
        function(data_options=DataOptions(pack, mask_prompt, long), **others)

    return command
