"""Compares predicted peaks, mapped bytes and counts in documents with what is computed today.

No weights are needed. DOCUMENTED has the tables. A sentence with such a figure has an entry in
docs/measurements.json with "computed". Exit code 1: a document states another figure.

\b
  python tools/studies/computed_figures.py             # the planner's figures
  python tools/studies/computed_figures.py --counts    # also a phone's GPU's: some minutes
  python tools/studies/computed_figures.py --write     # writes them into the documents
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))
from mesp.bundle.data_files import write_data
from mesp.bundle.export import prepare_export
from mesp.bundle.manifest import File, Manifest, sha256
from mesp.bundle.weight_files import weight_files
from mesp.bundle.writer import write_model
from mesp.commands.command import Command
from mesp.data.load import make_random_data
from mesp.engine.build import find_engine
from mesp.engine.process import find_count, find_plan
from mesp.errors import MespError
from mesp.models.layout import DTYPE_OF
from mesp.models.short_names import KNOWN
from studies.benchmarks.cells import Cell
from studies.benchmarks.preferences import write_pairs
from studies.benchmarks.tables import PARTS
from studies.benchmarks.variants import OFFLOADS

ROOT = Path(__file__).resolve().parents[2]
PLANNED = ("predicted_peak_bytes", "mapped_bytes", "read_weight_bytes")

Figures = dict[int, list[float]]
"""The numbers that cells of a row state, by column, in the unit of the document."""


class Size(NamedTuple):
    """A model's short name, and the options of its export."""

    model: str
    seq_len: int = 256
    rank: int = 8
    layers: int | None = None
    is_read: bool = False  # whether the manifest has the digests of the weight files


class Bundles:
    """Bundles without weights. Their weight files are sparse, because planning and counting do not
    read them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.find = cache(self._write)
        self.plan = cache(self._plan)
        self.count = cache(self._count)

    def _write(self, size: Size) -> tuple[Path, Manifest]:
        folder = self.folder / f"{len(list(self.folder.iterdir()))}.mesp"
        job = prepare_export(
            size.model, folder, data=None, data_options=None, seq_len=size.seq_len, rank=size.rank,
            mode=None, bits=None, group_size=None, head_bits=None, quantize="nearest",
            calibrate=None, random_weights=True, layers=size.layers, seed=0, overwrite=False,
        )  # fmt: skip
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(job.source.config), encoding="utf-8")
        arch, options = job.architecture, job.options
        files = weight_files(None, arch, options)
        manifest = write_model(folder, job.source, arch, files, options, lambda size: None)
        data = write_data(folder, "data", make_random_data(arch.vocab_size, size.seq_len, 0))
        listed = tuple(
            File(str(file.relative_to(folder)), file.stat().st_size,
                 sha256(file) if size.is_read or file.suffix != ".bin" else "0" * 64)
            for file in sorted(folder.rglob("*")) if file.is_file()
        )  # fmt: skip
        manifest = replace(manifest, data=data, files=listed)
        manifest.write(folder)
        return folder, manifest

    def _plan(self, size: Size, threads: int, **settings: Any) -> dict[str, Any]:
        """Returns the engine's plan of a run. The default optimizer is SGD."""
        folder, _ = self.find(size)
        asked = {"bundle": str(folder), "seq_len": size.seq_len, "rank": size.rank}
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
        return find_plan(find_engine(), {**asked, "optimizer": "sgd", **settings})

    def _count(self, size: Size) -> dict[str, Any]:
        """Returns the counts of a step on a phone's GPU."""
        folder, _ = self.find(size._replace(is_read=True))
        asked = {"bundle": str(folder), "seq_len": size.seq_len, "rank": size.rank}
        return find_count({**asked, "method": "mesp", "val_batches": 0, "save_every": 0})

    def peak(self, size: Size, threads: int = 2, **settings: Any) -> float:
        """Returns the predicted peak in MB."""
        return self.plan(size, threads, **settings)["predicted_peak_bytes"] / 1e6


