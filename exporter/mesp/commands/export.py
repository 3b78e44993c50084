from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesp import hub_upload
from mesp.bundle.data_files import describe_data
from mesp.bundle.export import QUANTIZERS, prepare_export, rewrite
from mesp.bundle.export_options import ExportArguments
from mesp.bundle.manifest import OF_SAME_WEIGHTS, Manifest, read_manifest
from mesp.commands.command import Command, several
from mesp.commands.data_options import data_options
from mesp.commands.progress_bars import export_progress
from mesp.commands.show import show_records
from mesp.data.sources import SOURCES
from mesp.engine.plan import predicted_memory
from mesp.errors import MespError
from mesp.models.quantization_formats import AFFINE, MODES, Quantization, describe_quantization
from mesp.quantization.choose import BITS, HEAD_BITS
from mesp.source_model.quantization_loss import QuantizationLoss


def list_and_exit(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:  # skipped during shell completion
        from mesp.commands.models import show_models

        show_models()
        context.exit()


OPTIONS_OF_FROM = ["--from", "--out", "--overwrite", "--seq-len", "--rank", "--upload"]


@click.command(cls=Command)
@click.option(
    "--list-models", is_flag=True, is_eager=True, expose_value=False, callback=list_and_exit,
    help="List the models that have short names, as `mesp models` does, and exit.",
)  # fmt: skip
@click.option(
    "--model", metavar="NAME|HUB_ID|DIR|FILE.gguf|demo",
    help="The model to export. A GGUF file on the Hub is OWNER/NAME:Q4_K_M or "
    "OWNER/NAME/FILE.gguf.",
)  # fmt: skip
@click.option(
    "--from", "old", type=click.Path(path_type=Path), metavar="BUNDLE",
    help="Instead of --model: a bundle to export again, with its weights and data.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR",
    show_default="NAME.mesp, or --from's with --overwrite", help="The bundle to write.",
)  # fmt: skip
@click.option(
    "--data", metavar="FILE|DIR|NAME", show_default="python-docs for demo",
    help=f"Data to train on: {SOURCES}.",
)  # fmt: skip
@data_options
@several(
    "--seq-len", "seq_lens", kind=click.IntRange(min=1), metavar="N,...",
    show_default="256, or --from's", help="Sequence lengths to train with.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(list(MODES)), show_default="affine",
    help="Kind of quantization; those but affine set the bits and the groups.",
)  # fmt: skip
@click.option("--bits", type=click.Choice(BITS), show_default="4", help="Bits a weight.")
@click.option(
    "--group-size", type=click.Choice(sorted(AFFINE[1])), show_default="64",
    help="Weights that share a scale.",
)  # fmt: skip
@click.option(
    "--head-bits", type=click.Choice(BITS),
    show_default=f"{HEAD_BITS}, or --bits where that is more",
    help="Bits a weight of the output head, which an embedding tied to it is too.",
)  # fmt: skip
@click.option(
    "--quantize", type=click.Choice(QUANTIZERS), default="least-squares",
    help="How weights become codes: with the least change of the matrices' outputs, or each the "
    "nearest, as in MLX. Modes other than affine are always nearest.",
)  # fmt: skip
@click.option(
    "--calibrate", metavar="FILE|DIR|NAME", show_default="random tokens",
    help="Text on which the matrices' outputs should change least.",
)  # fmt: skip
@click.option(
    "--measure", is_flag=False, flag_value="python-docs", metavar="[FILE|DIR|NAME]",
    help="Print how far the bundle's predictions are from the model's, on a text (python-docs if "
    "none is named).",
)  # fmt: skip
@several(
    "--rank", "ranks", kind=click.IntRange(min=1), metavar="R,...",
    show_default="8, or --from's", help="LoRA ranks to train with.",
)  # fmt: skip
@click.option("--random-weights", is_flag=True, help="The model's geometry with random weights.")
@click.option("--layers", type=click.IntRange(min=1), help="Keep only the first N blocks.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of --random-weights.")
@click.option("--overwrite", is_flag=True, help="Replace --out where it is a bundle.")
@click.option(
    "--upload", metavar="OWNER/NAME",
    help="Put the bundle, with its data, into a repository of the Hugging Face Hub too.",
)  # fmt: skip
def main(
    model: str | None, old: Path | None, out: Path | None, seq_lens: tuple[int, ...],
    ranks: tuple[int, ...], measure: str | None, overwrite: bool, upload: str | None,
    **options: Any,
) -> None:  # fmt: skip
    """Quantize a model and write it as a bundle to fine-tune on an iPhone, a Mac or Linux."""
    if old is not None:
        check_options_of_from(out, overwrite)
        if upload is not None:
            has = read_manifest(old, OF_SAME_WEIGHTS)
            hub_upload.check_license(old, has.model, (file.path for file in has.files))
        with export_progress() as progress:
            bundle = rewrite(
                old, out, seq_len=seq_lens, rank=ranks, overwrite=overwrite, progress=progress
            )
        tell(bundle.path, bundle.manifest, upload)
        return
    if model is None:
        raise MespError("Name a model with --model, or a bundle to export again with --from.")
    options |= {"seq_len": seq_lens or 256, "rank": ranks or 8, "overwrite": overwrite}
    job = prepare_export(model, out, ExportArguments(**options))
    if upload is not None:
        folder = job.source.folder
        files = [] if folder is None else [file.name for file in folder.iterdir()]
        hub_upload.check_license(job.source.name, job.source.license, files)
    measured = None if measure is None else job.sequences_to_measure(measure)
    with export_progress() as progress:
        manifest = job.run(progress)
    tell(job.options.out, manifest, upload, job.describe_gguf())
    if measured is not None:
        click.echo(f"  {'lost':10} {describe_loss(job.measure(measured))} of {measure}")


def describe_loss(loss: QuantizationLoss) -> str:
    before, after = loss.perplexities
    return (
        f"KL to the source {loss.kl.mean():.4f} nats, perplexity {before:.2f} -> {after:.2f}, on "
        f"{len(loss.kl):,} tokens"
    )


def tell(out: Path, manifest: Manifest, repo: str | None, gguf: str | None = None) -> None:
    click.echo(summary(out, manifest))
    if gguf is not None:
        click.echo(f"  {'GGUF':10} {gguf}")
    if "train" in manifest.data and (out / "tokenizer_config.json").exists():
        show_records(out, 1)
    if repo is not None:
        click.echo(f"  {'at':10} {hub_upload.upload(out, manifest, repo)}")


def check_options_of_from(out: Path | None, overwrite: bool) -> None:
    """Raises MespError if a given option cannot be used with --from, or if neither `out` nor
    `overwrite` is given.
    """
    context = click.get_current_context()
    given = [
        parameter.opts[0]
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name) == ParameterSource.COMMANDLINE
    ]
    if others := [option for option in given if option not in OPTIONS_OF_FROM]:
        raise MespError(
            "--from takes the weights and the data as the bundle has them; leave out "
            f"{', '.join(others)}, or export the model."
        )
    if out is None and not overwrite:
        raise MespError("Name the bundle to write with --out, or replace --from's by --overwrite.")


