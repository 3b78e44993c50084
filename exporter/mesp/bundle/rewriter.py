"""Writes a bundle again from one that there is, with the same weights and data."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from mesp.block_function.mlxfn import LAYOUTS
from mesp.bundle.export_options import BundleOptions
from mesp.bundle.function_files import write_functions, write_layouts
from mesp.bundle.manifest import LAYOUT_FOLDERS, Manifest, Table, describe_files
from mesp.bundle.reader import Bundle, block_file
from mesp.bundle.weight_files import write_weights
from mesp.bundle.writer import check_disk
from mesp.errors import MespError, plain_os_errors
from mesp.folders import locked, new_folder
from mesp.models.config_json import check_lengths
from mesp.progress import Report, Task
from mesp.source_model.texts import copy_texts, naming_code, texts_of


def rewrite_bundle(
    source: Path, options: BundleOptions, progress: Report | None = None
) -> Manifest:
    """Writes the bundle `options.out`, which may be `source`, and returns its manifest.

    Functions are traced again, unless nothing is asked for but the layouts that the bundle lacks.
    Weights are written again where the dtype changes, and
    configurations without the code that they name; other files are links to the same content, or
    copies where there can be none. Raises MespError where
    the bundle, its data or the disk do not allow it; nothing is left then, and `source` is whole.
    """
    in_place = options.out.resolve() == source.resolve()
    another = f"mesp-export or mesp data is writing to {source}"
    with (
        plain_os_errors(f"Cannot write {options.out}"),
        nullcontext() if in_place else locked(source, another),
        new_folder(options.out.resolve(), options.overwrite) as folder,
    ):
        bundle = Bundle(source, to_run=False)
        check_data(bundle, max(options.seq_lens))
        check_lengths(bundle.config(), [*bundle.manifest.seq_lens, *options.seq_lens])
        Task(progress, f"Checking {source.name}")
        bundle.verify()
        old = bundle.weight_files()
        layouts = bundle.layouts_in(options.dtype)
        changed = [file for file in old if layouts[file] != old[file]]
        total = sum(layouts[file].words * 4 for file in changed)
        check_disk(options.out, folder, total)
        writing = Task(progress, f"Writing {options.out.name}", total or None)

        (folder / "blocks").mkdir()
        manifest = bundle.manifest
        if lacks_only_layouts(manifest, options):
            groups, functions = manifest.blocks, bundle.function_names()
            write_layouts(source, functions, folder)
        else:
            blocks = [layouts[block_file(i)] for i in range(bundle.architecture.num_hidden_layers)]
            packs = options.pack or any(split.pack for split in manifest.data.values())
            options = replace(options, pack=packs)
            groups = tuple(write_functions(folder, bundle.architecture, blocks, options))
            functions = set()
        for file in changed:
            words = bundle.words(file)
            pieces = (piece for spec in old[file].arrays for piece in spec.pieces(words))
            write_weights(folder / file, layouts[file], pieces, writing.advance)
        gone = {*changed, *bundle.function_files()} - functions
        listed = {entry.path for entry in manifest.files}
        changed_texts = naming_code(source, listed)
        copy_texts(source, changed_texts, folder)
        gone |= set(changed_texts)
        written = describe_files(folder)
        used = {*old, *functions, "config.json", *texts_of(listed)}
        used |= {file for split in manifest.data.values() for file in split.sizes}
        kept = [entry for entry in manifest.files if entry.path in used - gone]
        for entry in kept:
            link(source / entry.path, folder / entry.path)
        embedding, head = (table.file for table in (manifest.embedding, manifest.head))
        per_layer = {
            name: Table(table.file, layouts[table.file])
            for name, table in manifest.per_layer.items()
        }
        manifest = replace(
            manifest,
            mlx_version=LAYOUTS[0],
            layouts=LAYOUT_FOLDERS,
            device=options.device,
            dtype=options.dtype,
            seq_lens=tuple(options.seq_lens),
            ranks=tuple(options.ranks),
            blocks=groups,
            embedding=Table(embedding, layouts[embedding]),
            head=Table(head, layouts[head]),
            per_layer=per_layer,
            files=tuple(sorted([*kept, *written], key=lambda entry: entry.path)),
        )
        manifest.write(folder)
    return manifest


def lacks_only_layouts(manifest: Manifest, options: BundleOptions) -> bool:
    """Whether the bundle is as asked for, but for layouts of its functions."""
    asked = options.seq_lens, options.ranks, options.dtype, options.device
    has = [*manifest.seq_lens], [*manifest.ranks], manifest.dtype, manifest.device
    lacking = LAYOUT_FOLDERS.keys() - manifest.layouts.keys()
    return asked == has and manifest.mlx_version == LAYOUTS[0] and bool(lacking)


def check_data(bundle: Bundle, seq_len: int) -> None:
    """Raises MespError where a packed split is shorter than one sequence of `seq_len`."""
    for split, entry in bundle.manifest.data.items():
        if entry.examples is None and entry.tokens < seq_len + 1:
            raise MespError(
                f"The {split} data of {bundle.path} has {entry.tokens:,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text with mesp data, or "
                "take a smaller --seq-len."
            )


def link(file: Path, new: Path) -> None:
    """Gives a file a second name, or copies it where it cannot have one."""
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, new)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(file, new)