class Table(NamedTuple):
    """A table in a document, with a function that computes a row's figures."""

    page: str
    heading: str
    figures: Callable[[Bundles, list[str]], Figures]
    number: int = 0
    """Among the tables under this heading."""
    is_counted: bool = False
    """Whether it takes the ledger, which is slow."""


def short_name(text: str) -> str:
    """Returns the short name of a row's model. Rows of Qwen2.5 have only the size."""
    name = text.partition(",")[0]
    return name if name in KNOWN else f"Qwen2.5-{name}"


def by_length(bundles: Bundles, row: list[str]) -> Figures:
    size = Size(short_name(row[0]), int(row[1].replace(",", "")))
    return {6: [bundles.peak(size, offload=offload) for offload in OFFLOADS["mesp"]]}


def by_model(bundles: Bundles, row: list[str]) -> Figures:
    layers = re.search(r"(\d+) blocks", row[0])
    size = Size(short_name(row[0]), layers=layers and int(layers[1]))
    how = {"threads": 1, "optimizer": "adamw8bit"}
    return {2: [bundles.peak(size, offload="none", **how)],
            4: [bundles.peak(size, offload="all", **how)]}  # fmt: skip


def by_part(bundles: Bundles, row: list[str]) -> Figures:
    name = row[0].partition(" (")[0]
    part = {key: tuple(value) if isinstance(value, list) else value
            for key, value in PARTS[name].items()}  # fmt: skip
    return {2: [bundles.peak(Size("Qwen2.5-0.5B"), optimizer="adamw8bit", **part)]}


def by_optimizer(bundles: Bundles, row: list[str]) -> Figures:
    settings: dict[str, Any] = {} if row[0].startswith("SGD") else {"optimizer": "adamw8bit"}
    for option, value in re.findall(r"`--(\S+) (\w+)`", row[0]):
        settings[option.replace("-", "_")] = int(value) if value.isdigit() else value
    return {2: [bundles.peak(Size("Qwen2.5-0.5B"), **settings)]}


def private(bundles: Bundles, row: list[str]) -> Figures:
    size = Size("SmolLM2-135M")
    folder, _ = bundles.find(size)
    cell = Cell(size.model, folder, 30, size.seq_len, size.rank, "cpu", DTYPE_OF["cpu"])
    data = write_pairs(cell, 8, folder / "records", labelled=False)
    settings = {"dp_clip": 1, "dp_noise": 1} if "--dp-clip" in row[0] else {"max_grad_norm": 1e6}
    return {3: [bundles.peak(size, batch_size=4, data=str(data), **settings)]}


def counted(bundles: Bundles, row: list[str]) -> Figures:
    count = bundles.count(Size(short_name(row[0]), int(row[1].replace(",", ""))))
    strict = count["strict"]
    peaks = [strict["ledger_peak_bytes"] / 1e6, strict["predicted_peak_bytes"] / 1e6]
    counts = [count["evals"], count["kernels"], count["tflop"], strict["command_buffers"]]
    values = [*counts, *peaks, count["modelled_seconds"]]
    return {column: [value] for column, value in enumerate(values, start=2)}


PERFORMANCE = "docs/performance.md"
DOCUMENTED = (
    Table(PERFORMANCE, "Memory by length", by_length),
    Table(PERFORMANCE, "On a phone's GPU, by count", counted, is_counted=True),
    Table(PERFORMANCE, "Other families, 256 tokens", by_model),
    Table(PERFORMANCE, "Parts of the adapters", by_part),
    Table(PERFORMANCE, "Defaults", by_optimizer, 1),
    Table("docs/privacy.md", "Cost", private),
)


def of_sentence(bundles: Bundles, computed: dict[str, Any]) -> float:
    """Computes the figure of an entry of docs/measurements.json, in the entry's unit."""
    settings = dict(computed)
    figure = settings.pop("figure")
    size = Size(**{name: settings.pop(name) for name in Size._fields if name in settings})
    if figure in PLANNED:
        return bundles.plan(size, settings.pop("threads", 2), **settings)[figure] / 1e6
    count = bundles.count(size)
    return count["strict"][figure[7:]] if figure.startswith("strict_") else count[figure]


