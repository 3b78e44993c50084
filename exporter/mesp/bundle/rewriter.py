from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from mesp.bundle.export_options import BundleOptions
from mesp.bundle.function_files import write_functions
from mesp.bundle.manifest import OF_SAME_WEIGHTS, Manifest, describe_files
from mesp.bundle.reader import Bundle, block_file
from mesp.errors import MespError, plain_os_errors
from mesp.folders import check_disk, locked, new_folder
from mesp.models.config_json import check_lengths
from mesp.progress import ProgressCallback, Task
from mesp.source_model.copied_files import configs_naming_code, copy_files, files_to_copy


def rewrite_bundle(
    source: Path, options: BundleOptions, progress: ProgressCallback | None = None
) -> Manifest:
    """Writes the bundle `options.out`, which may be `source`, and returns its manifest.

    The other files are hard links or, if links are not possible, copies. Raises MespError if the
    new bundle cannot be written. Then nothing of the new bundle is left, and `source` is unchanged.
    """
    in_place = options.out.resolve() == source.resolve()
    another = f"mesp-export or mesp data is writing to {source}"
    with (
        plain_os_errors(f"Cannot write {options.out}"),
        nullcontext() if in_place else locked(source, another),
        new_folder(options.out.resolve(), options.overwrite) as folder,
    ):
        bundle = Bundle(source, OF_SAME_WEIGHTS)
        check_data(bundle, max(options.seq_lens))
        check_lengths(bundle.config(), [*bundle.manifest.seq_lens, *options.seq_lens])
        Task(progress, f"Checking {source.name}")
        bundle.verify()
        layouts = bundle.weight_files()
        if source.stat().st_dev != folder.stat().st_dev:
            check_disk(folder, sum(layout.words * 4 for layout in layouts.values()))
        Task(progress, f"Writing {options.out.name}")

        (folder / "blocks").mkdir()
        manifest = bundle.manifest
        blocks = [layouts[block_file(i)] for i in range(bundle.architecture.num_hidden_layers)]
        packs = options.pack or any(split.pack for split in manifest.data.values())
        options = replace(options, pack=packs)
        groups = tuple(write_functions(folder, bundle.architecture, blocks, options))
        listed = {entry.path for entry in manifest.files}
        changed_texts = configs_naming_code(source, listed)
        copy_files(source, changed_texts, folder)
        written = describe_files(folder)
        used = {*layouts, "config.json", *files_to_copy(listed)}
        used |= {file for split in manifest.data.values() for file in split.sizes(0)}
        used -= {*changed_texts}
        kept = [entry for entry in manifest.files if entry.path in used]
        for entry in kept:
            link(source / entry.path, folder / entry.path)
        manifest = replace(
            manifest,
            seq_lens=tuple(options.seq_lens),
            ranks=tuple(options.ranks),
            blocks=groups,
            files=tuple(sorted([*kept, *written], key=lambda entry: entry.path)),
        )
        manifest.write(folder)
    return manifest


def check_data(bundle: Bundle, seq_len: int) -> None:
    """Raises MespError if a split that is one stream has fewer than `seq_len` + 1 tokens."""
    for split, entry in bundle.manifest.data.items():
        if entry.examples is None and entry.tokens < seq_len + 1:
            raise MespError(
                f"The {split} data of {bundle.path} has {entry.tokens:,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text with mesp data, or "
                "take a smaller --seq-len."
            )


def link(file: Path, new: Path) -> None:
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, new)
    except OSError:  # for example on another disk
        shutil.copyfile(file, new)
