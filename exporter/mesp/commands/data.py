"""`mesp data`: replaces the data in a bundle."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from mesp.bundle.data_files import describe_data, replace_data
from mesp.bundle.manifest import read_manifest
from mesp.commands.command import Command
from mesp.commands.data_options import data_options
from mesp.data.load import DataOptions, load
from mesp.data.sources import SOURCES
from mesp.text import load_tokenizer


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--data", required=True, metavar="FILE|DIR|NAME", help=f"The new data: {SOURCES}.")
@data_options
def main(bundle: Path, data: str, data_options: DataOptions) -> None:
    """Replace the data in BUNDLE, a folder that mesp-export wrote, using its tokenizer."""
    manifest = read_manifest(bundle, to_run=False)
    vocab_size = manifest.architecture.vocab_size
    with Console(stderr=True).status("Tokenizing"):
        tokenizer = load_tokenizer(bundle)
        splits = load(data, tokenizer, max(manifest.seq_lens), vocab_size, data_options)
    click.echo(f"{bundle} now has {describe_data(replace_data(bundle, splits).data)}.")
