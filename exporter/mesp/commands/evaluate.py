"""mesp-evaluate: how good a bundle's model is, with adapters and without, scored by mesp-engine."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path
from typing import Any

import click

from mesp.bundle.manifest import read_manifest
from mesp.commands.shared_options import ListOptions
from mesp.engine.prompts import load_tokenizer
from mesp.errors import MespError
from mesp.evaluation.measure import Options, measure
from mesp.evaluation.model import running_model
from mesp.evaluation.records import Task, Text, read_records
from mesp.evaluation.report import check_writable, rows, show, write
from mesp.files import read_object
from mesp.progress_bars import evaluation_progress

# Tokens that a model is given at once where nobody says: keys and values of all of them are held.
MAX_LENGTH = 2048


@click.command(
    cls=ListOptions,
    short_help="Measure how good a model is.",
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@click.option(
    "--adapters", multiple=True, type=click.Path(path_type=Path), metavar="FOLDER ...",
    help="Adapters of mesp-train, mlx-lm or PEFT to compare with the base model.",
)  # fmt: skip
@click.option("--base/--no-base", default=True, help="Whether the base model is measured too.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="The first so many records, of a task too."
)
@click.option(
    "--max-length", type=click.IntRange(min=2),
    show_default=f"the model's, at most {MAX_LENGTH:,}",
    help="Tokens that the model sees at once; longer prompts lose their beginning.",
)  # fmt: skip
@click.option(
    "--chat/--no-chat", default=None,
    show_default="--chat for answers to write where the tokenizer has one, --no-chat otherwise",
    help="Put prompts into the chat template.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=1), show_default="256", help="Of an answer.")
@click.option(
    "--stop",
    "stops",
    multiple=True,
    metavar="TEXT ...",
    help="What ends an answer, and is no part.",
)
@click.option(
    "--extract", metavar="REGEX",
    help="Compare what it finds first in an answer, its group where it has one.",
)  # fmt: skip
@click.option(
    "--json", "is_json", is_flag=True,
    help="Answers are JSON: how many are valid, and values are compared.",
)  # fmt: skip
@click.option(
    "--tasks", multiple=True, metavar="TASK ...",
    help="Run these tasks of lm-evaluation-harness in place of DATA; commas separate them too.",
)  # fmt: skip
@click.option(
    "--include-path", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder with tasks of your own, in YAML, whose `!function` runs Python of that folder: "
    "name none that you do not trust.",
)  # fmt: skip
@click.option("--num-fewshot", type=click.IntRange(min=0), help="Examples before each of a task.")
@click.option("--out", type=click.Path(path_type=Path), help="Write all figures there, as JSON.")
def main(
    bundle: Path, data: str | None, adapters: tuple[Path, ...], base: bool, limit: int | None,
    max_length: int | None, chat: bool | None, max_tokens: int | None, stops: tuple[str, ...],
    extract: str | None, is_json: bool, tasks: tuple[str, ...], include_path: Path | None,
    num_fewshot: int | None, out: Path | None,
) -> None:  # fmt: skip
    """Measure how good the model in BUNDLE is, with adapters and without.

    DATA is a JSONL file, or - for standard input. Records with "text" give its perplexity, with
    "prompt", "choices" and "answer" the accuracy of choosing, with "prompt" and "completion", or
    "messages", how many answers are right.
    """
    read_manifest(bundle)
    folders = [None] * (base or not adapters) + list(adapters)
    names = tuple(name for each in tasks for name in each.split(",") if name)
    if (data is None) == (not names):
        raise MespError("Name either a JSONL file to measure on, or --tasks.")
    written = {"--max-tokens": max_tokens, "--stop": stops, "--extract": extract, "--json": is_json}
    if names:
        check_unused(written, "is for DATA; a task says that itself")
        from mesp.evaluation import harness

        if include_path is not None:
            click.echo(f"Note: tasks in {include_path} may run Python code of theirs.", err=True)
        chosen = harness.Tasks(names, include_path, num_fewshot, limit, bool(chat))
        evaluate, total = partial(harness.run, tasks=chosen, manager=chosen.manager()), None
    else:
        of_tasks = {"--include-path": include_path, "--num-fewshot": num_fewshot}
        check_unused(of_tasks, "needs --tasks")
        records = read_records(data, limit)
        if not isinstance(records[0], Task):
            check_unused(written, 'is for records with "prompt" and "completion", or "messages"')
        if isinstance(records[0], Text):
            check_unused({"--chat": chat}, "is for records with a prompt")
        options = Options(chat, max_tokens or 256, stops, pattern(extract), is_json)
        evaluate, total = partial(measure, records=records, options=options), len(records)
    if out is not None:
        check_writable(out)
        if data is not None and out.exists() and out.resolve() == Path(data).resolve():
            raise MespError(f"--out {out} is the data; name another file.")

    measured, cut = [], 0
    try:
        tokenizer = load_tokenizer(bundle)
        max_length = max_length or min(context_of(bundle), MAX_LENGTH)
        for folder in folders[1:]:  # what cannot be loaded is said before the others take hours
            with running_model(bundle, folder, tokenizer, max_length):
                pass
        with evaluation_progress() as bar:
            for folder in folders:
                task = bar.add_task("base" if folder is None else str(folder), total=total)
                with running_model(bundle, folder, tokenizer, max_length) as model:
                    measured.append(evaluate(model, partial(bar.advance, task)))
                cut = max(cut, model.cut)
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    if cut:
        click.echo(f"Prompts that --max-length {max_length:,} cut to their end: {cut:,}.", err=True)
    found = rows(folders, [metrics for metrics, _ in measured])
    show(found)
    if out is not None:
        what = {"bundle": str(bundle), "adapters": folders, "data": data, "tasks": list(tasks)}
        what["max_length"] = max_length
        write(out, what, found, [samples for _, samples in measured])
        click.echo(f"Figures: {out}")


def check_unused(options: dict[str, Any], why: str) -> None:
    """Raises MespError where one of the options was given."""
    for name, value in options.items():
        if value not in (None, ()) and value is not False:
            raise MespError(f"{name} {why}.")


def pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise MespError(f"--extract {text} is no regular expression: {error}.") from error


def context_of(bundle: Path) -> int:
    """How many tokens the model was made for."""
    try:
        length = read_object(bundle / "config.json").get("max_position_embeddings")
    except (OSError, ValueError) as error:
        raise MespError(f"{bundle / 'config.json'} cannot be read ({error}).") from error
    return length if type(length) is int and length > 1 else MAX_LENGTH
