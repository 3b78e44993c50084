"""mesp-generate: writes on from a prompt with a bundle's model, run by mesp-engine.

The engine takes token ids (docs/architecture.md); text is mlx-lm's part: tokenizer, chat template
and streaming detokenizer.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click

from mesp.bundle.manifest import read_manifest
from mesp.data.records import read_utf8
from mesp.data.tokens import plain_errors
from mesp.engine.generate import generate
from mesp.engine.prompts import encode, load_tokenizer
from mesp.errors import Command
from mesp.formatting import decimal, megabytes, printable


@click.command(
    cls=Command,
    short_help="Write on from a prompt.",
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    help="Folder of adapters, of mesp-train, mlx-lm or PEFT.  [default: the base model]",
)
@click.option("--prompt", required=True, help="What to write on from; - reads standard input.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256)
@click.option(
    "--temp",
    "--temperature",
    "temperature",
    type=click.FloatRange(min=0, max=100),
    default=0.0,
    help="0 takes the likeliest token each time.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    help="Draw from the fewest tokens that are together as likely as this.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Of the draws.")
@click.option("--system-prompt", help="What the chat template says before the prompt.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put the prompt into the chat template.  [default: where the tokenizer has one]",
)
def main(
    bundle: Path,
    adapters: Path | None,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    system_prompt: str | None,
    chat: bool | None,
) -> None:
    """Write on from a prompt with the model in BUNDLE, a folder that mesp-export wrote.

    The text goes to standard output as it comes; Ctrl-C ends it.
    """
    read_manifest(bundle)
    tokenizer = load_tokenizer(bundle)
    if prompt == "-":
        prompt = read_utf8("Standard input", sys.stdin.buffer.read)
    tokens = encode(tokenizer, prompt, chat, system_prompt)
    records = generate(
        bundle,
        tokens,
        adapters=adapters,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=sorted(tokenizer.eos_token_ids),
    )
    detokenizer = tokenizer.detokenizer
    # A terminal would obey what a model writes.
    shown = printable if sys.stdout.isatty() else str
    for record in records:
        if record["type"] == "token":
            with plain_errors(f"Token {record['token']} is none of the tokenizer's"):
                detokenizer.add_token(record["token"])
            click.echo(shown(detokenizer.last_segment), nl=False)
    detokenizer.finalize()
    click.echo(shown(detokenizer.last_segment))
    if sys.stderr.isatty():
        click.echo(summary(record, len(tokens)), err=True)
    if record["reason"] == "stopped":
        raise SystemExit(128 + signal.SIGINT)


def summary(end: dict, prompt_tokens: int) -> str:
    """What an end record says, in a line."""

    def speed(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens, {decimal(tokens / seconds if seconds else None, 1)} tokens/s"

    return (
        f"Prompt: {speed(prompt_tokens, end['prompt_seconds'])}. "
        f"Text: {speed(end['tokens'], end['seconds'])}. "
        f"Peak footprint {megabytes(end['footprint_peak_bytes'])} MB."
    )
