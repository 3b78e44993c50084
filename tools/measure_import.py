"""Measures memory, time and bytes of mesp-engine import, which makes bundles on a phone.

Models get their true geometry and random weights, in MLX's format as mlx-lm saves it: 4 bits in
groups of 64, files of 5 GB. Each import is a separate process, which reads files that are not in
the system's cache.

\b
Columns, an MB being 1,000,000 bytes:
  footprint  the highest of the process's anonymous memory (phys_footprint on a Mac)
  beside     the footprint, less that of importing a model with almost no weights
  resident   the same difference of all resident memory, which includes mapped files
  read, written
             by the process's system calls (only on Linux)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mesp.commands.command import Command, several
from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.formatting import decimal, megabytes
from mesp.models.architecture import Architecture
from mesp.models.short_names import KNOWN
from mesp.models.tensor_names import name_there

WORK = Path(__file__).resolve().parents[1] / "build" / "import"
BITS, GROUP_SIZE = 4, 64
SHARD = 5 << 30  # The maximum size of a file in bytes, as in mlx-lm.
SCALES = {"bfloat16": "BF16", "float16": "F16"}
SIZES = {"U32": 4, "BF16": 2, "F16": 2}
TINY = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
RANDOM = os.urandom(1 << 24)
Tensor = tuple[str, str, tuple[int, ...]]  # name, type and shape


@click.command(cls=Command, help=__doc__)
@several(
    "--model", "models", metavar="NAME,...",
    default=("Qwen2.5-0.5B", "Qwen2.5-3B"), show_default=True,
    help="Short names, as mesp-export --list-models prints them.",
)  # fmt: skip
@click.option(
    "--scales", type=click.Choice([*SCALES]), default="bfloat16", show_default=True,
    help="The type of scales and norms in the model; float16 is rounded.",
)  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows there.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=WORK, show_default="build/import",
    help="Folder of the models and the bundles, on a disk (not tmpfs); they are deleted.",
)  # fmt: skip
def main(models: tuple[str, ...], scales: str, json_file: Path | None, work: Path) -> None:
    for name in models:
        if name not in KNOWN:
            raise MespError(f"There is no {name}; mesp-export --list-models prints the names.")
    engine = find_engine()
    least = measure(engine, TINY, scales, work)
    rows = []
    line = "{:<16} {:>9} {:>7} {:>9} {:>6} {:>9} {:>8} {:>9} {:>9}"
    heads = ("weights", "s", "MB/s", "footprint", "beside", "resident", "read", "written")
    click.echo(line.format("model (MB)", *heads))
    for name in models:
        row: dict[str, Any] = {"model": name, **measure(engine, KNOWN[name][2], scales, work)}
        row["beside"] = row["footprint"] - least["footprint"]
        row["resident"] -= least["resident"]
        rows.append(row)
        sizes = ("footprint", "beside", "resident", "read", "written")
        rate = row["weights"] / row["seconds"]
        click.echo(
            line.format(
                name, megabytes(row["weights"]), decimal(row["seconds"], 1),
                decimal(rate / 1e6, 0), *(megabytes(row[key]) for key in sizes),
            )
        )  # fmt: skip
    if json_file:
        json_file.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")


def measure(engine: Path, config: dict[str, Any], scales: str, work: Path) -> dict[str, Any]:
    model, bundle, file = work / "model", work / "model.mesp", work / "settings.json"
    for folder in (model, bundle):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        write_model(model, config, SCALES[scales])
        settings = {"model": str(model), "bundle": str(bundle)}
        file.write_text(json.dumps(settings))
        with subprocess.Popen([engine, "import", file], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            records = [json.loads(line) for line in process.stdout]
            moved, resident = account(process)
        if process.returncode != 0 or records[-1]["type"] != "end":
            raise MespError(f"mesp-engine import failed with exit status {process.returncode}.")
    finally:
        for folder in (model, bundle):
            shutil.rmtree(folder, ignore_errors=True)
        file.unlink(missing_ok=True)
    end = records[-1]
    return {
        "weights": end["bytes"],
        "seconds": end["seconds"],
        "footprint": end["footprint_peak_bytes"],
        "resident": resident,
        "read": moved.get("rchar"),
        "written": moved.get("wchar"),
    }


def account(process: subprocess.Popen[bytes]) -> tuple[dict[str, int], int]:
    """Returns its I/O counters (Linux) and peak resident memory in bytes."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    moved = {}
    if sys.platform == "linux":
        lines = Path(f"/proc/{process.pid}/io").read_text("utf-8").splitlines()
        moved = {key: int(value) for key, value in (line.split(": ") for line in lines)}
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return moved, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def write_model(folder: Path, config: dict[str, Any], scales: str) -> None:
    """Raises MespError if the disk has too little space for the model and its bundle."""
    arch = Architecture.from_config(config)
    tensors = list(quantized_tensors(arch, scales))
    size = sum(map(bytes_of, tensors))
    folder.mkdir(parents=True)
    if (free := shutil.disk_usage(folder).free) < 2.1 * size:
        raise MespError(
            f"The model and its bundle take {2.1 * size / 1e6:,.0f} MB, and the disk of {folder} "
            f"has {free / 1e6:,.0f} MB free; free some space or name another --work."
        )
    quantization = {"bits": BITS, "group_size": GROUP_SIZE}
    text = json.dumps(config | {"quantization": quantization})
    (folder / "config.json").write_text(text, "utf-8")
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(map(bytes_of, shards[-1])) + bytes_of(tensor) > SHARD:
            shards.append([])
        shards[-1].append(tensor)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        write_shard(folder / name, shard)
        weight_map |= {tensor[0]: name for tensor in shard}
    index = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, "utf-8")


def quantized_tensors(arch: Architecture, scales: str) -> Iterator[Tensor]:
    for ours, shape in arch.tensors().items():
        name = name_there(ours, arch.model_type)
        if len(shape) < 2:
            yield name, scales, shape
            continue
        rows, columns = shape
        yield name, "U32", (rows, columns * BITS // 32)
        stem = name.removesuffix("weight")
        for part in ("scales", "biases"):
            yield stem + part, scales, (rows, columns // GROUP_SIZE)


def bytes_of(tensor: Tensor) -> int:
    size = SIZES[tensor[1]]
    for dimension in tensor[2]:
        size *= dimension
    return size


def write_shard(file: Path, tensors: list[Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        name, dtype, shape = tensor
        begin, end = end, end + bytes_of(tensor)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(file, "wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(RANDOM)):
            opened.write(RANDOM[: end - start])
        opened.flush()
        os.fsync(opened.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
