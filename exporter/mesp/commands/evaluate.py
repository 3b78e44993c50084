from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mesp.commands.command import Command, several
from mesp.commands.data_options import ignore_option
from mesp.commands.progress_bars import evaluation_progress
from mesp.commands.prompt_options import prompt_options, vision_option
from mesp.errors import MespError
from mesp.evaluation.evaluate import MAX_LENGTH, MAX_TOKENS, check_unused, evaluate
from mesp.evaluation.evaluated_model import AT_ONCE
from mesp.evaluation.results import check_writable, format_table, write_results
from mesp.settings.command_options import add_options
from mesp.settings.train_settings import TrainSettings


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("data", required=False)
@several(
    "--adapters", kind=click.Path(path_type=Path), metavar="FOLDER,...",
    help="Adapters of mesp-train, mlx-lm or PEFT to compare with the base model.",
)  # fmt: skip
@several(
    "--weights", kind=click.FLOAT, metavar="NUMBER,...",
    help="A factor from 0 to 10 for each of --adapters: measure the model with their sum, instead "
    "of each.",
)  # fmt: skip
@click.option("--base/--no-base", default=True, help="Whether the base model is measured too.")
@click.option(
    "--limit", type=click.IntRange(min=1), help="Number of records, the first ones, also of a task."
)
@click.option(
    "--max-length", type=click.IntRange(min=2),
    show_default=f"the model's, at most {MAX_LENGTH:,}",
    help="Tokens that the model sees at once; longer prompts lose their beginning.",
)  # fmt: skip
@prompt_options(
    "for answers to write as the bundle's data, or where the tokenizer has one; --no-chat otherwise"
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), show_default=str(MAX_TOKENS),
    help="Most tokens of an answer.",
)  # fmt: skip
@click.option(
    "--stop", multiple=True, metavar="TEXT",
    help="Text that ends an answer and is not part of it; repeatable.",
)  # fmt: skip
@click.option(
    "--extract", metavar="REGEX",
    help="Compare the first match in an answer, or the match of its group.",
)  # fmt: skip
@click.option(
    "--json", "is_json", is_flag=True,
    help="Answers are JSON: count the valid ones, and compare values.",
)  # fmt: skip
@click.option(
    "--at-once", type=click.IntRange(1, 16), default=AT_ONCE, show_default=True,
    help="Most answers that are generated together, as far as memory allows.",
)  # fmt: skip
@add_options(TrainSettings, names=("device",))
@ignore_option
@several(
    "--tasks", metavar="TASK,...",
    help="Run these tasks of lm-evaluation-harness in place of DATA.",
)  # fmt: skip
@click.option(
    "--include-path", type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder with tasks of your own, in YAML, whose `!function` runs Python of that folder: "
    "name none that you do not trust.",
)  # fmt: skip
@click.option(
    "--num-fewshot", type=click.IntRange(min=0), help="Examples before each question of a task."
)
@vision_option
@click.option("--out", type=click.Path(path_type=Path), help="Write all figures there, as JSON.")
def main(
    bundle: Path, data: str | None, tasks: tuple[str, ...], include_path: Path | None,
    num_fewshot: int | None, out: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Measure how good the model in BUNDLE is, with adapters and without.

    DATA is a file of records (.jsonl, .json, .csv, .tsv, .parquet) or of text (.txt, .md), or - for
    JSON lines on standard input. Records with "text" give its perplexity, with "prompt", "choices"
    and "answer" the accuracy of choosing, with "prompt" and "completion", or "messages", how many
    answers are right.
    """
    if (data is None) == (not tasks):
        raise MespError("Name either a file to measure on, or --tasks.")
    chosen = None
    if tasks:
        from mesp.evaluation import harness

        if include_path is not None:
            click.echo(f"Note: tasks in {include_path} may run their own Python code.", err=True)
        chosen = harness.Tasks(
            tasks, include_path, num_fewshot, options["limit"], bool(options["chat"])
        )
    else:
        of_tasks = {"--include-path": include_path, "--num-fewshot": num_fewshot}
        check_unused(of_tasks, "needs --tasks")
    if out is not None:
        check_writable(out)
        if data is not None and out.exists() and out.resolve() == Path(data).resolve():
            raise MespError(f"--out {out} is the data; name another file.")
    with evaluation_progress() as progress:
        found = evaluate(bundle, data, tasks=chosen, progress=progress, **options)
    if found.cut:
        cut = f"Prompts that --max-length {found.max_length:,} cut to their end: {found.cut:,}."
        click.echo(cut, err=True)
    console = Console()
    click.echo(format_table(found.rows, console.width if console.is_terminal else 200))
    if out is not None:
        names = dict.fromkeys(row.adapters for row in found.rows)
        what: dict[str, Any] = {"bundle": str(bundle), "adapters": list(names), "data": data}
        what |= {"tasks": list(tasks), "max_length": found.max_length}
        write_results(out, what, found.rows, found.samples)
        click.echo(f"Figures: {out}")
