from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mesp.bundle.manifest import (
    DataSplit,
    ImageRows,
    Manifest,
    damaged,
    describe_files,
    read_manifest,
)
from mesp.data.image_encoder import name_of
from mesp.data.splits import Split
from mesp.errors import plain_os_errors
from mesp.files import create, read_object, remove_link, sync
from mesp.folders import check_disk, locked

FOLDERS = ("data", "data.2")


def write_data(bundle: Path, folder: str, splits: dict[str, Split]) -> dict[str, DataSplit]:
    if splits:
        remove_link(bundle / folder)
        (bundle / folder).mkdir(exist_ok=True)
        check_disk(bundle, sum(4 * len(split.tokens) for split in splits.values()))
    rows = next((split.rows for split in splits.values() if split.rows is not None), None)
    images = f"{folder}/images.bin"
    if rows is not None:
        with create(bundle / images) as opened:
            opened.write(bytes(memoryview(rows)))  # type: ignore[arg-type]

    def image_rows(name: str, split: Split) -> ImageRows | None:
        places = write(f"{name}.places.bin", split.places, "<u4")
        if places is None or rows is None:
            return None
        return ImageRows(images, rows.shape[0], name_of(rows), places)

    def write(file: str, array: np.ndarray | None, dtype: str) -> str | None:
        if array is None:
            return None
        with create(bundle / folder / file) as opened:
            opened.write(array.astype(dtype).tobytes())
        return f"{folder}/{file}"

    return {
        name: DataSplit(
            str(write(f"{name}.bin", split.tokens, "<u4")),
            len(split.tokens),
            write(f"{name}.examples.bin", split.examples, "<u4"),
            None if split.examples is None else len(split.examples),
            write(f"{name}.mask.bin", split.mask, "u1"),
            write(f"{name}.labels.bin", split.labels, "u1"),
            split.begin,
            split.pack,
            image_rows(name, split),
        )
        for name, split in splits.items()
    }


def fields_of(splits: Mapping[str, Split]) -> dict[str, Any]:
    """Returns the manifest's `end_tokens` and `encoding`."""
    ends = {token for split in splits.values() for token in split.ends}
    encoding = next((split.encoding for split in splits.values()), {})
    return {"end_tokens": tuple(sorted(ends)), "encoding": encoding}


def write_index(folder: Path, data: Mapping[str, DataSplit]) -> None:
    with create(folder / "data.json") as file:
        file.write(json.dumps({name: split.to_json() for name, split in data.items()}).encode())


def replace_data(bundle: Path, splits: dict[str, Split]) -> Manifest:
    """Replaces the data of a finished bundle, and returns the bundle's new manifest.

    One rename switches to the new manifest and the new data.
    """
    with (
        plain_os_errors(f"Cannot write the data to {bundle}"),
        locked(bundle, f"mesp data is writing to {bundle}"),
    ):
        manifest = read_manifest(bundle)
        new = _remove_unused(bundle)
        try:
            data = write_data(bundle, new, splits)
            kept = [file for file in manifest.files if file.path.split("/")[0] not in FOLDERS]
            files = sorted([*kept, *describe_files(bundle, new)], key=lambda file: file.path)
            manifest = replace(manifest, data=data, files=tuple(files), **fields_of(splits))
            manifest.write(bundle / new)
            for written in (*(bundle / new).iterdir(), bundle / new):
                sync(written)
            os.replace(bundle / new / "manifest.json", bundle / "manifest.json")
            sync(bundle)
        finally:
            _remove_unused(bundle)
    return manifest


def _remove_unused(bundle: Path) -> str:
    files = read_object(bundle / "manifest.json")["files"]
    used = {file["path"].split("/")[0] for file in files}
    unused = next((folder for folder in FOLDERS if folder not in used), None)
    if unused is None:
        raise damaged(bundle)
    remove_link(bundle / unused)
    shutil.rmtree(bundle / unused, ignore_errors=True)
    return unused


def describe_data(data: Mapping[str, DataSplit]) -> str:
    def describe(name: str, split: DataSplit) -> str:
        if split.count is None:
            return f"{split.tokens:,} {name} tokens"
        unit = "example" if split.labels is None else "answer"
        units = unit if split.count == 1 else f"{unit}s"
        return f"{split.count:,} {name} {units} of {split.tokens:,} tokens"

    return ", ".join(describe(name, split) for name, split in data.items())
