from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import mlx.core as mx

from mesp.adapters.fuse import BFLOAT16, fuse, save
from mesp.adapters.gguf import TYPES, read_base, write_fused_gguf, write_gguf
from mesp.adapters.held_out_loss import measure_held_out_loss
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.adapters.modelfile import write_modelfile
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.bundle.to_source_model import BundleWeights
from mesp.commands.command import Command, several
from mesp.commands.progress_bars import export_progress
from mesp.commands.prompt_options import weights_option
from mesp.errors import MespError, plain_os_errors
from mesp.folders import replacing
from mesp.formatting import decimal
from mesp.models.quantization_formats import Quantization, describe_quantization
from mesp.progress import Task
from mesp.settings.train_settings import TrainSettings

# the largest part of the adapters' gain that quantization may undo without a warning
MOST_LOST = 0.1
FUSED_GGUF = "model.gguf"
WIDTHS = {"4": 4, "6": 6, "8": 8, "bfloat16": BFLOAT16}


@click.command(cls=Command)
@click.argument("bundle", type=click.Path(path_type=Path))
@several(
    "--adapters", required=True, kind=click.Path(path_type=Path), metavar="FOLDER,...",
    help="Folder of adapters, of mesp-train, mlx-lm or PEFT, or several, to fuse their sum.",
)  # fmt: skip
@weights_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder.")
@click.option(
    "--bits", type=click.Choice(list(WIDTHS)), default="8",
    help="Quantization of the layers that have adapters; the others stay as they are; "
    "bfloat16 quantizes none, as Hugging Face's Transformers reads it.",
)  # fmt: skip
@click.option("--gguf", is_flag=True, help="Write adapters.gguf for llama.cpp into it too.")
@click.option(
    "--gguf-base", type=click.Path(path_type=Path), metavar="FILE.gguf",
    help="The GGUF file that BUNDLE was exported from: write model.gguf too, which is it with the "
    "adapters in its weights, and a Modelfile for Ollama. The weights become Q8_0, with --bits 4 "
    "Q4_1, or BF16.",
)  # fmt: skip
@click.option(
    "--val-batches", type=click.IntRange(min=0), default=8,
    help="Held-out sequences to measure the loss on; 0 measures none.",
)  # fmt: skip
def main(
    bundle: Path, adapters: tuple[Path, ...], weights: tuple[float, ...], out: Path, bits: str,
    gguf: bool, gguf_base: Path | None, val_batches: int,
) -> None:  # fmt: skip
    """Write the model in BUNDLE with adapters fused into the weights, as mlx-lm reads it.

    Prints the held-out loss without adapters, with them, and of the fused model.
    """
    if out.exists():
        raise MespError(f"{out} exists; name another --out.")
    weighted = weigh(adapters, weights)
    opened = Bundle(bundle)
    adapters_read = [
        (read_adapters(folder, opened.architecture), weight) for folder, weight in weighted
    ]
    if not any(weight for _, weight in weighted):
        raise MespError("Every one of --weights is 0, which leaves nothing to fuse; raise one.")
    valid = opened.manifest.data.get("valid")
    measured = val_batches if valid and valid.images is None else 0
    with (
        plain_os_errors(f"Cannot write {out}"),
        replacing(out.resolve(), f"mesp fuse is writing {out}") as folder,
        export_progress() as progress,
    ):
        Task(progress, f"Checking {bundle.name}")
        opened.verify()
        model = opened.to_mlx_lm()
        model.set_dtype(mx.float32)

        def measure(what: str) -> float:
            if not measured:
                return float("nan")
            task = Task(progress, f"Held-out loss, {what}", measured)
            longest = max(opened.manifest.seq_lens)
            return measure_held_out_loss(model, opened, longest, measured, task.advance)

        summed = stack_adapters(adapters_read, model)
        if gguf:
            written = folder / "adapters.gguf"
            write_gguf(written, summed, opened.architecture, opened.manifest.model)
        if gguf_base is not None:
            base = read_base(gguf_base, opened)
            target = folder / FUSED_GGUF
            write_fused_gguf(target, base, summed, opened.architecture, WIDTHS[bits])
        untuned = measure("base")
        apply_adapters(model, summed)
        tuned = measure("with adapters")
        Task(progress, "Fusing")
        quantized = fuse(model, WIDTHS[bits])
        save(folder, model, opened, quantized)
        if gguf_base is not None:
            write_modelfile(folder, FUSED_GGUF, opened)
        model.set_dtype(mx.float32)
        fused = measure("fused")
    if measured:
        click.echo(describe_losses(untuned, tuned, fused, bits))
        if val_batches != TrainSettings.val_batches:
            click.echo(
                f"These losses are of the first {val_batches} held-out sequences, and a run's of "
                f"{TrainSettings.val_batches} by default; --val-batches takes as many."
            )
    click.echo(describe_changes(opened, quantized))
    if gguf_base is not None:
        click.echo(
            f"In {FUSED_GGUF} the matrices with adapters are {TYPES[WIDTHS[bits]]}; all other "
            f"tensors are those of {gguf_base.name}."
        )
    click.echo(f"Model: {out}")


def describe_changes(bundle: Bundle, quantized: dict[str, dict[str, int]]) -> str:
    had = BundleWeights(bundle).quantizations()
    if not quantized:
        kinds = dict.fromkeys(describe_quantization(had.of(name)) for name in had.others)
        return f"No matrix is quantized any more: they had {', or '.join(kinds)}."
    prefix = bundle.architecture.mlx_root
    changes = Counter(
        (had.of(path.removeprefix(prefix)), Quantization(now["bits"], now["group_size"]))
        for path, now in quantized.items()
    )
    with_adapters = ", ".join(
        f"{count} of {describe_quantization(before)} now have {describe_quantization(now)}"
        for (before, now), count in changes.items()
    )
    is_rounded = bundle.manifest.dtype != "bfloat16" and any(
        each.mode == "affine" for each in had.all if each
    )
    rest = "keep their codes, with scales in bfloat16" if is_rounded else "stay as they were"
    return f"With the adapters in them, {with_adapters}; the other matrices {rest}."


def describe_losses(base: float, tuned: float, fused: float, bits: str) -> str:
    lines = [
        f"Held-out loss {decimal(base, 3)}, {decimal(tuned, 3)} with adapters, "
        f"{decimal(fused, 3)} fused (nats a token)."
    ]
    gained, lost = base - tuned, fused - tuned
    if gained > 0 and lost > MOST_LOST * gained and bits != "bfloat16":
        lines.append(
            f"Quantizing to {bits} bits has lost {lost / gained:.0%} of what the adapters gained; "
            "take more --bits, or keep the adapters apart."
        )
    return "\n".join(lines)
