from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mesp.data.loss_mask import Encoded
from mesp.data.records import BAD, GOOD, REJECTED
from mesp.errors import MespError

HELD_OUT = 0.1


@dataclass(frozen=True)
class Split:
    """A tokenized split: `tokens` uint32 [N] and, unless the split is a stream, `examples` uint32
    [M, 2].

    `mask` uint8 [N] is 1 if the prediction of a token is in the loss, else 0. Without a mask, all
    predictions are in the loss. No token predicts the first token of an example, whatever its mask.

    `places` uint32 [N] is 0 for a token, or 1 + the row of `rows` [R, hidden] that takes the place
    of its embedding. Both are None without images.

    `labels` uint8 [M] are people's labels of the examples, or None. `begin` replaces the first
    token of each window, unless it is None. With `pack`, short examples share a sequence in
    training, but do not see each other's tokens. `ends` are the tokens at which generation stops,
    ascending. `too_long` counts records that were cut or split, `left_out` records without a token
    to predict, and `no_room` records whose tokens in the loss come after the longest sequence.
    """

    tokens: np.ndarray
    examples: np.ndarray | None = None
    mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    ends: tuple[int, ...] = ()
    begin: int | None = None
    pack: bool = False
    too_long: int = 0
    left_out: int = 0
    no_room: int = 0
    encoding: Mapping[str, Any] = field(default_factory=dict)
    places: np.ndarray | None = None
    rows: mx.array | None = None


def as_stream(encoded: Sequence[Encoded], begin: int | None) -> Split:
    tokens, _ = _joined(encoded)
    return Split(tokens, begin=begin, left_out=sum(not each.ids for each in encoded))


def as_examples(
    data: str, split: str, encoded: Sequence[Encoded], seq_len: int, long: str, pack: bool = False
) -> Split:
    """Returns examples of at most `seq_len` + 1 tokens.

    A longer example is cut, or split into pieces. A piece begins with the last token of the piece
    before it, so each token in the loss is predicted once. Raises MespError if no example is left.
    """
    longest = seq_len + 1
    parts, examples = [], []
    start, counts = 0, Counter[str]()
    for each in encoded:
        ids, mask = each.ids, each.mask
        stop = min(len(ids), longest) if long == "cut" else len(ids)
        pieces = [
            (start + at, min(stop - at, longest))
            for at in range(0, stop - 1, seq_len)
            if mask[at + 1 : min(stop, at + longest)].any()
        ]
        if not pieces:
            counts["no_room" if mask[1:].any() else "left_out"] += 1
            continue
        counts["too_long"] += len(ids) > longest
        examples += pieces
        places = None if each.places is None else each.places[:stop]
        parts.append(replace(each, ids=ids[:stop], mask=mask[:stop], places=places))
        start += stop
    if not examples:
        raise MespError(
            f"The {split} data of {data} has no example with something to predict in its first "
            f"{longest} tokens; give it others or export with a larger --seq-len."
        )
    tokens, mask = _joined(parts)
    places = None
    if any(part.places is not None for part in parts):
        places = np.concatenate(
            [np.zeros(len(p.ids), np.uint32) if p.places is None else p.places for p in parts]
        )
    return Split(tokens, np.array(examples, np.uint32), mask, pack=pack, places=places, **counts)


def _joined(parts: Sequence[Encoded]) -> tuple[np.ndarray, np.ndarray | None]:
    tokens = np.concatenate([np.array(part.ids, np.uint32) for part in parts])
    mask = np.concatenate([part.mask for part in parts])
    return tokens, None if mask.all() else mask.astype(np.uint8)


def as_answers(data: str, encoded: Sequence[Encoded], seq_len: int) -> Split:
    """Returns one example for each answer of preference data: prompt and answer, cut to `seq_len` +
    1 tokens.
    """
    longest = seq_len + 1
    before: list[int] = []
    for each in encoded:
        if not each.mask[1:].any():
            raise MespError(f"{each.where} has an answer without a token: leave it out.")
        context, ids = int(np.argmax(each.mask)), each.ids[:longest]
        if context >= longest:
            raise MespError(
                f"{each.where} has a prompt of {context} tokens, which leaves no room for an "
                f"answer in {longest}: shorten it, or export with a larger --seq-len."
            )
        if each.label == REJECTED and before == ids:
            raise MespError(
                f"{each.where} has a chosen and a rejected answer of the same tokens, as far as "
                f"sequences of {longest} hold: leave it out."
            )
        before = ids
    split = as_examples(data, "", encoded, seq_len, "cut")
    mask = np.ones(len(split.tokens), np.uint8) if split.mask is None else split.mask
    return replace(split, mask=mask, labels=np.array([each.label for each in encoded], np.uint8))


def check_labels(data: str, splits: Mapping[str, Split]) -> None:
    labels = {
        name: {*split.labels.tolist()} for name, split in splits.items() if split.labels is not None
    }
    train = labels.get("train", set())
    if train not in ({GOOD}, {BAD}):
        return
    kinds = ("good", "bad") if train == {GOOD} else ("bad", "good")
    if {GOOD, BAD} <= set().union(*labels.values()):
        raise MespError(
            f"The train data of {data} has {kinds[0]} answers alone, because its {kinds[1]} ones "
            "are held out: mix them, or hold out none with --hold-out 0."
        )
    raise MespError(
        f"All labels of {data} are alike: there must be good answers and bad ones to learn from."
    )


def held_out_of(count: int, fraction: float, least: int = 1) -> int:
    if not 0 <= fraction < 1:
        raise MespError(f"--hold-out is 0 or more and below 1, and not {fraction}.")
    return max(int(count * fraction), least) if fraction else 0


def hold_out_records(data: str, records: dict[str, list[Any]], fraction: float) -> None:
    if "valid" in records:
        return
    train = records["train"]
    held_out = held_out_of(len(train), fraction)
    if len(train) <= held_out:
        raise MespError(
            f"{data} has one record, too few to train on and hold out one; give it more, or hold "
            "out none with --hold-out 0."
        )
    if held_out:
        records["train"], records["valid"] = train[:-held_out], train[-held_out:]


def hold_out_tokens(data: str, splits: dict[str, Split], seq_len: int, fraction: float) -> None:
    train = splits["train"] if "valid" not in splits else None
    held_out = held_out_of(len(train.tokens), fraction, seq_len + 1) if train else 0
    if train and held_out:
        if len(train.tokens) < held_out + seq_len + 1:
            raise MespError(
                f"{data} has {len(train.tokens):,} tokens, too few to train on and hold out one "
                f"sequence of {seq_len} each; give it more text, export with a smaller --seq-len, "
                "or hold out none with --hold-out 0."
            )
        splits["valid"] = Split(train.tokens[-held_out:], begin=train.begin)
        splits["train"] = replace(train, tokens=train.tokens[:-held_out])
    for split, each in splits.items():
        if len(each.tokens) < seq_len + 1:
            raise MespError(
                f"The {split} data of {data} has {len(each.tokens):,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text or export with a "
                "smaller --seq-len."
            )
