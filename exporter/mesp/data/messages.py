"""Converts a record's messages to the form that chat templates take.

`content` is a string, the `arguments` of a tool call are an object, and `weight` is 0 for an answer
that is not trained. Other keys are kept, so that a later check can tell whether the chat template
uses them.
"""

from __future__ import annotations

import json
from typing import Any

from mesp.errors import MespError
from mesp.files import parse_json

Message = dict[str, Any]

TEXT_PARTS = ("text", "input_text", "output_text")
PART_KEYS = (
    "type",
    "text",
    "id",
    "index",
    "annotations",
    "cache_control",
)  # the last four hold no text
# Fields that say whether an answer or a record is trained, and the value that means yes. For
# example, Mistral and OpenAI have `weight`, Axolotl has `train` and `training`, ms-swift has
# `loss`, and torchtune has `masked`.
WEIGHTS = {"weight": 1, "train": 1, "training": 1, "trainable": 1, "loss": 1, "masked": 0}
CALLS = "tool_calls"
CALL_KEYS = ("id", "type", "index", "function")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of an answer's reasoning


def are_messages(value: Any) -> bool:
    """Returns whether `value` is a list of one or more objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) for m in value)


def read_messages(
    where: str, messages: list[Message], ignored: tuple[str, ...] = ()
) -> list[Message]:
    """Returns the messages of the record called `where`, without the `ignored` keys.

    Raises MespError if a message cannot be used, for example because it has no role, or content
    that is not text.
    """
    return [
        _read(f"{where} has a message {number}", message, ignored)
        for number, message in enumerate(messages, 1)
    ]


def _read(where: str, raw: Message, ignored: tuple[str, ...]) -> Message:
    message = {key: value for key, value in raw.items() if value is not None and key not in ignored}
    role = message.get("role")
    if not isinstance(role, str):
        raise MespError(
            f'{where} without a "role" that is a string: {_keys(raw)}. Write '
            '{"role": "user", "content": "…"}.'
        )
    weight = read_weight(f"{where} with", message)
    if "content" in message:
        message["content"] = _text(where, message["content"])
    if message.get("function_call"):
        raise MespError(f'{where} with "function_call": write it as "tool_calls".')
    thoughts = {key: _text(where, message[key]) for key in REASONING if key in message}
    if len({*thoughts.values()}) > 1:
        raise MespError(
            f"{where} with two kinds of reasoning, {' and '.join(thoughts)}: leave one out."
        )
    message |= thoughts
    if CALLS in message:
        if message[CALLS] == []:
            del message[CALLS]
        else:
            message[CALLS] = _calls(where, message[CALLS])
    if "content" not in message:
        if role != "assistant" or CALLS not in message:
            raise MespError(
                f'{where} without "content": {_keys(raw)}. Write its text as "content".'
            )
        message["content"] = ""
    if role != "assistant" and weight == 1 and not raw.get("weight"):
        raise MespError(
            f"{where} of the role {role} that is to be trained, and only the assistant's are: "
            "remove the field that says so."
        )
    return message | {"weight": 0} if role == "assistant" and weight == 0 else message


def _keys(message: Message) -> str:
    keys = [key for key, value in message.items() if value is not None]
    return f"it has {', '.join(keys)}" if keys else "it is empty"


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MespError(
            f'{where} with "content" that is neither text nor a list of text parts: write text.'
        )
    texts = []
    for part in content:
        text = part
        if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
            text = part.get("text")
            if others := [
                k for k in part if k not in PART_KEYS and part[k] not in (None, "", [], {})
            ]:
                raise MespError(
                    f'{where} with a part of content that has "{others[0]}", which nothing reads: '
                    "remove it."
                )
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise MespError(
                f"{where} with a part of content that is not text but {kind!s:.40}: only text can "
                "be trained."
            )
        texts.append(text)
    return "".join(texts)


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Returns tool calls in transformers' form.

    The given calls may lack ``function``, and may have arguments as JSON in a string.
    """
    if not isinstance(calls, list):
        raise MespError(f'{where} with "{CALLS}" that is not a list.')
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MespError(f'{where} with a tool call without a "name": give it one.')
        known = ("name", "arguments") if "function" in call else (*CALL_KEYS, "name", "arguments")
        others = [key for key in function if function[key] is not None and key not in known]
        others += [key for key in call if "function" in call and key not in CALL_KEYS]
        if others:
            raise MespError(
                f'{where} with a tool call that has "{others[0]}", which nothing reads: a call has '
                '"name" and "arguments".'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(arguments or "{}", strict=True)
            except ValueError as error:
                raise MespError(
                    f"{where} with arguments of a tool call that are no JSON: write an object."
                ) from error
        else:
            arguments = without_null({} if arguments is None else arguments)
        if not isinstance(arguments, dict):
            raise MespError(
                f"{where} with arguments of a tool call that are not an object: write one."
            )
        kept = call if "function" in call else {key: call[key] for key in ("id",) if key in call}
        known = {"name": function["name"], "arguments": arguments}
        found.append(
            {
                **kept,
                "type": "function",
                "function": {**function, **known} if "function" in call else known,
            }
        )
    return found


def without_null(value: Any) -> Any:
    """Returns a value without the null entries of its objects.

    A table has null where a record lacks a key. So null counts as absent.
    """
    if isinstance(value, dict):
        return {key: without_null(each) for key, each in value.items() if each is not None}
    return [without_null(each) for each in value] if isinstance(value, list) else value


def read_tools(where: str, tools: Any) -> list[Any] | None:
    """Returns a record's tools, or None if it has none. `tools` is None, a list of objects, or
    such a list as a JSON string. Raises MespError for any other value, or for a tool without a
    name.
    """
    if isinstance(tools, str):
        try:
            tools = parse_json(tools or "[]")
        except ValueError as error:
            raise MespError(
                f'{where} has "tools" in a string that is no JSON: write a list.'
            ) from error
    else:
        tools = without_null(tools)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
    ):
        raise MespError(
            f'{where} has "tools" that are not a list of objects: write them in OpenAI\'s form.'
        )
    for tool in tools or []:
        function = tool.get("function", tool)
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise MespError(f'{where} has a tool without a "name": give it one.')
    return tools or None


def read_weight(where: str, entries: dict[str, Any]) -> int | None:
    """Removes from `entries` the fields that say whether a message or a record is trained.

    Returns 1 if it is trained, 0 if not, and None if no such field has a value. Raises MespError,
    whose message begins with `where`, for a value that means neither yes nor no.
    """
    found: int | None = None
    for key, trained in WEIGHTS.items():
        value = as_truth(entries.pop(key, None))
        if value is None:
            continue
        if value not in (0, 1):  # True equals 1
            raise MespError(
                f'{where} "{key}" {json.dumps(value):.40}, which is neither 0 nor 1: write 1 '
                f"to train it and 0 not to, or leave the field out with --ignore {key}."
            )
        weight = int(value == trained)
        found = weight if found is None else min(found, weight)
    return found


def as_truth(value: Any) -> Any:
    """Returns the number or boolean that a table's cell stands for (0, 1, true or false), None for
    an empty cell, or the unchanged value.
    """
    words = {"0": 0, "1": 1, "true": True, "false": False, "": None}
    return words.get(value.lower(), value) if isinstance(value, str) else value
