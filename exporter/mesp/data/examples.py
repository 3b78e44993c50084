"""Makes splits for training from token ids: one stream, or separate examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from mesp.data.loss_mask import Encoded
from mesp.errors import MespError


@dataclass(frozen=True)
class Split:
    """A tokenized split: `tokens` uint32 [N] and, unless the split is a stream, `examples` uint32
    [M, 2].

    An example is (start, length): the tokens [start, start + length).

    `mask` uint8 [N] is 1 if the prediction of a token is in the loss, else 0. Without a mask, all
    predictions are in the loss. No token predicts the first token of an example, whatever its mask.
    At least one later token of each example is in the loss.

    `labels` uint8 [M] are people's labels of the examples, or None. `begin` replaces the first
    token of each window, unless it is None. With `pack`, short examples share a sequence in
    training, but do not see each other's tokens. `ends` are the tokens at which generation stops,
    ascending. `encoding` has the options that changed the encoding of texts. `too_long` counts
    records that were cut or split. `left_out` counts records without a token to predict.
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
    encoding: Mapping[str, bool] = field(default_factory=dict)


def as_stream(encoded: Iterable[Encoded], begin: int | None) -> Split:
    """Returns one stream of all texts. `begin` is as in `Split`."""
    parts = list(encoded)
    tokens, _ = _joined(parts)
    left_out = sum(not part.ids for part in parts)
    return Split(tokens, begin=begin, left_out=left_out)


def as_examples(
    data: str, split: str, encoded: Iterable[Encoded], seq_len: int, long: str, pack: bool = False
) -> Split:
    """Returns examples of at most `seq_len` + 1 tokens. `pack` is as in `Split`.

    A longer example is cut, or split into pieces. A piece begins with the last token of the piece
    before it, so each token in the loss is predicted once. Examples without a token in the loss are
    left out. Raises MespError if no example is left.
    """
    longest = seq_len + 1
    parts, examples = [], []
    start = too_long = left_out = 0
    for each in encoded:
        ids, mask = each.ids, each.mask
        stop = min(len(ids), longest) if long == "cut" else len(ids)
        pieces = [
            (start + at, min(stop - at, longest))
            for at in range(0, stop - 1, seq_len)
            if mask[at + 1 : min(stop, at + longest)].any()
        ]
        if not pieces:
            left_out += 1
            continue
        too_long += len(ids) > longest
        examples += pieces
        parts.append(Encoded(ids[:stop], mask[:stop]))
        start += stop
    if not examples:
        remedy = "give it others or export with a larger --seq-len."
        if not any(each.mask[1:].any() for each in encoded):
            remedy = "add assistant messages, or take --loss-on all."
        raise MespError(
            f"The {split} data of {data} has no example with something to predict in its first "
            f"{longest} tokens; {remedy}"
        )
    tokens, mask = _joined(parts)
    bounds = np.array(examples, np.uint32)
    return Split(tokens, bounds, mask, pack=pack, too_long=too_long, left_out=left_out)


def _joined(parts: list[Encoded]) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the tokens of all parts, uint32 [N], and their mask, uint8 [N], or None if the mask
    is all ones.
    """
    tokens = np.concatenate([np.array(part.ids, np.uint32) for part in parts])
    mask = np.concatenate([part.mask for part in parts])
    return tokens, None if mask.all() else mask.astype(np.uint8)
