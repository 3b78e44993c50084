"""`mesp check`: whether a bundle is whole, and trains as it should on this machine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from mesp.bundle.reader import load
from mesp.commands.command import Command
from mesp.engine.process import records
from mesp.errors import EngineError
from mesp.formatting import printable

# The engine's checks of exactness. tools/check_gpu.py measures the machine.
CHECKS = ("block.outputs", "gradients.cpu", "gradients.mebp", "repeats", "resume")


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="Check the files alone, and train nothing.")
def main(bundle: Path, files: bool) -> None:
    """Check the files in BUNDLE by their digests, then training with it on this machine.

    A line is printed for each check of training that fails; the exit code is then 1.
    """
    load(bundle, to_run=not files).verify()
    if files:
        click.echo(f"The files of {bundle} are whole.")
        return
    verdicts: Counter[str] = Counter()
    settings = {"bundle": str(bundle.resolve()), "checks": CHECKS, "repeats": 2, "seconds": 0.1}
    for record in records("self-check", settings):
        if record["type"] == "check":
            verdicts[record["verdict"]] += 1
            if record["verdict"] == "fail":
                click.echo(printable(f"{record['name']}: {record['sentence']}"))
    if verdicts["fail"]:
        raise EngineError(f"{verdicts['fail']} of {verdicts.total()} checks of {bundle} failed.")
    click.echo(f"The files of {bundle} are whole; none of {verdicts.total()} checks failed.")
