"""Encodes records as token ids, as mlx-lm's datasets do."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np

from mesp.data.loss_mask import Encoded, check_answers, encode_conversation, end_tokens
from mesp.data.records import Conversation, Document
from mesp.data.special_tokens import encode_split, special_pattern
from mesp.errors import MespError, plain_errors

SPLIT = "--split-special-tokens"
PIECE = 1 << 14  # a text is cut at a start of a line after this many characters
LOSS_ON = ("answers", "last", "all")  # the values of --loss-on


@dataclass(frozen=True)
class Encoder:
    """An encoder of documents of one kind. It marks the tokens in the loss.

    `loss_on` is ``answers``, ``last`` (the last message) or ``all``. With `chat`, prompts and
    completions go through the chat template. Otherwise they are joined. With `split_special`,
    special tokens in texts are encoded as ordinary text.
    """

    kind: str
    tokenizer: Any
    loss_on: str
    chat: bool
    split_special: bool = False

    def __call__(self, document: Document) -> Encoded:
        if (
            self.loss_on == "last"
            and self.kind == "messages"
            and len(document.content["messages"]) == 1
        ):
            raise MespError(
                f"{document.where} has one message and so no prompt before it: leave it out, or "
                "take --loss-on all."
            )
        content = document.content
        if isinstance(content, dict) and content.get("completion", "a") in ("", []):
            raise MespError(
                f"{document.where} has an empty completion: write one, or leave it out."
            )
        with named(document):
            if self.kind == "text":
                ids = _encode_text(self.tokenizer, content, self.split_special)
                text = content if isinstance(content, str) else content["text"]
                return self._noted(Encoded(ids, np.ones(len(ids), bool)), text)
            if self.chat:
                return self.conversation(document.conversation)
            return self.joined(document.content["prompt"], document.content["completion"])

    def conversation(self, conversation: Conversation) -> Encoded:
        """Returns the encoded conversation. Raises MespError if the conversation cannot be
        trained on."""
        encoded = encode_conversation(
            self.tokenizer, conversation, self.loss_on, self.split_special
        )
        return self._noted(encoded, *(message["content"] for message in conversation.messages))

    def joined(self, prompt: str, answer: str) -> Encoded:
        """Returns an encoded prompt, followed by the answer and the end-of-text token.

        Raises MespError if the answer is empty, or contains an end token that is not at its end.
        """
        check_answers(Conversation([{"role": "assistant", "content": answer}]))
        ids, context = encode_joined(self.tokenizer, prompt, answer, self.split_special)
        ends = end_tokens(self.tokenizer)
        within = [at for at, token in enumerate(ids[context:]) if token in ends]
        if len(within) > 1 or within[:1] == [0]:
            raise MespError("it has an end token in its answer, which is added: leave it out.")
        mask = np.arange(len(ids)) >= (0 if self.loss_on == "all" else context)
        return self._noted(Encoded(ids, mask), prompt, answer)

    def _noted(self, encoded: Encoded, *texts: str) -> Encoded:
        """Returns `encoded`, with a note if a text has control tokens inside."""
        note = f"Records with control tokens in their text, which {SPLIT} encodes as text"
        within = list(texts)
        if not self.split_special:
            note = (
                "Records with control tokens in their text, which the model reads as such without "
                f"{SPLIT}"
            )
            begin, end = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            within = [text.strip().removeprefix(begin).removesuffix(end) for text in texts]
        if not any(map(special_pattern(self.tokenizer).search, within)):
            return encoded
        return replace(encoded, notes=(*encoded.notes, note))


@contextmanager
def named(document: Document) -> Iterator[None]:
    """Turns any error into a MespError whose message begins with the document's place."""
    with plain_errors(f"{document.where} cannot be tokenized"):
        try:
            yield
        except MespError as error:
            raise MespError(f"{document.where}: {error.message}") from error


def encode_joined(
    tokenizer: Any, prompt: str, answer: str, split_special: bool = False
) -> tuple[list[int], int]:
    """Returns the ids of prompt, answer and end-of-text token, and the number of prompt ids.

    The prompt is encoded without the answer, as at inference, so no token spans both. If the ids
    would not decode to both texts, prompt and answer are encoded as one text. With `split_special`,
    special tokens in prompt and answer are encoded as ordinary text.
    """
    end = tokenizer.eos_token or ""
    ends: list[int] = []
    encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False)
    if split_special:
        encode, ends = partial(encode_split, tokenizer), [tokenizer.eos_token_id] if end else []
    elif not answer.rstrip().endswith(end):
        answer += end
    asked = encode_plain_prompt(tokenizer, prompt, split_special)
    # SentencePiece puts a space before the beginning of a text, so the answer is encoded after a
    # line feed. If that fails, the answer is encoded after a colon, and then alone.
    for feed in ("\n", ":", ""):
        before, after = (encode(text) for text in (feed, feed + answer))
        if after[: len(before)] == before:
            ids = [*asked, *after[len(before) :]]
            if _normal(tokenizer.decode(ids)).endswith(_normal(prompt + answer)):
                return [*ids, *ends], len(asked)
    whole = encode_plain_prompt(tokenizer, prompt + answer, split_special) + ends
    return whole, sum(1 for _ in takewhile(bool, map(eq, asked, whole)))


def _normal(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def encode_plain_prompt(tokenizer: Any, prompt: str, split_special: bool = False) -> list[int]:
    """Returns the ids of a text to be continued.

    The begin token is added if the tokenizer uses one and the text lacks it. No end token is added.
    With `split_special`, special tokens in the text are encoded as ordinary text.
    """
    begins = bool(tokenizer.bos_token) and prompt.startswith(tokenizer.bos_token)
    if split_special:
        begins, ids = False, encode_split(tokenizer, prompt, add_special_tokens=True)
    else:
        ids = list(tokenizer.encode(prompt, add_special_tokens=not begins))
    ends = not begins and tokenizer.encode("")[-1:] == [tokenizer.eos_token_id]
    return ids[:-1] if ends else ids


def _encode_text(tokenizer: Any, content: str | dict[str, str], split_special: bool) -> list[int]:
    """Returns the ids of a text, as mlx-lm's TextDataset does. An empty text is accepted.

    A file is encoded in pieces. Begin and end tokens in the text are not repeated, unless
    `split_special` makes them ordinary text.
    """
    text = content if isinstance(content, str) else content["text"]
    if isinstance(content, str):
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
    """Returns the token that the tokenizer puts before a text; None if there is no such token."""
    begin = tokenizer.bos_token_id
    return begin if begin is not None and tokenizer.encode("")[:1] == [begin] else None


def cut_text(text: str, size: int = PIECE) -> Iterator[str]:
    """Cuts a long text at starts of lines. Encoding the whole text at once would take much memory.

    Only white space before a cut may be encoded differently.
    """
    start = 0
    while start < len(text):
        cut = re.compile(r"\n(?= ?\S)").search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop
