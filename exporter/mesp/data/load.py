"""Loads data as splits of token ids.

A split of packed text is one stream of token ids, and training takes windows of it. Any other split
also has the place of each example in its token ids.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mesp.data.encoder import Encoder, begin_of_text
from mesp.data.examples import Split, as_examples, as_stream
from mesp.data.held_out import HELD_OUT, hold_out_records, hold_out_tokens
from mesp.data.loss_mask import end_tokens
from mesp.data.preferences import (
    PREFERENCE_KINDS,
    LabelledAnswer,
    as_preference_data,
    encode_answers,
)
from mesp.data.records import OPTIONS, Document, kind_of, unread_columns
from mesp.data.sources import Selection, read_documents
from mesp.data.special_tokens import special_tokens
from mesp.errors import MespError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataOptions:
    """The options for reading data.

    - `pack`: whether text becomes one stream, and short records of other kinds share a sequence.
      None: only text is packed.
    - `loss_on`: the part in the loss, one of `LOSS_ON`. None: ``all`` for text, ``answers`` for
      other kinds.
    - `long`: whether examples longer than the longest sequence are ``cut`` or ``split``.
    - `selection`: the part of a dataset that is read.
    - `chat`: whether prompts and answers that are strings go through the chat template. None: yes,
      if the tokenizer has a template.
    - `hold_out`: the fraction to hold out if there is no valid split, 0 for none.
    - `split_special_tokens`: whether special tokens in texts are encoded as ordinary text.
    """

    pack: bool | None = None
    loss_on: str | None = None
    long: str = "cut"
    selection: Selection = field(default_factory=Selection)
    chat: bool | None = None
    hold_out: float = HELD_OUT
    split_special_tokens: bool = False

    @property
    def encoding(self) -> dict[str, bool]:
        """The options that change the encoding of texts: `chat` if it is False, and
        `split_special_tokens` if it is True.
        """
        found = {"chat": False} if self.chat is False else {}
        return found | ({"split_special_tokens": True} if self.split_special_tokens else {})


def load(
    data: str, tokenizer: Any, seq_len: int, vocab_size: int, options: DataOptions | None = None
) -> dict[str, Split]:
    """Returns the tokenized splits of `data`: train and, if they exist, valid and test.

    `data` is one of `SOURCES`. An existing file or folder takes precedence over a name. `tokenizer`
    comes from `load_tokenizer`. Without a valid split, the fraction `options.hold_out` of the data
    becomes one. Logs how many examples were cut, split or left out.

    Raises MespError if the data cannot be read or used, if a split of packed text has fewer than
    `seq_len` + 1 tokens, or if ids do not fit the model's `vocab_size`.
    """
    options = options or DataOptions()
    documents = read_documents(data, options.selection)
    return tokenize(data, documents, tokenizer, seq_len, vocab_size, options)


def load_additional(
    data: str, tokenizer: Any, seq_len: int, vocab_size: int, encoding: Mapping[str, bool]
) -> Split:
    """Returns the train split of additional data, with nothing held out.

    The data is encoded with the bundle's `encoding` (see `DataOptions.encoding`), but messages
    always go through the chat template. Raises MespError as `load` does.
    """
    documents = read_documents(data, Selection())
    has_messages = any(each.has_messages for split in documents.values() for each in split)
    options = DataOptions(
        hold_out=0,
        chat=None if has_messages else encoding.get("chat"),
        split_special_tokens=encoding.get("split_special_tokens", False),
    )
    return tokenize(data, documents, tokenizer, seq_len, vocab_size, options)["train"]


def tokenize(
    data: str,
    documents: dict[str, list[Document]],
    tokenizer: Any,
    seq_len: int,
    vocab_size: int,
    options: DataOptions,
) -> dict[str, Split]:
    """Returns the tokenized splits of `documents`, as `load` does.

    If one split is called ``valid``, the others may have any names.
    """
    documents, weightless = leave_out(data, documents)
    kind = kind_of(documents)
    pack = kind == "text" if options.pack is None else options.pack
    loss_on = options.loss_on or ("all" if kind == "text" else "answers")
    _check_options(data, documents, kind, pack, loss_on, options)
    chat = tokenizer.has_chat_template if options.chat is None else options.chat
    if kind != "text":
        _check_chat(data, documents, tokenizer, options.chat)
    encoder = Encoder(kind, tokenizer, loss_on, chat, options.split_special_tokens)
    if kind != "text" or not pack:
        hold_out_records(data, documents, options.hold_out)
    encoded: dict[str, Any] = encode_all(data, documents, encoder)
    if kind in PREFERENCE_KINDS:
        splits = {
            split: as_preference_data(data, split, each, seq_len) for split, each in encoded.items()
        }
    elif pack and kind == "text":
        begin = begin_of_text(tokenizer)
        splits = {split: as_stream(each, begin) for split, each in encoded.items()}
        hold_out_tokens(data, splits, seq_len, options.hold_out)
        _check_lengths(data, splits, seq_len)
    else:
        splits = {
            split: as_examples(data, split, each, seq_len, options.long, pack)
            for split, each in encoded.items()
        }
    largest = max(int(split.tokens.max()) for split in splits.values())
    if largest >= vocab_size:
        raise MespError(
            f"The model's tokenizer gives id {largest}, and the model knows {vocab_size} ids; the "
            "two do not belong together."
        )
    splits = {
        split: replace(each, ends=ends_of(each, tokenizer), encoding=options.encoding)
        for split, each in splits.items()
    }
    sentences = _report(splits, seq_len, options.long)
    sentences += _notes(documents, encoded, weightless)
    if sentences:
        log.warning("%s", " ".join(sentences))
    return splits


def ends_of(split: Split, tokenizer: Any) -> tuple[int, ...]:
    """Returns the tokens at which a model that was trained on `split` stops generating."""
    ends = end_tokens(tokenizer)
    if split.examples is not None:
        special = special_tokens(tokenizer)
        for start, length in split.examples.tolist():
            at = start + length - 1
            while at > start and not tokenizer.decode([int(split.tokens[at])]).strip():
                at -= 1
            if int(split.tokens[at]) in special and (split.mask is None or split.mask[at]):
                ends.add(int(split.tokens[at]))
    return tuple(sorted(ends))


def leave_out(
    data: str, documents: dict[str, list[Document]]
) -> tuple[dict[str, list[Document]], int]:
    """Returns the documents without those that are marked not to be trained, and the number of
    documents left out.

    Raises MespError if no record of a split is left.
    """
    kept = {
        split: [each for each in those if not each.is_left_out]
        for split, those in documents.items()
    }
    for split, those in kept.items():
        if not those:
            raise MespError(
                f"All records of the {split} data of {data} are marked not to be trained, for "
                "example by the weight 0: remove the mark from some."
            )
    return kept, sum(map(len, documents.values())) - sum(map(len, kept.values()))


def encode_all(
    data: str, documents: dict[str, list[Document]], encoder: Encoder
) -> dict[str, list[Any]]:
    """Returns the encoded documents of each split. In preference data, each answer is encoded
    separately.

    Raises MespError if a record cannot be used. The message names the first such record and counts
    the others.
    """
    encoded: dict[str, list[Any]] = {split: [] for split in documents}
    refused: list[MespError] = []
    for split, each in documents.items():
        for document in each:
            try:
                if encoder.kind in PREFERENCE_KINDS:
                    encoded[split] += encode_answers(document, encoder)
                else:
                    encoded[split].append(encoder(document))
            except MespError as error:
                refused.append(error)
    if refused:
        first, others = refused[0].message, len(refused) - 1
        total = sum(map(len, documents.values()))
        counted = f" {others} more of {total} records of {data} cannot be used." if others else ""
        raise MespError(first + counted)
    return encoded


def make_random_data(vocab_size: int, seq_len: int, seed: int) -> dict[str, Split]:
    """Returns streams of random ids, 64 windows each, to time training without a text."""
    generator = np.random.default_rng(seed)
    tokens = 64 * seq_len + 1
    return {
        split: Split(generator.integers(vocab_size, size=tokens, dtype=np.uint32))
        for split in ("train", "valid")
    }


def _check_options(
    data: str,
    documents: dict[str, list[Document]],
    kind: str,
    pack: bool,
    loss_on: str,
    options: DataOptions,
) -> None:
    if loss_on != "all" and kind == "text":
        raise MespError(f"{data} has text, which has no answers: leave out --loss-on {loss_on}.")
    if options.chat and kind == "text":
        raise MespError(f"{data} has text, which has no prompts: leave out --chat.")
    if kind in PREFERENCE_KINDS and (pack or loss_on != "answers" or options.long != "cut"):
        option = "--pack" if pack else f"--loss-on {loss_on}"
        option = option if options.long == "cut" else f"--long {options.long}"
        raise MespError(
            f"{data} is preference data, whose answers are one a sequence and alone in "
            f"the loss: leave out {option}."
        )
    files = any(isinstance(each.content, str) for split in documents.values() for each in split)
    if files and not pack:
        raise MespError(
            f"{data} has text without records, so it is packed: leave out --no-pack, or write it "
            'as a JSONL file of {"text": …}.'
        )


def _check_chat(
    data: str, documents: dict[str, list[Document]], tokenizer: Any, chat: bool | None
) -> None:
    records = [each for split in documents.values() for each in split]
    if any(each.has_messages for each in records):
        if chat is False:
            raise MespError(
                f"{data} has messages, which go through the chat template: leave out --no-chat."
            )
        if not tokenizer.has_chat_template:
            raise MespError(
                f"The model's tokenizer has no chat template, which the messages of {data} need; "
                "take an -Instruct model, or write the records as prompts and answers."
            )
    for each in records:
        is_joined = chat is False or not tokenizer.has_chat_template or "prompt" not in each.content
        if is_joined and not each.has_messages:
            for key in ("tools", OPTIONS):
                if each.content.get(key):
                    raise MespError(
                        f"{each.where} has {key}, which only a chat template reads, and its prompt "
                        f"and answer are joined without one: leave it out with --ignore {key}."
                    )
    if chat and not any(each.has_messages for each in records):
        if not tokenizer.has_chat_template:
            raise MespError("The model's tokenizer has no chat template: leave out --chat.")
        for each in records:
            if "prompt" not in each.content:
                raise MespError(
                    f"{each.where} has no prompt, which the chat template needs: give it one, or "
                    "leave out --chat."
                )


def _check_lengths(data: str, splits: dict[str, Split], seq_len: int) -> None:
    for split, each in splits.items():
        if len(each.tokens) < seq_len + 1:
            raise MespError(
                f"The {split} data of {data} has {len(each.tokens):,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text or export with a "
                "smaller --seq-len."
            )


def _report(splits: dict[str, Split], seq_len: int, long: str) -> list[str]:
    def counts(of: Callable[[Split], int]) -> str:
        return ", ".join(f"{of(each):,} in {split}" for split, each in splits.items() if of(each))

    too_long, left_out = counts(lambda split: split.too_long), counts(lambda split: split.left_out)
    sentences = []
    if too_long:
        sentences.append(
            f"Records longer than {seq_len} tokens and the one after were {long}: {too_long}."
        )
    if left_out:
        sentences.append(f"Records with nothing to predict were left out: {left_out}.")
    return sentences


def _notes(
    documents: dict[str, list[Document]], encoded: dict[str, Any], weightless: int
) -> list[str]:
    sentences = []
    if weightless:
        sentences.append(
            f"Records that are marked not to be trained were left out: {weightless:,}."
        )
    if columns := unread_columns(documents):
        sentences.append(f"Columns that were not read: {', '.join(columns)}.")
    notes: Counter[str] = Counter()
    for each in itertools.chain(*encoded.values()):
        notes.update({*(each.encoded if isinstance(each, LabelledAnswer) else each).notes})
    return [*sentences, *(f"{note}: {count:,}." for note, count in notes.items())]
