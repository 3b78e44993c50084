"""A part of the data that is held out, where it has no valid split of its own."""

from __future__ import annotations

from dataclasses import replace

from mesp.data.examples import Split
from mesp.data.records import Document
from mesp.errors import MespError

HELD_OUT = 10  # where the data has no valid split of its own, one part in this many becomes it


def hold_out_records(data: str, documents: dict[str, list[Document]]) -> None:
    """Makes the last records ``valid``. Raises MespError where they are too few."""
    if "valid" not in documents:
        train = documents["train"]
        held_out = max(len(train) // HELD_OUT, 1)
        if len(train) == held_out:
            raise MespError(
                f"{data} has one record, too few to train on and hold out one; give it more."
            )
        documents["train"], documents["valid"] = train[:-held_out], train[-held_out:]


def hold_out_tokens(data: str, splits: dict[str, Split], seq_len: int) -> None:
    """Makes the end of the stream ``valid``. Raises MespError where it is too short for that."""
    if "valid" in splits:
        return
    train = splits["train"]
    held_out = max(len(train.tokens) // HELD_OUT, seq_len + 1)
    if len(train.tokens) < held_out + seq_len + 1:
        raise MespError(
            f"{data} has {len(train.tokens):,} tokens, too few to train on and hold out one "
            f"sequence of {seq_len} each; give it more text or export with a smaller --seq-len."
        )
    for split, part in (("train", slice(-held_out)), ("valid", slice(-held_out, None))):
        mask = None if train.mask is None else train.mask[part]
        splits[split] = Split(train.tokens[part], mask=mask, begin=train.begin)
    splits["train"] = replace(splits["train"], left_out=train.left_out)
