"""Encodes special tokens in texts: as special tokens, or split into ordinary text.

With --split-special-tokens, a text outside of a conversation is encoded with transformers' option
`split_special_tokens`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

from mesp.errors import MespError

Bounds = Sequence[tuple[int, int]]
Tokens = tuple[list[int], Bounds]  # ids, and the bounds of each one's characters


def special_tokens(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(id for id, token in added.items() if token.special)}


@lru_cache(maxsize=4)
def special_pattern(tokenizer: Any) -> re.Pattern[str]:
    added = tokenizer.added_tokens_decoder.values()
    tokens = sorted((t.content for t in added if t.special and t.content), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def encode_split(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Raises MespError if the ids include other special tokens."""
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, split_special_tokens=True)
    check_special(tokenizer, ids, tokenizer.encode("") if add_special_tokens else [])
    return list(ids)


def check_special(tokenizer: Any, ids: Iterable[int], expected: Iterable[int]) -> None:
    """Raises MespError unless `ids` and `expected` have the same special tokens, each equally
    often."""
    special = special_tokens(tokenizer)
    # The unknown token is not special, unless it is also a begin or end token.
    if tokenizer.unk_token_id not in (*tokenizer.eos_token_ids, tokenizer.bos_token_id):
        special.discard(tokenizer.unk_token_id)
    found, wanted = (Counter(id for id in each if id in special) for each in (ids, expected))
    if found != wanted:
        token = next(iter((found - wanted) | (wanted - found)))
        raise MespError(
            f"the tokenizer takes text for its special token {tokenizer.decode([token])!r} with "
            "--split-special-tokens too: leave the option out, or take the text out."
        )


def tokens(tokenizer: Any, text: str, written: Bounds = ()) -> Tokens:
    """Each of the parts `written` is encoded separately, so no token spans its bounds.

    Raises MespError if the ids of such a part include special tokens.
    """
    ids: list[int] = []
    bounds: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(pairwise([0, *chain(*written), len(text)])):
        found, places = piece(tokenizer, text[start:stop], number == 0, number % 2 == 1)
        ids += found
        bounds += [(start + first, start + last) for first, last in places] if start else places
    return ids, bounds


def piece(tokenizer: Any, text: str, is_first: bool, is_written: bool) -> Tokens:
    """SentencePiece puts a space before the beginning of a text. So a piece that is not the first
    is encoded after a line feed. If the piece shares a token with the line feed, a colon takes its
    place. If that fails too, the piece is encoded alone.
    """
    for feed in () if is_first else ("\n", ":"):
        before = tokenizer.encode(feed, add_special_tokens=False)
        ids, bounds = _encode(tokenizer, feed + text, is_written)
        if ids[: len(before)] == before:
            return ids[len(before) :], [(a - 1, b - 1) for a, b in bounds[len(before) :]]
    return _encode(tokenizer, text, is_written)


def _encode(tokenizer: Any, text: str, is_written: bool) -> Tokens:
    # transformers calls this backend too, and converts the result.
    backend = tokenizer._tokenizer.backend_tokenizer
    backend.encode_special_tokens = is_written or tokenizer.split_special_tokens
    encoded = backend.encode(text, add_special_tokens=False)
    ids, bounds = encoded.ids, encoded.offsets
    if is_written:
        check_special(tokenizer, ids, [])
    if taking := _tokens_that_take_space(tokenizer):
        bounds = [
            _own(text, taking[id], *place) if id in taking else place
            for id, place in zip(ids, bounds, strict=True)
        ]
    return ids, bounds


def _own(text: str, token: str, start: int, stop: int) -> tuple[int, int]:
    at = text.find(token, start, stop)
    return (start, stop) if at < 0 else (at, at + len(token))


@lru_cache(maxsize=4)
def _tokens_that_take_space(tokenizer: Any) -> dict[int, str]:
    added = tokenizer.added_tokens_decoder.items()
    return {id: token.content for id, token in added if token.lstrip or token.rstrip}
