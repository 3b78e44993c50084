from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from mesp.bundle.data_files import describe_data, replace_data
from mesp.bundle.manifest import read_manifest
from mesp.commands.command import Command
from mesp.commands.data_options import data_options, given_data_options
from mesp.commands.show import show_records
from mesp.data.load import DataOptions, load
from mesp.data.sources import SOURCES
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--data", metavar="FILE|DIR|NAME", help=f"The new data: {SOURCES}.")
@click.option(
    "--show", type=click.IntRange(min=1), default=1,
    help="Print the first records as they are trained; text in the loss is marked.",
)  # fmt: skip
@data_options
def main(bundle: Path, data: str | None, show: int, data_options: DataOptions) -> None:
    """Replace the data in BUNDLE, a folder that mesp-export wrote, and use the bundle's tokenizer.
    Without --data, print records of the data that BUNDLE has."""
    if data is None:
        if options := given_data_options(click.get_current_context()):
            raise MespError(f"Name the new data with --data, which {options[0]} is about.")
        show_records(bundle, show)
        return
    manifest = read_manifest(bundle)
    vocab_size = manifest.architecture.vocab_size
    with Console(stderr=True).status("Tokenizing"):
        tokenizer = load_tokenizer(bundle)
        splits = load(data, tokenizer, max(manifest.seq_lens), vocab_size, data_options)
    click.echo(f"{bundle} now has {describe_data(replace_data(bundle, splits).data)}.")
    show_records(bundle, show)
