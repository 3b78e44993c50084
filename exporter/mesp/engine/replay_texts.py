"""Texts that a model writes itself, to be replayed while it is trained.

Drawn from the model they are its distribution, so that the gradient of their loss is, in the mean,
that of the Kullback-Leibler divergence from it (docs/method.md, "Forgetting").
"""

from __future__ import annotations

import math
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from mesp.adapters.weighted import StrPath, weigh
from mesp.data.examples import Split
from mesp.engine.process import evaluator
from mesp.errors import MespError

MOST_TEXTS = 64
TIMES = 2  # that a text is replayed, unless they are too few: to write one takes longer than a step
LENGTH = 128  # tokens of a text after its opening, where sequences have as many
AT_ONCE = 8


def sample_replay_texts(
    bundle: Path, adapters: StrPath | None, tokenizer: Any, count: int, seq_len: int, seed: int
) -> Split:
    """Texts drawn from the bundle's model with `adapters` at temperature 1, an example each, for
    `count` sequences: of `LENGTH` tokens after their opening, or as many as a sequence holds.

    They begin as the chat template begins a conversation, or where there is none as a text does;
    that is not in the loss. Raises MespError where that alone fills a sequence.
    """
    start = find_opening(tokenizer)
    length = min(seq_len + 1, len(start) + LENGTH)
    if length <= len(start):
        raise MespError(
            f"The chat template begins with {len(start)} tokens, which fill a sequence of "
            f"{seq_len}: give --replay-data to replay, or a longer --seq-len."
        )
    prompts = [start] * min(math.ceil(count / TIMES), MOST_TEXTS)
    texts = [[*start] for _ in prompts]

    def take(index: int, token: int) -> bool:
        texts[index].append(token)
        return True

    with evaluator(bundle, weigh(adapters)) as engine:
        written = engine.generate(prompts, length - len(start), (), AT_ONCE, take, 1.0, seed << 16)
        for _ in written:
            pass
    starts = np.arange(len(texts)) * length
    examples = np.stack([starts, np.full(len(texts), length)], axis=1)
    mask = np.tile(np.arange(length) >= len(start), len(texts)).astype(np.uint8)
    return Split(np.array(texts, np.uint32).ravel(), examples.astype(np.uint32), mask)


def find_opening(tokenizer: Any) -> list[int]:
    """Returns the tokens before a person's first words in a conversation, or before a text."""
    if tokenizer.has_chat_template:
        first, second = (
            tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
            for text in ("x", "y")
        )
        same = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        if found := [token for token, _ in same]:
            return found
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [int(token)]
    raise MespError(
        "The bundle's tokenizer has no token that begins a text: give --replay-data to replay."
    )
