"""mesp-generate: writes on from a prompt with a bundle's model, run by mesp-engine.

The engine takes token ids and prints a record a token (docs/architecture.md); text is mlx-lm's
part: its tokenizer, chat template and streaming detokenizer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mesp.bundle import read_manifest
from mesp.engine import find_engine
from mesp.errors import MespError, plain_os_errors
from mesp.log import decimal, megabytes
from mesp.train import Positive, forward_signals


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--adapters",
    type=click.Path(path_type=Path),
    help="Adapter folder, as mesp-train, mlx-lm or PEFT writes it.  [default: none]",
)
@click.option("--prompt", required=True, help="What to write on from; - reads standard input.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0) | None if False else click.FloatRange(min=0),
    default=0.0,
    help="0 always takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=1.0,
    help="Draw only from the likeliest tokens, which have this probability together.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Of the draws.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Put the prompt into the chat template.  [default: where the tokenizer has one]",
)
def main(
    bundle: Path, adapters: Path | None, prompt: str, chat: bool | None, **options: Any
) -> None:
    """Write on from a prompt with the model in BUNDLE, a folder that mesp-export wrote.

    The text goes to standard output as it comes. Ctrl-C ends it.
    """
