from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from mesp.bundle.data_files import fields_of, write_data
from mesp.bundle.export_options import ExportOptions
from mesp.bundle.function_files import write_functions
from mesp.bundle.manifest import Manifest, ModelName, Table, describe_files
from mesp.bundle.weight_files import (
    PER_LAYER_FILES,
    WeightFiles,
    weight_bytes,
    weight_files,
    write_weights,
)
from mesp.data.image_encoder import ImageEncoder
from mesp.data.load import load, load_additional, make_random_data
from mesp.data.splits import Split
from mesp.data.tokenizer import load_checked_tokenizer, load_tokenizer, write_tokenizer
from mesp.errors import MespError, plain_os_errors
from mesp.folders import check_disk, new_folder
from mesp.models.architecture import Architecture
from mesp.models.config_json import check_lengths, complete
from mesp.models.families import FAMILIES
from mesp.models.weights import Weights
from mesp.progress import ProgressCallback, Task
from mesp.quantization.choose import Quantizations, check_quantizations, in_2_bits
from mesp.source_model.calibration import (
    CALIBRATION_SEQUENCES,
    LENGTH,
    Moments,
    choose_excerpts,
    draw_tokens,
)
from mesp.source_model.copied_files import copy_files, files_to_copy, write_config
from mesp.source_model.find import Source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.random_weights import RandomWeights
from mesp.vision import VisionTower

log = logging.getLogger(__name__)

# Files that may hold chat templates, but are not read.
OTHER_TEMPLATES = ("additional_chat_templates", "chat_template.json")


