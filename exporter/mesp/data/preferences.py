"""Preference data as token ids: as TRL's trainers take them.

A record is a pair, `chosen` and `rejected` answers to a `prompt`, or an answer by itself, a
`completion` with a `label`, true where it is good. They are strings or lists of messages, and go
through the chat template. A pair without a prompt begins alike, and that is its prompt; two strings
without one are joined to it as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from mesp.data.examples import Split
from mesp.data.records import LABELS, PAIRS, Document, Said, as_messages
from mesp.data.tokens import encode_joined
from mesp.errors import MespError

JUDGED = (PAIRS, LABELS)

# A byte an example: of an answer by itself, and of a pair, its chosen right before its rejected.
BAD, GOOD, REJECTED, CHOSEN = range(4)


def as_judged(
    data: str, split: str, documents: Iterable[Document], tokenizer: Any, seq_len: int, chat: bool
) -> Split:
    """An example for each answer, with its prompt, cut to `seq_len` tokens and the token after.

    With `chat` strings go through the chat template too, where the prompt is one. The answer alone
    counts. Raises MespError where a record cannot be used, or where all answers that are judged by
    themselves are alike.
    """
    longest = seq_len + 1
    parts, examples, masks, labels = [], [], [], []
    start = too_long = 0
    for document in documents:
        prompt, answers = _answers(document)
        for answer, label in answers:
            ids, context = _encode(document, tokenizer, prompt, answer, chat)
            if context >= longest:
                raise MespError(
                    f"{document.where} has a prompt of {context} tokens, which leaves no room for "
                    f"an answer in {longest}: shorten it, or export with a larger --seq-len."
                )
            if context >= len(ids):
                raise MespError(f"{document.where} has an answer without a token: leave it out.")
            too_long += len(ids) > longest
            ids = ids[:longest]
            parts.append(np.array(ids, np.uint32))
            masks.append(np.arange(len(ids)) >= context)
            examples.append((start, len(ids)))
            labels.append(label)
            start += len(ids)
    if split == "train" and set(labels) in ({GOOD}, {BAD}):
        raise MespError(
            f"All labels of {data} are alike: there must be good answers and bad ones to learn "
            "from."
        )
    return Split(
        np.concatenate(parts),
        np.array(examples, np.uint32),
        np.concatenate(masks).astype(np.uint8),
        np.array(labels, np.uint8),
        too_long=too_long,
    )


def _answers(document: Document) -> tuple[Said, list[tuple[Said, int]]]:
    """The prompt of a record, and its answers with their labels."""
    record, where = document.content, document.where
    if document.kind == LABELS:
        answers = [(record["completion"], GOOD if record["label"] else BAD)]
        prompt = record["prompt"]
    else:
        chosen, rejected = record["chosen"], record["rejected"]
        prompt = record.get("prompt")
        if prompt is None:
            alike = itertools.takewhile(
                lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)
            )
            prompt = chosen[: len(list(alike))]
            if isinstance(prompt, str) and prompt.endswith(" "):
                prompt = prompt[:-1]  # the space is the next word's
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if chosen == rejected:
            raise MespError(
                f"{where} has a chosen and a rejected answer that are equal: leave it out."
            )
        answers = [(chosen, CHOSEN), (rejected, REJECTED)]
    if not prompt:
        raise MespError(f"{where} has no prompt: give it one, or leave it out.")
    for answer, _ in answers:
        empty = not answer if isinstance(answer, list) else not answer.strip()
        if empty or (isinstance(answer, list) and not any(m.get("content") for m in answer)):
            raise MespError(f"{where} has an empty answer: leave it out.")
    return prompt, answers


def _encode(
    document: Document, tokenizer: Any, prompt: Said, answer: Said, chat: bool
) -> tuple[list[int], int]:
    """The ids of a prompt with an answer, and how many of them are the prompt's."""
    try:
        # Where two strings happen to differ is not where a message ends.
        if isinstance(prompt, str) and not (chat and "prompt" in document.content):
            return encode_joined(tokenizer, prompt, answer)
        asked, tools = as_messages("user", prompt), document.content.get("tools")
        ids = tokenizer.apply_chat_template(
            asked + as_messages("assistant", answer), tools=tools, return_dict=False
        )
        context = tokenizer.apply_chat_template(
            asked, tools=tools, add_generation_prompt=True, return_dict=False
        )
    except Exception as error:  # a chat template can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MespError(f"{document.where} cannot be tokenized: {reason}") from error
    return ids, len(context)
