from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, takewhile
from operator import eq
from typing import Any, NamedTuple

import numpy as np

from mesp.data.chat_template import MARK, MARKS, PROBE, Form, Rendering, apply_template
from mesp.data.messages import CALLS
from mesp.data.special_tokens import Bounds, special_pattern, special_tokens, tokens
from mesp.errors import MespError


class Span(NamedTuple):
    """The characters [start, stop) of an answer in a rendering.

    `said` is the end of the answer's last text. The characters from `said` to `stop` end the
    answer, for example with an end token.
    """

    start: int
    said: int
    stop: int


@dataclass(frozen=True)
class Encoded:
    """The N token ids of a record's text, and a `mask` [N], true for tokens in the loss.

    `notes` are messages for the user, `unread` the names of keys that nothing reads, and `options`
    the arguments of the chat template. `label` is of an answer in preference data, and `where` the
    record's place. `places` uint32 [N] are those of `Split`.
    """

    ids: list[int]
    mask: np.ndarray
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    label: int | None = None
    where: str = ""
    places: np.ndarray | None = None


def encode_conversation(rendering: Rendering, loss_on: str) -> Encoded:
    """`loss_on` names the part in the loss: ``answers``, ``last`` (the last message, if it is an
    answer) or ``all``.

    With other templates, the conversation is rendered up to each answer to find the answer.

    Raises MespError if the conversation cannot be trained on, for example because an answer is
    empty or contains an end token.
    """
    tokenizer, conversation = rendering.tokenizer, rendering.conversation
    trained = conversation.trained(loss_on)
    for index in conversation.answers:
        message = conversation.messages[index]
        if not message["content"].strip() and CALLS not in message:
            raise empty_answer(index)
    notes, unread = rendering.check()
    found = trained if loss_on != "all" else sorted({*trained, *conversation.untrained})
    try:
        spans = _spans(rendering, found, notes) if found else {}
    except MespError:
        if loss_on != "all" or conversation.untrained:
            raise
        spans = {}
    written = rendering.written(rendering.form.marked, rendering.text)
    text, spans, written, added = _with_ends(rendering, spans, written, notes)
    ids, offsets = rendering.tokens(text, written, rendering.form.marked + added)
    ends, mask = end_tokens(tokenizer), np.full(len(ids), loss_on == "all")
    for index, span in spans.items():
        inside = [at for at, (a, b) in enumerate(offsets) if a < span.stop and b > span.start]
        mask[inside] = index in trained
        within = [ids[at] for at in inside if ids[at] in ends and offsets[at][0] < span.said]
        if index in trained and within:
            raise MespError(
                f"message {index + 1} is an answer with the end token "
                f"{tokenizer.decode(within[:1])} in it, which the chat template adds: leave it out."
            )
    if trained and loss_on != "all" and (loss_on == "last" or conversation.prompt):
        first, prompt = trained[0], ids[: int(np.argmax(mask))]
        if first and rendering.encode(first, asks=True)[: len(prompt)] != prompt:
            raise MespError(
                f"the prompt for the answer in message {first + 1} is not the beginning of the "
                "conversation in the chat template: take records of messages and --loss-on "
                "answers, or leave it out."
            )
    return Encoded(ids, mask, tuple(notes), tuple(unread), conversation.options)


def empty_answer(index: int) -> MespError:
    return MespError(
        f"message {index + 1} is an empty answer: leave it out, or give it the weight 0."
    )


def _spans(rendering: Rendering, answers: Sequence[int], notes: list[str]) -> dict[int, Span]:
    marks, spans = rendering.generated, {}
    for index in answers:
        said = [p for p in rendering.places if rendering.texts[p.text].message == index]
        if not said:
            raise _not_found(index)
        if marks is None:
            *bounds, note = _bounds(rendering.form, index)
            start, stop = map(rendering.to_rendered, bounds)
            notes += [note] if note else []
        else:
            first = said[0].start
            start, stop = next((b for b in marks if b[0] <= first < b[1]), (-1, -1))
        # Texts are compared, not places, because a template may repeat a text elsewhere, such as a
        # tool's name.
        inside = {p.text for p in rendering.places_in(start, stop)}
        if not 0 <= start < stop or inside != {p.text for p in said}:
            raise _not_found(index)
        spans[index] = Span(start, max(p.stop for p in said if p.stop <= stop), stop)
    return spans