def summary(out: Path, manifest: Manifest) -> str:
    arch = manifest.architecture
    size = sum(file.size for file in manifest.files)
    lora = {r: sum(block.lora_size(r) for block in arch.blocks) for r in manifest.ranks}
    blocks = dict.fromkeys(f"{g.layout.words * 4 / 1e6:,.2f}" for g in manifest.blocks)
    lines = {
        "model": f"{manifest.name}, {arch.num_hidden_layers} blocks, hidden size "
        f"{arch.hidden_size}, vocabulary {arch.vocab_size:,}",
        "weights": f"{describe_weights(manifest)}, scales in {manifest.dtype}",
        "size": f"{size / 1e6:,.1f} MB: blocks of {' or '.join(blocks)} MB, "
        f"embedding {manifest.embedding.layout.words * 4 / 1e6:,.2f} MB",
        "sequences": " or ".join(map(str, manifest.seq_lens)) + " tokens",
        "LoRA": "; ".join(f"rank {r}: {n:,} parameters" for r, n in lora.items()),
        "data": describe_data(manifest.data) or "none (training needs --data)",
    }
    if memory := predicted_memory(out, manifest):
        lines["memory"] = memory
    return "\n".join([f"Wrote {out}", *(f"  {key:10} {value}" for key, value in lines.items())])


def describe_weights(manifest: Manifest) -> str:
    """Routers and experts' matrices are not considered.

    If only the head differs, alone or with the embedding, its quantization is described.
    """
    main, arch = manifest.quantization, manifest.architecture
    of_blocks = {
        Quantization.of(group.layout, f"{name}.", columns)
        for group in manifest.blocks
        for name, (_, columns) in arch.blocks[group.layers[0]].sizes().items()
    }
    embedding, head = (
        Quantization.of(table.layout, "", arch.hidden_size)
        for table in (manifest.embedding, manifest.head)
    )
    if of_blocks != {main} or embedding not in (main, head):
        return f"{describe_quantization(main)}, some matrices otherwise"
    differs = "" if head == main else f", the head {describe_quantization(head)}"
    return describe_quantization(main) + differs
