from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import mlx.core as mx
import numpy as np
from mlx import nn

from mesp.bundle.reader import Bundle
from mesp.errors import MespError


def measure_held_out_loss(
    model: nn.Module,
    bundle: Bundle,
    seq_len: int,
    count: int,
    advance: Callable[[], None] = lambda: None,
) -> float:
    """Returns the mean loss per target, in nats, over the first `count` sequences of `valid` that
    have a target in the loss.
    """
    total, tokens = 0.0, 0
    for ids, counted in islice(read_sequences(bundle, "valid", seq_len), count):
        logits = model(mx.array(ids[None, :-1]))[0].astype(mx.float32)
        losses = nn.losses.cross_entropy(logits, mx.array(ids[1:]))
        total += (losses * mx.array(counted)).sum().item()
        tokens += int(counted.sum())
        advance()
    if not tokens:
        raise MespError(
            f"The valid data of {bundle.path} has nothing to predict; replace it with mesp data."
        )
    if not math.isfinite(total):
        raise MespError("The held-out loss is not finite; train the adapters again.")
    return total / tokens


def read_sequences(
    bundle: Bundle, split: str, seq_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the sequences of a split that have a target in the loss.

    A sequence consists of int32 ids [n + 1], n ≤ `seq_len`, and of float32 weights [n]. The weight
    of a target is 1 if the target is in the loss, else 0.
    """
    tokens, examples, mask = bundle.tokens(split), bundle.examples(split), bundle.mask(split)
    begin = None
    if examples is None:
        begin, starts = bundle.begin(split), range(0, len(tokens) - seq_len, seq_len)
        rows = ((start, seq_len + 1) for start in starts)
    else:
        rows = ((start, min(length, seq_len + 1)) for start, length in examples.tolist())
    for start, length in rows:
        ids = tokens[start : start + length]
        if not 0 < length <= len(ids) or ids.max() >= bundle.architecture.vocab_size:
            raise MespError(
                f"The {split} data of {bundle.path} has an example outside of its tokens, or a "
                "token outside of the vocabulary; replace it with mesp data."
            )
        ids = np.array(ids, np.int32)
        if begin is not None:
            ids[0] = begin
        counted = np.ones(length - 1, np.float32)
        if mask is not None:
            counted = np.asarray(mask[start + 1 : start + length] != 0, np.float32)
        if counted.any():
            yield ids, counted
