"""Compares the figures of documents that are computed, not measured, with what computes them today.

These are predicted peaks, mapped bytes, the counts of a step on a phone's GPU and numbers of
parameters. No weights are needed: they come from the models' geometries. A table states its figures
in the columns that TABLES names; what stands in sentences has an entry in docs/measurements.json
with "computed". Exit code 1: a document states another figure.

\b
  python tools/studies/computed_figures.py             # the planner's and the geometries' figures
  python tools/studies/computed_figures.py --counts    # also a phone's GPU's: some minutes
  python tools/studies/computed_figures.py --write     # writes them into the documents
"""

from __future__ import annotations

import itertools
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
from mesp.engine.process import find_plan
from mesp.errors import MespError
from mesp.models.layout import DTYPE_OF
from mesp.models.short_names import KNOWN
from studies.benchmarks.cells import Cell, Row, quantized_models
from studies.benchmarks.preferences import write_pairs
from studies.benchmarks.tables import COUNTED, KINDS, PARTS, TABLES, Bench
from studies.benchmarks.variants import OFFLOADS

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements.json"

Cells = dict[str, str]
"""A row of a table, by heading."""

Figures = dict[str, list[float]]
"""The numbers that cells of a row state, by heading, in the unit of the document."""


class Size(NamedTuple):
    model: str
    seq_len: int = 256
    rank: int = 8
    layers: int | None = None
    is_read: bool = False


class Bundles:
    """Bundles without weights. Their weight files are sparse, because planning and counting do not
    read them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.geometries = folder / "bundles", folder / "geometries"
        self.folder.mkdir()
        self.find = cache(self._write)
        self.plan = cache(self._plan)
        self.rows = cache(self._rows)

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
        folder, _ = self.find(size)
        asked = {"bundle": str(folder), "seq_len": size.seq_len, "rank": size.rank}
        os.environ["OPENBLAS_NUM_THREADS"] = str(threads)
        return find_plan(find_engine(), {**asked, "optimizer": "sgd", **settings})

    def _rows(self, table: str, model: str, *lengths: int) -> list[Row]:
        """Returns the rows of a table of tools/bench.py that only counts steps."""
        bench = HollowBench(self, table, (model,), lengths)
        return list(KINDS[table].rows(bench))

    def pairs(self, size: Size, labelled: bool) -> str:
        folder, manifest = self.find(size)
        blocks = manifest.architecture.num_hidden_layers
        cell = Cell(size.model, folder, blocks, size.seq_len, size.rank, "cpu", DTYPE_OF["cpu"])
        return str(write_pairs(cell, 8, folder / ("pairs" if labelled else "records"), labelled))

    def peak(self, size: Size, threads: int = 2, **settings: Any) -> float:
        return self.plan(size, threads, **settings)["predicted_peak_bytes"] / 1e6

    def mapped(self, size: Size) -> float:
        return self.plan(size, 2)["mapped_bytes"] / 1e6

    def parameters(self, size: Size, dora: bool = False) -> int:
        blocks = self.find(size)[1].architecture.blocks
        outputs = sum(out for block in blocks for out, _ in block.sizes().values())
        return sum(block.lora_size(size.rank) for block in blocks) + dora * outputs


class HollowBench(Bench):
    def __init__(
        self, bundles: Bundles, table: str, models: tuple[str, ...], lengths: tuple[int, ...]
    ) -> None:
        options = {**TABLES[table], "models": models, "seq_lens": lengths}
        super().__init__(table, options, bundles.folder)
        self.bundles = bundles

    def cells(self, whole: bool = False) -> list[Cell]:
        cells = []
        for model, length in itertools.product(self.options["models"], self.options["seq_lens"]):
            size = Size(model, length, is_read=True)
            folder, manifest = self.bundles.find(size)
            blocks = manifest.architecture.num_hidden_layers
            cells.append(Cell(model, folder, blocks, length, size.rank, "gpu", DTYPE_OF["gpu"]))
        return cells


class Table(NamedTuple):
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
    return name if name in KNOWN or name == "demo" else f"Qwen2.5-{name}"


def number(text: str) -> int:
    return int(text.replace(",", ""))


def blocks(text: str) -> int | None:
    found = re.search(r"(\w+) blocks", text)
    return found and (4 if found[1] == "four" else int(found[1]))


def by_length(bundles: Bundles, row: list[str]) -> Figures:
    size = Size(short_name(row[0]), number(row[1]))
    arch = bundles.find(size)[1].architecture
    inputs = arch.num_hidden_layers * size.seq_len * arch.hidden_size * 4 / 1e6
    written = [inputs, inputs + bundles.parameters(size) * 4 / 1e6]
    return {6: written, 7: [bundles.peak(size, offload=offload) for offload in OFFLOADS["mesp"]]}


def long(bundles: Bundles, row: list[str]) -> Figures:
    size = Size(short_name(row[0]), number(row[1]), layers=blocks(row[0]) or 2)
    return {3: [bundles.peak(size, threads=1, offload="all")]}


def by_model(bundles: Bundles, row: list[str]) -> Figures:
    return {2: [bundles.peak(Size(short_name(row[0])))]}


def recurrent(bundles: Bundles, row: list[str]) -> Figures:
    size = Size(row[0])
    peaks = [[bundles.peak(size, offload=offload)] for offload in OFFLOADS["mesp"]]
    return dict(zip((2, 4, 6), peaks, strict=True))


def with_adamw(bundles: Bundles, row: list[str]) -> Figures:
    size = Size(short_name(row[0]), layers=blocks(row[0]))
    how = {"threads": 1, "optimizer": "adamw8bit"}
    return {2: [bundles.peak(size, offload="none", **how)],
            4: [bundles.peak(size, offload="all", **how)]}  # fmt: skip


def by_bits(bundles: Bundles, row: list[str]) -> Figures:
    bits, group_size = map(int, row[0].split(","))
    options = {"models": ["Qwen2.5-0.5B"], "quantizations": [(bits, group_size)]}
    [model] = quantized_models(options, bundles.geometries)
    return {1: [bundles.mapped(Size(model))]}


def several_adapters(bundles: Bundles, row: list[str]) -> Figures:
    return {6: [int(row[0]) * bundles.parameters(Size("Qwen2.5-0.5B")) * 4 / 1e6]}


def by_rank(bundles: Bundles, row: list[str]) -> Figures:
    ranks = dict(enumerate((4, 8, 16, 32), start=1))
    return {column: [None, bundles.peak(Size(short_name(row[0]), rank=rank))]
            for column, rank in ranks.items()}  # fmt: skip


def by_part(bundles: Bundles, row: list[str]) -> Figures:
    name = row[0].partition(" (")[0]
    part = {key: tuple(value) if isinstance(value, list) else value
            for key, value in PARTS[name].items()}  # fmt: skip
    return {2: [bundles.peak(Size("Qwen2.5-0.5B"), optimizer="adamw8bit", **part)]}


def stored_h(bundles: Bundles, row: list[str]) -> Figures:
    size = Size(short_name(row[0]))
    arch = bundles.find(size)[1].architecture
    modules = [len(block.sizes()) for block in arch.blocks]
    mb = size.seq_len * size.rank * 4 / 1e6
    return {1: [modules[0] * mb], 2: [sum(modules) * mb]}


def by_optimizer(bundles: Bundles, row: list[str]) -> Figures:
    settings = {
        "SGD (`--paper`)": {},
        "AdamW in 8 bits, the default": {"optimizer": "adamw8bit"},
        "with clipping (`--max-grad-norm 1`)": {"optimizer": "adamw8bit", "max_grad_norm": 1},
        "with two sequences a step (`--batch-size 2`)": {"optimizer": "adamw8bit", "batch_size": 2},
        "AdamW in float32 (`--optimizer adamw`)": {"optimizer": "adamw"},
    }[row[0]]
    return {2: [bundles.peak(Size("Qwen2.5-0.5B"), **settings)]}


def records(bundles: Bundles, row: list[str]) -> Figures:
    return {5: [bundles.peak(Size(row[0], 512))]}


def batches(bundles: Bundles, row: list[str]) -> Figures:
    place, order = row[0].split(", by ")
    offload = {"in memory": "none", "inputs on disk": "inputs", "all on disk": "all"}[place]
    settings = {"batch_size": 4, "offload": offload, "order": order}
    size = Size("Qwen2.5-0.5B")
    read = bundles.plan(size, 2, **settings)["read_weight_bytes"] / 1e6
    return {2: [bundles.peak(size, **settings)], 3: [read]}


def preferences(bundles: Bundles, row: list[str]) -> Figures:
    settings: dict[str, Any] = {"optimizer": "adamw8bit", "max_grad_norm": 1}
    if objective := re.match(r"`(\w+)`", row[0]):
        settings = {"optimizer": "adamw8bit", "objective": objective[1]}
        settings |= {"batch_size": 2} if objective[1] == "kto" else {}
        settings["data"] = bundles.pairs(Size("Qwen2.5-0.5B"), labelled=True)
        settings |= {"offload": "inputs"} if "inputs on disk" in row[0] else {}
    return {5: [bundles.peak(Size("Qwen2.5-0.5B"), **settings)]}


def private(bundles: Bundles, row: list[str]) -> Figures:
    size = Size("SmolLM2-135M")
    settings: dict[str, Any] = {"batch_size": 4, "data": bundles.pairs(size, labelled=False)}
    settings |= {"dp_clip": 1, "dp_noise": 1} if "--dp-clip" in row[0] else {"max_grad_norm": 1e6}
    return {3: [bundles.peak(size, **settings)]}


def listed(bundles: Bundles, row: list[str]) -> Figures:
    name = short_name(row[0])
    arch = bundles.find(Size(name))[1].architecture
    peaks = {4: Size(name, 256), 5: Size(name, 1024)}
    return {1: [arch.num_parameters / 1e6], 2: [bundles.mapped(Size(name))]} | {
        column: [bundles.peak(size, threads=1, optimizer="adamw8bit")]
        for column, size in peaks.items()
    }


def of_dora(bundles: Bundles, row: list[str]) -> Figures:
    kind, rank = row[1].split(", rank ")
    model = row[0].partition(",")[0]
    return {2: [bundles.parameters(Size(model, rank=int(rank)), dora=kind == "DoRA")]}


COUNTS = ("evals", "kernels", "tflop", "ledger_peak_bytes", "predicted_peak_bytes")
SHORT = ("command_buffers", "spinning_seconds", "fast_command_buffers", "fast_ledger_peak_bytes",
         "strict_command_buffers", "strict_spinning_seconds", "strict_ledger_peak_bytes",
         "strict_predicted_peak_bytes", "slow_ledger_peak_bytes")  # fmt: skip
FUNCTIONS = ("evals", "kernels", "ledger_peak_bytes", "strict_ledger_peak_bytes",
             "strict_predicted_peak_bytes", "moved_bytes", "modelled_seconds")  # fmt: skip
PACKED = ("records_per_second", "to_alone", "evals", "kernels", "tflop", "ledger_peak_bytes",
          "modelled_seconds")  # fmt: skip


def columns(row: Row, names: tuple[str, ...], first: int) -> Figures:
    """Returns values of a row of tools/bench.py by column, from the column `first` on."""
    values = [row[name] / 1e6 if name.endswith("bytes") else row[name] for name in names]
    return {column: [value] for column, value in enumerate(values, start=first)}


def counted(bundles: Bundles, row: list[str]) -> Figures:
    [count] = bundles.rows("gpu", short_name(row[0]), number(row[1]))
    return columns(count, COUNTS, 2) | {8: [count["modelled_seconds"]]}


def short_buffers(bundles: Bundles, row: list[str]) -> Figures:
    [count] = bundles.rows("gpu", short_name(row[0]), number(row[1]))
    return columns(count, SHORT, 2)


def forward_pass(bundles: Bundles, row: list[str]) -> Figures:
    ways = {
        "functions": "functions",
        "formulas": "formulas",
        "formulas, `--dropout 0.1`": "dropout",
        "formulas, `--dora`": "dora",
    }
    counts = bundles.rows("functions", short_name(row[0]), number(row[1]))
    [count] = (each for each in counts if each["forward_pass"] == ways[row[2]])
    figures = columns(count, FUNCTIONS, 3)
    if count["forward_pass"] in ("dropout", "dora"):
        # A thread of MLX frees arrays late, so this peak differs from count to count.
        figures[3 + FUNCTIONS.index("ledger_peak_bytes")] = [None]
    return figures


def packed(bundles: Bundles, row: list[str]) -> Figures:
    counts = bundles.rows("packing-gpu", row[0], 64, 128, 256, 512)
    [count] = (each for each in counts if each["lengths"] == row[1])
    return columns(count, PACKED, 2)


PERFORMANCE = "docs/performance.md"
DOCUMENTED = (
    Table(PERFORMANCE, "Memory by length", by_length),
    Table(PERFORMANCE, "8,192 tokens and more", long),
    Table(PERFORMANCE, "On a phone's GPU, by count", counted, is_counted=True),
    Table(PERFORMANCE, "On a phone's GPU, by count", short_buffers, 1, is_counted=True),
    Table(PERFORMANCE, "Without block functions", forward_pass, is_counted=True),
    Table(PERFORMANCE, "Other families, 256 tokens", by_model),
    Table(PERFORMANCE, "Models with recurrent blocks", recurrent),
    Table(PERFORMANCE, "With AdamW in 8 bits, and mixtures of experts", with_adamw),
    Table(PERFORMANCE, "Weights of fewer bits", by_bits),
    Table(PERFORMANCE, "With several adapters", several_adapters),
    Table(PERFORMANCE, "Rank", by_rank),
    Table(PERFORMANCE, "Parts of the adapters", by_part),
    Table(PERFORMANCE, "Storing or recomputing h = xA", stored_h),
    Table(PERFORMANCE, "Defaults", by_optimizer, 2),
    Table(PERFORMANCE, "Short records", records),
    Table(PERFORMANCE, "Packed records", packed, is_counted=True),
    Table(PERFORMANCE, "Batches", batches),
    Table(PERFORMANCE, "Preference data", preferences),
    Table("docs/quality.md", "DoRA", of_dora),
    Table("docs/privacy.md", "Cost", private),
    Table("docs/models.md", "Models", listed),
)


def of_sentence(bundles: Bundles, computed: dict[str, Any]) -> float:
    names = {name: computed[name] for name in Size._fields if name in computed}
    settings = {name: value for name, value in computed.items()
                if name not in ("figure", *Size._fields)}  # fmt: skip
    figure, size = computed["figure"], Size(**names)
    if figure == "parameters":
        return bundles.parameters(size, **settings)
    if figure in ("predicted_peak_bytes", "mapped_bytes", "read_weight_bytes"):
        plan = bundles.plan(size, settings.pop("threads", 2), **settings)
        return plan[figure] / 1e6
    value = bundles.rows("gpu", size.model, size.seq_len)[0][figure]
    return value / 1e6 if figure.endswith("bytes") else value


def restated(stated: float | int, value: float) -> float | int:
    decimals = len(str(stated).partition(".")[2])
    return round(value, decimals) if decimals else round(value)


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def rewritten(cell: str, values: list[float | None]) -> str:
    """Replaces the first number of each part of a table's cell by the part's value, and keeps its
    number of decimals. The parts are separated by ` / `.
    """
    parts = re.split(r"( / )", cell)
    for index, value in zip(range(0, len(parts), 2), values, strict=True):
        found = NUMBER.search(parts[index])
        if found and value is not None:
            decimals = len(found[0].partition(".")[2])
            parts[index] = NUMBER.sub(f"{value:,.{decimals}f}", parts[index], count=1)
    return "".join(parts)


def split_row(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table_lines(lines: list[str], table: Table) -> Iterator[int]:
    headings = [
        i for i, line in enumerate(lines) if re.fullmatch(rf"#+ {re.escape(table.heading)}", line)
    ]
    [begin] = headings
    count = -1
    for index in range(begin + 1, len(lines)):
        if re.match("#+ ", lines[index]):
            break
        if not lines[index].startswith("|"):
            continue
        if not lines[index - 1].startswith("|"):
            count, first = count + 1, index
        if count == table.number and index >= first + 2:
            yield index


def compare_tables(
    bundles: Bundles, tables: tuple[Table, ...], root: Path, write: bool
) -> Iterator[str]:
    """Yields a sentence for each cell that differs from the computed figure. With `write`, corrects
    the cell.
    """
    for table in tables:
        page = root / table.page
        lines = page.read_text(encoding="utf-8").split("\n")
        rows = list(table_lines(lines, table))
        if not rows:
            raise MespError(f"{table.page} has no table {table.number} under {table.heading}.")
        for index in rows:
            row = split_row(lines[index])
            for column, values in table.figures(bundles, row).items():
                cell = rewritten(row[column], values)
                if cell != row[column]:
                    where = f"{table.page}, {table.heading}, {', '.join(row[:2])}"
                    yield f"{where}, column {column + 1}: {row[column]} is {cell}"
                    row[column] = cell
            if split_row(lines[index]) != row:
                widths = [len(cell) - 2 for cell in lines[index].strip().strip("|").split("|")]
                numeric = [
                    cell.startswith("  ") for cell in lines[index].strip().strip("|").split("|")
                ]
                cells = (cell.rjust(w) if right else cell.ljust(w)
                         for cell, w, right in zip(row, widths, numeric, strict=True))  # fmt: skip
                lines[index] = f"| {' | '.join(cells)} |"
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
        if computed is None or (computed["figure"] in COUNTED and not has_counts):
            continue
        old, new = entry["value"], restated(entry["value"], of_sentence(bundles, computed))
        if new != old:
            yield f"docs/measurements.json, {entry['name']}: {old} is {new}"
            entry["value"] = new
            for name, sentences in entry["stated"].items() if write else ():
                text = (root / name).read_text(encoding="utf-8")
                for sentence in sentences:
                    parts = [re.escape(part) for part in sentence.split("{}")]
                    text = restate(text, [re.sub(r"\\ ", r"\\s+", p) for p in parts], old, new)
                (root / name).write_text(text, encoding="utf-8")
    if write:
        text = json.dumps(entries, indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


def restate(text: str, parts: list[str], old: float, new: float) -> str:
    """Replaces the old value by the new one between these parts of a sentence."""
    pattern = re.escape(f"{old:,}").join(f"({part})" for part in parts)
    return re.sub(pattern, lambda m: f"{new:,}".join(m.groups()), text)


@click.command(cls=Command, help=__doc__)
@click.option("--counts", is_flag=True, help="Count steps on a phone's GPU, too.")
@click.option("--write", is_flag=True, help="Write the figures into the documents.")
@click.option("--only", metavar="TEXT", help="The tables whose headings contain this, alone.")
def main(counts: bool, write: bool, only: str | None) -> None:
    tables = tuple(
        table
        for table in DOCUMENTED
        if (counts or not table.is_counted) and (only or "") in table.heading
    )
    with tempfile.TemporaryDirectory() as folder:
        bundles = Bundles(Path(folder))
        found = list(compare_tables(bundles, tables, ROOT, write))
        if only is None:
            found += compare_sentences(bundles, ROOT, counts, write)
    click.echo("\n".join(found) or "The documents state what is computed.")
    if found and not write:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
