from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mesp.data.fields import OPTIONS, refuse_unread
from mesp.data.image_encoder import ImageEncoder
from mesp.data.loss_mask import Encoded, end_tokens
from mesp.data.plain_text import begin_of_text, cut_text
from mesp.data.records import AnyRecord, Conversation, Encoder, Text, kind_of, mask_record
from mesp.data.source_files import read_file
from mesp.data.sources import Selection, read_data
from mesp.data.special_tokens import special_tokens
from mesp.data.splits import (
    HELD_OUT,
    Split,
    as_answers,
    as_examples,
    as_stream,
    check_labels,
    hold_out_records,
    hold_out_tokens,
)
from mesp.errors import MespError

GENERAL_TEXT_SIZE = 1 << 22  # the maximum size of a text in bytes

log = logging.getLogger(__name__)

Records = dict[str, list[AnyRecord]]


@dataclass(frozen=True)
class DataOptions:
    """The options for reading data.

    - `pack`: whether text becomes one stream, and short records of other kinds share a sequence.
      None: only the text of files does.
    - `loss_on`: the part in the loss, one of `LOSS_ON`. None: ``all`` for text, ``answers`` for
      other kinds.
    - `long`: whether examples longer than the longest sequence are ``cut`` or ``split``. None:
      ``split`` for text, ``cut`` for other kinds.
    - `selection`: the part of a dataset that is read.
    - `chat`: whether prompts and answers that are strings go through the chat template. None: yes,
      if the tokenizer has a template.
    - `hold_out`: the fraction to hold out if there is no valid split, 0 for none.
    - `split_special_tokens`: whether special tokens in texts are encoded as ordinary text.
    - `chat_template_kwargs`: arguments of the chat template for records that have none.
    """

    pack: bool | None = None
    loss_on: str | None = None
    long: str | None = None
    selection: Selection = field(default_factory=Selection)
    chat: bool | None = None
    hold_out: float = HELD_OUT
    split_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def encoding(self) -> dict[str, Any]:
        found: dict[str, Any] = {"chat": False} if self.chat is False else {}
        found |= {"split_special_tokens": True} if self.split_special_tokens else {}
        return found | ({OPTIONS: self.chat_template_kwargs} if self.chat_template_kwargs else {})

    def encoded_as(self, encoding: Mapping[str, Any]) -> DataOptions:
        chat = {} if self.chat is None else {"chat": self.chat}
        return replace(self, **{**encoding, **chat, **self.encoding})


def load(
    data: str, tokenizer: Any, seq_len: int, vocab_size: int, options: DataOptions | None = None,
    open_images: Callable[[], ImageEncoder] | None = None,
) -> dict[str, Split]:  # fmt: skip
    """Returns the tokenized splits of `data`: train and, if they exist, valid and test.

    `data` is one of `SOURCES`. An existing file or folder takes precedence over a name. `tokenizer`
    comes from `load_tokenizer`, and `open_images` opens the model's vision tower. Without a valid
    split, the fraction `options.hold_out` of the data becomes one. Logs how many examples were cut,
    split or left out.

    Raises MespError if the data cannot be read or used, if a split of packed text has fewer than
    `seq_len` + 1 tokens, or if ids do not fit the model's `vocab_size`.
    """
    options = options or DataOptions()
    records = read_data(data, options.selection)
    return tokenize(data, records, tokenizer, seq_len, vocab_size, options, open_images)


def load_additional(
    data: str, tokenizer: Any, seq_len: int, vocab_size: int, encoding: Mapping[str, Any]
) -> Split:
    records = read_data(data, Selection())
    options = DataOptions(hold_out=0).encoded_as(encoding)
    if any(isinstance(each, Conversation) and not each.texts for each in records["train"]):
        options = replace(options, chat=None)
    return tokenize(data, records, tokenizer, seq_len, vocab_size, options)["train"]


