from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mesp.commands.command import several
from mesp.data.source_files import read_value

weights_option = several(
    "--weights", kind=click.FLOAT, metavar="NUMBER,...", show_default="1 for each",
    help="A factor from 0 to 10 for each of --adapters.",
)  # fmt: skip

vision_option = click.option(
    "--vision", metavar="MODEL", show_default="the model that the bundle is of",
    help="The model whose vision tower reads images, as mesp-export takes it.",
)  # fmt: skip


def read_json(_: click.Context, option: click.Parameter, value: str | None) -> Any:
    return None if value is None else read_value(option.opts[0], value)


def prompt_options(chat_default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option(
                "--chat-template-kwargs", metavar="JSON", callback=read_json,
                show_default="as the bundle's data",
                help="Options of the chat template, as in '{\"enable_thinking\": false}'.",
            ),
            click.option(
                "--split-special-tokens/--no-split-special-tokens", default=None,
                show_default="as the bundle's data",
                help="Encode special tokens in texts, such as <|im_end|>, as ordinary text; the "
                "chat template's stay.",
            ),
            click.option(
                "--chat/--no-chat", default=None, show_default=chat_default,
                help="Put prompts into the chat template.",
            ),
        ):  # fmt: skip
            command = option(command)
        return command

    return add
