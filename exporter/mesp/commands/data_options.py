from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import click

from mesp.commands.command import pairs, several
from mesp.data.fields import KEYS
from mesp.data.load import DataOptions
from mesp.data.records import LOSS_ON
from mesp.data.source_files import SPLITS
from mesp.data.sources import Selection
from mesp.data.splits import HELD_OUT
from mesp.errors import MespError
from mesp.settings.command_options import is_given
from mesp.settings.declaration import name_option

OPTIONS = (
    "pack", "loss_on", "mask_prompt", "chat", "split_special_tokens", "long", "hold_out", "columns",
    "ignore", "splits", "subset",
)  # fmt: skip


def given_data_options(context: click.Context) -> list[str]:
    return [name_option(name) for name in OPTIONS if is_given(context, name)]


ignore_option = several(
    "--ignore", metavar="NAME,...",
    help="Fields of records and of their messages to leave out, such as one that is refused.",
)  # fmt: skip


def data_options(function: Callable[..., None]) -> Callable[..., None]:
    @click.option(
        "--pack/--no-pack", default=None, show_default="--pack for text files, else --no-pack",
        help="Several records a sequence, or one: text is joined into one stream, and prompts with "
        "answers and conversations are kept apart, each with its own positions and attention.",
    )  # fmt: skip
    @click.option(
        "--loss-on", type=click.Choice(LOSS_ON), show_default="answers; of text all",
        help="The part of a conversation in the loss: each answer, the last message, or all.",
    )  # fmt: skip
    @click.option("--mask-prompt", is_flag=True, help="mlx-lm's name for --loss-on last.")
    @click.option(
        "--chat/--no-chat", default=None, show_default="where the tokenizer has one",
        help="Put prompts and answers that are strings into the chat template, or join them.",
    )  # fmt: skip
    @click.option(
        "--split-special-tokens", is_flag=True,
        help="Encode special tokens in the text of records, such as <|im_end|>, as ordinary text; "
        "the chat template's stay.",
    )  # fmt: skip
    @click.option(
        "--long", type=click.Choice(["cut", "split"]), show_default="split for text, cut otherwise",
        help="Cut or split records longer than the longest sequence; text in one stream has none.",
    )  # fmt: skip
    @click.option(
        "--hold-out", type=click.FloatRange(0, 1, max_open=True), default=HELD_OUT,
        metavar="FRACTION",
        help="The part of the data that is held out where it has no valid split; 0 holds out none.",
    )  # fmt: skip
    @several(
        "--columns", metavar="KEY=COLUMN,...", then=pairs(KEYS),
        comma=rf",(?=\s*(?:{'|'.join(KEYS)})=)",
        help="The columns with a record's prompt, completion, …",
    )  # fmt: skip
    @ignore_option
    @several(
        "--splits", metavar="SPLIT=NAME,...", then=pairs(tuple(SPLITS)),
        help="The parts of a dataset for train, valid and test, as in train=train[:1000].",
    )  # fmt: skip
    @click.option("--subset", metavar="NAME", help="A dataset's configuration.")
    @functools.wraps(function)
    def command(**options: Any) -> None:
        taken = data_options_of({name: options.pop(name) for name in OPTIONS})
        function(data_options=taken, **options)

    return command


def data_options_of(options: Mapping[str, Any]) -> DataOptions:
    """Raises MespError if two options contradict each other."""
    loss_on = options["loss_on"]
    if options["mask_prompt"] and loss_on not in (None, "last"):
        raise MespError(
            f"--mask-prompt means --loss-on last, not --loss-on {loss_on}: give one of them."
        )
    loss_on = "last" if options["mask_prompt"] else loss_on
    selection = Selection(
        options["subset"], options["splits"], options["columns"], options["ignore"]
    )
    return DataOptions(
        options["pack"], loss_on, options["long"], selection, options["chat"],
        options["hold_out"], options["split_special_tokens"],
    )  # fmt: skip