def tokenize(
    data: str, records: Records, tokenizer: Any, seq_len: int, vocab_size: int,
    options: DataOptions, open_images: Callable[[], ImageEncoder] | None = None,
) -> dict[str, Split]:  # fmt: skip
    every_record = [*itertools.chain(*records.values())]
    kind = kind_of(every_record)
    of_files = any(isinstance(each, Text) and each.is_file for each in every_record)
    pack = of_files if options.pack is None else options.pack
    loss_on = options.loss_on or ("all" if kind is Text else "answers")
    long = options.long or ("split" if kind is Text else "cut")
    is_stream = kind is Text and pack
    kept = leave_out(data, records, loss_on)
    _check_options(data, of_files, kind, replace(options, pack=pack, loss_on=loss_on, long=long))
    if not is_stream:
        hold_out_records(data, kept, options.hold_out)
    encoder = Encoder(
        tokenizer, loss_on, options.chat, options.split_special_tokens,
        options.chat_template_kwargs, open_images,
    )  # fmt: skip
    encoded = encode_all(data, kept, encoder)
    splits = {}
    for split, each in encoded.items():
        if kind.is_preference:
            splits[split] = as_answers(data, each, seq_len)
        elif is_stream:
            splits[split] = as_stream(each, begin_of_text(tokenizer))
        else:
            splits[split] = as_examples(data, split, each, seq_len, long, pack)
    if is_stream:
        hold_out_tokens(data, splits, seq_len, options.hold_out)
    check_labels(data, splits)
    largest = max(int(split.tokens.max()) for split in splits.values())
    if largest >= vocab_size:
        raise MespError(
            f"The model's tokenizer gives id {largest}, and the model knows {vocab_size} ids; the "
            "two do not belong together."
        )
    every = [*itertools.chain(*encoded.values())]
    kwargs = {repr(each.options): each.options for each in every}
    common = every[0].options if len(kwargs) == 1 else {}
    encoding = replace(options, chat_template_kwargs=common).encoding
    sentences = _counts(records, splits, seq_len, long, loss_on) + _notes(every)
    if len(kwargs) > 1:
        sentences.append(
            f'Records differ in "{OPTIONS}", so the model is asked without: {len(kwargs)} kinds.'
        )
    if is_stream:
        count = len(splits["train"].tokens)
        rest = (count - 1) % seq_len
        if rest > count / 100:
            sentences.append(
                f"The last {rest:,} of {count:,} train tokens fill no sequence of {seq_len} and "
                "are not trained: with a shorter --seq-len fewer are left."
            )
    if sentences:
        log.warning("%s", " ".join(sentences))
    rows = (
        open_images().rows
        if open_images and any(each.places is not None for each in every)
        else None
    )
    return {
        name: replace(split, ends=ends_of(split, tokenizer), encoding=encoding, rows=rows)
        for name, split in splits.items()
    }


def ends_of(split: Split, tokenizer: Any) -> tuple[int, ...]:
    ends = end_tokens(tokenizer)
    if split.examples is not None:
        special = special_tokens(tokenizer)
        is_blank = cache(lambda token: not tokenizer.decode([token]).strip())
        for start, length in split.examples.tolist():
            at = start + length - 1
            while at > start and is_blank(int(split.tokens[at])):
                at -= 1
            if int(split.tokens[at]) in special and (split.mask is None or split.mask[at]):
                ends.add(int(split.tokens[at]))
    return tuple(sorted(ends))


def leave_out(data: str, records: Records, loss_on: str) -> Records:
    """Raises MespError if no record of a split is left."""
    marked = {k: [r for r in those if not r.is_left_out] for k, those in records.items()}
    kept = {k: [r for r in those if has_answer(r, loss_on)] for k, those in marked.items()}
    for split in records:
        if not marked[split]:
            raise MespError(
                f"All records of the {split} data of {data} are marked not to be trained, for "
                "example by the weight 0: remove the mark from some."
            )
        if not kept[split]:
            has = "ends with" if loss_on == "last" else "has"
            raise MespError(
                f"No record of the {split} data of {data} {has} an answer to train: end records "
                "with an assistant's message, or take --loss-on all."
            )
    return kept


def has_answer(record: AnyRecord, loss_on: str) -> bool:
    is_chat = isinstance(record, Conversation) and record.texts is None and loss_on != "all"
    return not is_chat or bool(record.trained(loss_on))


