"""Answers that people have judged, to token ids: as TRL's trainers take them.

A record is a pair, `chosen` and `rejected` answers to a `prompt`, or an answer by itself, a
`completion` with a `label`, true where it is good. Texts are strings, or lists of messages, which
the chat template joins. A pair without a prompt begins alike, and that is its prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from mesp.data.examples import Split
from mesp.data.records import LABELS, PAIRS, Document
from mesp.errors import MespError

JUDGED = (PAIRS, LABELS)

# A byte an example: of an answer by itself, and of a pair, its chosen right before its rejected.
BAD, GOOD, REJECTED, CHOSEN = range(4)

Text = str | list[dict[str, Any]]


def as_judged(
    data: str, split: str, documents: Iterable[Document], tokenizer: Any, seq_len: int
) -> Split:
    """An example for each answer, with its prompt, cut to `seq_len` tokens and the token after.

    The answer alone counts. Raises MespError where a record cannot be used, or where all answers
    that are judged by themselves are alike.
    """
    longest = seq_len + 1
    parts, examples, masks, labels = [], [], [], []
    start = too_long = 0
    for document in documents:
        prompt, answers = _answers(document)
        for answer, label in answers:
            ids, context = _encode(document, tokenizer, prompt, answer)
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
        too_long,
    )


def are_strings(documents: dict[str, list[Document]]) -> bool:
    """Whether no record's texts are messages, which need a chat template."""
    return all(
        isinstance(each.content.get("chosen", each.content.get("completion")), str)
        for split in documents.values()
        for each in split
    )


def _answers(document: Document) -> tuple[Text, list[tuple[Text, int]]]:
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
    document: Document, tokenizer: Any, prompt: Text, answer: Text
) -> tuple[list[int], int]:
    """The ids of a prompt with an answer, and how many of them are the prompt's."""
    try:
        if isinstance(prompt, str):
            end = tokenizer.eos_token or ""
            whole = prompt + answer + ("" if answer.endswith(end) else end)
            ids, context = tokenizer.encode(whole), tokenizer.encode(prompt)
        else:
            tools = document.content.get("tools")
            ids = tokenizer.apply_chat_template(prompt + answer, tools=tools, return_dict=False)
            context = tokenizer.apply_chat_template(
                prompt, tools=tools, add_generation_prompt=True, return_dict=False
            )
    except Exception as error:  # a chat template can raise anything
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise MespError(f"{document.where} cannot be tokenized: {reason}") from error
    return ids, len(context)
