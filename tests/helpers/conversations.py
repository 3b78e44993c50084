"""Conversations of every kind that people train on, made up by Hypothesis.

Each message has a word of its own, so that a test finds it again in what was made of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import count
from typing import Any

from hypothesis import strategies as st

PLAIN = ["{}", "{}.", "What is {}?", "Say {}, please.", "1. {}\n2. two", "Täglich {} — ça va?"]
ODD = [
    " {}",
    "{}\n",
    "\n\n{}\n\n",
    "  {} \t",
    "\r\n{}\r\n",
    "\u2028{}\u00a0",
    "{} \U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\u0645\u0631\u062d\u0628\u0627 {} \u0628\u0627\u0644\u0639\u0627\u0644\u0645",
    "\u3053\u3093\u306b\u3061\u306f{}\u3002",
    "E\u0301{}",
    "{}\n```python\ndef f(x):\n    return {{'a': [1, 2]}}\n```",
    "<b>{}</b>",
    "{{{{ {} }}}} {{% if x %}}",
    "\"{}\" 'quotes' \\n \\",
    "{} & <tag/> <",
    "{} assistant",
    "user: {}\nassistant: yes",
    "/no_think {}",
    "{} /no_think",
    "{}</think>",
    "a </think> {}",
    "<think>{}",
    "{} <think>{}</think> {}",
    "{} <think></think>",
]
SHORT = ["a", "1", "\u00e9", "OK", "?"]
VALUES = [73041, -2.5, 0, True, False, "", [1, 2], {"x": {"y": 1}}, [], {}]


@dataclass(frozen=True)
class Kinds:
    """What conversations may have beside questions and answers."""

    system: bool = True
    odd: bool = True
    reasoning: bool = True
    tools: bool = True
    any_order: bool = True


ALL = Kinds()
QUESTIONS_AND_ANSWERS = Kinds(
    system=False, odd=False, reasoning=False, tools=False, any_order=False
)


def word(number: int) -> str:
    return f"Wq{number:03}z"


class _Writer:
    """Makes the messages of one conversation, each with the next word."""

    def __init__(self, draw: Any, kinds: Kinds) -> None:
        self.draw, self.kinds = draw, kinds
        self.words = count()
        self.said: list[str] = []
        self.odd = kinds.odd and self.seldom(3)
        self.reasons = kinds.reasoning and self.seldom(4)
        self.thinks = kinds.reasoning and not self.reasons and self.seldom(5)
        self.tools = self._tools() if kinds.tools and self.seldom(4) else []

    def seldom(self, of: int) -> bool:
        """True once in so many times."""
        return self.draw(st.integers(0, of - 1)) == of - 1

    def text(self) -> str:
        if self.odd and self.seldom(12):
            text = self.draw(st.sampled_from([*SHORT, *self.said[-2:]]))
        else:
            text = self.draw(st.sampled_from(PLAIN + ODD if self.odd else PLAIN))
            text = text.format(*(word(next(self.words)) for _ in range(text.count("{}"))))
        self.said.append(text)
        return text

    def content(self) -> str | list[dict[str, str]]:
        text = self.text()
        if self.odd and self.seldom(8):
            cut = len(text) // 2
            return [{"type": "text", "text": part} for part in (text[:cut], text[cut:])]
        return text

    def question(self) -> dict[str, Any]:
        empty = self.odd and self.seldom(15)
        return {"role": "user", "content": "" if empty else self.content()}

    def answer(self, calls: bool = False) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if not calls or self.seldom(3):
            message["content"] = self.content()
        else:
            message["content"] = self.draw(st.sampled_from(["", None]))
        if self.reasons and not self.seldom(4):
            message["reasoning_content"] = f"I think {word(next(self.words))}."
        elif self.thinks and not self.seldom(4):
            said = message["content"] if isinstance(message["content"], str) else ""
            message["content"] = f"<think>\n{word(next(self.words))}, so.\n</think>\n\n{said}"
        if calls:
            message["tool_calls"] = [self._call(i) for i in range(1 + self.seldom(3))]
        elif self.kinds.any_order and self.seldom(20):
            message["weight"] = 0
        return message

    def _tools(self) -> list[dict[str, Any]]:
        parameters = {
            "type": "object",
            "properties": {"of": {"type": "string", "description": "What of."}},
            "required": ["of"],
        }
        return [
            {
                "type": "function",
                "function": {
                    "name": f"get_{word(next(self.words))}",
                    "description": "Looks something up.",
                    "parameters": parameters,
                },
            }
            for _ in range(1 + self.seldom(3))
        ]

    def _call(self, number: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if not self.seldom(6):
            forms = PLAIN + ODD[:19] if self.odd else PLAIN[:4]
            arguments["of"] = self.draw(st.sampled_from(forms)).format(word(next(self.words)))
        if self.seldom(3):
            arguments["n"] = self.draw(st.sampled_from(VALUES))
        if self.seldom(5):
            arguments["more"] = {"list": [word(next(self.words)), 7]}
        name = self.draw(st.sampled_from(self.tools))["function"]["name"]
        call: dict[str, Any] = {"name": name, "arguments": arguments}
        if self.seldom(3):
            call["arguments"] = json.dumps(arguments)
        call = {"type": "function", "function": call}
        return {"id": f"call{number:05}", **call} if self.seldom(2) else call

    def turn(self) -> list[dict[str, Any]]:
        messages = [self.question()]
        if self.tools and not self.seldom(3):
            asked = self.answer(calls=True)
            messages.append(asked)
            for call in asked["tool_calls"]:
                result: dict[str, Any] = {"role": "tool", "content": self.text()}
                if "id" in call:
                    result["tool_call_id"] = call["id"]
                if self.seldom(2):
                    result["name"] = call["function"]["name"]
                messages.append(result)
        messages.append(self.answer())
        if self.kinds.any_order and self.seldom(15):
            messages.append(self.answer())
        return messages

    def messages(self) -> list[dict[str, Any]]:
        messages = []
        if self.kinds.system and self.seldom(3):
            messages.append({"role": "system", "content": self.text()})
        if self.kinds.any_order and self.seldom(12):
            messages.append(self.answer())
        for _ in range(self.draw(st.integers(1, 3))):
            messages += self.turn()
        if self.kinds.any_order and len(messages) > 3 and self.seldom(10):
            messages.append(self.question())
        return messages

    def record(self, **others: Any) -> dict[str, Any]:
        return others | ({"tools": self.tools} if self.tools else {})


@st.composite
def conversations(draw: Any, kinds: Kinds = ALL) -> dict[str, Any]:
    """Returns a record of messages, or TRL's of a prompt and a completion."""
    writer = _Writer(draw, kinds)
    if kinds.any_order and writer.seldom(15):
        return {"prompt": writer.text(), "completion": writer.text()}
    messages = writer.messages()
    if kinds.any_order and writer.seldom(8):
        last = max(i for i, each in enumerate(messages) if each["role"] == "user")
        if last + 1 < len(messages):
            return writer.record(prompt=messages[: last + 1], completion=messages[last + 1 :])
    return writer.record(messages=messages)


@st.composite
def pairs(draw: Any) -> dict[str, Any]:
    """Returns a record of a chosen and a rejected answer."""
    writer = _Writer(draw, ALL)
    if writer.seldom(4):
        return {"prompt": writer.text(), "chosen": writer.text(), "rejected": writer.text()}
    messages = writer.messages()
    last = max(i for i, each in enumerate(messages) if each["role"] == "user")
    prompt, chosen = messages[: last + 1], messages[last + 1 :] or [writer.answer()]
    chosen = [{k: v for k, v in each.items() if k != "weight"} for each in chosen]
    rejected = [writer.answer()]
    rejected[0].pop("weight", None)
    if writer.seldom(3):
        return writer.record(chosen=prompt + chosen, rejected=prompt + rejected)
    return writer.record(prompt=prompt, chosen=chosen, rejected=rejected)
