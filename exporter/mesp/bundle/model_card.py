from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import yaml

from mesp.bundle.manifest import Manifest
from mesp.files import create
from mesp.license import is_terms
from mesp.source_model.copied_files import copy_files


def front_matter(manifest: Manifest, **others: str) -> str:
    model = manifest.model
    entries: dict[str, Any] = {**others}
    if model.revision:
        entries["base_model"] = "/".join(model.id.split("/")[:2])  # drops the name of a GGUF file
    for name in ("license", "license_name", "license_link"):
        if value := getattr(model, name):
            entries[name] = value
    if not entries:
        return ""
    text = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=sys.maxsize)
    return f"---\n{text}---\n"


def write_card(manifest: Manifest, folder: Path) -> None:
    path, head = folder / "README.md", front_matter(manifest)
    if not head or os.path.lexists(path):
        return
    text = f"""
# {manifest.name}, fine-tuned

Made with MeSP. The terms of {manifest.name} apply to it too.
"""
    with create(path) as file:
        file.write((head + text).encode())


def write_terms(bundle: Path, manifest: Manifest, folder: Path) -> None:
    copy_files(bundle, filter(is_terms, (file.path for file in manifest.files)), folder)
    write_card(manifest, folder)


def write_terms_of_run(bundle: Path, manifest: Manifest, run: Path) -> None:
    """Writes the licence files and a model card beside each of a run's adapters, because people
    share adapters without the run.
    """
    for name in ("adapters", "adapters/peft", "best", "best/peft"):
        if (run / name).is_dir():
            write_terms(bundle, manifest, run / name)
