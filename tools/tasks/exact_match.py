"""Whether a bundle's model answers as it should, to the letter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mesp.data.answers import encode_answers
from mesp.engine.generate import generate
from mesp.engine.prompts import load_tokenizer
from tasks.house import Case


class Answer(NamedTuple):
    """What the model wrote for a case, as far as it was read, and whether it is right."""

    text: str
    is_right: bool


def answers(
    bundle: Path, cases: list[Case], adapters: Path | None = None, *, whole: int
) -> list[Answer]:
    """The model's answers, always its likeliest token, until they are as long as the right ones.

    Those after the first `whole` are read until they are wrong.
    """
    tokenizer = load_tokenizer(bundle)
    found = []
    for number, case in enumerate(cases):
        said = {"user": case.prompt, "assistant": case.completion}
        messages = [{"role": role, "content": content} for role, content in said.items()]
        ids, counted = encode_answers(tokenizer, messages, None)
        start = int(counted.argmax())
        right = ids[start : ids.index(tokenizer.eos_token_id, start) + 1]
        written: list[int] = []
        for record in generate(bundle, ids[:start], adapters=adapters, max_tokens=len(right)):
            if record["type"] == "token":
                written.append(record["token"])
            if number >= whole and written != right[: len(written)]:
                break
        text = tokenizer.decode(written).partition(tokenizer.eos_token)[0]
        found.append(Answer(text.strip(), written == right))
    return found
