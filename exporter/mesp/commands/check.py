from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from mesp.bundle.compare_with_source import compare_with_source
from mesp.bundle.reader import load
from mesp.commands.command import Command
from mesp.commands.export import describe_loss
from mesp.engine.process import check_device, stream_records
from mesp.errors import EngineError
from mesp.formatting import printable
from mesp.settings.command_options import add_options
from mesp.settings.train_settings import TrainSettings
from mesp.source_model.find import find_source

CHECKS = ("block.outputs", "gradients.cpu", "gradients.mebp", "repeats", "resume")


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--files", is_flag=True, help="Check only the files, and train nothing.")
@click.option(
    "--source", metavar="MODEL",
    help="Train nothing, and compare logits of a short text with those of MODEL, the bundle's "
    "source, by its own model in mlx-lm, which needs memory for its weights in float32.",
)  # fmt: skip
@add_options(TrainSettings, names=("device",))
def main(bundle: Path, files: bool, source: str | None, device: str | None) -> None:
    """Check the files in BUNDLE by their digests, then training with it on this machine.

    A line is printed for each check of training that fails; the exit code is then 1. With --source
    it is 2 where more than quantization tells the bundle from its source.
    """
    opened = load(bundle)
    opened.verify()
    if source is not None:
        comparison = compare_with_source(opened, find_source(source, random_weights=False))
        click.echo(f"quantization  {describe_loss(comparison.loss)}")
        for name, difference in (("source", comparison.read), ("bundle", comparison.written)):
            click.echo(f"{name}        logits differ by {difference:.1e} from its own in mlx-lm")
        comparison.check()
        click.echo(f"{bundle} computes what {source} does, except for quantization.")
    elif files:
        click.echo(f"The files of {bundle} are whole.")
    else:
        _check_training(bundle, device)


def _check_training(bundle: Path, device: str | None) -> None:
    check_device(device)
    verdicts: Counter[str] = Counter()
    what = {"checks": CHECKS, "repeats": 2, "seconds": 0.1}
    settings = {"bundle": str(bundle.resolve()), "device": device, **what}
    for record in stream_records("self-check", settings):
        if record["type"] == "check":
            verdicts[record["verdict"]] += 1
            if record["verdict"] == "fail":
                click.echo(printable(f"{record['name']}: {record['sentence']}"))
    if verdicts["fail"]:
        raise EngineError(f"{verdicts['fail']} of {verdicts.total()} checks of {bundle} failed.")
    click.echo(f"The files of {bundle} are whole; none of {verdicts.total()} checks failed.")
