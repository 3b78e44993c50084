"""Prints a table of the CPU time of several ways to quantize a model.

    python tools/studies/quantizer_cost.py --model Qwen2.5-3B --calibrate TEXT

Measures exports of random weights with the model's widths: one block, two blocks, and one block
with twice the vocabulary. Time is linear in the blocks and in the vocabulary, so the whole model's
time is extrapolated. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from helpers import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx

import mesp
from mesp.commands.command import Command
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.short_names import KNOWN

DEMO_MODEL = Path(mesp.__file__).parent / "demo_model"  # contains the tokenizer
ROWS = 8192  # rows of the vocabulary
PLAIN = ("Qwen2.5", "Qwen3-", "Llama", "SmolLM")  # models whose blocks are all alike


def write_model(folder: Path, config: dict[str, Any], rows: int) -> None:
    """Writes a model with random weights, two blocks and a vocabulary of `rows` tokens."""
    config = config | {"num_hidden_layers": 2, "vocab_size": rows}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / file, folder)
    arch = Architecture.from_config(config)
    mx.random.seed(0)

    def drawn(*shape: int) -> mx.array:
        return mx.random.normal(shape, scale=0.02).astype(mx.bfloat16)

    tensors = {"model.embed_tokens.weight": drawn(rows, arch.hidden_size)}
    tensors["model.norm.weight"] = mx.ones(arch.hidden_size)
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = drawn(rows, arch.hidden_size)
    for index, block in enumerate(arch.blocks):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}{name}.weight": drawn(*s) for name, s in block.sizes().items()}
        tensors |= {f"{prefix}{name}.bias": drawn(n) for name, n in block.biases().items()}
        tensors |= {f"{prefix}{name}": mx.ones(n) for name, n in block.norms().items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)


def export(source: Path, blocks: int, *options: object) -> float:
    """Returns the CPU time in seconds of an export of the first blocks."""
    line = [sys.executable, "-c", "from mesp.commands.export import main; main()"]
    line += ["--model", source, "--layers", blocks, "--seq-len", 8, *options]
    line += ["--out", source.with_suffix(".mesp"), "--overwrite"]
    with tempfile.TemporaryFile("w+") as said:
        started = subprocess.Popen(list(map(str, line)), stdout=said, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        if started.returncode:
            said.seek(0)
            raise MespError(said.read().strip().removeprefix("Error: "))
    return used.ru_utime + used.ru_stime


@click.command(cls=Command)
@click.option(
    "--model",
    type=click.Choice([name for name in KNOWN if name.startswith(PLAIN)]),
    default="Qwen2.5-0.5B",
    show_default=True,
)
@click.option("--calibrate", type=click.Path(path_type=Path, exists=True), required=True)
def main(model: str, calibrate: Path) -> None:
    """Print the cost of several ways to quantize a model."""
    config = KNOWN[model][2]
    arch = Architecture.from_config(config)
    print(f"| {model} | 1 block, CPU s | 2 blocks, CPU s | all {arch.num_hidden_layers} |")
    print("|---|---|---|---|")
    ways = {
        "`--quantize nearest`": ("--quantize", "nearest"),
        "`mesp-export`": (),
        "`mesp-export --calibrate`": ("--calibrate", calibrate),
    }
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small"), Path(folder, "large")
        write_model(small, config, ROWS)
        write_model(large, config, 2 * ROWS)
        for name, options in ways.items():
            one, two = (export(small, blocks, *options) for blocks in (1, 2))
            more = export(large, 1, *options)
            whole = one + (arch.num_hidden_layers - 1) * (two - one)
            whole += (arch.vocab_size / ROWS - 1) * (more - one)
            print(f"| {name} | {one:.1f} | {two:.1f} | {whole:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
