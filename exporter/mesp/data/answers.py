"""Finds a conversation's answers among its token ids, as its chat template writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np

from mesp.errors import MespError

PROBE = "MeSP"  # a message's text, found again in what the template makes of it
NOT_FOUND = "take --loss-on last for the last message alone, or --loss-on all."


def encode_answers(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None
) -> tuple[list[int], np.ndarray]:
    """The ids of a conversation, and a mask [N] that is true for the tokens of its answers.

    An answer is what the template writes of an assistant's message after what asks for one (its
    generation prompt), with the token that ends it: what TRL's `assistant_only_loss` takes. A
    template says so itself by `{% generation %}`; of others it is found by what they make of the
    conversation's beginnings. Raises MespError, without the record's name, where it cannot be.
    """
    template = tokenizer.chat_template
    if isinstance(template, str) and re.search(r"{%-?\s*generation\s*-?%}", template):
        encoded = tokenizer._tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], np.array(encoded["assistant_masks"], bool)
    text = _render(tokenizer, messages, tools)
    encoded = _encode(tokenizer, text)
    offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
    mask = np.zeros(len(offsets), bool)
    for start, stop in _spans(tokenizer, text, messages, tools):
        mask |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return encoded["input_ids"], mask


def _spans(
    tokenizer: Any, text: str, messages: list[dict[str, Any]], tools: list[Any] | None
) -> list[tuple[int, int]]:
    """The characters of each answer in `text`, which the template makes of `messages`."""
    spans, stop, end = [], 0, ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _start(tokenizer, text, stop, messages[:i], tools)
        at = stop = len(text)
        if i + 1 < len(messages):
            end = end or _end_of_answers(tokenizer)
            at = text.find(end, start)
            stop = at + len(end)
        content = message.get("content")
        # Templates leave thoughts out.
        said = content.split("</think>")[-1].strip() if isinstance(content, str) else ""
        if min(start, at) < 0 or said not in text[start:stop]:
            raise MespError(
                "the chat template rewrites the conversation, so its answers cannot be located: "
                f"{NOT_FOUND}"
            )
        spans.append((start, stop))
    return spans


def _start(
    tokenizer: Any, text: str, since: int, before: list[dict[str, Any]], tools: list[Any] | None
) -> int:
    """The place in `text` of the answer to the messages `before` it, after the end `since` of the
    answer before it; -1 if it cannot be found."""
    # No template can be asked to begin a conversation.
    context = before or [{"role": "user", "content": PROBE}]
    told = _render(tokenizer, context, tools)
    asked = _render(tokenizer, context, tools, add_generation_prompt=True)
    same = _agreed(told, asked)
    # As far as the text agrees with what asks for the answer: a template may ask for thoughts that
    # it then leaves out.
    start = _agreed(asked, text)
    if start >= same:
        return start
    # With thoughts left out before, or nothing before.
    header = asked[same:]
    at = text.find(header, since) if header else -1
    return at if at < 0 else at + len(header)


def _end_of_answers(tokenizer: Any) -> str:
    """The template's text after each answer, such as ``<|im_end|>`` and a line feed."""
    turns = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
    tails = ["".join(_render(tokenizer, turns[:n], None).split(PROBE)[2:3]) for n in (2, 3)]
    last, before_another = (_encode(tokenizer, tail) for tail in tails)
    same = _agreed(last["input_ids"], before_another["input_ids"])
    if not same:
        raise MespError(f"the chat template does not mark where an answer ends: {NOT_FOUND}")
    return tails[0][: last["offset_mapping"][same - 1][1]]


def _encode(tokenizer: Any, text: str) -> dict[str, Any]:
    return tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)


def _agreed(a: Sequence, b: Sequence) -> int:
    """The length of the common beginning of two texts, or of two lists of ids."""
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None, **options: Any
) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
