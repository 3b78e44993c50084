"""The kinds of records that data is made of."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, NamedTuple

from mesp.errors import MespError
from mesp.files import UnclearError, parse_json

RECORDS = (
    'records have "text", "prompt" and "completion", or "messages"; for an objective "prompt", '
    '"chosen" and "rejected", or "prompt", "completion" and "label"'
)
# The keys of a record that are read.
KEYS = ("text", "prompt", "completion", "messages", "tools", "chosen", "rejected", "label")
PAIRS, LABELS = "chosen and rejected", "completion and label"  # preference data

Said = str | list[dict[str, Any]]  # a prompt or an answer: a string, or messages


class Document(NamedTuple):
    """A text that is tokenized at once: of a file, or a record; `where` it is, for messages."""

    where: str
    content: str | dict[str, Any]

    @property
    def kind(self) -> str:
        """Which of mlx-lm's kinds of record it is, found as mlx-lm finds it, or of TRL's."""
        if isinstance(self.content, str):
            return "text"
        for judged in (PAIRS, LABELS):
            if all(key in self.content for key in judged.split(" and ")):
                return judged
        if "prompt" in self.content and "completion" in self.content:
            return "prompt and completion"
        return "messages" if "messages" in self.content else "text"

    @property
    def has_messages(self) -> bool:
        """Whether a record of another kind than text has messages, which only a template joins."""
        answer = self.content.get("chosen", self.content.get("completion"))
        return self.kind == "messages" or isinstance(answer, list)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation in a record of messages, or of a prompt and a completion."""
        if self.kind == "messages":
            return self.content["messages"]
        return as_messages("user", self.content["prompt"]) + as_messages(
            "assistant", self.content["completion"]
        )


def as_messages(role: str, said: Said) -> list[dict[str, Any]]:
    """A prompt or an answer as messages: a string is one message of `role`."""
    return [{"role": role, "content": said}] if isinstance(said, str) else said


def read_utf8(name: str, read: Callable[[], bytes]) -> str:
    """The text that `read` gives of what is called `name`, its lines ended as Python's are. Raises
    MespError where that fails, or bytes are not text."""
    try:
        return io.TextIOWrapper(io.BytesIO(read()), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        raise MespError(f"{name} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise MespError(f"{name} cannot be read: {error.strerror}.") from error


def read_value(where: str, text: str) -> Any:
    """The value of a JSON text. Raises MespError where it is not valid, has a key twice or a number
    that JSON lacks, or a string that a tokenizer cannot take."""
    try:
        return parse_json(text, strict=True)
    except UnicodeEncodeError as error:
        raise MespError(f"{where} has half a character, as \\ud83d alone is; fix it.") from error
    except UnclearError as error:
        raise MespError(f"{where} {error}.") from error
    except ValueError as error:
        raise MespError(f"{where} is not JSON.") from error


def as_object(where: str, record: Any) -> dict[str, Any]:
    """A value of JSON as the object of a record. Raises MespError for anything else."""
    if not isinstance(record, dict):
        raise MespError(f"{where} is not an object, as a record is; fix it.")
    return record


def read_record(where: str, record: dict[str, Any], columns: dict[str, str]) -> Document:
    """A record of one of `RECORDS`, in which a key of `columns` stands for that column's value.

    Raises MespError where it is not one of them, or lacks a column.
    """
    for column in columns.values():
        if column not in record:
            raise MespError(
                f"{where} has no column {column}, which --columns names; it has "
                f"{', '.join(record) or 'none'}."
            )
    record = record | {key: record[column] for key, column in columns.items()}
    document = Document(where, record)
    if document.kind in (PAIRS, LABELS):
        _check_judged(document)
        return document
    if document.kind == "messages":
        if not _are_messages(record["messages"]):
            raise MespError(
                f'{where} has messages that are not a list of objects with a "role" each.'
            )
        return document
    for key in document.kind.split(" and "):
        if key not in record:
            raise MespError(f"{where} has {', '.join(record) or 'nothing'}; {RECORDS}.")
        if not isinstance(record[key], str):
            raise MespError(f'{where} has a "{key}" that is not a string.')
    return document


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    )


def _check_judged(document: Document) -> None:
    """Raises MespError unless the texts are all strings or all messages, and the label a bool."""
    where, record = document
    if document.kind == LABELS:
        if "prompt" not in record:
            raise MespError(f"{where} has {', '.join(record)}; {RECORDS}.")
        if not isinstance(record["label"], bool):
            raise MespError(f'{where} has a "label" that is neither true nor false.')
    texts = [record[key] for key in ("prompt", "chosen", "rejected", "completion") if key in record]
    strings = all(isinstance(text, str) for text in texts)
    if not strings and not all(text == [] or _are_messages(text) for text in texts):
        raise MespError(
            f"{where} has a prompt and answers that are not all strings, nor all lists of messages "
            'with a "role" each.'
        )


def kind_of(documents: dict[str, list[Document]]) -> str:
    """The kind of all documents. Raises MespError where it is not one."""
    first = next(iter(documents.values()))[0]
    for document in (each for split in documents.values() for each in split):
        if document.kind != first.kind:
            raise MespError(
                f"{document.where} has {document.kind}, and the data began with {first.kind}; "
                "keep one kind of record."
            )
    return first.kind
