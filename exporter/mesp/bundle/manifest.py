"""A bundle's manifest.json, read with its checks, and written."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mesp.bundle.layout import Layout
from mesp.errors import MespError
from mesp.files import create, inside, read_object
from mesp.models.architecture import Architecture

FORMAT = 4

# What commands read of a manifest, by its type; `Bundle` reads the rest.
READ_BY_COMMANDS = {
    "name": str,
    "model": {"id": str},
    "device": str,
    "seq_lens": [int],
    "ranks": [int],
    "architecture": dict,
    "files": [{"path": str, "size": int, "sha256": str}],
}
MODEL = ("id", "revision", "license")  # what a manifest says of the model
_PACKED = {
    "words": int,
    "arrays": [{"name": str, "offset": int, "shape": [int], "dtype": str}],
}
READ_BY_BUNDLE = {
    "quantization": {"bits": int, "group_size": int, "mode": str},
    "blocks": [{"layers": [int], "functions": dict, "plain_functions": dict, **_PACKED}],
    "embedding": {"file": str, **_PACKED},
    "head": {"file": str, **_PACKED},
}


def fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value has the keys and types `wanted`; a number may not be negative."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(fits(value.get(k), wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and all(fits(each, wanted[0]) for each in value)
    return type(value) is wanted and (wanted is not int or 0 <= value < 1 << 53)


def _is_line(value: Any) -> bool:
    """Whether it is a line of text, or nothing: it goes to terminals and into model cards."""
    return value is None or (isinstance(value, str) and value.isprintable())


def _is_split(entry: Any) -> bool:
    return (
        fits(entry, {"tokens": int})
        and ("examples" not in entry or fits(entry["examples"], {"count": int}))
        and all(key not in entry or fits(entry[key], str) for key in ("mask", "labels"))
    )


def read_manifest(path: Path, to_run: bool = True) -> dict[str, Any]:
    """The manifest of the bundle at `path`, after checking that this machine can run it.

    Raises MespError where the folder is no bundle, is of another format, lacks a file or part of
    one, or, unless it is not `to_run`, is of another MLX version or needs a GPU that is not there.
    Contents are checked by `Bundle.verify`.
    """
    try:
        manifest = read_object(path / "manifest.json")
        version, mlx_version = manifest["format"], manifest["mlx_version"]
    except FileNotFoundError as error:
        raise MespError(
            f"{path} is not a bundle (it has no manifest.json); write one with mesp-export."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MespError(
            f"{path / 'manifest.json'} cannot be read; write the bundle again with mesp-export."
        ) from error
    if version != FORMAT:
        raise MespError(
            f"{path} has bundle format {version}, and this version reads format {FORMAT}; "
            "export it again."
        )
    if to_run and mlx_version != mx.__version__:
        raise MespError(
            f"{path} was exported with MLX {mlx_version}, and this is MLX {mx.__version__}; "
            f"write it anew with mesp-export --from, or install mlx=={mlx_version}."
        )
    if to_run and manifest.get("device") == "gpu" and not mx.metal.is_available():
        raise MespError(
            f"{path} was exported for a GPU, and this machine has none that MLX can use; "
            "write it anew with mesp-export --from and --device cpu."
        )
    data = manifest.get("data") or {}
    if (
        not fits(manifest, READ_BY_COMMANDS)
        or not manifest["model"].keys() >= {*MODEL}
        or not all(map(_is_line, (manifest["name"], *map(manifest["model"].get, MODEL))))
        or not (manifest["seq_lens"] and manifest["ranks"])
        or 0 in (*manifest["seq_lens"], *manifest["ranks"])
        or not (isinstance(data, dict) and all(map(_is_split, data.values())))
        or not all(map(_is_line, data))
    ):
        raise damaged(path)
    try:
        Architecture.from_manifest(manifest["architecture"])
    except (TypeError, KeyError, ValueError, ArithmeticError) as error:
        raise damaged(path) from error
    for entry in manifest["files"]:
        try:
            file = inside(path, entry["path"])
        except ValueError as error:
            raise MespError(
                f"{path} names a file outside of it, {entry['path']!r:.200}; do not use it."
            ) from error
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size"]:
            found = "missing" if size is None else f"{size:,} bytes long, not {entry['size']:,}"
            raise MespError(f"{file} is {found}; write the bundle again with mesp-export.")
    return manifest


def damaged(path: Path) -> MespError:
    """What is said of a bundle whose manifest contradicts itself."""
    return MespError(f"{path / 'manifest.json'} is damaged; write the bundle again.")


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one layout and one mixer, and their functions' files by length."""

    layers: tuple[int, ...]
    functions: dict[str, str]
    plain_functions: dict[str, str]
    layout: Layout

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> BlockGroup:
        layers, layout = tuple(entry["layers"]), Layout.from_manifest(entry)
        return cls(layers, entry["functions"], entry["plain_functions"], layout)

    def to_manifest(self) -> dict[str, Any]:
        described = {name: getattr(self, name) for name in ("functions", "plain_functions")}
        return {"layers": self.layers, **described, **self.layout.to_manifest()}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes ``manifest.json``."""
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    with create(folder / "manifest.json") as file:
        file.write(f"{text}\n".encode())


def describe_files(bundle: Path, folder: str = ".") -> list[dict[str, Any]]:
    """The manifest's ``files``: every file in the bundle, or in a folder of it."""
    files = sorted(path for path in (bundle / folder).rglob("*") if path.is_file())
    return [
        {
            "path": file.relative_to(bundle).as_posix(),
            "size": file.stat().st_size,
            "sha256": sha256(file),
        }
        for file in files
    ]


def sha256(path: Path) -> str:
    """The digest of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