def write_bundle(
    source: Source,
    weights: Weights,
    arch: Architecture,
    options: ExportOptions,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Raises MespError if the bundle cannot be written."""
    check_quantizations(arch, options.quantizations)
    check_lengths(source.config, options.seq_lens)
    total = weight_bytes(weight_files(None, arch, options))
    with (
        plain_os_errors(f"Cannot write {options.out}"),
        new_folder(options.out.resolve(), options.overwrite) as folder,
    ):
        check_disk(folder, total)
        Task(progress, "Tokenizing")
        tokenizer = load_checked_tokenizer(source.folder, source.name) if source.folder else None
        splits = tokenize(source, weights, arch, options, tokenizer)
        moments = find_moments(source, weights, arch, options)
        files = weight_files(weights, arch, options, moments)
        writing = Task(progress, f"Writing {options.out.name}", total)
        options = replace(options, pack=any(split.pack for split in splits.values()))
        manifest = write_model(folder, source, arch, files, options, writing.advance)
        data = write_data(folder, "data", splits)
        write_config_and_tokenizer(source, folder, arch, options.quantizations)
        if tokenizer and not (folder / "tokenizer.json").exists():
            write_tokenizer(tokenizer, folder)
        manifest = replace(manifest, data=data, files=describe_files(folder), **fields_of(splits))
        manifest.write(folder)
    return manifest


def write_model(
    folder: Path, source: Source, arch: Architecture, files: WeightFiles, options: ExportOptions,
    progress: Callable[[int], Any],
) -> Manifest:  # fmt: skip
    (folder / "blocks").mkdir()
    layouts = {file: layout for file, (layout, _) in files.items()}
    blocks = [layouts[f"blocks/{i:02d}.bin"] for i in range(arch.num_hidden_layers)]
    groups = write_functions(folder, arch, blocks, options)
    for file, (layout, pieces) in files.items():
        write_weights(folder / file, layout, pieces, progress)
    head = "head.bin" if "head.bin" in files else "embedding.bin"
    return Manifest(
        name=source.name,
        model=ModelName(source.id, source.revision, **asdict(source.license)),
        architecture=arch,
        quantization=options.quantizations.main.in_bundle,
        seq_lens=tuple(options.seq_lens),
        ranks=tuple(options.ranks),
        blocks=tuple(groups),
        embedding=Table("embedding.bin", layouts["embedding.bin"]),
        head=Table(head, layouts[head]),
        per_layer={
            name: Table(file, layouts[file])
            for name, file in PER_LAYER_FILES.items()
            if name in arch.per_layer_shapes
        },
    )


def tokenize(
    source: Source, weights: Weights, arch: Architecture, options: ExportOptions, tokenizer: Any
) -> dict[str, Split]:
    longest = max(options.seq_lens)
    if options.data is None:
        if isinstance(weights, RandomWeights):
            return make_random_data(arch.vocab_size, longest, options.seed)
        return {}
    if source.folder is None:
        raise MespError(
            f"{source.name} has no tokenizer here, so --data cannot be used with it; leave out "
            "--data (random weights then get random tokens), or give a folder with a tokenizer."
        )
    tokenizer, folder = tokenizer or load_tokenizer(source.folder), source.folder

    @cache
    def open_images() -> ImageEncoder:
        if arch.embedding_scale != 1 or isinstance(weights, RandomWeights):
            raise MespError(f"{source.name} takes no images here; leave them out.")
        return ImageEncoder(VisionTower.open(folder), tokenizer)

    return load(
        options.data, tokenizer, longest, arch.vocab_size, options.data_options, open_images
    )


def find_moments(
    source: Source, weights: Weights, arch: Architecture, options: ExportOptions
) -> Moments | None:
    quantizations = options.quantizations
    comes_quantized = quantizations.config is not None
    if options.quantize == "nearest" or comes_quantized or isinstance(weights, RandomWeights):
        return None
    model = SourceModel(weights, arch, quantizations)
    if options.calibrate is None:
        return Moments(model, choose_excerpts(draw_tokens(arch.vocab_size), source, arch))
    if source.folder is None:
        raise MespError(f"{source.name} has no tokenizer here, so --calibrate cannot be used.")
    tokenizer = load_tokenizer(source.folder, "which --calibrate needs; leave it out")
    encoding = options.data_options.encoding
    split = load_additional(options.calibrate, tokenizer, LENGTH, arch.vocab_size, encoding)
    sequences = choose_excerpts(split.tokens, source, arch, CALIBRATION_SEQUENCES)
    return Moments(model, sequences, with_products=True)


def write_config_and_tokenizer(
    source: Source, folder: Path, arch: Architecture, quantizations: Quantizations
) -> None:
    family = FAMILIES[arch.model_type]
    config = complete(source.config) | {
        "num_hidden_layers": arch.num_hidden_layers,
        "tie_word_embeddings": arch.is_tied_in_mlx_lm,
    }
    if "num_kv_shared_layers" in config:
        config["num_kv_shared_layers"] = sum(each.keys_of is not None for each in arch.blocks)
    for key in ("quantization", "quantization_config"):
        if config.get(key):
            config[key] = in_2_bits(config[key])
    for key in ("layer_types", "no_rope_layers"):
        if isinstance(config.get(key), list):
            config[key] = config[key][: arch.num_hidden_layers]
    # mlx-lm reads the text model's keys inside `text_config`, and others, such as end tokens,
    # outside.
    if family.texts:
        text = (source.config.get("text_config") or {}).get("model_type", family.texts[0])
        config["text_config"] = config | {"model_type": text}
    config["model_type"] = family.mlx_type or arch.model_type
    own = quantizations.config
    config["quantization"] = quantizations.to_config(arch) if own is None else in_2_bits(own)
    write_config(folder / "config.json", config)
    if source.folder:
        files = [file.name for file in source.folder.iterdir() if file.is_file()]
        copy_files(source.folder, files_to_copy(files), folder)
        for name in OTHER_TEMPLATES:
            if (source.folder / name).exists():
                log.warning(
                    "%s of %s is not read; the chat template is that of chat_template.jinja or "
                    "tokenizer_config.json.",
                    name,
                    source.name,
                )
