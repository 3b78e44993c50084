from __future__ import annotations

from pathlib import Path

import click

from mesp.commands.command import Command
from mesp.runs.report import write_report


@click.command(cls=Command)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The page, *.html.")
def main(folders: tuple[Path, ...], out: Path) -> None:
    """Write a page with loss, memory, time, settings, events and samples of the runs in FOLDERS.

    A folder is a run's, or has runs in it, as tools/collect.py writes them. The pictures need
    matplotlib: pip install 'mesp[report]'.
    """
    write_report(folders, out)
    click.echo(out)