def _not_found(index: int) -> MespError:
    return MespError(
        f"the chat template does not tell where the answer in message {index + 1} begins and ends: "
        "take --loss-on all, or leave the record out."
    )


@lru_cache(maxsize=4096)
def _bounds(form: Form, index: int) -> tuple[int, int, str]:
    """Returns the bounds of the answer in message `index` in the rendering with marks, and a note
    for the user, which may be empty.
    """
    marked, first = form.marked, form.marks_of(index)[0].start()
    is_last = index == len(form.messages) - 1
    stop = len(marked) if is_last else _stop(form, index)
    asked = _asked(form, index)
    anchor, after = _last_mark(form, asked)
    if asked:
        gap = marked[anchor:first]
        agreed = _agreed(form.tokenizer, asked[after:], gap)
        opening = asked[after + agreed :]
        told = form.render(index) if opening else asked
        same = _agreed(form.tokenizer, told[after:], asked[after:])
        if not opening or agreed >= same:
            note = ""
            if is_last and opening.strip() not in gap[agreed:]:
                note = (
                    f"Answers that begin without {opening!r}, with which the chat template asks "
                    "for them"
                )
            return anchor + agreed, stop, note
        header = asked[max(after + same, 0) :]
    else:
        asked, told = map(form.render_question, (True, False))
        header = asked[_agreed(form.tokenizer, told, asked) :]
        before = [found.end() for found in MARKS.finditer(marked, 0, first)]
        anchor = before[-1] if before else 0
        gap = marked[anchor:first]
    # The two renderings differ before the answer, or there is only one rendering. So `header`, the
    # end of the generation prompt, is looked for. A beginning of the header is enough if it has a
    # special token.
    opened, bounds = tokens(form.tokenizer, header)
    special = special_tokens(form.tokenizer)
    for count in range(len(opened), 0, -1):
        length = bounds[count - 1][1]
        at = gap.rfind(header[:length])
        if at >= 0 and (count == len(opened) or special.intersection(opened[:count])):
            return anchor + at + length, stop, ""
    raise _not_found(index)


def _asked(form: Form, index: int) -> str:
    try:
        return form.render(index, asks=True) if index else ""
    except Exception:
        return ""


def _stop(form: Form, index: int) -> int:
    until = form.render(index + 1)
    anchor, after = _last_mark(form, until)
    return anchor + _agreed(form.tokenizer, until[after:], form.marked[anchor:])


def alike(a: Sequence[Any], b: Sequence[Any]) -> int:
    return sum(1 for _ in takewhile(bool, map(eq, a, b)))


def _last_mark(form: Form, beginning: str) -> tuple[int, int]:
    """Finds the last text that is in both the full rendering and `beginning`, a rendering of the
    first messages.

    Returns the text's end in the full rendering, and its end in `beginning`.
    """
    for found in reversed(list(MARKS.finditer(beginning))):
        # A template may repeat a text, such as a tool's name. So occurrences of a mark are counted.
        before = beginning.count(found[0], 0, found.start())
        there = [each.end() for each in re.finditer(found[0], form.marked)]
        if len(there) > before:
            return there[before], found.end()
    return 0, 0


def _agreed(tokenizer: Any, a: str, b: str) -> int:
    longest = min(len(a), len(b))
    if a[:longest] == b[:longest]:
        return longest
    ids, bounds = tokens(tokenizer, a)
    same = alike(ids, tokens(tokenizer, b[: 2 * len(a) + 100])[0])
    return bounds[same - 1][1] if same else 0