def encode_all(data: str, records: Records, encoder: Encoder) -> dict[str, list[Encoded]]:
    """In preference data, each answer is encoded separately."""
    encoded: dict[str, list[Encoded]] = {split: [] for split in records}
    refused: list[MespError] = []
    for split, each in records.items():
        for record in each:
            try:
                encoded[split] += mask_record(record, encoder)
            except MespError as error:
                refused.append(error)
    if refused:
        first, others = refused[0].message, len(refused) - 1
        total = sum(map(len, records.values()))
        counted = f" {others} more of {total} records of {data} cannot be used." if others else ""
        raise MespError(first + counted)
    refuse_unread((each.where, each.unread) for each in itertools.chain(*encoded.values()))
    return encoded


def read_general_text(file: Path | None, tokenizer: Any, vocab_size: int) -> Split:
    """Returns the tokens of `file`, or of MeSP's own general.txt, as a stream.

    Raises MespError if the file cannot be read, has fewer than two tokens, or has a token outside
    the vocabulary.
    """
    if file is None:
        text = (files("mesp.data") / "general.txt").read_text("utf-8")
    else:
        _, text = next(read_file(file, size=GENERAL_TEXT_SIZE), ("", None))
    if not isinstance(text, str):
        raise MespError(f"{file} is a file of records; give a text: .txt or .md.")
    ids: list[int] = []
    for piece in cut_text(text):
        ids += tokenizer.encode(piece, add_special_tokens=False)
    if len(ids) < 2 or max(ids) >= vocab_size:
        raise MespError(f"{file or 'The general text'} has no tokens that the model knows.")
    return Split(np.array(ids, np.uint32), begin=begin_of_text(tokenizer))


def make_random_data(vocab_size: int, seq_len: int, seed: int) -> dict[str, Split]:
    generator = np.random.default_rng(seed)
    tokens = 64 * seq_len + 1
    return {
        split: Split(generator.integers(vocab_size, size=tokens, dtype=np.uint32))
        for split in ("train", "valid")
    }


def _check_options(data: str, of_files: bool, kind: type[AnyRecord], given: DataOptions) -> None:
    of_text, loss_on = kind is Text, f"--loss-on {given.loss_on}"
    if of_text and given.loss_on != "all":
        raise MespError(f"{data} has text, which has no answers: leave out {loss_on}.")
    if of_text and given.chat:
        raise MespError(f"{data} has text, which has no prompts: leave out --chat.")
    if kind.is_preference and (given.pack or given.loss_on != "answers" or given.long != "cut"):
        option = "--pack" if given.pack else loss_on
        option = option if given.long == "cut" else f"--long {given.long}"
        raise MespError(
            f"{data} is preference data, whose answers are one a sequence and alone in "
            f"the loss: leave out {option}."
        )
    if of_files and not given.pack:
        raise MespError(
            f"{data} has text without records, so it is packed: leave out --no-pack, or write it "
            'as a JSONL file of {"text": …}.'
        )


def _counts(
    records: Records, splits: dict[str, Split], seq_len: int, long: str, loss_on: str
) -> list[str]:
    def by_split(count: str) -> str:
        found = {name: getattr(split, count) for name, split in splits.items()}
        return ", ".join(f"{number:,} in {name}" for name, number in found.items() if number)

    every = [*itertools.chain(*records.values())]
    unanswered = sum(not (each.is_left_out or has_answer(each, loss_on)) for each in every)
    have = "do not end with an" if loss_on == "last" else "have no"
    marked = sum(each.is_left_out for each in every)
    sentences = {
        f"Records longer than {seq_len + 1} tokens were {long}": by_split("too_long"),
        "Records with nothing to predict were left out": by_split("left_out"),
        f"Records whose prompt fills {seq_len + 1} tokens were left out": by_split("no_room"),
        "Records that are marked not to be trained were left out": marked,
        f"Records that {have} answer to train were left out": unanswered,
    }
    return [f"{said}: {count}." for said, count in sentences.items() if count]


def _notes(encoded: list[Encoded]) -> list[str]:
    columns = dict.fromkeys(itertools.chain(*(each.unread for each in encoded)))
    notes = Counter(note for each in encoded for note in {*each.notes})
    unread = [f"Columns that were not read: {', '.join(columns)}."] if columns else []
    return [*unread, *(f"{note}: {count:,}." for note, count in notes.items())]
