r"""Renders a conversation with its chat template, and finds each of its texts in the result.

A template can reorder messages, rewrite them, or leave them out. So a conversation is rendered
twice: unchanged, and with a mark in place of each text. If the renderings differ only in marks and
texts, the place of each text is known exactly:

    marked    <|im_start|>user\nM0<|im_end|>\n<|im_start|>assistant\nM1<|im_end|>\n
    rendered  <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n

The texts are the content of messages, an answer's reasoning, and the names and strings in its tool
calls.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mesp.data.fields import OPTIONS, is_empty
from mesp.data.images import IMAGE
from mesp.data.messages import CALLS, REASONING, Message
from mesp.data.special_tokens import Bounds, Tokens, check_special, special_pattern, tokens
from mesp.errors import MespError

if TYPE_CHECKING:
    from mesp.data.records import Conversation

# Templates look for the tags, so the tags get no marks.
TAGS = re.compile(r"(</?think>)")
IMAGES = re.compile(f"({IMAGE})")
# The keys of a message that `_unread` does not check: checked elsewhere, or never content.
KNOWN = ("role", "content", "weight", CALLS, *REASONING, "tool_call_id", "id", "index")
# Splits a text into the white space before it, its body, and the white space and flags such as
# /no_think after it.
ENDS = re.compile(r"(?s)(?P<before>\s*)(?P<body>.*?)(?P<after>(?:\s|/no_?think\b|/think\b)*)")
PROBE = "MeSP"
QUESTION = {"role": "user", "content": PROBE}
MARK, MARKS = "Mk{:04}yQ", re.compile(r"Mk(\d{4,})yQ")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MEANT = {
    **dict.fromkeys(("human", "usr", "customer", "person"), "user"),
    **dict.fromkeys(("model", "bot", "gpt", "ai", "chatbot", "chatgpt", "agent"), "assistant"),
}
REMEDIES = {
    "developer": "write it as a system message or at the beginning of the user's.",
    "system": "write it at the beginning of the user's message.",
    "assistant": "take a model whose template writes it, or write it into the content.",
}


class Text(NamedTuple):
    """A text of the message with the index `message`.

    `kind` is `content`, `reasoning`, `tool call` for its name, or `arguments of a tool call` for a
    string in them.
    """

    message: int
    kind: str
    text: str


class Place(NamedTuple):
    text: int
    marked_start: int
    marked_stop: int
    start: int
    stop: int


def apply_template(tokenizer: Any, messages: list[Message], **arguments: Any) -> str:
    """Returns the text of transformers' `apply_chat_template`, or of mlx-lm's own renderer if the
    tokenizer has one. Unlike mlx-lm, sets no `enable_thinking`.
    """
    own = tokenizer if tokenizer._chat_template is not None else tokenizer._tokenizer
    taken = with_parts(tokenizer, messages)
    return str(own.apply_chat_template(taken, tokenize=False, **arguments))


def with_parts(tokenizer: Any, messages: list[Message]) -> list[Message]:
    """Returns the messages with content in parts, if one has an image, or if the chat template
    takes parts alone.
    """
    if takes_parts_alone(tokenizer, str(tokenizer.chat_template)) or any(
        IMAGE in message["content"] for message in messages
    ):
        return [{**each, "content": _parts(each["content"])} for each in messages]
    return messages


@lru_cache(maxsize=4)
def takes_parts_alone(tokenizer: Any, _template: str) -> bool:
    """Returns whether the chat template writes content in parts, and leaves out a string."""
    own = tokenizer if tokenizer._chat_template is not None else tokenizer._tokenizer

    def writes(content: Any) -> bool:
        try:
            messages = [{"role": "user", "content": content}]
            return PROBE in str(own.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template can raise anything
            return False

    return not writes(PROBE) and writes(_parts(PROBE))


def _parts(content: str) -> list[Message]:
    parts: list[Message] = []
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text or IMAGE not in content else []
    return parts


@dataclass(frozen=True, eq=False)
class Form:
    """A conversation with marks in place of its texts."""

    tokenizer: Any
    messages: list[Message]
    arguments: dict[str, Any]
    owners: list[int]

    @cached_property
    def marked(self) -> str:
        return self.apply(self.messages)

    @cached_property
    def with_text(self) -> bool:
        try:
            if any(CALLS in message for message in self.messages):
                apply_template(self.tokenizer, template_messages(self.messages), **self.arguments)
        except TypeError:
            return True
        return False

    def apply(self, messages: list[Message], asks: bool = False, given: dict | None = None) -> str:
        given = self.arguments if given is None else given
        taken = template_messages(messages, self.with_text)
        return apply_template(self.tokenizer, taken, add_generation_prompt=asks, **given)

    def render(self, count: int, asks: bool = False) -> str:
        """Returns the first `count` messages rendered. With `asks`, the generation prompt follows.

        If the template fails without a user message, a question is inserted at the beginning, after
        any system message.
        """
        messages = self.messages[:count]
        try:
            return self.apply(messages, asks)
        except Exception:  # a template can raise anything
            if any(message["role"] == "user" for message in messages):
                raise
            first = sum(message["role"] in ("system", "developer") for message in messages[:1])
            return self.apply([*messages[:first], QUESTION, *messages[first:]], asks)

    def render_question(self, asks: bool) -> str:
        return self.apply([QUESTION], asks)

    def marks_of(self, message: int) -> list[re.Match[str]]:
        marks = MARKS.finditer(self.marked)
        return [mark for mark in marks if self.owners[int(mark[1])] == message]

    @cached_property
    def unread(self) -> list[str]:
        """The names of the messages' keys that nothing reads and that have values.

        Raises MespError if the template leaves out a tool, its description, a value in a tool call,
        or an option.
        """
        messages, tools = self.messages, self.arguments["tools"] or []
        for number, tool in enumerate(tools):
            for key in ("name", "description"):
                said, changed = tool.get("function", tool).get(key), copy.deepcopy(tools)
                changed[number].get("function", changed[number])[key] = f"{PROBE}{said}"
                if said and self._is_same(messages, self.arguments | {"tools": changed}):
                    raise MespError(
                        f"the chat template leaves out the tools, such as {_short(str(said))}: "
                        "take a model whose template has them, or leave them out with --ignore "
                        "tools."
                    )
        for index, message in enumerate(messages):
            for number, call in enumerate(message.get(CALLS, [])):
                for value, arguments in _changes(call["function"]["arguments"]):
                    changed = copy.deepcopy(messages)
                    changed[index][CALLS][number]["function"]["arguments"] = arguments
                    if self._is_same(changed):
                        raise MespError(
                            f"the chat template leaves out {json.dumps(value)} in a tool call of "
                            f"message {index + 1}: take a model whose template has tool calls."
                        )
        for key in self.arguments.keys() - {"tools"}:
            others = {k: v for k, v in self.arguments.items() if k != key}
            if key not in str(self.tokenizer.chat_template) and self._is_same(messages, others):
                raise MespError(
                    f'"{OPTIONS}" has "{key}", which the chat template does not read: remove it.'
                )
        unread = []
        for key in dict.fromkeys(key for m in messages for key in m if key not in KNOWN):
            without = [{k: v for k, v in m.items() if k != key} for m in messages]
            if not all(is_empty(m.get(key)) for m in messages) and self._is_same(without):
                unread.append(key)
        return unread

    def _is_same(self, messages: list[Message], given: dict | None = None) -> bool:
        return self.apply(messages, given=given) == self.marked


@lru_cache(maxsize=512)
def _form(tokenizer: Any, _template: str, inputs: str) -> Form:
    return Form(tokenizer, *json.loads(inputs))


class Rendering:
    """A conversation rendered with its chat template. With `split_special`, special tokens in texts
    are encoded as ordinary text. The index of one of `texts` is the number in its mark.

    Raises MespError if a message has a role that is neither known nor used by the chat template, or
    that is another name for a known role, such as human.
    """

    def __init__(
        self, tokenizer: Any, conversation: Conversation, split_special: bool = False
    ) -> None:
        self.tokenizer, self.split_special = tokenizer, split_special
        self.conversation, template = conversation, str(tokenizer.chat_template)
        self._arguments = {"tools": conversation.tools, **conversation.options}
        self.texts: list[Text] = []
        messages = []
        for index, message in enumerate(conversation.messages):
            _check_role(index, message["role"], template)
            messages.append(_marked(message, partial(self._mark, index)))
        owners = [text.message for text in self.texts]
        inputs = json.dumps([messages, self._arguments, owners], default=str)
        self.form = _form(tokenizer, template, inputs)

    def _mark(self, message: int, kind: str, text: str) -> str:
        """White space and flags around the text are kept."""
        found = ENDS.fullmatch(text)
        if not found["body"]:
            return text
        self.texts.append(Text(message, kind, found["body"]))
        return found["before"] + MARK.format(len(self.texts) - 1) + found["after"]

    @cached_property
    def text(self) -> str:
        return self.render(self.conversation.messages)

    def render(self, messages: list[Message], asks: bool = False) -> str:
        return self.form.apply(messages, asks, self._arguments)

    def check(self) -> tuple[list[str], list[str]]:
        """Returns notes, and the names of the messages' keys that nothing reads.

        A template may leave out the reasoning of answers before the last question, and of answers
        that are not in `Conversation.answers`. Raises MespError if the template leaves out another
        text, a tool, a value in a tool call, or an option for the template.
        """
        seen = {int(number) for number in MARKS.findall(self.form.marked)}
        messages, notes = self.conversation.messages, []
        last_question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for number, (index, kind, text) in enumerate(self.texts):
            if number in seen and any(form in self.text for form in _forms(text)):
                continue
            is_earlier = index < last_question or index not in self.conversation.answers
            role = messages[index]["role"]
            if kind == "reasoning" and role == "assistant" and is_earlier:
                notes.append(
                    "Earlier or untrained answers without their reasoning, which the chat template "
                    "leaves out there"
                )
                continue
            remedy = REMEDIES.get(role, "write it as a user's message.")
            raise MespError(
                f"the chat template leaves out the {kind} of message {index + 1}, of the role "
                f"{role} ({_short(text)}): {remedy}"
            )
        called = {each.text for each in self.texts if each.kind == "tool call"}
        names = {str(m["name"]) for m in messages if not is_empty(m.get("name"))}
        return notes, [k for k in self.form.unread if k != "name" or not names <= called]

    @cached_property
    def places(self) -> list[Place]:
        """The places of the texts, in the order of the rendering.

        Raises MespError if the two renderings differ in more than marks and texts.
        """
        return self._places(self.form.marked, self.text)

    def _places(self, marked: str, text: str) -> list[Place]:
        first, *others = MARKS.split(marked)
        found, at = [], len(first)
        for mark, following in zip(MARKS.finditer(marked), others[1::2], strict=True):
            forms = _forms(self.texts[int(mark[1])].text)
            length = next((len(f) for f in forms if text.startswith(f + following, at)), None)
            if length is None:
                break
            found.append(Place(int(mark[1]), *mark.span(), at, at + length))
            at += length + len(following)
        else:
            if text.startswith(first) and at == len(text):
                return found
        raise MespError(
            "the chat template rewrites the conversation, so its answers cannot be located: take "
            "--loss-on all."
        )

    def written(self, marked: str, text: str) -> list[tuple[int, int]]:
        """Returns the bounds of the special tokens in the conversation's texts.

        Raises MespError if a special token in a text cannot be told from the template's, or if the
        conversation has a special token outside of its texts.
        """
        if not self.split_special:
            return []
        pattern = special_pattern(self.tokenizer)
        messages = [
            {k: v for k, v in m.items() if k not in ("role", "weight")} for m in self.form.messages
        ]
        beside = [messages, self.conversation.tools, self.conversation.options]
        said = TAGS.sub("", json.dumps(beside, ensure_ascii=False, default=str))
        if found := pattern.search(said):
            raise MespError(
                f"it has the special token {found[0]} outside of its texts, for example in its "
                "tools, where it stays special: take it out, or leave out --split-special-tokens."
            )
        if not any(pattern.search(each.text) for each in self.texts):
            return []
        try:
            places = self._places(marked, text)
        except MespError as error:
            raise MespError(
                "the chat template rewrites the conversation, so special tokens in its texts "
                "cannot be told from the template's: take them out, or leave out "
                "--split-special-tokens."
            ) from error
        return [
            found.span()
            for place in places
            for found in pattern.finditer(text, place.start, place.stop)
        ]

    def encode(self, count: int, asks: bool = False) -> list[int]:
        """Returns the ids of the first `count` messages.

        Raises MespError if special tokens in texts cannot be told from the template's.
        """
        text = self.render(self.conversation.messages[:count], asks)
        if not self.split_special:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        marked = self.form.render(count, asks)
        return self.tokens(text, self.written(marked, text), marked)[0]

    def tokens(self, text: str, written: Bounds, marked: str) -> Tokens:
        """Special tokens within `written` are encoded as ordinary text."""
        encoded = tokens(self.tokenizer, text, written)
        if self.split_special:
            check_special(self.tokenizer, encoded[0], tokens(self.tokenizer, marked)[0])
        return encoded

    def places_in(self, start: int, stop: int) -> list[Place]:
        return [place for place in self.places if place.start < stop and place.stop > start]

    @property
    def generated(self) -> list[tuple[int, int]] | None:
        """The bounds of the characters within the template's `{% generation %}` blocks.

        None if the template has no such blocks.
        """
        template = self.tokenizer.chat_template
        if not (isinstance(template, str) and re.search(r"{%-?\s*generation\s*-?%}", template)):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        _, (marked,) = render_jinja_template(
            [
                with_parts(
                    self.tokenizer,
                    template_messages(self.conversation.messages, self.form.with_text),
                )
            ],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self._arguments},
        )
        found: list[tuple[int, int]] = []
        said: set[int] = set()
        for start, stop in marked:
            inside = {self.texts[place.text].message for place in self.places_in(start, stop)}
            if found and found[-1][1] == start and (not said or not inside or said == inside):
                start, inside = found.pop()[0], said | inside
            found.append((start, stop))
            said = inside
        return found

    def to_rendered(self, position: int) -> int:
        before = [p.stop - p.marked_stop for p in self.places if p.marked_stop <= position]
        return position + (before[-1] if before else 0)


def without_tags(message: Message) -> str:
    content = message["content"]
    return TAGS.sub("", content) if message["role"] == "assistant" else content


def template_messages(messages: list[Message], with_text: bool = False) -> list[Message]:
    """With `with_text`, the arguments of tool calls are a JSON string."""
    found = [{key: value for key, value in each.items() if key != "weight"} for each in messages]
    for message in found if with_text else []:
        message[CALLS] = copy.deepcopy(message.get(CALLS, []))
        for call in message[CALLS]:
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return found


def _check_role(index: int, role: str, template: str) -> None:
    if role in ROLES:
        return
    meant = MEANT.get(role.lower(), role.lower() if role.lower() in ROLES else None)
    if meant is None and re.search(rf"['\"]{re.escape(role)}['\"]", template):
        return
    remedy = f"write {meant}" if meant else f"roles are {', '.join(ROLES)}"
    raise MespError(f'message {index + 1} has the role "{role:.40}": {remedy}.')


def _marked(message: Message, mark: Callable[[str, str], str]) -> Message:
    changed = dict(message)
    thoughts = [key for key in REASONING if key in message]
    if thoughts:
        changed |= dict.fromkeys(thoughts, mark("reasoning", message[thoughts[0]]))
    content = message["content"]
    pieces = TAGS.split(content) if message["role"] == "assistant" else IMAGES.split(content)
    for at in range(0, len(pieces), 2):  # odd items are tags
        around = (pieces[at - 1] if at else "<think>", *pieces[at + 1 : at + 2])
        kind = "reasoning" if around == ("<think>", "</think>") else "content"
        pieces[at] = mark(kind, pieces[at])
    changed["content"] = "".join(pieces)
    if CALLS in message:
        changed[CALLS] = [_marked_call(call, mark) for call in message[CALLS]]
    return changed


def _marked_call(call: dict[str, Any], mark: Callable[[str, str], str]) -> dict[str, Any]:
    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        if isinstance(value, list):
            return [marked(each) for each in value]
        return mark("arguments of a tool call", value) if isinstance(value, str) else value

    function = call["function"]
    name = mark("tool call", function["name"])
    known = {"name": name, "arguments": marked(function["arguments"])}
    return {**call, "function": {**function, **known}}


def _changes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each null, number, boolean and blank string, and a copy of `value` in which only this
    value differs. These values get no marks.
    """
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in entries:
            for leaf, changed in _changes(each):
                other = value.copy()
                other[key] = changed
                yield leaf, other
    elif isinstance(value, bool):
        yield value, not value
    elif isinstance(value, int | float):
        yield value, value + 1
    elif value is None or (isinstance(value, str) and not value.strip()):
        yield value, f"{value or ''}{PROBE}"


def _forms(text: str) -> list[str]:
    """The forms in which templates write a text: unchanged, in JSON, and as Python's repr."""
    in_json = [json.dumps(text, ensure_ascii=each)[1:-1] for each in (False, True)]
    return [text, *in_json, repr(text)[1:-1], repr(f'"{text}')[2:-1]]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return json.dumps(text if len(text) <= 30 else f"{text[:29]}…", ensure_ascii=False)
