"""mesp-export: quantizes a model and writes it as a bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from mesp import hub_upload
from mesp.bundle.as_source import as_source
from mesp.bundle.export_options import DEVICE, DTYPE_OF, BundleOptions, ExportOptions
from mesp.bundle.layout import Layout
from mesp.bundle.reader import Bundle
from mesp.bundle.rewriter import rewrite_bundle
from mesp.bundle.writer import write_bundle
from mesp.commands.list_models import list_models
from mesp.commands.shared_options import ListOptions, data_options
from mesp.data.load import DataOptions, load
from mesp.data.sources import SOURCES
from mesp.data.store import describe_data
from mesp.data.tokens import load_tokenizer
from mesp.engine.plan import predicted_memory
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.quantization.choose import BITS, HEAD_BITS, Quantizations, find_quantizations
from mesp.quantization.measure import Loss
from mesp.quantization.measure import measure as measure_loss
from mesp.quantization.modes import MODES, Quantization, describe_quantization
from mesp.quantization.moments import excerpts
from mesp.source_model.find import Source, find_source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.random_weights import RandomWeights
from mesp.source_model.safetensors import SafetensorsWeights

MEASURED = 8, 256  # sequences that --measure reads, and tokens of each

OPTIONS_OF_FROM = [
    "--from",
    "--out",
    "--overwrite",
    "--seq-len",
    "--rank",
    "--device",
    "--dtype",
    "--upload",
]


@click.command(
    cls=ListOptions,
    short_help="Write a model as a bundle.",
    context_settings={"show_default": True},
)
@click.option(
    "--list-models", is_flag=True, is_eager=True, expose_value=False, callback=list_models,
    help="List the models that have short names, with the memory that training takes, and exit.",
)  # fmt: skip
@click.option(
    "--model", metavar="NAME|HUB_ID|DIR|FILE.gguf|demo",
    help="The model to export. A GGUF file on the Hub is OWNER/NAME:Q4_K_M or "
    "OWNER/NAME/FILE.gguf.",
)  # fmt: skip
@click.option(
    "--from", "old", type=click.Path(path_type=Path), metavar="BUNDLE",
    help="In place of --model: a bundle whose functions to write anew, with its weights and data.",
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
@click.option(
    "--seq-len", "seq_lens", multiple=True, type=click.IntRange(min=1), metavar="N ...",
    show_default="256, or --from's", help="Sequence lengths to train with.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(list(MODES)), show_default="affine",
    help="Kind of quantization; those but affine set the bits and the groups.",
)  # fmt: skip
@click.option(
    "--bits", type=click.Choice(list(map(str, BITS))), show_default="4", help="Bits a weight.",
)  # fmt: skip
@click.option(
    "--group-size", type=click.Choice(["32", "64", "128"]), show_default="64",
    help="Weights that share a scale.",
)  # fmt: skip
@click.option(
    "--head-bits", type=click.Choice(list(map(str, BITS))),
    show_default=f"{HEAD_BITS}, or --bits where that is more",
    help="Bits a weight of the output head, which an embedding tied to it is too.",
)  # fmt: skip
@click.option(
    "--quantize", type=click.Choice(["least-squares", "nearest"]), default="least-squares",
    help="How weights become codes: so that what the matrices give changes least, or each the "
    "nearest, as MLX does. Modes other than affine are always nearest.",
)  # fmt: skip
@click.option(
    "--calibrate", metavar="FILE|DIR|NAME", show_default="random tokens",
    help="Text on which what the matrices give is to change least.",
)  # fmt: skip
@click.option(
    "--measure", is_flag=False, flag_value="python-docs", metavar="[FILE|DIR|NAME]",
    help="Say how far the bundle's predictions are from the model's, on some text (python-docs "
    "where none is named).",
)  # fmt: skip
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(min=1), metavar="R ...",
    show_default="8, or --from's", help="LoRA ranks to train with.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]),
    show_default="float32 on the CPU, bfloat16 on the GPU, or --from's",
    help="Type of activations.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "gpu"]), show_default="auto, or --from's",
    help="Device the bundle runs on; auto is what is here.",
)  # fmt: skip
@click.option("--random-weights", is_flag=True, help="The model's geometry with random weights.")
@click.option("--layers", type=click.IntRange(min=1), help="Keep only the first N blocks.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of --random-weights.")
@click.option("--overwrite", is_flag=True, help="Replace --out where it is a bundle.")
@click.option(
    "--upload", metavar="OWNER/NAME",
    help="Put the bundle, with its data, into a repository of the Hugging Face Hub too.",
)  # fmt: skip
def main(
    model, old, out, data, data_options, seq_lens, mode, bits, group_size, head_bits, quantize,
    calibrate, measure, ranks, dtype, device, random_weights, layers, seed, overwrite, upload,
):  # fmt: skip
    """Quantize a model and write it as a bundle to fine-tune on an iPhone, a Mac or Linux."""
    if old is not None:
        check_options_of_from(out, overwrite)
        has = Bundle(old, to_run=False).manifest
        options = BundleOptions(
            out=out or old,
            seq_lens=sorted(set(seq_lens)) or has["seq_lens"],
            ranks=sorted(set(ranks)) or has["ranks"],
            dtype=dtype or has["dtype"],
            device=DEVICE if device == "auto" else device or has["device"],
            overwrite=overwrite,
        )
        tell(options.out, rewrite_bundle(old, options), upload)
        return
    if model is None:
        raise MespError("Name what to export with --model, or a bundle to write anew with --from.")
    if device in (None, "auto"):
        device = DEVICE
    source = find_source(model, random_weights)
    arch = Architecture.from_config(source.config)
    if layers and layers > arch.num_hidden_layers:
        raise MespError(f"{source.name} has {arch.num_hidden_layers} blocks, fewer than --layers.")
    arch = arch.first(layers or arch.num_hidden_layers)
    if measure is not None and random_weights:
        raise MespError("Random weights predict nothing; leave out --measure.")
    quantizations = find_quantizations(
        source, arch, mode, *(each and int(each) for each in (bits, group_size, head_bits))
    )
    if calibrate is not None:
        check_calibrate(quantizations, quantize, random_weights)
    if random_weights:
        source = replace(source, name=f"{source.name}-random", revision=None)
        weights = RandomWeights(seed, norm=1 - arch.norm_offset)
    elif source.gguf:
        from mesp.source_model.gguf.weights import GGUFWeights  # which needs the gguf package

        weights = GGUFWeights(source.gguf, arch)
    else:
        weights = SafetensorsWeights(source.folder, arch.model_type)
        if weights.left_out:
            click.echo(
                f"Note: {weights.left_out:,} tensors are left out: the text alone is trained, "
                "without layers that predict several tokens.",
                err=True,
            )
        if arch.model_type in ("gemma3", "gemma3_text") and weights.is_quantized("lm_head"):
            arch = replace(arch, tie_word_embeddings=False)  # a copy that older mlx-lm made
    if data is None and data_options != DataOptions():
        raise MespError("The options of how data is taken need --data; name it too.")
    if data is None and model == "demo" and not random_weights:
        data = "python-docs"
    options = ExportOptions(
        out=out or Path(f"{source.name}.mesp"),
        data=data,
        data_options=data_options,
        seq_lens=sorted(set(seq_lens)) or [256],
        ranks=sorted(set(ranks)) or [8],
        quantizations=quantizations,
        dtype=dtype or DTYPE_OF[device],
        device=device,
        seed=seed,
        overwrite=overwrite,
        quantize=quantize,
        calibrate=calibrate,
    )
    measured = None if measure is None else sequences_to_measure(source, arch, measure)
    manifest = write_bundle(source, weights, arch, options)
    if options.dtype == "bfloat16" and quantizations.config and weights.has_float16_scales:
        click.echo(
            "Note: the model's scales are float16, and lose 3 bits of their mantissa in bfloat16; "
            "--dtype float32 keeps them.",
            err=True,
        )
    tell(options.out, manifest, upload, weights.describe(options.dtype) if source.gguf else None)
    if measured is not None:
        model = SourceModel(weights, arch, quantizations)
        loss = measure_loss(model, as_source(Bundle(options.out, to_run=False)), measured)
        click.echo(f"  {'lost':10} {describe_loss(loss)} of {measure}")


def sequences_to_measure(source: Source, arch: Architecture, data: str) -> list[list[int]]:
    """Some sequences of a text."""
    tokenizer = load_tokenizer(source.folder, "which --measure needs; leave it out")
    count, length = MEASURED
    tokens = load(data, tokenizer, length, arch.vocab_size)["train"].tokens
    return excerpts(tokens, source, arch, count, length)


def describe_loss(loss: Loss) -> str:
    """How far the predictions of a bundle are from those of its source."""
    before, after = loss.perplexities
    return (
        f"KL to the source {loss.kl.mean():.4f} nats, perplexity {before:.2f} -> {after:.2f}, on "
        f"{len(loss.kl):,} tokens"
    )


def check_calibrate(quantizations: Quantizations, quantize: str, random_weights: bool) -> None:
    """Raises MespError where --calibrate would change nothing."""
    if quantizations.config is not None:
        raise MespError("The model comes quantized, and stays as it is; leave out --calibrate.")
    reasons = {
        "--quantize nearest": quantize == "nearest",
        "--random-weights": random_weights,
        f"--mode {quantizations.main.mode}": quantizations.main.mode != "affine",
    }
    for option, given in reasons.items():
        if given:
            raise MespError(f"{option} makes no use of --calibrate; leave out one of them.")


def tell(out: Path, manifest: dict[str, Any], repo: str | None, gguf: str | None = None) -> None:
    """Says what was written, of a GGUF file how too, and uploads it where `repo` is given."""
    click.echo(summary(out, manifest))
    if gguf is not None:
        click.echo(f"  {'GGUF':10} {gguf}")
    if repo is not None:
        click.echo(f"  {'at':10} {hub_upload.upload(out, manifest, repo)}")


def check_options_of_from(out: Path | None, overwrite: bool) -> None:
    """Raises MespError unless the options given say what --from needs, and nothing else."""
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


def summary(out: Path, manifest: dict[str, Any]) -> str:
    """What was written, for people."""
    arch = Architecture.from_manifest(manifest["architecture"])
    size = sum(file["size"] for file in manifest["files"])
    lora = {r: sum(block.lora_size(r) for block in arch.blocks) for r in manifest["ranks"]}
    blocks = dict.fromkeys(f"{g['words'] * 4 / 1e6:,.2f}" for g in manifest["blocks"])
    lines = {
        "model": f"{manifest['name']}, {arch.num_hidden_layers} blocks, hidden size "
        f"{arch.hidden_size}, vocabulary {arch.vocab_size:,}",
        "weights": f"{describe_weights(manifest)}, "
        f"{manifest['dtype']} on the {manifest['device'].upper()}",
        "size": f"{size / 1e6:,.1f} MB: blocks of {' or '.join(blocks)} MB, "
        f"embedding {manifest['embedding']['words'] * 4 / 1e6:,.2f} MB",
        "sequences": " or ".join(map(str, manifest["seq_lens"])) + " tokens",
        "LoRA": "; ".join(f"rank {r}: {n:,} parameters" for r, n in lora.items()),
        "data": describe_data(manifest.get("data", {})) or "none (training needs --data)",
    }
    if memory := predicted_memory(out, manifest):
        lines["memory"] = memory
    return "\n".join([f"Wrote {out}", *(f"  {key:10} {value}" for key, value in lines.items())])


def describe_weights(manifest: dict[str, Any]) -> str:
    """The quantization, that of the head where it alone has another, or that some do."""
    main = Quantization(**manifest["quantization"])
    arch = Architecture.from_manifest(manifest["architecture"])
    of_blocks = {
        Quantization.of(Layout.from_manifest(group), f"{name}.", columns)
        for group in manifest["blocks"]
        for name, (_, columns) in arch.blocks[group["layers"][0]].sizes().items()
    }
    embedding, head = (
        Quantization.of(Layout.from_manifest(manifest[name]), "", arch.hidden_size)
        for name in ("embedding", "head")
    )
    if of_blocks != {main} or embedding not in (main, head):
        return f"{describe_quantization(main)}, some matrices otherwise"
    differs = "" if head == main else f", the head {describe_quantization(head)}"
    return describe_quantization(main) + differs
