"""Whether a bundle's model answers as it should, to the letter."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mesp.data.answers import encode_answers
from mesp.engine.process import evaluator
from mesp.text import bundle_tokenizer
from tasks.house import Case


class Answer(NamedTuple):
    """An answer of the model, as far as it was read, and whether it is right."""

    text: str
    is_right: bool


def answers(
    bundle: Path, cases: list[Case], adapters: Path | None = None, *, whole: int
) -> list[Answer]:
    """The model's answers, always its likeliest token, until they are as long as the right ones.

    Those after the first `whole` are read until they are wrong.
    """
    tokenizer = bundle_tokenizer(bundle)
    with evaluator(bundle, adapters) as engine:

        def answer(number: int, case: Case) -> Answer:
            said = {"user": case.prompt, "assistant": case.completion}
            messages = [{"role": role, "content": content} for role, content in said.items()]
            ids, counted = encode_answers(tokenizer, messages, None)
            start = int(counted.argmax())
            right = ids[start : ids.index(tokenizer.eos_token_id, start) + 1]
            written: list[int] = []

            def go_on(token: int) -> bool:
                written.append(token)
                return number < whole or written == right[: len(written)]

            engine.generate(ids[:start], len(right), stop=[], go_on=go_on)
            text = tokenizer.decode(written).partition(tokenizer.eos_token)[0]
            return Answer(text.strip(), written == right)

        return [answer(number, case) for number, case in enumerate(cases)]
