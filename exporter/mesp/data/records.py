"""The kinds of records, a class each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from mesp.data.chat_template import Rendering, without_tags
from mesp.data.fields import OPTIONS, Fields
from mesp.data.image_encoder import ImageEncoder
from mesp.data.images import IMAGE, Image
from mesp.data.loss_mask import Encoded, alike, encode_conversation
from mesp.data.messages import Message, as_truth, read_messages, read_template_inputs, read_weight
from mesp.data.plain_text import encode_text, mask_joined
from mesp.data.special_tokens import special_pattern
from mesp.errors import MespError, plain_errors

RECORDS = (
    'records have "text", "prompt" and "completion", or "messages"; for an objective "prompt", '
    '"chosen" and "rejected", or "prompt", "completion" and "label"'
)
COLUMNS = "Name other columns with --columns, as in prompt=question,completion=answer."
# The labels of answers, one byte each. BAD and GOOD are for single answers, and REJECTED and CHOSEN
# for pairs.
BAD, GOOD, REJECTED, CHOSEN = range(4)
HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"

SPLIT = "--split-special-tokens"
LOSS_ON = ("answers", "last", "all")

Said = str | list[Message]  # a prompt or an answer


@dataclass(frozen=True)
class Encoder:
    """How records are encoded.

    `loss_on` is ``answers``, ``last`` (the last message) or ``all``. `chat` says whether prompts
    and answers go through the chat template or are joined; None: they go through it if there is
    one. With `split_special`, special tokens in texts are encoded as ordinary text. `options` are
    arguments of the chat template for records that have none.
    """

    tokenizer: Any
    loss_on: str = "answers"
    chat: bool | None = None
    split_special: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    open_images: Callable[[], ImageEncoder] | None = None

    @property
    def images(self) -> ImageEncoder:
        """Raises MespError if the model has no vision tower here."""
        if self.open_images is None:
            raise MespError(
                "it has images, whose rows a model's vision tower computes: give the data to "
                "mesp-export, with the model."
            )
        return self.open_images()

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.has_chat_template) if self.chat is None else self.chat

    def noted(self, encoded: Encoded, *texts: str) -> Encoded:
        within, are_read = [*texts], f"{SPLIT} encodes as text"
        if not self.split_special:
            are_read = f"the model reads as such without {SPLIT}"
            begin, end = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            within = [text.strip().removeprefix(begin).removesuffix(end) for text in texts]
        if not any(map(special_pattern(self.tokenizer).search, within)):
            return encoded
        note = f"Records with control tokens in their text, which {are_read}"
        return replace(encoded, notes=(*encoded.notes, note))


@dataclass(frozen=True, kw_only=True)
class Record:
    """`where` is its place, for error messages.

    `unread` are the names of its columns and keys that have values and that nothing reads.
    """

    kind: ClassVar[str]
    is_preference: ClassVar[bool] = False

    where: str = ""
    unread: tuple[str, ...] = ()
    is_left_out: bool = False


@dataclass(frozen=True)
class Text(Record):
    kind = "a text"

    text: str
    is_file: bool = False

    @classmethod
    def read(cls, fields: Fields) -> Text:
        return cls(fields.take_text("text"))

    def mask(self, encoder: Encoder) -> list[Encoded]:
        ids = encode_text(encoder.tokenizer, self.text, self.is_file, encoder.split_special)
        return [encoder.noted(Encoded(ids, np.ones(len(ids), bool)), self.text)]


@dataclass(frozen=True)
class Conversation(Record):
    """Messages that go through the chat template, or a prompt and an answer.

    Assistant messages from the index `prompt` on are trained, unless their weight is 0. `options`
    are arguments of the template. `texts` are a prompt and an answer that can also be joined
    without the template; without `messages`, they must be.
    """

    kind = "a conversation"

    messages: list[Message]
    prompt: int = 0
    tools: list[Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, str] | None = None
    images: tuple[Image, ...] = ()

    @classmethod
    def read(cls, fields: Fields) -> Conversation:
        found = cls._read(fields)
        if not fields.images and (count := fields.add_column()):
            # As in TRL, images of a column come first in the first message of the user.
            first = next((m for m in found.messages if m["role"] == "user"), None)
            if first is None:
                raise MespError(f"{fields.where} has images, and no message of a user for them.")
            first["content"] = IMAGE * count + first["content"]
        if not fields.images:
            return found
        for number, message in enumerate(found.messages, 1):
            if message["role"] == "assistant" and IMAGE in message["content"]:
                raise MespError(
                    f"{fields.where} has a message {number} of the assistant with an image, which "
                    "no model here writes: put it into a user's message."
                )
        return replace(found, images=(*fields.images,), texts=None)

    @classmethod
    def _read(cls, fields: Fields) -> Conversation:
        inputs = read_template_inputs(fields)
        if fields.has("prompt", "completion"):
            prompt, answer = (_said(fields, key) for key in ("prompt", "completion"))
        elif fields.has("messages"):
            return cls(read_messages(fields, "messages"), **inputs)
        else:
            prompt = fields.take_text("instruction")
            source, to = ("input", "output") if fields.has("output") else ("context", "response")
            given = fields.take_text(source) if fields.has(source) else ""
            answer, whole = fields.take_text(to), str(fields.values.get("text"))
            if all(part.strip() in whole for part in (prompt, given, answer)):
                fields.take("text")  # Alpaca's text repeats the other columns
            prompt = f"{prompt}\n\n{given}" if given.strip() else prompt
        return cls.of(prompt, answer, **inputs)

    @classmethod
    def of(cls, prompt: Said, answer: Said, **inputs: Any) -> Conversation:
        asked, answered = _as_messages("user", prompt), _as_messages("assistant", answer)
        answered = answered[len(asked) :] if answered[: len(asked)] == asked else answered
        texts = (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None
        return cls([*asked, *answered], len(asked), **inputs, texts=texts)

    @cached_property
    def answers(self) -> list[int]:
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.prompt and message["role"] == "assistant" and message.get("weight", 1)
        ]

    def trained(self, loss_on: str) -> list[int]:
        """The indices of the answers in the loss, with ``last`` of the last message alone."""
        last = len(self.messages) - 1
        return [index for index in self.answers if loss_on != "last" or index == last]

    @property
    def untrained(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message.get("weight", 1) == 0]

    def mask(self, encoder: Encoder) -> list[Encoded]:
        return [self.encode(encoder)]

    def encode(self, encoder: Encoder) -> Encoded:
        tokenizer, chat, loss_on = encoder.tokenizer, encoder.chat, encoder.loss_on
        if chat and not tokenizer.has_chat_template:
            raise MespError("the model's tokenizer has no chat template: leave out --chat.")
        is_joined = self.texts and not (self.messages and encoder.is_chat)
        if is_joined:
            if chat:
                raise MespError(
                    "it has no prompt, which the chat template needs: give it one, or leave out "
                    "--chat."
                )
            inputs = {"tools": self.tools, OPTIONS: self.options}
            if keys := [key for key, value in inputs.items() if value]:
                raise MespError(
                    f"it has {' and '.join(keys)}, which only a chat template reads, and its "
                    "prompt and answer are joined without one: leave out with --ignore "
                    f"{','.join(keys)}."
                )
        elif chat is False:
            raise MespError(
                "it has messages, which go through the chat template: leave out --no-chat."
            )
        elif not tokenizer.has_chat_template:
            raise MespError(
                "the model's tokenizer has no chat template, which its messages need; take an "
                "-Instruct model, or write the records as prompts and answers."
            )
        if not (self.texts[1] if self.texts else self.messages[self.prompt :]):
            raise MespError("it has an empty completion: write one, or leave it out.")
        if loss_on == "last" and [m["role"] for m in self.messages] == ["assistant"]:
            raise MespError(
                "it has one message and so no prompt before it: leave it out, or take --loss-on "
                "all."
            )
        if is_joined:
            encoded = mask_joined(tokenizer, *self.texts, loss_on, encoder.split_special)
            return encoder.noted(encoded, *self.texts)
        images = encoder.images if self.images else None
        # A copy would compute `answers` again.
        is_own = self.options or not encoder.options
        conversation = self if is_own else replace(self, options=encoder.options)
        rendering = Rendering(tokenizer, conversation, encoder.split_special)
        encoded = encode_conversation(rendering, loss_on)
        encoded = encoder.noted(encoded, *map(without_tags, self.messages))
        return images.put(encoded, self.images) if images else encoded


@dataclass(frozen=True)
class Pair(Record):
    """A chosen and a rejected answer to a prompt.

    Without a prompt, the prompt is the common beginning of the answers. Texts are then joined
    without the chat template.
    """

    kind = "a pair of answers"
    is_preference = True

    chosen: Conversation
    rejected: Conversation

    @classmethod
    def read(cls, fields: Fields) -> Pair:
        inputs, where = read_template_inputs(fields), fields.where
        asked = next((key for key in ("prompt", "question") if fields.has(key)), None)
        prompt = None if asked is None else _said(fields, asked)
        chosen, rejected = _said(fields, "chosen"), _said(fields, "rejected")
        if chosen == rejected:
            raise MespError(
                f"{where} has a chosen and a rejected answer that are equal: leave it out."
            )
        is_joined = prompt is None and isinstance(chosen, str)
        if prompt is None or _is_within(prompt, chosen, rejected):
            if isinstance(chosen, str) != isinstance(rejected, str):
                raise MespError(f"{where} has no prompt: give it one, or leave it out.")
            prompt = (_shared_text if is_joined else _alike)(chosen, rejected)
            if prompt is None:
                raise MespError(
                    f"{where} has dialogues that differ before the last answer: write them as "
                    "lists of messages."
                )
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
            if not chosen or not rejected:
                raise MespError(
                    f"{where} has a chosen and a rejected answer of which one is the beginning of "
                    "the other: give it a prompt."
                )
        both = [_answer(where, prompt, answer, inputs) for answer in (chosen, rejected)]
        if is_joined:
            both = [replace(each, messages=[]) for each in both]
        return cls(*both)

    def mask(self, encoder: Encoder) -> list[Encoded]:
        labelled = ((self.chosen, CHOSEN), (self.rejected, REJECTED))
        return [replace(each.encode(encoder), label=label) for each, label in labelled]


@dataclass(frozen=True)
class Labelled(Record):
    kind = "a labelled answer"
    is_preference = True

    answer: Conversation
    is_good: bool

    @classmethod
    def read(cls, fields: Fields) -> Labelled:
        inputs, label = read_template_inputs(fields), as_truth(fields.take("label"))
        if not isinstance(label, bool):
            raise MespError(
                f'{fields.where} has a "label" that is neither true nor false: write true or '
                "false, or leave it out with --ignore label."
            )
        prompt, answer = _said(fields, "prompt"), _said(fields, "completion")
        return cls(_answer(fields.where, prompt, answer, inputs), label)

    def mask(self, encoder: Encoder) -> list[Encoded]:
        return [replace(self.answer.encode(encoder), label=GOOD if self.is_good else BAD)]


AnyRecord = Text | Conversation | Pair | Labelled
# A record that has values in all of these columns is of the kind. The first that fits counts.
FORMS: dict[tuple[str, ...], type[AnyRecord]] = {
    ("chosen", "rejected"): Pair,
    ("prompt", "completion", "label"): Labelled,
    ("prompt", "completion"): Conversation,
    ("messages",): Conversation,
    ("instruction", "output"): Conversation,  # Alpaca
    ("instruction", "response"): Conversation,  # Dolly
    ("text",): Text,
}


def read_record(fields: Fields) -> AnyRecord:
    """Raises MespError if the record is of no kind, or has a value that cannot be used."""
    where, weight = fields.where, read_weight(f"{fields.where} has", fields.values)
    kind = next((kind for form, kind in FORMS.items() if fields.has(*form)), None)
    if kind is None:
        for form in FORMS:
            null = [key for key in form if not fields.has(key)]
            if {*form} <= {*fields.names}:
                raise MespError(
                    f'{where} has a null "{null[0]}": write it, or leave the record out.'
                )
        raise MespError(f"{where} has {', '.join(fields.names) or 'nothing'}; {RECORDS}. {COLUMNS}")
    found = kind.read(fields)
    if fields.images and not isinstance(found, Conversation):
        raise MespError(f"{where} has images, which {kind.kind} cannot have.")
    return replace(found, where=where, unread=fields.left(), is_left_out=weight == 0)


def kind_of(records: Iterable[AnyRecord]) -> type[AnyRecord]:
    """Raises MespError if the kinds differ."""
    first, *others = records
    for each in others:
        if each.kind != first.kind:
            raise MespError(
                f"{each.where} is {each.kind}, and the data began with {first.kind}; keep one "
                "kind of record."
            )
    return type(first)


def mask_record(record: AnyRecord, encoder: Encoder) -> list[Encoded]:
    with plain_errors(f"{record.where} cannot be tokenized"):
        try:
            return [
                replace(each, unread=record.unread + each.unread, where=record.where)
                for each in record.mask(encoder)
            ]
        except MespError as error:
            raise MespError(f"{record.where}: {error.message}") from error


def _said(fields: Fields, key: str) -> Said:
    if isinstance(fields.values.get(key), str):
        return fields.take_text(key)
    return read_messages(fields, key)


def _as_messages(role: str, said: Said) -> list[Message]:
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def _answer(where: str, prompt: Said, answer: Said, inputs: Mapping[str, Any]) -> Conversation:
    if not prompt:
        raise MespError(f"{where} has no prompt: give it one, or leave it out.")
    if not (answer.strip() if isinstance(answer, str) else answer):
        raise MespError(f"{where} has an empty answer: leave it out.")
    if isinstance(answer, list) and any(not message.get("weight", 1) for message in answer):
        raise MespError(f"{where} has an answer with the weight 0: leave the record out.")
    return Conversation.of(prompt, answer, **inputs)


def _is_within(prompt: Said, chosen: Said, rejected: Said) -> bool:
    if isinstance(chosen, str) or isinstance(rejected, str):
        return False
    alike = _alike(chosen, rejected)
    if isinstance(prompt, list):
        return alike[: len(prompt)] == prompt
    return prompt.strip() in [m["content"].strip() for m in alike if m["role"] == "user"]


def _alike(chosen: Any, rejected: Any) -> Any:
    return chosen[: alike(chosen, rejected)]


def _shared_text(chosen: str, rejected: str) -> str | None:
    """Returns the prompt that two texts begin with: all before the last answer of a dialogue, or
    else whole words.
    """
    alike = str(_alike(chosen, rejected))
    if HUMAN in chosen or ASSISTANT in chosen:
        shared = alike[: alike.rfind(ASSISTANT) + len(ASSISTANT)] if ASSISTANT in alike else ""
        rest = chosen[len(shared) :] + rejected[len(shared) :]
        return shared if shared and HUMAN not in rest and ASSISTANT not in rest else None
    words = re.match(r"(?s).*\s", alike)
    whole = alike in (chosen, rejected)
    return alike if whole else words[0].removesuffix(" ") if words else ""
