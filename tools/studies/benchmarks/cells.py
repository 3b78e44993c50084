import itertools
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mesp
from mesp.bundle.manifest import BlockGroup, read_manifest
from mesp.bundle.reader import Bundle
from mesp.bundle.rewriter import link
from mesp.errors import MespError
from mesp.models.layout import DTYPE_OF
from mesp.models.short_names import KNOWN
from mesp.source_model.find import find_source
from studies.benchmarks.machine import cpu

DEVICE = "cpu"  # unless a table names another
Row = dict[str, Any]


class Cell(NamedTuple):
    model: str
    bundle: Path
    blocks: int
    seq_len: int
    rank: int
    device: str
    dtype: str

    def row(self) -> Row:
        row = self._asdict() | {"cpu": cpu(), "os": platform.platform()}
        del row["bundle"]
        return row


def find_cells(options: dict[str, Any], layers: int | None, work: Path) -> list[Cell]:
    cells = []
    for model in quantized_models(options, work):
        bundle = Path(model)
        if not (bundle / "manifest.json").is_file():
            bundle = export(model, options, layers, work)
        elif layers or options.get("data"):
            raise MespError(f"{model} is a bundle: --layers and --data are of its export.")
        manifest = read_manifest(bundle)
        name = manifest.name.removesuffix("-random")
        blocks = manifest.architecture.num_hidden_layers
        device = options.get("device", DEVICE)
        kind = (device, DTYPE_OF[device])
        sizes = itertools.product(options["seq_lens"], options["ranks"])
        cells += [Cell(name, bundle, blocks, *size, *kind) for size in sizes]
    return cells


def quantized_models(options: dict[str, Any], work: Path) -> Iterator[str]:
    """Yields the table's models. For a table with quantizations, yields a folder for each model and
    quantization.

    The folder has only a config.json, which declares the quantization of all matrices.
    """
    for model in options["models"]:
        if "quantizations" not in options:
            yield model
            continue
        if (Path(model) / "manifest.json").is_file():
            raise MespError(f"{model} is a bundle: this table quantizes geometries itself.")
        config = find_source(model, random_weights=True).config
        for bits, group_size in options["quantizations"]:
            folder = work / "geometries" / f"{Path(model).name}-{bits}bit-{group_size}"
            folder.mkdir(parents=True, exist_ok=True)
            quantization = {"quantization": {"bits": bits, "group_size": group_size}}
            text, file = json.dumps(config | quantization), folder / "config.json"
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                file.write_text(text, encoding="utf-8")
            yield str(folder)


def export(model: str, options: dict[str, Any], layers: int | None, work: Path) -> Path:
    """Returns the path of the model's bundle in `work`.

    The bundle has the model's own weights if the table has the option `data`, and for the demo
    model and GGUF files. Otherwise the weights are random.
    """
    seq_lens, ranks = {*options["seq_lens"]}, {*options["ranks"]}
    learns = "data" in options
    data = options["data"] or "python-docs" if learns else None
    name = Path(model).name if "quantizations" in options else model.strip("/").replace("/", "-")
    parts = [name, layers and f"{layers}-blocks", data and "data"]
    path = work / ("-".join(part for part in parts if part) + ".mesp")
    if model in KNOWN or "quantizations" in options:
        with suppress(MespError):
            manifest = read_manifest(path)
            seq_lens, ranks = seq_lens | {*manifest.seq_lens}, ranks | {*manifest.ranks}
            written = (path / "manifest.json").stat().st_mtime
            sources = [*Path(mesp.__file__).parent.rglob("*.py"), *Path(model).glob("config.json")]
            current = all(file.stat().st_mtime < written for file in sources)
            covered = (sorted(seq_lens), sorted(ranks)) == ([*manifest.seq_lens], [*manifest.ranks])
            if current and covered:
                return path
    command = ["--model", model, "--out", path, "--overwrite"]
    sizes = {"--seq-len": seq_lens, "--rank": ranks}
    for option, numbers in sizes.items():
        command += [option, ",".join(map(str, sorted(numbers)))]
    command += ["--layers", layers] if layers else []
    command += ["--data", data] if data else []
    command += ["--quantize", "nearest"] if "quantizations" in options else []
    command += [] if model == "demo" or learns or model.endswith(".gguf") else ["--random-weights"]
    program = [sys.executable, "-c", "from mesp.commands.export import main; main()"]
    done = subprocess.run(
        [*program, *map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["mesp-export failed."]
        raise MespError(said[-1].removeprefix("Error: "))
    return path


def without_functions(bundle: Path, out: Path) -> Path:
    """Writes the bundle `out` with the weights and data of `bundle` but no block functions."""
    old = Bundle(bundle)
    files = tuple(e for e in old.manifest.files if e.path not in old.function_files())
    blocks = tuple(BlockGroup(each.layers, {}, {}, each.layout) for each in old.manifest.blocks)
    shutil.rmtree(out, ignore_errors=True)
    for entry in files:
        link(bundle / entry.path, out / entry.path)
    replace(old.manifest, blocks=blocks, files=files).write(out)
    return out
