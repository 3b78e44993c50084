"""The kinds of records that data consists of."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mesp.data.messages import (
    Message,
    are_messages,
    as_truth,
    read_messages,
    read_tools,
    read_weight,
)
from mesp.errors import MespError
from mesp.files import UnclearError, parse_json

RECORDS = (
    'records have "text", "prompt" and "completion", or "messages"; for an objective "prompt", '
    '"chosen" and "rejected", or "prompt", "completion" and "label"'
)
COLUMNS = "Name other columns with --columns, as in prompt=question,completion=answer."
# The keys of a record that --columns can name columns for.
KEYS = ("text", "prompt", "completion", "messages", "tools", "chosen", "rejected", "label")
OPTIONS = "chat_template_kwargs"  # TRL's key for chat template options
# Names that a record's options must not have. They are arguments of transformers'
# `apply_chat_template`, or other variables of the template.
FIXED_OPTIONS = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip
SAID = ("prompt", "completion", "chosen", "rejected")
PAIRS, LABELS = "chosen and rejected", "completion and label"  # kinds of preference data
# Columns that an answer may depend on, and that MeSP cannot use.
UNUSABLE = (
    "images", "image", "audios", "audio", "videos", "video", "documents", "functions", "history",
    "system", "system_prompt",
)  # fmt: skip

Said = str | list[Message]  # a prompt or an answer


@dataclass(frozen=True)
class Conversation:
    """Messages that go through the chat template.

    Assistant messages from the index `prompt` on are trained, unless their weight is 0. `options`
    are arguments of the template.
    """

    messages: list[Message]
    prompt: int = 0
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def answers(self) -> list[int]:
        """The indices of the messages that are trained."""
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= self.prompt and message["role"] == "assistant" and message.get("weight", 1)
        ]

    @property
    def untrained(self) -> list[int]:
        """The indices of the messages with weight 0."""
        return [i for i, message in enumerate(self.messages) if message.get("weight", 1) == 0]


class Document(NamedTuple):
    """A file's text, or a record. `where` is its place, for error messages."""

    where: str
    content: str | dict[str, Any]

    @property
    def kind(self) -> str:
        """The record's kind: one of TRL's kinds of preference data, or one of mlx-lm's kinds."""
        if isinstance(self.content, str):
            return "text"
        for kind in (PAIRS, LABELS):
            if all(key in self.content for key in kind.split(" and ")):
                return kind
        if "prompt" in self.content and "completion" in self.content:
            return "prompt and completion"
        return "messages" if "messages" in self.content else "text"

    @property
    def has_messages(self) -> bool:
        """Whether the record has messages, which only a chat template can join."""
        content = {} if isinstance(self.content, str) else self.content
        return self.kind == "messages" or any(isinstance(content.get(key), list) for key in SAID)

    @property
    def conversation(self) -> Conversation:
        """The conversation of a record with messages, or with a prompt and a completion."""
        if self.kind == "messages":
            return self.of(0, self.content["messages"])
        prompt = as_messages("user", self.content["prompt"])
        answer = as_messages("assistant", self.content["completion"])
        answer = answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
        return self.of(len(prompt), prompt + answer)

    def of(self, prompt: int, messages: list[Message]) -> Conversation:
        return Conversation(
            messages, prompt, self.content.get("tools"), self.content.get(OPTIONS, {})
        )

    @property
    def is_left_out(self) -> bool:
        return isinstance(self.content, dict) and self.content.get("weight", 1) == 0


