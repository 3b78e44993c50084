"""Writes a bundle anew from one that there is: other functions, and the same weights and data."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mesp.bundle.export_options import BundleOptions
from mesp.bundle.folders import locked, new_folder
from mesp.bundle.function_files import write_functions
from mesp.bundle.manifest import describe_files, write_manifest
from mesp.bundle.reader import Bundle, block_file, data_files
from mesp.bundle.weight_files import write_weights
from mesp.bundle.writer import check_disk
from mesp.errors import MespError, plain_os_errors
from mesp.progress_bars import export_progress
from mesp.source_model.texts import copy_texts, naming_code, texts_of


def rewrite_bundle(source: Path, options: BundleOptions) -> dict[str, Any]:
    """Writes the bundle `options.out`, which may be `source`, and returns its manifest.

    Functions are traced anew, by this MLX. Weights are written anew where the dtype changes, and
    configurations without the code that they name; other files are links to the same content, or
    copies where there can be none. Raises MespError where
    the bundle, its data or the disk do not allow it; nothing is left then, and `source` is whole.
    """
    in_place = options.out.resolve() == source.resolve()
    writing = f"mesp-export or mesp-data is writing to {source}"
    with (
        plain_os_errors(f"Cannot write {options.out}"),
        nullcontext() if in_place else locked(source, writing),
        new_folder(options.out.resolve(), options.overwrite) as folder,
        export_progress() as bar,
    ):
        bundle = Bundle(source, to_run=False)
        check_data(bundle, max(options.seq_lens))
        task = bar.add_task(f"Checking {source.name}", total=None)
        bundle.verify()
        old = bundle.weight_files()
        layouts = bundle.layouts_in(options.dtype)
        changed = [file for file in old if layouts[file] != old[file]]
        total = sum(layouts[file].words * 4 for file in changed)
        check_disk(options.out, folder, total)
        bar.update(task, description=f"Writing {options.out.name}", total=total or None)

        (folder / "blocks").mkdir()
        blocks = [layouts[block_file(i)] for i in range(bundle.architecture.num_hidden_layers)]
        groups = write_functions(folder, bundle.architecture, blocks, options)
        for file in changed:
            arrays = old[file].unpack(bundle.words(file))
            pieces = ((name, 0, array) for name, array in arrays.items())
            write_weights(folder / file, layouts[file], pieces, partial(bar.advance, task))
        gone = {*changed, *bundle.function_files()}
        data = bundle.manifest.get("data", {})
        listed = {entry["path"] for entry in bundle.manifest["files"]}
        changed_texts = naming_code(source, listed)
        copy_texts(source, changed_texts, folder)
        gone |= set(changed_texts)
        written = describe_files(folder)
        used = {*old, "config.json", *texts_of(listed)}
        used |= {file for entry in data.values() for file in data_files(entry)}
        kept = [entry for entry in bundle.manifest["files"] if entry["path"] in used - gone]
        for entry in kept:
            link(source / entry["path"], folder / entry["path"])
        tables = {name: bundle.manifest[name]["file"] for name in ("embedding", "head")}
        manifest = {
            **bundle.manifest,
            "mlx_version": mx.__version__,
            "device": options.device,
            "dtype": options.dtype,
            "architecture": bundle.architecture.to_manifest(),
            "seq_lens": options.seq_lens,
            "ranks": options.ranks,
            "blocks": [group.to_manifest() for group in groups],
            **{n: {"file": file, **layouts[file].to_manifest()} for n, file in tables.items()},
            "files": sorted(kept + written, key=lambda entry: entry["path"]),
        }
        write_manifest(folder, manifest)
    return manifest


def check_data(bundle: Bundle, seq_len: int) -> None:
    """Raises MespError where a packed split is shorter than one sequence of `seq_len`."""
    for split, entry in bundle.manifest.get("data", {}).items():
        if "examples" not in entry and entry["tokens"] < seq_len + 1:
            raise MespError(
                f"The {split} data of {bundle.path} has {entry['tokens']:,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text with mesp-data, or "
                "take a smaller --seq-len."
            )


def link(file: Path, new: Path) -> None:
    """Gives a file a second name, or copies it where it cannot have one."""
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, new)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(file, new)