def rewritten(cell: str, values: list[float]) -> str:
    """Replaces the first number of each part of a table's cell by the part's value, and keeps its
    number of decimals. The parts are separated by ` / `.
    """

    def replaced(part: str, value: float) -> str:
        def form(found: re.Match[str]) -> str:
            return f"{value:,.{len(found[0].partition('.')[2])}f}"

        return re.sub(r"\d[\d,]*(?:\.\d+)?", form, part, count=1)

    return " / ".join(map(replaced, cell.split(" / "), values))


def table_lines(lines: list[str], table: Table) -> list[int]:
    """Returns the indices of the lines with a table's rows, without its two heading lines."""
    begin = lines.index(f"## {table.heading}")
    end = next((i for i in range(begin + 1, len(lines)) if lines[i].startswith("#")), len(lines))
    heads = [i for i in range(begin, end) if re.match(r"\|[-| ]+$", lines[i])]
    if len(heads) <= table.number:
        raise MespError(f"{table.page} has no table {table.number} under {table.heading}.")
    first = last = heads[table.number] + 1
    while lines[last].startswith("|"):
        last += 1
    return list(range(first, last))


def compare_tables(
    bundles: Bundles, tables: tuple[Table, ...], root: Path, write: bool
) -> Iterator[str]:
    """Yields a sentence for each cell that differs from the computed figure. With `write`, corrects
    the cell.
    """
    for table in tables:
        page = root / table.page
        lines = page.read_text(encoding="utf-8").split("\n")
        for index in table_lines(lines, table):
            row = [cell.strip() for cell in lines[index].split("|")[1:-1]]
            for column, values in table.figures(bundles, row).items():
                cell = rewritten(row[column], values)
                if cell != row[column]:
                    where = f"{table.page}, {table.heading}, {', '.join(row[:2])}"
                    yield f"{where}, column {column + 1}: {row[column]} is {cell}"
                    parts = lines[index].split("|")
                    parts[column + 1] = parts[column + 1].replace(row[column], cell)
                    lines[index] = "|".join(parts)
        if write:
            page.write_text("\n".join(lines), encoding="utf-8")


def compare_sentences(bundles: Bundles, root: Path, has_counts: bool, write: bool) -> Iterator[str]:
    """Yields a sentence for each entry of docs/measurements.json that differs from the computed
    figure.

    With `write`, corrects the entry and the sentences with its value.
    """
    file = root / "docs" / "measurements.json"
    entries = json.loads(file.read_text(encoding="utf-8"))
    for entry in entries:
        computed = entry.get("computed")
        if not computed or not (has_counts or computed["figure"] in PLANNED):
            continue
        old = f"{entry['value']:,}"
        new = rewritten(old, [of_sentence(bundles, computed)])
        if new != old:
            yield f"docs/measurements.json, {entry['name']}: {old} is {new}"
            entry["value"] = json.loads(new.replace(",", ""))
            for name, sentences in entry["stated"].items() if write else ():
                text = (root / name).read_text(encoding="utf-8")
                for parts in (sentence.split("{}") for sentence in sentences):
                    spaced = [re.escape(part).replace(r"\ ", r"\s+") for part in parts]
                    pattern = re.escape(old).join(f"({part})" for part in spaced)
                    text = re.sub(pattern, rf"\g<1>{new}\g<2>", text)
                (root / name).write_text(text, encoding="utf-8")
    if write:
        text = json.dumps(entries, indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


@click.command(cls=Command, help=__doc__)
@click.option("--counts", is_flag=True, help="Count steps on a phone's GPU, too.")
@click.option("--write", is_flag=True, help="Write the figures into the documents.")
def main(counts: bool, write: bool) -> None:
    tables = tuple(table for table in DOCUMENTED if counts or not table.is_counted)
    with tempfile.TemporaryDirectory() as folder:
        bundles = Bundles(Path(folder))
        found = list(compare_tables(bundles, tables, ROOT, write))
        found += compare_sentences(bundles, ROOT, counts, write)
    click.echo("\n".join(found) or "The documents state what is computed.")
    if found and not write:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
