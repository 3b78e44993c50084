from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from mesp.data.fields import Fields, Selection, refuse_unread
from mesp.data.messages import CALLS
from mesp.data.records import Conversation, Text, read_record
from mesp.data.source_files import read_file, read_lines
from mesp.errors import MespError

RECORDS = (
    'records have "text"; "prompt", "choices" and "answer"; "prompt" and "completion"; or '
    '"messages" that end with an answer'
)


@dataclass(frozen=True)
class TextRecord:
    where: str
    text: str


@dataclass(frozen=True)
class ChoiceRecord:
    where: str
    prompt: str
    choices: list[str]
    answer: int


@dataclass(frozen=True)
class AnswerRecord:
    where: str
    prompt: str | Conversation
    answer: str


Record = TextRecord | ChoiceRecord | AnswerRecord


def read_records(data: str, limit: int | None, ignored: tuple[str, ...] = ()) -> list[Record]:
    """Returns the first `limit` records of a file or, for ``-``, of JSON lines on standard input.

    A file of text is one record. All records must be of one kind. The `ignored` fields of records
    and messages are left out.
    """
    if data == "-":
        name, rows = "standard input", read_lines(sys.stdin.buffer, "standard input")
    else:
        name, rows = data, read_file(Path(data))
    records: list[Record] = []
    for where, content in islice(rows, limit):
        record = {"text": content} if isinstance(content, str) else content
        records.append(_record(where, record, ignored, Path(data).parent))
        if type(records[-1]) is not type(records[0]):
            raise MespError(
                f"{records[-1].where} is of another kind than the first; keep one kind."
            )
    if not records:
        raise MespError(f"{name} has no records; {RECORDS}.")
    return records


def _record(where: str, record: dict[str, Any], ignored: tuple[str, ...], folder: Path) -> Record:
    fields = Fields(where, record, Selection(ignored=ignored), folder)
    if fields.has("choices"):
        question = _question(where, fields)
        refuse_unread([(where, fields.left())])
        return question
    keys = ({"text"}, {"prompt", "completion"}, {"messages"}, {"instruction"})
    if not any({*fields.names} >= each for each in keys):
        raise MespError(f"{where} has {', '.join(fields.names) or 'nothing'}; {RECORDS}.")
    found = read_record(fields)
    refuse_unread([(where, found.unread)])
    if isinstance(found, Text):
        if not found.text:
            raise MespError(f"{where} has an empty text; leave it out.")
        return TextRecord(where, found.text)
    if found.is_left_out:
        raise MespError(f"{where} has the weight 0: leave it out.")
    if not isinstance(found, Conversation):
        raise MespError(f"{where} has {', '.join(fields.names)}; {RECORDS}.")
    if found.texts and not (found.tools or found.options):
        prompt, answer = found.texts
        if not answer.strip():
            raise MespError(f"{where} has an empty completion: write the right answer.")
        return AnswerRecord(where, prompt, answer)
    *before, last = found.messages
    if not before or last["role"] != "assistant" or not last["content"]:
        raise MespError(f"{where} has messages that do not end with an assistant's answer.")
    if CALLS in last:
        raise MespError(f"{where} ends with a tool call, which is not compared: leave it out.")
    return AnswerRecord(where, replace(found, messages=before, texts=None), last["content"])


def _question(where: str, fields: Fields) -> ChoiceRecord:
    prompt, choices, answer = (fields.take(key) for key in ("prompt", "choices", "answer"))
    if not isinstance(prompt, str):
        raise MespError(f'{where} has no "prompt" that is a string.')
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice.strip() for choice in choices)
    ):
        raise MespError(f'{where} has "choices" that are not two or more strings with words.')
    if len({*choices}) < len(choices):
        raise MespError(f'{where} has "choices" of which two are equal; keep one of them.')
    if isinstance(answer, str) and answer in choices:
        answer = choices.index(answer)
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise MespError(
            f'{where} has an "answer" that is neither one of its choices nor its index, from 0 to '
            f"{len(choices) - 1}."
        )
    return ChoiceRecord(where, prompt, choices, answer)
