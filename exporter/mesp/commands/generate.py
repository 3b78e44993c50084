from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import click

from mesp.commands.command import Command, several
from mesp.commands.prompt_options import prompt_options, vision_option, weights_option
from mesp.data.source_files import read_utf8
from mesp.engine.generate import TextStream
from mesp.formatting import decimal, megabytes, printable
from mesp.settings.command_options import add_options
from mesp.settings.train_settings import TrainSettings


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@several(
    "--adapters", kind=click.Path(path_type=Path), metavar="FOLDER,...",
    show_default="the base model",
    help="Folder of adapters, from mesp-train, mlx-lm or PEFT, or several, to add their sum.",
)  # fmt: skip
@weights_option
@click.option("--prompt", required=True, help="The text to continue; - reads standard input.")
@click.option(
    "--image", "images", type=click.Path(path_type=Path), multiple=True,
    help="An image before the prompt; repeatable.",
)  # fmt: skip
@vision_option
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=256, help="Most tokens of the text."
)
@click.option(
    "--temp", "--temperature", "temperature", type=click.FloatRange(min=0, max=100), default=0.0,
    help="Temperature of sampling; 0 takes the likeliest token each time.",
)  # fmt: skip
@click.option(
    "--top-p", type=click.FloatRange(min=0, max=1, min_open=True), default=1.0,
    help="Draw from the fewest tokens whose probabilities sum up to this.",
)  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of sampling.")
@add_options(TrainSettings, names=("device",))
@click.option("--system-prompt", help="System prompt of the chat template.")
@prompt_options("as the bundle's data, or where the tokenizer has one")
def main(bundle: Path, prompt: str, **options: Any) -> None:
    """Continue a prompt with the model in BUNDLE, a folder that mesp-export wrote.

    The text goes to standard output as it comes; Ctrl-C ends it.
    """
    if prompt == "-":
        prompt = read_utf8("Standard input", sys.stdin.buffer.read)
    stream = TextStream(bundle, prompt, **options)
    # Control characters in a model's text could control the terminal.
    shown = printable if sys.stdout.isatty() else str
    for piece in stream:
        click.echo(shown(piece), nl=False)
    click.echo()
    if sys.stderr.isatty():
        click.echo(summary(stream.end, stream.prompt_tokens), err=True)
    if stream.end["reason"] == "stopped":
        raise SystemExit(128 + stream.end.get("signal", signal.SIGINT))


def summary(end: dict[str, Any], prompt_tokens: int) -> str:
    def speed(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens, {decimal(tokens / seconds if seconds else None, 1)} tokens/s"

    return (
        f"Prompt: {speed(prompt_tokens, end['prompt_seconds'])}. "
        f"Text: {speed(end['tokens'], end['seconds'])}. "
        f"Peak footprint {megabytes(end['footprint_peak_bytes'])} MB."
    )