def as_messages(role: str, said: Said) -> list[Message]:
    """Returns a prompt or an answer as messages. A string becomes one message of `role`."""
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def read_utf8(name: str, read: Callable[[], bytes]) -> str:
    """Returns the UTF-8 text from `read`, with universal newlines. Error messages call the text
    `name`.

    Raises MespError if reading fails, or if the bytes are not UTF-8.
    """
    try:
        return io.TextIOWrapper(io.BytesIO(read()), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise MespError(f"{name} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise MespError(f"{name} cannot be read: {error.strerror}.") from error


def read_value(where: str, text: str) -> Any:
    """Returns the value of a JSON text.

    Raises MespError if the text is not valid JSON, repeats a key, or has a number such as NaN or a
    string that is not valid Unicode.
    """
    try:
        return parse_json(text, strict=True)
    except UnicodeEncodeError as error:
        raise MespError(f"{where} has half a character, such as \\ud83d; fix it.") from error
    except UnclearError as error:
        raise MespError(f"{where} {error}.") from error
    except ValueError as error:
        raise MespError(f"{where} is not JSON.") from error


def as_object(where: str, record: Any) -> dict[str, Any]:
    """Returns a record's JSON value. Raises MespError if the value is not an object."""
    if not isinstance(record, dict):
        raise MespError(f"{where} is not an object; write each record as one.")
    return record


def read_record(
    where: str, record: dict[str, Any], columns: dict[str, str], ignored: tuple[str, ...] = ()
) -> Document:
    """Returns a record of one of `RECORDS`, with the values of `columns` under their keys.

    Removes `ignored` fields, also from messages. Null counts as absent. Messages and tools are
    converted to the form for chat templates, and fields such as ``train`` become a ``weight`` of 0
    or 1. Raises MespError if the record is none of `RECORDS`, lacks one of `columns`, or has a
    value that cannot be used.
    """
    for column in columns.values():
        if column not in record:
            raise MespError(
                f"{where} has no column {column}, which --columns names; it has "
                f"{', '.join(record) or 'none'}."
            )
    record = record | {key: record[column] for key, column in columns.items()}
    taken = [column for column in columns.values() if column not in columns]
    record = {
        key: value
        for key, value in record.items()
        if value is not None and key not in ignored and key not in taken
    }
    refuse_unusable(where, record)
    weight = read_weight(f"{where} has", record)
    if weight is not None:
        record["weight"] = weight
    document = Document(where, record)
    if "tools" in record:
        record["tools"] = read_tools(where, record["tools"])
    if not isinstance(record.get(OPTIONS, {}), dict):
        raise MespError(f'{where} has "{OPTIONS}" that are not an object: write one.')
    for key in record.get(OPTIONS, {}):
        if key in FIXED_OPTIONS:
            raise MespError(
                f'{where} has "{OPTIONS}" with "{key}", which MeSP sets itself: remove it.'
            )
    if document.kind == "messages":
        if not are_messages(record["messages"]):
            raise MespError(
                f"{where} has messages that are not a list of objects: write each as "
                '{"role": "user", "content": "…"}.'
            )
        record["messages"] = read_messages(where, record["messages"], ignored)
        return document
    keys = [key for key in KEYS if key in (SAID if document.kind != "text" else ("text",))]
    for key in document.kind.split(" and "):
        if key not in record:
            raise MespError(f"{where} has {', '.join(record) or 'nothing'}; {RECORDS}. {COLUMNS}")
    if document.kind == LABELS:
        if "prompt" not in record:
            raise MespError(f"{where} has {', '.join(record)}; {RECORDS}.")
        record["label"] = as_truth(record["label"])
        if not isinstance(record["label"], bool):
            raise MespError(
                f'{where} has a "label" that is neither true nor false: write true or false, '
                "or leave it out with --ignore label."
            )
    for key in (key for key in keys if key in record):
        record[key] = _said(where, key, record[key], ignored)
    return document


def refuse_unusable(where: str, record: dict[str, Any]) -> None:
    """Raises MespError if a record has a field that its answer may depend on, but that MeSP cannot
    use.
    """
    for key in UNUSABLE:
        if record.get(key) not in (None, "", [], {}):
            raise MespError(
                f'{where} has "{key}", which cannot be used: write its text as messages, or leave '
                f"it out with --ignore {key}."
            )


def _said(where: str, key: str, value: Any, ignored: tuple[str, ...]) -> Said:
    if isinstance(value, str):
        return value
    if key not in SAID:
        raise MespError(f'{where} has a "{key}" that is not a string: write it as one.')
    if value == [] and key != "prompt":
        return []
    if not are_messages(value):
        raise MespError(
            f'{where} has a "{key}" that is neither a string nor a list of messages with a "role" '
            "each."
        )
    return read_messages(where, value, ignored)


def unread_columns(documents: dict[str, list[Document]]) -> list[str]:
    """Returns the records' columns that are not read."""
    found: dict[str, None] = {}
    for document in (each for split in documents.values() for each in split):
        if isinstance(document.content, dict):
            found |= dict.fromkeys(document.content)
    known = _read_of(next(iter(documents.values()))[0].kind)
    return [key for key in found if key not in known]


def _read_of(kind: str) -> tuple[str, ...]:
    if kind == "text":
        return ("text", "weight")
    prompt = () if kind == "messages" else ("prompt",)
    return (*prompt, *kind.split(" and "), "tools", OPTIONS, "weight")


def kind_of(documents: dict[str, list[Document]]) -> str:
    """Returns the kind of all documents. Raises MespError if the kinds differ."""
    first = next(iter(documents.values()))[0]
    for document in (each for split in documents.values() for each in split):
        if document.kind != first.kind:
            raise MespError(
                f"{document.where} has {document.kind}, and the data began with {first.kind}; "
                "keep one kind of record."
            )
    return first.kind
