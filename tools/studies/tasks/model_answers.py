from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from mesp.adapters.weighted import weigh
from mesp.data.chat_template import Rendering
from mesp.data.loss_mask import encode_conversation
from mesp.data.records import Conversation
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.process import evaluator
from studies.tasks.house_requests import Case

AT_ONCE = 8


class Answer(NamedTuple):
    text: str
    is_right: bool


def answers(
    bundle: Path, cases: list[Case], adapters: Path | None = None, *, whole: int
) -> list[Answer]:
    """Returns the model's greedy answers, up to the length of the right ones.

    Generation stops at the first wrong token, except for the first `whole` answers.
    """
    tokenizer = load_bundle_tokenizer(bundle)
    prompts, right = [], []
    for case in cases:
        said = {"user": case.prompt, "assistant": case.completion}
        messages = [{"role": role, "content": content} for role, content in said.items()]
        encoded = encode_conversation(Rendering(tokenizer, Conversation(messages)), "answers")
        ids, start = encoded.ids, int(encoded.mask.argmax())
        prompts.append(ids[:start])
        right.append(ids[start : ids.index(tokenizer.eos_token_id, start) + 1])
    written: list[list[int]] = [[] for _ in cases]

    def go_on(number: int, token: int) -> bool:
        written[number].append(token)
        so_far = right[number][: len(written[number])]
        return len(so_far) < len(right[number]) and (number < whole or written[number] == so_far)

    with evaluator(bundle, weigh(adapters)) as engine:
        for _ in engine.generate(prompts, max(map(len, right), default=1), [], AT_ONCE, go_on):
            pass
    texts = [tokenizer.decode(tokens).partition(tokenizer.eos_token)[0] for tokens in written]
    return [
        Answer(text.strip(), tokens == wanted)
        for text, tokens, wanted in zip(texts, written, right, strict=True)
    ]
