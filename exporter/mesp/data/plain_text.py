from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np

from mesp.data.loss_mask import Encoded, alike, empty_answer, end_tokens
from mesp.data.special_tokens import encode_split, piece
from mesp.errors import MespError

PIECE = 1 << 14


def mask_joined(
    tokenizer: Any, prompt: str, answer: str, loss_on: str, split_special: bool
) -> Encoded:
    """Raises MespError if the answer is empty, or contains an end token that is not at its end."""
    if not answer.strip():
        raise empty_answer(0)
    ids, context = join(tokenizer, prompt, answer, split_special)
    ends = end_tokens(tokenizer)
    within = [at for at, token in enumerate(ids[context:]) if token in ends]
    if len(within) > 1 or within[:1] == [0]:
        raise MespError("it has an end token in its answer, which is added: leave it out.")
    return Encoded(ids, np.arange(len(ids)) >= (0 if loss_on == "all" else context))


def join(
    tokenizer: Any, prompt: str, answer: str, split_special: bool = False
) -> tuple[list[int], int]:
    """Returns the ids of prompt, answer and end-of-text token, and the number of prompt ids.

    The prompt is encoded without the answer, as at inference, so no token spans both. If the ids
    would not decode to both texts, prompt and answer are encoded as one text. With `split_special`,
    special tokens in both are encoded as ordinary text.
    """
    end = tokenizer.eos_token or ""
    ends = [tokenizer.eos_token_id] if end and split_special else []
    if not split_special and not answer.rstrip().endswith(end):
        answer += end
    asked = encode_plain_prompt(tokenizer, prompt, split_special)
    ids = asked + piece(tokenizer, answer, False, split_special)[0]
    found, wanted = (
        unicodedata.normalize("NFC", text) for text in (tokenizer.decode(ids), prompt + answer)
    )
    if found.endswith(wanted):
        return ids + ends, len(asked)
    whole = encode_plain_prompt(tokenizer, prompt + answer, split_special) + ends
    return whole, alike(asked, whole)


def encode_plain_prompt(tokenizer: Any, prompt: str, split_special: bool = False) -> list[int]:
    """Returns the ids of a text to be continued.

    The begin token is added if the tokenizer uses one and the text lacks it.
    """
    begins = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
    if split_special:
        begins, ids = False, encode_split(tokenizer, prompt, add_special_tokens=True)
    else:
        ids = list(tokenizer.encode(prompt, add_special_tokens=not begins))
    ends = not begins and tokenizer.encode("")[-1:] == [tokenizer.eos_token_id]
    return ids[:-1] if ends else ids


def encode_text(tokenizer: Any, text: str, is_file: bool, split_special: bool) -> list[int]:
    """Returns the ids of a text, as mlx-lm's TextDataset does.

    The text of a file is encoded in pieces.
    """
    if is_file:
        begin = begin_of_text(tokenizer)
        has_begin = not split_special and begin is not None and text.startswith(tokenizer.bos_token)
        ids = [] if begin is None or not text or has_begin else [begin]
        for piece in cut_text(text):
            if split_special:
                ids += encode_split(tokenizer, piece)
            else:
                ids += tokenizer.encode(piece, add_special_tokens=False)
    else:
        ids = encode_plain_prompt(tokenizer, text, split_special)
    end = tokenizer.eos_token_id
    if ids and end is not None and (split_special or not _has_end(tokenizer, text)):
        ids.append(end)
    return ids


def _has_end(tokenizer: Any, text: str) -> bool:
    last = text.rstrip()[-100:]
    ids = tokenizer.encode(last, add_special_tokens=False)
    return bool(ids) and ids[-1] in end_tokens(tokenizer)


def begin_of_text(tokenizer: Any) -> int | None:
    begin = tokenizer.bos_token_id
    return begin if begin is not None and tokenizer.encode("")[:1] == [begin] else None


def cut_text(text: str, size: int = PIECE) -> Iterator[str]:
    """Cuts a long text at starts of lines. Encoding the whole text at once would take much
    memory.
    """
    start = 0
    while start < len(text):
        cut = re.compile(r"\n(?= ?\S)").search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop
