"""Token ids to what training takes: one stream, or an example a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mesp.data.tokens import Encoded
from mesp.errors import MespError


@dataclass(frozen=True)
class Split:
    """A split, tokenized: `tokens` uint32 [N], and unless it is packed `examples` uint32 [M, 3].

    An example is (start, length, prompt): the tokens [start, start + length), of which the
    prediction of the first `prompt` is not in the loss; max(prompt, 1) < length. `too_long` of the
    records were cut or split, and `left_out` have nothing that can be predicted.
    """

    tokens: np.ndarray
    examples: np.ndarray | None = None
    too_long: int = 0
    left_out: int = 0


def as_stream(encoded: Iterable[Encoded]) -> Split:
    """One stream, of one document after another."""
    parts = [np.array(ids, np.uint32) for ids, _ in encoded]
    return Split(np.concatenate(parts), left_out=sum(not len(part) for part in parts))


def as_examples(
    data: str, split: str, encoded: Iterable[Encoded], seq_len: int, long: str
) -> Split:
    """One example a sequence, none longer than `seq_len` tokens and the token after.

    A longer one is cut to that, or split into examples that follow each other as windows do: each
    begins with the last token of the one before, and those in which nothing counts are left out,
    so every token that counts counts once.
    """
    longest = seq_len + 1
    parts, examples = [], []
    start = too_long = left_out = 0
    for ids, prompt in encoded:
        stop = min(len(ids), longest) if long == "cut" else len(ids)
        pieces = [
            (start + at, min(stop - at, longest), max(prompt - at, 0))
            for at in range(0, stop - 1, seq_len)
        ]
        pieces = [piece for piece in pieces if max(piece[2], 1) < piece[1]]
        if not pieces:
            left_out += 1
            continue
        too_long += len(ids) > longest
        examples += pieces
        parts.append(np.array(ids[:stop], np.uint32))
        start += stop
    if not examples:
        raise MespError(
            f"The {split} data of {data} has no example with something to predict in its first "
            f"{longest} tokens; give it others or export with a larger --seq-len."
        )
    return Split(np.concatenate(parts), np.array(examples, np.uint32), too_long, left_out)
