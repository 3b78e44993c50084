from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mesp.bundle import export
from mesp.bundle.export_options import ExportOptions
from mesp.bundle.manifest import File
from mesp.bundle.weight_files import WeightFiles, weight_bytes, weight_files
from mesp.bundle.writer import write_model
from mesp.commands.command import Command
from mesp.data.load import DataOptions
from mesp.engine.build import engine_path
from mesp.engine.plan import find_plans
from mesp.errors import MespError, plain_os_errors
from mesp.formatting import megabytes
from mesp.models.architecture import Architecture
from mesp.models.quantization_formats import Quantization
from mesp.models.short_names import KNOWN, geometries
from mesp.quantization.choose import choose_quantizations
from mesp.source_model.find import Source

LISTED_LENGTHS, LISTED_RANK = [256, 1024], 8

LISTED = {"model": "<", "parameters": ">", "MB on disk": ">", "licence": "<"}
LISTED |= {f"peak MB, {length:,} tokens": ">" for length in LISTED_LENGTHS}


@click.command(cls=Command)
def main() -> None:
    """List the models that have short names, with the memory that training takes.

    The size is that of the weights; peaks are of training with the default plan. Variants of one
    geometry share a row.
    """
    show_models()


def show_models() -> None:
    labels = {
        first: ", ".join([first, *(name.removeprefix(first) for name in others)])
        for first, *others in geometries()
    }
    longest = {"model": labels.values(), "licence": [license for _, license, _ in KNOWN.values()]}
    widths = {title: max(map(len, (title, *longest.get(title, ())))) for title in LISTED}
    console = Console()

    def show(*cells: str) -> None:
        padded = (
            f"{cell:{side}{widths[title]}}"
            for cell, (title, side) in zip(cells, LISTED.items(), strict=True)
        )
        console.out(f"| {' | '.join(padded)} |", highlight=False)

    show(*LISTED)
    show(*(f"{'-' * (widths[title] - 1)}{'-' if s == '<' else ':'}" for title, s in LISTED.items()))
    built = os.access(engine_path(), os.X_OK)
    with console.status("") as status:
        for name, label in labels.items():
            status.update(f"Planning {name}")
            repo, license, config = KNOWN[name]
            arch = Architecture.from_config(config)
            options = ExportOptions(
                out=Path(name), data=None, data_options=DataOptions(), seq_lens=LISTED_LENGTHS,
                ranks=[LISTED_RANK], quantizations=choose_quantizations(arch, Quantization(), None),
                dtype=export.DTYPE, seed=0, overwrite=False,
            )  # fmt: skip
            files = weight_files(None, arch, options)
            peaks = ["-"] * len(LISTED_LENGTHS)
            if built:
                try:
                    plans = plans_without_weights(Source(name, repo, config), arch, files, options)
                    peaks = [megabytes(plan["predicted_peak_bytes"]) for plan in plans.values()]
                except MespError as error:
                    click.echo(f"{name}: {error.message}", err=True)
            size = megabytes(weight_bytes(files))
            show(label, f"{arch.num_parameters / 1e6:,.0f} M", size, license, *peaks)
    if not built:
        click.echo(
            "The trainer predicts the peaks: mesp-train builds it, or `make engine`.", err=True
        )


def plans_without_weights(
    source: Source, arch: Architecture, files: WeightFiles, options: ExportOptions
) -> dict[int, dict[str, Any]]:
    """Planning does not read weights."""
    with (
        plain_os_errors("Cannot plan the training"),
        tempfile.TemporaryDirectory(prefix="mesp-") as path,
    ):
        folder = Path(path)
        manifest = write_model(folder, source, arch, files, options, lambda size: None)
        listed = tuple(
            File(str(file.relative_to(folder)), file.stat().st_size, "")
            for file in folder.rglob("*")
            if file.is_file()
        )
        manifest = replace(manifest, files=listed)
        manifest.write(folder)
        return find_plans(folder, manifest)
