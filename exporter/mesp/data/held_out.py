"""Holds out a part of data that has no valid split."""

from __future__ import annotations

from dataclasses import replace

from mesp.data.examples import Split
from mesp.data.records import Document
from mesp.errors import MespError

HELD_OUT = 0.1  # the default fraction


def held_out_of(count: int, fraction: float, least: int = 1) -> int:
    """Returns how many of `count` records or tokens are held out: `fraction` of them, at least
    `least`. Returns 0 if `fraction` is 0.

    Raises MespError unless 0 ≤ `fraction` < 1.
    """
    if not 0 <= fraction < 1:
        raise MespError(f"--hold-out is 0 or more and below 1, and not {fraction}.")
    return max(int(count * fraction), least) if fraction else 0


def hold_out_records(data: str, documents: dict[str, list[Document]], fraction: float) -> None:
    """Moves the last `fraction` of the records to ``valid``, unless there is a valid split or
    `fraction` is 0. Raises MespError if there are too few records.
    """
    if "valid" in documents:
        return
    train = documents["train"]
    held_out = held_out_of(len(train), fraction)
    if len(train) <= held_out:
        raise MespError(
            f"{data} has one record, too few to train on and hold out one; give it more, or hold "
            "out none with --hold-out 0."
        )
    if held_out:
        documents["train"], documents["valid"] = train[:-held_out], train[-held_out:]


def hold_out_tokens(data: str, splits: dict[str, Split], seq_len: int, fraction: float) -> None:
    """Moves the last `fraction` of the stream to ``valid``, unless there is a valid split or
    `fraction` is 0. Raises MespError if the stream is too short.
    """
    if "valid" in splits:
        return
    train = splits["train"]
    held_out = held_out_of(len(train.tokens), fraction, least=seq_len + 1)
    if not held_out:
        return
    if len(train.tokens) < held_out + seq_len + 1:
        raise MespError(
            f"{data} has {len(train.tokens):,} tokens, too few to train on and hold out one "
            f"sequence of {seq_len} each; give it more text, export with a smaller --seq-len, or "
            "hold out none with --hold-out 0."
        )
    for split, part in (("train", slice(-held_out)), ("valid", slice(-held_out, None))):
        mask = None if train.mask is None else train.mask[part]
        splits[split] = Split(train.tokens[part], mask=mask, begin=train.begin)
    splits["train"] = replace(splits["train"], left_out=train.left_out)
