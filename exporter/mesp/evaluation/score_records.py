from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mesp.data.chat_template import Rendering
from mesp.data.image_encoder import ImageEncoder
from mesp.data.prompts import encode_in_template, encode_prompt, render_checked
from mesp.data.records import Conversation
from mesp.data.special_tokens import encode_split, special_pattern, tokens
from mesp.errors import MespError
from mesp.evaluation.evaluated_model import EvaluatedModel
from mesp.evaluation.metrics import Metric, exponential
from mesp.evaluation.records import AnswerRecord, ChoiceRecord, Record, TextRecord
from mesp.exact_match import canonical_json, exact_match, extract, f1


@dataclass(frozen=True)
class ScoringOptions:
    # whether prompts use the chat template; if None, those of records with answers do, if there is
    # one
    chat: bool | None = None
    max_tokens: int = 256
    stops: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    is_json: bool = False
    split_special: bool = False
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    images: ImageEncoder | None = None


Sample = dict[str, Any]


def score_records(
    model: EvaluatedModel,
    advance: Callable[[], None],
    records: Sequence[Record],
    options: ScoringOptions,
) -> tuple[list[Metric], list[Sample]]:
    if isinstance(records[0], AnswerRecord):
        samples = _score_answers(model, advance, records, options)
        return _answer_metrics(samples), samples
    kinds: dict[type, Any] = {
        TextRecord: (_score_text, _text_metrics),
        ChoiceRecord: (_score_choices, _choice_metrics),
    }
    one, figures = kinds[type(records[0])]
    samples = []
    for record in records:
        with _named(record):
            samples.append(one(model, record, options))
        advance()
    return figures(samples), samples


@contextmanager
def _named(record: Record) -> Iterator[None]:
    try:
        yield
    except MespError as error:
        raise MespError(f"{record.where}: {error.message.rstrip('.')}.") from error


def _column(samples: list[Sample], key: str) -> list[float]:
    return [float(sample[key]) for sample in samples]


def _score_text(model: EvaluatedModel, record: TextRecord, options: ScoringOptions) -> Sample:
    encode = partial(encode_split, model.tokenizer) if options.split_special else None
    log_likelihood, tokens = model.log_likelihood(record.text, encode)
    size = len(record.text.encode())
    kl = model.divergence(record.text, encode)
    return {"log_likelihood": log_likelihood, "tokens": tokens, "bytes": size, "kl_from_base": kl}


def _text_metrics(samples: list[Sample]) -> list[Metric]:
    losses = [-value for value in _column(samples, "log_likelihood")]
    bits = [loss / math.log(2) for loss in losses]
    tokens, size = _column(samples, "tokens"), _column(samples, "bytes")
    return [
        Metric.of("perplexity", losses, tokens, final=exponential, higher_is_better=False),
        Metric.of("bits_per_byte", bits, size, higher_is_better=False),
        Metric.of("kl_from_base", _column(samples, "kl_from_base"), tokens, higher_is_better=False),
    ]


def _score_choices(model: EvaluatedModel, record: ChoiceRecord, options: ScoringOptions) -> Sample:
    prompt = record.prompt
    encode = partial(encode_split, model.tokenizer) if options.split_special else None
    if options.chat:
        message = {"role": "user", "content": prompt}
        conversation = Conversation([message], options=options.kwargs)
        rendering = render_checked(model.tokenizer, conversation, options.split_special)
        prompt = rendering.render(conversation.messages, asks=True)
        encode = partial(_in_chat, rendering, prompt) if options.split_special else None
    pairs = [model.encode_pair(prompt, c, not options.chat, encode) for c in record.choices]
    scores = model.scores(pairs[0][0], [continuation for _, continuation in pairs])
    values = [score.log_likelihood for score in scores]
    by_length = [v / len(c.strip()) for v, c in zip(values, record.choices, strict=True)]
    chosen = [max(range(len(each)), key=each.__getitem__) for each in (values, by_length)]
    return {
        "log_likelihoods": values,
        "chosen": chosen[0],
        "acc": chosen[0] == record.answer,
        "acc_norm": chosen[1] == record.answer,
    }


def _in_chat(rendering: Rendering, prompt: str, text: str, add_special_tokens: bool) -> list[int]:
    written = rendering.written(rendering.form.render(1, asks=True), prompt)
    choice = special_pattern(rendering.tokenizer).finditer(text, len(prompt.rstrip()))
    bounds = [*written, *(found.span() for found in choice)]
    return tokens(rendering.tokenizer, text, bounds)[0]


def _choice_metrics(samples: list[Sample]) -> list[Metric]:
    return [Metric.of(name, _column(samples, name)) for name in ("acc", "acc_norm")]


def _score_answers(
    model: EvaluatedModel,
    advance: Callable[[], None],
    records: Sequence[Any],
    options: ScoringOptions,
) -> list[Sample]:
    prompts = []
    for record in records:
        with _named(record):
            prompts.append(_prompt(model.tokenizer, record, options))
    written = model.write(prompts, options.max_tokens, options.stops, advance)
    return [_compare(*each, options) for each in zip(records, written, strict=True)]


def _compare(record: AnswerRecord, written: str, options: ScoringOptions) -> Sample:
    answer = extract(options.pattern, written)
    wanted = extract(options.pattern, record.answer)
    wanted = record.answer.strip() if wanted is None else wanted
    sample: Sample = {"written": written, "answer": answer}
    sample["exact_match"] = exact_match(answer, wanted, options.is_json)
    sample["f1"] = f1(answer or "", wanted)
    if options.is_json:
        sample["valid_json"] = canonical_json(answer or "") is not None
    return sample


def _answer_metrics(samples: list[Sample]) -> list[Metric]:
    names = [name for name in ("exact_match", "f1", "valid_json") if name in samples[0]]
    return [Metric.of(name, _column(samples, name)) for name in names]


def _prompt(tokenizer: Any, record: AnswerRecord, options: ScoringOptions) -> list[int]:
    split = options.split_special
    if isinstance(record.prompt, str):
        return encode_prompt(
            tokenizer, record.prompt, options.chat, split_special=split, options=options.kwargs
        )
    if options.chat is False:
        raise MespError("messages go through the chat template; leave out --no-chat")
    asked = replace(record.prompt, options=record.prompt.options or options.kwargs)
    return encode_in_template(tokenizer, asked, split, options.images)
