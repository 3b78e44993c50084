"""Records to token ids, as mlx-lm's datasets make them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mesp.data.answers import encode_answers
from mesp.data.records import Document
from mesp.errors import MespError
from mesp.text import plain_errors

Encoded = tuple[list[int], np.ndarray]  # n ids, and a mask [n] of those that count in the loss
LOSS_ON = ("answers", "last", "all")  # what is in the loss, of records with answers


def encoder(kind: str, tokenizer: Any, loss_on: str, chat: bool) -> Callable[[Document], Encoded]:
    """The function that makes token ids of a document, and marks those in the loss: the
    ``answers``, the ``last`` message, or ``all``. It raises MespError where that fails.

    With `chat` prompts and completions go through the chat template, else they are joined.
    """

    def process(document: Document) -> Encoded:
        if kind == "text":
            ids = _encode_text(tokenizer, document.content)
            return ids, np.ones(len(ids), bool)
        if not chat:
            record = document.content
            ids, context = encode_joined(tokenizer, record["prompt"], record["completion"])
            return ids, np.arange(len(ids)) >= (0 if loss_on == "all" else context)
        messages, tools = document.messages, document.content.get("tools")
        if loss_on == "answers":
            return encode_answers(tokenizer, messages, tools)
        # As mlx-lm's datasets.
        ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        context = 0
        if loss_on == "last":
            asks = messages[-1]["role"] == "assistant"
            context = len(
                tokenizer.apply_chat_template(
                    messages[:-1], tools=tools, add_generation_prompt=asks, return_dict=False
                )
            )
        return ids, np.arange(len(ids)) >= context

    def encode(document: Document) -> Encoded:
        if loss_on == "last" and kind == "messages" and len(document.messages) == 1:
            raise MespError(
                f"{document.where} has one message and so no prompt before it: leave it out, or "
                "take --loss-on all."
            )
        with plain_errors(f"{document.where} cannot be tokenized"):
            try:
                return process(document)
            except MespError as error:
                raise MespError(f"{document.where}: {error}") from error

    return encode


def encode_joined(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], int]:
    """The ids of a prompt with the answer right after it and the end-of-text token, and how many
    of them are the prompt's."""
    end = tokenizer.eos_token or ""
    whole = prompt + answer + ("" if answer.endswith(end) else end)
    return tokenizer.encode(whole), len(tokenizer.encode(prompt))


def _encode_text(tokenizer: Any, content: str | dict[str, str]) -> list[int]:
    """A record as mlx-lm's TextDataset has it, which cannot take an empty one; a file in pieces."""
    if isinstance(content, str):
        begin = begin_of_text(tokenizer)
        ids = [] if begin is None or not content else [begin]
        for piece in cut_text(content):
            ids += tokenizer.encode(piece, add_special_tokens=False)
    else:
        ids = tokenizer.encode(content["text"])
    end = tokenizer.eos_token_id
    if ids and end is not None and ids[-1] != end:
        ids.append(end)
    return ids


def begin_of_text(tokenizer: Any) -> int | None:
    """The token that the tokenizer puts before a text; None where it puts none."""
    begin = tokenizer.bos_token_id
    return begin if begin is not None and tokenizer.encode("")[:1] == [begin] else None


def cut_text(text: str, size: int = 1 << 14) -> Iterator[str]:
    """Cuts a long text at starts of lines, as tokenizing it whole takes much memory.

    Byte-level BPE cuts there too; at most the white space before a cut is tokenized differently.
    """
    start = 0
    while start < len(text):
        cut = re.compile(r"\n(?= ?\S)").search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop
