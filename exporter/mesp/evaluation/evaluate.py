from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mesp.adapters.weighted import StrPath, describe, list_folders, weigh
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.data.fields import OPTIONS
from mesp.data.prompts import as_trained
from mesp.data.records import Conversation
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.images import open_images
from mesp.errors import MespError
from mesp.evaluation.evaluated_model import AT_ONCE, EvaluatedModel, running_model
from mesp.evaluation.metrics import Metric
from mesp.evaluation.records import AnswerRecord, TextRecord, read_records
from mesp.evaluation.results import Row, format_table, make_rows
from mesp.evaluation.score_records import ScoringOptions, score_records
from mesp.models.config_json import complete, find_positions
from mesp.progress import ProgressCallback, Task

if TYPE_CHECKING:
    from mesp.evaluation.harness import Tasks

MAX_LENGTH = 2048
MAX_TOKENS = 256  # of an answer


@dataclass(frozen=True)
class Evaluation:
    """The figures of an evaluation, with a row for each metric of each model.

    `max_length` is the limit of the tokens that a model sees at once. `str` returns a table.
    """

    rows: tuple[Row, ...]
    samples: tuple[Any, ...]
    max_length: int
    cut: int

    def __str__(self) -> str:
        return format_table(self.rows)


def evaluate(
    bundle: Bundle | StrPath,
    data: StrPath | None = None,
    *,
    adapters: StrPath | Sequence[StrPath] = (),
    weights: Sequence[float] = (),
    base: bool = True,
    tasks: Tasks | None = None,
    limit: int | None = None,
    max_length: int | None = None,
    chat: bool | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    extract: str | None = None,
    is_json: bool = False,
    at_once: int = AT_ONCE,
    device: str | None = None,
    ignore: Sequence[str] = (),
    split_special_tokens: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    vision: str | None = None,
    progress: ProgressCallback | None = None,
) -> Evaluation:
    """Measures how good a bundle's model is, with and without adapters.

    The measure depends on the records' fields:

    - ``text``: perplexity, bits per byte, and the KL divergence from the base model in nats a token
    - ``prompt``, ``choices`` and ``answer``: accuracy of choosing
    - ``prompt`` and ``completion``, or ``messages``: share of right answers, and F1 of the words

    An interval holds 95% of the draws of a bootstrap over the records.

    Args:
        bundle: A bundle or its folder.
        data: A file of records or of text, or ``-`` for JSON lines on standard input.
        adapters: A folder of adapters, or several, to compare with the base model.
        weights: A factor from 0 to 10 for each folder of `adapters`. If given, the folders'
            weighted sum is measured in place of each folder.
        base: Whether the base model is measured too. Without adapters, it always is.
        tasks: Tasks of lm-evaluation-harness, in place of `data`.
        limit: The number of records of `data` to use, from the first; None: all.
        max_length: The largest number of tokens that the model sees at once; the beginning of
            longer prompts is cut off. None: the model's, at most 2,048.
        chat: Whether prompts go into the chat template; None: only if answers are written, as the
            bundle's data or if the tokenizer has a template.
        max_tokens: The largest number of tokens in an answer; 256 by default.
        stop: Texts that end an answer, and are not part of it.
        extract: A regular expression; an answer is its first match, or its group if it has one.
        is_json: Whether answers are JSON: values are compared, and the share of valid JSON is
            measured.
        at_once: How many answers are written together, from 1 to 16.
        device: ``cpu`` or ``gpu``; None: a GPU if MLX can use one.
        ignore: Fields of records and of their messages to leave out.
        split_special_tokens: Whether special tokens in the records are encoded as ordinary text;
            None: as the bundle's data.
        chat_template_kwargs: Options of the chat template for records that have none; None: as the
            bundle's data.
        vision: The model whose vision tower reads images, as `export` takes it; None: the one that
            the bundle is of.
        progress: Called with the progress of the evaluation.

    Raises:
        MespError: The bundle, the data, the adapters or an argument cannot be used, or the engine
            fails.
    """
    path = bundle.path if isinstance(bundle, Bundle) else Path(bundle)
    manifest = read_manifest(path)
    each = [weigh(folder) for folder in list_folders(adapters)]
    tuned = [weigh(adapters, weights)] if len(weights) else each
    models = [()] * (base or not tuned) + tuned
    if (data is None) == (tasks is None):
        raise MespError("Name either a file to measure on, or --tasks.")
    written = {"--max-tokens": max_tokens, "--stop": stop, "--extract": extract, "--json": is_json}
    of_data = {"--ignore": ignore, "--split-special-tokens": split_special_tokens}
    tokenizer, encoder = load_bundle_tokenizer(path), None
    total: int | None
    one: Callable[[EvaluatedModel, Callable[[], None]], tuple[list[Metric], Any]]
    if tasks is not None:
        from mesp.evaluation import harness

        check_unused(written | of_data, "is for DATA; a task says that itself")
        how = as_trained(
            manifest.encoding, bool(manifest.data), chat_template_kwargs=chat_template_kwargs
        )
        one = partial(harness.run, tasks=tasks, manager=tasks.manager(), kwargs=how[OPTIONS] or {})
        total = None
    else:
        records = read_records(os.fspath(data or ""), limit, tuple(ignore))
        if not isinstance(records[0], AnswerRecord):
            check_unused(written, 'is for records with "prompt" and "completion", or "messages"')
        if isinstance(records[0], TextRecord):
            check_unused({"--chat": chat}, "is for records with a prompt")
        how = as_trained(
            manifest.encoding, bool(manifest.data), chat=chat,
            split_special_tokens=split_special_tokens, chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        prompts = (each.prompt for each in records if isinstance(each, AnswerRecord))
        images = [i for each in prompts if isinstance(each, Conversation) for i in each.images]
        if images:
            encoder = open_images(manifest, vision, tokenizer)
            encoder.add(images)
        options = ScoringOptions(
            how["chat"], max_tokens or MAX_TOKENS, tuple(stop), _pattern(extract), is_json,
            bool(how["split_special_tokens"]), how[OPTIONS] or {}, encoder,
        )  # fmt: skip
        one, total = partial(score_records, records=records, options=options), len(records)

    positions, limit = read_limits(path)
    if limit and max_length and max_length > limit:
        raise MespError(
            f"Beyond {limit:,} tokens the model scales positions differently from the bundle; take "
            f"a --max-length up to {limit}, or export a bundle with a longer --seq-len."
        )
    max_length = max_length or min(positions, MAX_LENGTH, limit or MAX_LENGTH)
    # All models but the first are loaded once here, so that an error in adapters appears before
    # hours of work.
    for weighted in models[1:]:
        with running_model(path, weighted, tokenizer, max_length, device=device):
            pass
    names = [describe(weighted) or None for weighted in models]
    measured, cut = [], 0
    with encoder.rows_file() if encoder else nullcontext() as file:
        for weighted, name in zip(models, names, strict=True):
            shown = Task(progress, name or "base", total)
            with running_model(
                path, weighted, tokenizer, max_length, at_once, device, file
            ) as model:
                measured.append(one(model, shown.advance))
            cut = max(cut, model.cut)
    return Evaluation(
        make_rows(names, [metrics for metrics, _ in measured]),
        tuple(samples for _, samples in measured),
        max_length,
        cut,
    )


def check_unused(options: dict[str, Any], why: str) -> None:
    for name, value in options.items():
        if value not in (None, (), []) and value is not False:
            raise MespError(f"{name} {why}.")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise MespError(f"--extract {text} is not a regular expression: {error}.") from error


def read_limits(bundle: Path) -> tuple[int, int | None]:
    """Returns the number of positions that the model was trained for, or `MAX_LENGTH` if
    config.json lacks it, and the largest number of tokens for which the bundle's LongRoPE has the
    right factors, or None if there is no limit.
    """
    opened = Bundle(bundle)
    config = complete(opened.config())
    rope = config.get("rope_scaling") or {}
    limit = rope["original_max_position_embeddings"] if rope.get("type") == "longrope" else None
    is_short = limit and max(opened.manifest.seq_lens) <= limit
    return find_positions(config) or MAX_LENGTH, limit if is_short else None
