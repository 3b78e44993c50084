"""Encodes preference data as token ids.

A record is a pair or a single answer. A pair has a `chosen` and a `rejected` answer to a `prompt`.
A single answer has a `prompt`, a `completion` and a `label`, which is true for a good answer.
Prompts and answers are strings or lists of messages. By default, they go through the chat template,
if the tokenizer has one.

If a pair has no prompt, its prompt is the common beginning of its answers. If such answers are
strings, they are encoded without the chat template.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from mesp.data.encoder import Encoder, named
from mesp.data.examples import Split
from mesp.data.loss_mask import Encoded
from mesp.data.records import LABELS, PAIRS, Document, Said, as_messages
from mesp.errors import MespError

PREFERENCE_KINDS = (PAIRS, LABELS)

# The labels, one byte per example. BAD and GOOD are for single answers, and REJECTED and CHOSEN for
# pairs. A pair's chosen answer comes right before its rejected answer.
BAD, GOOD, REJECTED, CHOSEN = range(4)


class LabelledAnswer(NamedTuple):
    where: str
    encoded: Encoded
    label: int


def encode_answers(document: Document, encoder: Encoder) -> list[LabelledAnswer]:
    """Returns the encoded answers of a record. Raises MespError if the record cannot be used."""
    prompt, answers = _answers(document)
    found = []
    for answer, label in answers:
        with named(document):
            found.append(
                LabelledAnswer(document.where, _encode(document, encoder, prompt, answer), label)
            )
    return found


def as_preference_data(
    data: str, split: str, answers: Iterable[LabelledAnswer], seq_len: int
) -> Split:
    """Returns one example for each answer: prompt and answer, cut to `seq_len` + 1 tokens.

    Only the answer is in the loss. Raises MespError if an answer has no token, if a prompt leaves
    no room for an answer, if the answers of a pair are equal, or if all single answers in the train
    split have the same label.
    """
    longest = seq_len + 1
    parts, examples, masks, labels = [], [], [], []
    start = too_long = 0
    for where, encoded, label in answers:
        ids, mask = encoded.ids, encoded.mask
        context = int(np.argmax(mask)) if mask.any() else len(ids)
        if context >= len(ids):
            raise MespError(f"{where} has an answer without a token: leave it out.")
        if context >= longest:
            raise MespError(
                f"{where} has a prompt of {context} tokens, which leaves no room for an answer in "
                f"{longest}: shorten it, or export with a larger --seq-len."
            )
        too_long += len(ids) > longest
        if label == REJECTED and np.array_equal(parts[-1], ids[:longest]):
            raise MespError(
                f"{where} has a chosen and a rejected answer of the same tokens, as far as "
                f"sequences of {longest} hold: leave it out."
            )
        parts.append(np.array(ids[:longest], np.uint32))
        masks.append(mask[:longest])
        examples.append((start, len(parts[-1])))
        labels.append(label)
        start += len(parts[-1])
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
    record, where = document.content, document.where
    assert isinstance(record, dict)
    prompt = record.get("prompt")
    if document.kind == LABELS:
        answers = [(record["completion"], GOOD if record["label"] else BAD)]
    else:
        chosen, rejected = record["chosen"], record["rejected"]
        if prompt is None or _is_within(prompt, chosen, rejected):
            prompt = _alike(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if chosen == rejected:
            raise MespError(
                f"{where} has a chosen and a rejected answer that are equal: leave it out."
            )
        answers = [(chosen, CHOSEN), (rejected, REJECTED)]
    if not prompt:
        raise MespError(f"{where} has no prompt: give it one, or leave it out.")
    for answer, _ in answers:
        if not (answer.strip() if isinstance(answer, str) else answer):
            raise MespError(f"{where} has an empty answer: leave it out.")
        if any(not message.get("weight", 1) for message in answer if isinstance(message, dict)):
            raise MespError(f"{where} has an answer with the weight 0: leave the record out.")
    return prompt, answers


def _is_within(prompt: Said, chosen: Said, rejected: Said) -> bool:
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return False
    alike = _alike(chosen, rejected)
    if isinstance(prompt, list):
        return alike[: len(prompt)] == prompt
    said = [m["content"].strip() for m in alike if isinstance(m, dict) and m["role"] == "user"]
    return prompt.strip() in said


def _alike(chosen: Said, rejected: Said) -> Said:
    """Returns the common beginning of two answers. For strings, a space at its end is left out."""
    alike = itertools.takewhile(
        lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)
    )
    prompt = chosen[: len(list(alike))]
    return prompt[:-1] if isinstance(prompt, str) and prompt.endswith(" ") else prompt


def _encode(document: Document, encoder: Encoder, prompt: Said, answer: Said) -> Encoded:
    # Strings without a prompt may begin to differ in the middle of a message. So they are joined
    # without the chat template.
    is_conversation = encoder.chat and "prompt" in document.content
    if isinstance(prompt, str) and isinstance(answer, str) and not is_conversation:
        return encoder.joined(prompt, answer)
    asked = as_messages("user", prompt)
    return encoder.conversation(document.of(len(asked), asked + as_messages("assistant", answer)))