def _with_ends(
    rendering: Rendering, spans: dict[int, Span], written: Bounds, notes: list[str]
) -> tuple[str, dict[int, Span], Bounds, str]:
    """Returns the rendering with an end token after each answer that ends the model's turn."""
    tokenizer, text = rendering.tokenizer, rendering.text
    is_end = _end_patterns(tokenizer, str(tokenizer.chat_template), *end_tokens(tokenizer))
    end, cuts, ended = tokenizer.eos_token or "", [], {}
    for index, span in sorted(spans.items(), key=lambda item: item[1].start):
        stop, shift = span.stop, len(end) * len(cuts)
        if not is_end[0].search(text[span.said : stop]):
            following = next((start for start, _ in written if start >= stop), len(text))
            # The end token may come right after the answer's span. It belongs to the answer, even
            # if it also opens the next turn.
            if after := is_end[1].match(text, stop, following):
                stop = after.end()
            elif not _goes_on(rendering.form, index):
                if not end:
                    raise MespError(
                        "the chat template ends an answer without a token at which generation "
                        "stops, and the tokenizer has none: take a model that has one."
                    )
                cuts.append(stop)
                notes.append(
                    f"Answers that the chat template does not end: {end} was put after each"
                )
        ended[index] = Span(span.start + shift, span.said + shift, stop + len(end) * len(cuts))
    shifts = [len(end) * bisect_right(cuts, start) for start, _ in written]
    moved = [(a + shift, b + shift) for (a, b), shift in zip(written, shifts, strict=True)]
    pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    return end.join(pieces), ended, moved, end * len(cuts)


@lru_cache(maxsize=4)
def _end_patterns(
    tokenizer: Any, template: str, *ends: int
) -> tuple[re.Pattern[str], re.Pattern[str]]:
    followed = _template_ends(tokenizer, template)[1]
    written = {tokenizer.decode([id]) for id in {*ends, *followed}}
    token = "|".join(map(re.escape, sorted(filter(str.strip, written), key=len, reverse=True)))
    return re.compile(rf"(?:{token or '(?!)'})\s*\Z"), re.compile(rf"\s*(?:{token or '(?!)'})")


@lru_cache(maxsize=4096)
def _goes_on(form: Form, index: int) -> bool:
    messages = form.messages
    results = [*takewhile(lambda m: m["role"] in ("tool", "function"), messages[index + 1 :])]
    count = index + 1 + len(results)
    is_answered = count < len(messages) and messages[count]["role"] == "assistant"
    if not is_answered and (count < len(messages) or not (results or CALLS in messages[index])):
        return False
    asked = form.render_question(True)
    if asked != form.render_question(False):
        asked, told = _asked(form, count), form.render(count)
        header = asked[alike(told, asked) :].strip()
        if not is_answered:
            return not header
    else:  # the template writes the header after a question
        header = asked.partition(PROBE)[2].strip()
        if not is_answered and not results:
            return False
    start = max(mark.end() for mark in form.marks_of(index))
    stop = min((mark.start() for mark in form.marks_of(count)), default=len(form.marked))
    # A special token at the header's beginning may also open the turn of a tool, which is no reason
    # to leave an end out either.
    first = special_pattern(form.tokenizer).match(header)
    return not header or (first[0] if first else header.split()[0]) not in form.marked[start:stop]


def end_tokens(tokenizer: Any) -> set[int]:
    last, _ = _template_ends(tokenizer, str(tokenizer.chat_template))
    return {*tokenizer.eos_token_ids, *last}


@lru_cache(maxsize=4)
def _template_ends(tokenizer: Any, _template: str) -> tuple[list[int], list[int]]:
    turns = [
        {"role": role, "content": MARK.format(number)}
        for number, role in enumerate(("user", "assistant", "user"))
    ]
    special = special_tokens(tokenizer)
    try:
        asked = _tail(tokenizer, turns[:2], 0)
        last, followed = (_tail(tokenizer, turns[:count], 1) for count in (2, 3))
    except Exception:
        return [], []
    ends, shared, others, after_question = (
        [token for token in ids if token in special]
        for ids in (last, last[: alike(last, followed)], followed, asked)
    )
    # The first special token after an answer, if it also comes first after a question. The token
    # ends every message, or begins the next message.
    turn = others[:1] if others[:1] == after_question[:1] else []
    return ([*ends[-1:], *shared[-1:]], shared[-1:] or turn) if ends else ([], [])


def _tail(tokenizer: Any, turns: list[dict[str, str]], number: int) -> list[int]:
    text = apply_template(tokenizer, turns)
    _, _, after = text.partition(turns[number]["content"])
    return list(tokenizer.encode(MARKS.split(after)[0], add_special_tokens=False))
