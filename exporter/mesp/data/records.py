"""The kinds of records that data is made of."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from mesp.errors import MespError

RECORDS = 'records have "text", "prompt" and "completion", or "messages"'


class Document(NamedTuple):
    """What is tokenized at once: the text of a file, or a record; `where` it is, for messages."""

    where: str
    content: str | dict[str, Any]

    @property
    def kind(self) -> str:
        """Which of mlx-lm's kinds of record it is, found as mlx-lm finds it."""
        if isinstance(self.content, str):
            return "text"
        if "prompt" in self.content and "completion" in self.content:
            return "prompt and completion"
        return "messages" if "messages" in self.content else "text"


def read_record(where: str, line: str) -> Document:
    """A line of a JSONL file, of one of `RECORDS`. Raises MespError where it is none."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MespError(f"{where} is not JSON.") from error
    if not isinstance(record, dict):
        raise MespError(f"{where} is no object; {RECORDS}.")
    document = Document(where, record)
    if document.kind == "messages":
        messages = record["messages"]
        if not (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        ):
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


def kind_of(documents: dict[str, list[Document]]) -> str:
    """The kind of all documents. Raises MespError where it is not one."""
    first = documents["train"][0]
    for document in (each for split in documents.values() for each in split):
        if document.kind != first.kind:
            raise MespError(
                f"{document.where} has {document.kind}, and the data began with {first.kind}; "
                "keep one kind of record."
            )
    return first.kind
