"""Samples texts from the model, to replay them while the model is trained.

The expected gradient of the loss on such texts is the gradient of the Kullback-Leibler divergence
from the model that wrote them, if each text is replayed once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from mesp.adapters.weighted import StrPath, weigh
from mesp.data.chat_template import apply_template
from mesp.data.splits import Split
from mesp.engine.process import evaluator
from mesp.errors import MespError

LENGTH = 128
AT_ONCE = 8
REPORTED = 50

log = logging.getLogger(__name__)


def sample_replay_texts(
    bundle: Path,
    adapters: StrPath | None,
    tokenizer: Any,
    count: int,
    seq_len: int,
    seed: int,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
) -> Split:
    """Returns `count` texts that the bundle's model with `adapters` wrote at temperature 1.

    Each example is an opening, followed by at most `LENGTH` tokens. The opening is the chat
    template's text before a user's first words or, if there is none, the begin or end token.
    """
    start = find_opening(tokenizer, options or {})
    length = min(seq_len + 1, len(start) + LENGTH)
    if length <= len(start):
        raise MespError(
            f"The chat template begins with {len(start)} tokens, which fill a sequence of "
            f"{seq_len}: give --replay-data to replay, or a longer --seq-len."
        )
    prompts = [start] * count
    texts = [[*start] for _ in prompts]

    def take(index: int, token: int) -> bool:
        texts[index].append(token)
        return True

    with evaluator(bundle, weigh(adapters), device) as engine:
        written = engine.generate(prompts, length - len(start), (), AT_ONCE, take, 1.0, seed << 16)
        for done, _ in enumerate(written, 1):
            if done % REPORTED == 0 or done == count:
                log.info("Sampled %s of %s texts", f"{done:,}", f"{count:,}")
    starts = np.arange(len(texts)) * length
    examples = np.stack([starts, np.full(len(texts), length)], axis=1)
    mask = np.tile(np.arange(length) >= len(start), len(texts)).astype(np.uint8)
    return Split(np.array(texts, np.uint32).ravel(), examples.astype(np.uint32), mask)


def find_opening(tokenizer: Any, options: Mapping[str, Any] | None = None) -> list[int]:
    if tokenizer.has_chat_template:
        first, second = (
            tokenizer.encode(
                apply_template(tokenizer, [{"role": "user", "content": text}], **(options or {})),
                add_special_tokens=False,
            )
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
