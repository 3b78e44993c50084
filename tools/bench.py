"""Measures memory and time of training with MeSP, its baselines and mlx-lm's trainer.

Models get their true geometry and random weights. Every row is a separate process; its memory is
the process's highest anonymous memory during any step (phys_footprint on a Mac). An MB is 1,000,000
bytes.

\b
  python tools/bench.py --model Qwen2.5-0.5B --seq-len 128,256 --methods mesp,mebp,mezo
  python tools/bench.py --table length --json length.json --plot length.png

\b
Tables, each with its own defaults for the options that apply to it:
  memory        peak and time by method and size
  length        the three methods by sequence length, the paper's sizes and other families
  families      MeSP on models with recurrent blocks, in memory and all on disk
  rank          MeSP by LoRA rank, all three sizes
  time          the time of MeSP and of MeBP, by memory limit
  gpu           a step on a phone's GPU, counted on any machine
  generation    tokens a second of prompts and of decoding, beside mlx-lm's and llama.cpp's
  functions     a step on a phone's GPU with a bundle's block functions, and without
  adapters      tokens a second with several adapters at once, and their memory
  bits          a step on weights of 4, 3 and 2 bits, also with too little memory for 4 bits
  h             the memory of storing h = xA, and the time of recomputing it
  mezo-quality  MeZO's estimate of each block's gradient against the exact gradient
  preferences   a step on preference data by objective, and a supervised one
  parts         some projections, or B alone, in place of all adapters
  defaults      mesp-train's default update, and a sweep of learning rates and optimizers
  records       short records at their own length, and padded to the longest
  packing       short records packed into one sequence, and one a step
  packing-gpu   the same on a phone's GPU, with the modelled time of a step
  convergence   losses of the three methods on the demo model
  paper         a short form of every exhibit of the paper; writes build/bench/paper/paper.md

\b
Methods:
  mesp, mebp, mezo        the trainer's
  mesp-paper              the paper's way: attention weights, logits, dequantized weights whole
  mesp-store-h            the same, but h = xA is stored in the forward pass, not recomputed
  mlx-lm                  mlx-lm's LoRA trainer as shipped
  mlx-lm-checkpoint       the same with gradient checkpointing
  mlx-lm-fast, mlx-lm-checkpoint-fast
                          the same, but its quantized layers dequantize and multiply with
                          OpenBLAS, as the trainer does on a CPU: faster, and more memory
  torch-peft              PEFT on PyTorch, with the weights dequantized; needs --peft
  torch-peft-checkpoint   the same with gradient checkpointing
  products                only the products with frozen matrices, forward and back
  products-recomputed     the same with the forward products twice, as in MeSP

\b
Memory limits, for MeSP:
  auto    none: the trainer's default      bar     half of the paper's peak
  least   the lowest possible              mebp    MeBP's measured peak
  all     enough to keep everything        MB      that many
"""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from mesp.commands.command import Command, several
from mesp.errors import MespError
from studies.benchmarks.measure_table import measure_table
from studies.benchmarks.paper_page import measure_paper
from studies.benchmarks.tables import TABLES
from studies.benchmarks.variants import EVERYTHING_MB, LIMITS, METHODS

WORK = Path(__file__).resolve().parents[1] / "build" / "bench"


def method_list(value: str) -> tuple[str, ...]:
    for method in value.split(","):
        if method not in METHODS:
            raise click.BadParameter(f"there is no method {method!r}, only {', '.join(METHODS)}.")
    return tuple(value.split(","))


def memory_limit(value: str) -> str:
    if value in LIMITS:
        return value
    try:
        if 0 < float(value) < EVERYTHING_MB:
            return f"{float(value):g}"
    except ValueError:
        pass
    raise click.BadParameter(f"{value} is neither a number of MB nor one of {', '.join(LIMITS)}.")


@click.command(cls=Command, help=__doc__)
@click.option(
    "--table",
    type=click.Choice(list(TABLES)),
    default="memory",
    show_default=True,
    help="The table to measure.",
)
@several(
    "--model", "models", metavar="NAME,...",
    help="Models as mesp-export takes them, or bundles.",
)  # fmt: skip
@several(
    "--seq-len", "seq_lens", kind=click.IntRange(min=1), metavar="T,...",
    help="Tokens in a sequence.",
)  # fmt: skip
@several("--rank", "ranks", kind=click.IntRange(min=1), metavar="R,...", help="LoRA rank.")
@click.option("--methods", type=method_list, metavar="METHOD,...", help="See above.")
@several(
    "--layers", kind=click.IntRange(min=1), metavar="N,...",
    help="Only the first N blocks; with several N, the whole model is extrapolated from them.",
)  # fmt: skip
@click.option(
    "--offload", type=click.Choice(["auto", "none", "inputs", "all", "each"]),
    help="Arrays in a file on disk, where the method has them; auto: as the trainer sees fit.",
)  # fmt: skip
@several(
    "--threads", kind=click.IntRange(min=1), metavar="N,...",
    help="Threads of products, each with every method; otherwise a core each, up to 8.",
)  # fmt: skip
@click.option(
    "--peft", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PYTHON",
    help="A Python with torch, peft and transformers, for torch-peft.",
)  # fmt: skip
@click.option(
    "--llama", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PYTHON",
    help="A Python with xllamacpp, for llama.cpp, where the model is a GGUF file.",
)  # fmt: skip
@several(
    "--memory-limit", "limits", kind=click.types.FuncParamType(memory_limit), metavar="MB,...",
    help="MeSP: see above.",
)  # fmt: skip
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Steps of a run; of mezo-quality, draws of z; of generation and adapters, tokens.",
)
@click.option("--data", metavar="FILE|DIR|NAME", help="Text for convergence and defaults.")
@click.option(
    "--learning-rate", type=click.FloatRange(min=0, min_open=True), metavar="RATE",
    help="For convergence, of all methods.",
)  # fmt: skip
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the rows there.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw them: *.png, *.svg or *.pdf.")
@click.option(
    "--work", type=click.Path(path_type=Path), default=WORK, show_default="build/bench",
    help="Folder of the exported bundles and the offload files, on a disk (not tmpfs).",
)  # fmt: skip
def main(table: str, json_file: Path | None, plot: Path | None, work: Path, **given: Any) -> None:
    command = shlex.join(["tools/bench.py", *sys.argv[1:]])
    options = find_options(table, given)
    if table == "paper":
        if json_file or plot:
            raise MespError("--json and --plot have no use in the table paper, which is a page.")
        failed = measure_paper(options, work, command)
    else:
        failed = measure_table(table, options, work, command, json_file=json_file, plot=plot)
    for row in failed:
        what = f"{row['model']} {row['seq_len']} {row['variant']}"
        click.echo(f"{what} failed: {row['error']}", err=True)
    raise SystemExit(1 if failed else 0)


def find_options(table: str, given: dict[str, Any]) -> dict[str, Any]:
    options = dict(TABLES[table])
    spelled = {param.name: param.opts[0] for param in main.params}
    for name, value in given.items():
        if value not in (None, ()):
            if name not in options:
                raise MespError(f"{spelled[name]} has no use in the table {table}.")
            options[name] = value
    return options


if __name__ == "__main__":
    main()
