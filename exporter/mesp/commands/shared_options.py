"""Options, and kinds of options, that several commands have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from mesp.data.load import DataOptions
from mesp.data.records import KEYS
from mesp.data.sources import SPLITS, Selection
from mesp.data.tokens import LOSS_ON
from mesp.errors import Command, MespError


class ListOptions(Command):
    """A command whose options may be given several values: ``--rank 4 8`` is ``--rank 4 --rank 8``.

    What has a place, not a name, comes before them.
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


def pairs(keys: tuple[str, ...]) -> Callable[..., dict[str, str]]:
    """A callback for an option of several KEY=VALUE, which makes a dictionary of them."""

    def callback(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict:
        found = dict(pair.partition("=")[::2] for pair in given)
        for key, value in found.items():
            if key not in keys or not value:
                wanted, first = option.metavar.removesuffix(" ..."), option.metavar.split("=")[0]
                raise MespError(
                    f"{option.opts[0]} takes {wanted}, with {first} one of {', '.join(keys)}, and "
                    f"not {key}{'=' if value else ''}{value}."
                )
        return found

    return callback


def data_options(function: Callable) -> Callable:
    """Adds the options of how data is taken to a command, which gets them as `data_options`."""

    @click.option(
        "--pack/--no-pack", default=None, show_default="--pack for text, --no-pack otherwise",
        help="Pack records into full sequences, or take one a sequence.",
    )  # fmt: skip
    @click.option(
        "--loss-on", type=click.Choice(LOSS_ON), show_default="answers; of text all",
        help="What of a conversation is in the loss: each answer, the last message, or all.",
    )  # fmt: skip
    @click.option("--mask-prompt", is_flag=True, help="mlx-lm's name for --loss-on last.")
    @click.option(
        "--chat/--no-chat", default=None, show_default="where the tokenizer has one",
        help="Put prompts and answers that are strings into the chat template, or join them.",
    )  # fmt: skip
    @click.option(
        "--long", type=click.Choice(["cut", "split"]), default="cut",
        help="What becomes of a record longer than the longest sequence, where none are packed.",
    )  # fmt: skip
    @click.option(
        "--columns", multiple=True, metavar="KEY=COLUMN ...", callback=pairs(KEYS),
        help="The columns of the data that are a record's prompt, completion, …",
    )  # fmt: skip
    @click.option(
        "--splits", multiple=True, metavar="SPLIT=NAME ...", callback=pairs(SPLITS),
        help="The parts of a dataset that are train, valid and test, as in train=train[:1000].",
    )  # fmt: skip
    @click.option("--subset", metavar="NAME", help="A dataset's configuration.")
    @functools.wraps(function)
    def command(
        *, pack: bool | None, loss_on: str | None, mask_prompt: bool,
        chat: bool | None, long: str, columns: dict[str, str], splits: dict[str, str],
        subset: str | None, **others: Any,
    ) -> None:  # fmt: skip
        if mask_prompt and loss_on not in (None, "last"):
            raise MespError(
                f"--mask-prompt means --loss-on last, not --loss-on {loss_on}: give one of them."
            )
        loss_on = "last" if mask_prompt else loss_on
        selection = Selection(subset, splits, columns)
        function(data_options=DataOptions(pack, loss_on, long, selection, chat), **others)

    return command
