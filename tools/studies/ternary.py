"""Compares what a model learns in a ternary form and in its 4-bit form.

    python tools/studies/ternary.py                 the demo model and SmolLM2-135M-Instruct

A model's linear layers are quantized to -s, 0 and s, with a scale s for each group of 128 weights,
or of 64 if 128 does not divide the length of every row. The embedding and the head are quantized as
in the 4-bit form. The result is written in MLX's format with 2-bit codes, and `mesp-export` keeps
the codes. The bundles of both forms are trained on the same sequences with the same settings. The
losses before training show the damage by quantization. The result does not apply to models that
were trained to be ternary.
"""

from __future__ import annotations

import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import click
import mlx.core as mx

sys.path.append(str(Path(__file__).resolve().parents[1]))
import mesp
from mesp.block_function.dequantize import pack
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.data.load import load_additional
from mesp.data.tokenizer import load_tokenizer
from mesp.files import read_object
from mesp.models.architecture import Architecture
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import name_there
from mesp.quantization.choose import (
    Quantizations,
    check_quantizations,
    choose_quantization,
    choose_quantizations,
)
from mesp.quantization.coordinate_descent import descend, shrink
from mesp.quantization.least_squares import damp, quantize
from mesp.source_model.calibration import CALIBRATION_SEQUENCES, LENGTH, Moments, choose_excerpts
from mesp.source_model.copied_files import copy_files, files_to_copy, write_config
from mesp.source_model.find import Source, find_source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.safetensors import SafetensorsWeights
from studies import real_models
from studies.held_out_loss import HELD_OUT, learn
from studies.tasks import bundles
from studies.tasks.bundles import EXTRACTION, RANK, TEXT

REFITS = 8  # alternating updates of the scales and the codes
OUT = Path("build/ternary")
TASKS = {task.name: task for task in (EXTRACTION, TEXT)}


@click.command(cls=Command)
@click.option(
    "--model", "models", multiple=True,
    help="A folder as mesp-export takes it, or demo. Repeatable.  [default: demo and SmolLM2]",
)  # fmt: skip
@click.option(
    "--task", "names", multiple=True, type=click.Choice(tuple(TASKS)), default=tuple(TASKS),
    show_default=True, help="Repeatable.",
)  # fmt: skip
@click.option("--steps", default=120, show_default=True, help="Of one sequence.")
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--calibrate", default="python-docs", show_default=True,
    help="Text on which a layer's outputs are to change least, as mesp-export takes it.",
)  # fmt: skip
def main(
    models: tuple[str, ...], names: tuple[str, ...], steps: int, seeds: int, calibrate: str
) -> None:
    """Compare what ternary and 4-bit forms of a model learn."""
    print("| model, task | perplexity before | loss in 4 bits | loss with ternary weights |")
    print("|---|---|---|---|")
    for model in models or ("demo", str(real_models.hugging_face_folder(real_models.SMOLLM2))):
        source = find_source(model, random_weights=False)
        ternary = write_ternary(source, OUT / f"{source.name}-ternary", calibrate)
        for name in names:
            forms = {"4-bits": model, "ternary": str(ternary)}
            perplexities, losses = [], []
            for form, of in forms.items():
                bundle = export(of, name, steps, OUT / f"{source.name}-{name}-{form}.mesp")
                befores, afters = zip(
                    *(
                        learn(bundle, run_folder(bundle, steps, seed), steps, seed)
                        for seed in range(seeds)
                    ),
                    strict=True,
                )
                perplexities.append(f"{math.exp(befores[0]):,.1f}")
                losses.append(f"{befores[0]:.3f} → {min(afters):.3f} to {max(afters):.3f}")
            row = (f"{source.name}, {name}", ", ".join(perplexities), *losses)
            print(f"| {' | '.join(row)} |", flush=True)


