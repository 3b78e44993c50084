"""The data of a bundle, written into it and replaced there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mesp.bundle.folders import locked
from mesp.bundle.manifest import damaged, describe_files, read_manifest, write_manifest
from mesp.data.examples import Split
from mesp.errors import plain_os_errors
from mesp.files import create, read_object, remove_link, sync

# A bundle's data lies in one of these folders; new data is written to the other.
FOLDERS = ("data", "data.2")


def write_data(bundle: Path, folder: str, splits: dict[str, Split]) -> dict[str, Any]:
    """Writes the splits to a new `folder` of the bundle; returns the manifest's ``data``."""
    entries = {}
    if splits:
        remove_link(bundle / folder)
        (bundle / folder).mkdir(exist_ok=True)

    def write(file: str, array: np.ndarray) -> str:
        with create(bundle / folder / file) as opened:
            opened.write(array.tobytes())
        return f"{folder}/{file}"

    for split, each in splits.items():
        file = write(f"{split}.bin", each.tokens.astype("<u4"))
        entries[split] = {"file": file, "tokens": len(each.tokens)}
        if each.examples is not None:
            file = write(f"{split}.examples.bin", each.examples.astype("<u4"))
            entries[split]["examples"] = {"file": file, "count": len(each.examples)}
        if each.mask is not None:
            entries[split]["mask"] = write(f"{split}.mask.bin", each.mask)
        if each.labels is not None:
            entries[split]["labels"] = write(f"{split}.labels.bin", each.labels)
    return entries


def replace_data(bundle: Path, splits: dict[str, Split]) -> dict[str, Any]:
    """Replaces the data of a finished bundle; returns the manifest's new ``data``.

    The new manifest, put in place by one rename, is what makes the new data the bundle's: ended at
    any time, this leaves a whole bundle. What else it leaves is removed by the next call.
    """
    with (
        plain_os_errors(f"Cannot write the data to {bundle}"),
        locked(bundle, f"mesp-data is writing to {bundle}"),
    ):
        manifest = read_manifest(bundle, to_run=False)
        new = _remove_unused(bundle)
        try:
            data = write_data(bundle, new, splits)
            kept = [f for f in manifest["files"] if f["path"].split("/")[0] not in FOLDERS]
            files = sorted(kept + describe_files(bundle, new), key=lambda file: file["path"])
            write_manifest(bundle / new, {**manifest, "data": data, "files": files})
            for written in (*(bundle / new).iterdir(), bundle / new):
                sync(written)
            os.replace(bundle / new / "manifest.json", bundle / "manifest.json")
            sync(bundle)
        finally:
            _remove_unused(bundle)
    return data


def _remove_unused(bundle: Path) -> str:
    """Removes the folder for data that is not the manifest's, if it is there; returns its name."""
    files = read_object(bundle / "manifest.json")["files"]
    used = {file["path"].split("/")[0] for file in files}
    unused = next((folder for folder in FOLDERS if folder not in used), None)
    if unused is None:
        raise damaged(bundle)
    remove_link(bundle / unused)
    shutil.rmtree(bundle / unused, ignore_errors=True)
    return unused


def describe_data(data: dict[str, Any]) -> str:
    """The manifest's ``data`` in words; empty where there is none."""
    return ", ".join(
        f"{entry['examples']['count']:,} {split} {_unit(entry)} of {entry['tokens']:,} tokens"
        if "examples" in entry
        else f"{entry['tokens']:,} {split} tokens"
        for split, entry in data.items()
    )


def _unit(entry: dict[str, Any]) -> str:
    return "answers" if "labels" in entry else "examples"
