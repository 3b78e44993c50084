"""Other keys are kept, so that a later check can tell whether the chat template uses them."""

from __future__ import annotations

import json
from typing import Any

from mesp.data import images
from mesp.data.fields import OPTIONS, Fields, is_empty
from mesp.errors import MespError
from mesp.files import parse_json

Message = dict[str, Any]

TEXT_PARTS = ("text", "input_text", "output_text")
# The keys of a part of content.
PART_KEYS = ("type", "text", "id", "index", "annotations", "cache_control")
# For example, Mistral and OpenAI have `weight`, Axolotl has `train` and `training`, ms-swift has
# `loss`, and torchtune has `masked`.
WEIGHTS = {"weight": 1, "train": 1, "training": 1, "trainable": 1, "loss": 1, "masked": 0}
TRUTHS = {"0": 0, "1": 1, "true": True, "false": False, "": None}
CALLS = "tool_calls"
CALL_KEYS = ("id", "type", "index", "function")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names of an answer's reasoning
# Names that a record's options must not have.
FIXED_OPTIONS = (
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
)  # fmt: skip


def read_messages(fields: Fields, key: str) -> list[Message]:
    """Raises MespError if a message cannot be used, for example because it has no role, or content
    that is not text.
    """
    messages = fields.take(key)
    if not _are_objects(messages) or (not messages and key in ("messages", "prompt")):
        other = "no" if key == "messages" else "neither a string nor a"
        raise MespError(
            f'{fields.where} has a "{key}" that is {other} list of messages: write each as '
            '{"role": "user", "content": "…"}.'
        )
    return [
        _read(fields, f"{fields.where} has a message {number}", message)
        for number, message in enumerate(messages, 1)
    ]


def _read(fields: Fields, where: str, raw: Message) -> Message:
    message = {k: v for k, v in raw.items() if v is not None and k not in fields.ignored}
    role = message.get("role")
    if not isinstance(role, str):
        raise MespError(
            f'{where} without a "role" that is a string: {_keys(raw)}. Write '
            '{"role": "user", "content": "…"}.'
        )
    weight = read_weight(f"{where} with", message)
    for key in ("content", *REASONING):
        if key in message:
            message[key] = _text(fields, where, message[key])
    if message.get("function_call"):
        raise MespError(f'{where} with "function_call": write it as "tool_calls".')
    thoughts = [key for key in REASONING if key in message]
    if len({message[key] for key in thoughts}) > 1:
        raise MespError(
            f"{where} with two kinds of reasoning, {' and '.join(thoughts)}: leave one out."
        )
    if message.get(CALLS) == []:
        del message[CALLS]
    if CALLS in message:
        message[CALLS] = _calls(fields, where, message[CALLS])
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


def _text(fields: Fields, where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise MespError(
            f'{where} with "content" that is neither text nor a list of text parts: write text.'
        )
    texts = []
    for part in content:
        text = part
        if isinstance(part, dict) and part.get("type") in images.PARTS:
            _taken(fields, part, images.KEYS)
            own = [part[key] for key in images.SOURCES if part.get(key)]
            fields.add_image(where, own[0] if own else None)
            texts.append(images.IMAGE)
            continue
        if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
            text = part.get("text")
            _taken(fields, part, PART_KEYS)
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise MespError(
                f"{where} with a part of content that is neither text nor an image but "
                f"{kind!s:.40}, which cannot be trained."
            )
        texts.append(text)
    return "".join(texts)


def _taken(fields: Fields, entries: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    taken = {k: v for k, v in entries.items() if k in known or k not in fields.ignored}
    fields.unread += [k for k, v in taken.items() if k not in known and not is_empty(v)]
    return taken


def _calls(fields: Fields, where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise MespError(f'{where} with "{CALLS}" that is not a list.')
    return [_call(fields, f"{where} with", call) for call in calls]


def _call(fields: Fields, where: str, call: Any) -> dict[str, Any]:
    if isinstance(call, dict) and "function" not in call:
        function = {k: v for k, v in call.items() if k not in CALL_KEYS}
        call = {k: call[k] for k in ("id",) if k in call} | {"type": "", "function": function}
    function = call["function"] if isinstance(call, dict) else None
    if not _has_name(function):
        raise MespError(f'{where} a tool call without a "name": give it one.')
    outer = _taken(fields, call, CALL_KEYS)
    inner = _taken(fields, function, ("name", "arguments"))
    fault = f"{where} arguments of a tool call that are no JSON: write an object."
    arguments = _parsed(function.get("arguments"), "{}", fault, strict=True)
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise MespError(f"{where} arguments of a tool call that are not an object: write one.")
    inner = {k: v for k, v in inner.items() if k not in CALL_KEYS} | {"arguments": arguments}
    return {**outer, "type": "function", "function": inner}


def _has_name(function: Any) -> bool:
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _parsed(value: Any, empty: str, fault: str, strict: bool = False) -> Any:
    try:
        return parse_json(value or empty, strict) if isinstance(value, str) else value
    except ValueError as error:
        raise MespError(fault) from error


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


def read_template_inputs(fields: Fields) -> dict[str, Any]:
    """Tools are a list of objects, or such a list as a JSON string. Raises MespError for any other
    value, or for a tool without a name.
    """
    where, tools, options = fields.where, fields.take("tools"), fields.take(OPTIONS)
    tools = _parsed(tools, "[]", f'{where} has "tools" in a string that is no JSON: write a list.')
    if not (tools is None or _are_objects(tools)):
        raise MespError(
            f'{where} has "tools" that are not a list of objects: write them in OpenAI\'s form.'
        )
    for tool in tools or []:
        if not _has_name(tool.get("function", tool)):
            raise MespError(f'{where} has a tool without a "name": give it one.')
    return {"tools": tools or None, "options": check_options(f'{where} has "{OPTIONS}"', options)}


def check_options(where: str, options: Any) -> dict[str, Any]:
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise MespError(f"{where} that are not an object: write one.")
    for key in options:
        if key in FIXED_OPTIONS:
            raise MespError(f'{where} with "{key}", which MeSP sets itself: remove it.')
    return options


def read_weight(where: str, entries: dict[str, Any]) -> int | None:
    """Returns 1 if it is trained, 0 if not, and None if no such field has a value."""
    weights = []
    for key, trained in WEIGHTS.items():
        value = as_truth(entries.pop(key, None))
        if value not in (None, 0, 1):
            raise MespError(
                f'{where} "{key}" {json.dumps(value):.40}, which is neither 0 nor 1: write 1 '
                f"to train it and 0 not to, or leave the field out with --ignore {key}."
            )
        if value is not None:
            weights.append(int(value == trained))
    return min(weights, default=None)


def as_truth(value: Any) -> Any:
    return TRUTHS.get(value.lower(), value) if isinstance(value, str) else value