def write_ternary(source: Source, folder: Path, calibrate: str) -> Path:
    """Writes a model with ternary linear layers in mlx-lm's format, and returns its folder."""
    assert source.folder is not None
    arch = Architecture.from_config(source.config)
    weights = SafetensorsWeights(source.folder, arch)
    arch = weights.arch
    quantizations = ternary_quantizations(arch)
    tokenizer = load_tokenizer(source.folder)
    split = load_additional(calibrate, tokenizer, LENGTH, arch.vocab_size, {})
    sequences = choose_excerpts(split.tokens, source, arch, CALIBRATION_SEQUENCES)
    moments = Moments(SourceModel(weights, arch, quantizations), sequences, with_products=True)
    found: dict[str, mx.array] = {}

    def matrix(name: str, shape: tuple[int, int]) -> mx.array:
        return weights.rows(f"{name}.weight", shape, slice(0, shape[0])).astype(mx.float32)

    def add(name: str, arrays: tuple[mx.array, ...]) -> None:
        mx.eval(arrays)
        parts = zip(("weight", "scales", "biases"), arrays, strict=True)
        found.update({f"{name}.{part}": array for part, array in parts})

    for i, block in enumerate(arch.blocks):
        products = moments.of_block(i)
        for module, shape in block.sizes().items():
            name = f"model.layers.{i}.{module}"
            its = quantizations.of(name)
            add(name, ternary(matrix(name, shape), products[module], its))
    *_, head = arch.embedding_columns
    for name in arch.embedding_columns:
        squares = moments.of_head() if name == head else None
        shape = (arch.vocab_size, arch.hidden_size)
        add(name, quantize(matrix(name, shape), quantizations.of(name), squares, mx.float32))
    for name, (array, dtype) in weights.tensors.items():
        if name.removesuffix(".weight") + ".scales" not in found:
            found[name] = mx.array(array).view(dtype)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    copy_files(source.folder, files_to_copy(p.name for p in source.folder.iterdir()), folder)
    config = read_object(source.folder / "config.json")
    config["quantization"] = quantizations.to_config(arch)
    write_config(folder / "config.json", config)
    theirs = {name_there(name, arch.model_type): array for name, array in found.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), theirs, {"format": "mlx"})
    return folder


def ternary_quantizations(arch: Architecture) -> Quantizations:
    """Returns 2 bits in groups of 128, or of 64 if 128 does not divide the length of every row.

    The embedding and the head are quantized as in the 4-bit form.
    """
    rows = [columns for block in arch.blocks for _, columns in block.sizes().values()]
    group_size = 64 if any(columns % 128 for columns in rows) else 128
    of_four_bits = choose_quantizations(arch, choose_quantization(None, None, None), None)
    others = {name: of_four_bits.of(name) for name in arch.embedding_columns}
    quantizations = Quantizations(Quantization(2, group_size), {**of_four_bits.others, **others})
    check_quantizations(arch, quantizations)
    return quantizations


def ternary(
    matrix: mx.array, products: mx.array, quantization: Quantization
) -> tuple[mx.array, mx.array, mx.array]:
    """Returns W [out, in] as packed codes 0, 1 and 2 with float32 scales s and biases -s.

    A scale begins as the mean of a group's |W|, as in BitNet b1.58. Weighted least squares then
    fits the scale, with the inputs' mean squares as weights. Coordinate descent chooses the codes
    by the `products` [in, in] of the inputs.
    """
    size = quantization.group_size
    x = matrix.reshape(len(matrix), -1, size)
    m = damp(mx.diag(products), matrix.shape[1]).reshape(-1, size)
    s = mx.abs(x).mean(axis=-1, keepdims=True)
    for _ in range(REFITS):
        used = m * (mx.abs(x) > s / 2)
        s = (used * mx.abs(x)).sum(axis=-1, keepdims=True)
        s = s / mx.maximum(used.sum(axis=-1, keepdims=True), 1e-30)
    codes = 1 + mx.sign(x) * (mx.abs(x) > s / 2)
    packed, scales = pack(codes.flatten(1).astype(mx.uint32), 2), s[..., 0]
    packed = descend(matrix, packed, scales, -scales, shrink(products), quantization, last=2)
    return packed, scales, -scales


def run_folder(bundle: Bundle, steps: int, seed: int) -> Path:
    return OUT / "runs" / f"{bundle.path.stem}-{steps}-{seed}"


def export(model: str, name: str, steps: int, out: Path) -> Bundle:
    task = TASKS[name]
    data = "python-docs"
    if task is EXTRACTION:
        data = str(
            bundles.write_data(
                replace(task, steps=steps, batch_size=1, held_out=HELD_OUT), OUT / name
            )
        )
    return mesp.export(model, out, data=data, seq_len=task.seq_len, rank=RANK, overwrite=True)


if __name__ == "__main__":
    main()
