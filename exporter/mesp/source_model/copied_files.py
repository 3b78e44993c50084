from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from mesp.errors import MespError
from mesp.files import SIZE, create, open_regular, read_object, root_of
from mesp.hub_download import TOKENIZER_FILES
from mesp.license import is_terms

_CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json")
FILES, TERMS, BYTES = 64, SIZE, 1 << 27
# Keys that name Python code to run.
CODE = ("auto_map", "custom_pipelines", "model_file")


def files_to_copy(names: Iterable[str]) -> list[str]:
    """Returns the names of the tokenizer and licence files and of generation_config.json, among
    `names`.
    """
    return sorted(name for name in names if name in TOKENIZER_FILES or is_terms(name))


def copy_files(source: Path, names: Iterable[str], folder: Path) -> None:
    """Copies files from `source` to `folder`. Configurations are copied without the keys in `CODE`.

    Raises MespError if the files are too many or one is too large, if a file is not regular, if a
    configuration is not a valid JSON object, or if a link leads out of `source` or, in a Hugging
    Face cache, out of the repository's folder.
    """
    root, names = root_of(source), list(names)
    if len(names) > FILES:
        raise MespError(
            f"{source} has more than {FILES} files of a tokenizer and of licences; remove those "
            "that the model does not need."
        )
    for name in names:
        file = source / name
        if not file.resolve().is_relative_to(root):
            raise MespError(f"{file} is a link that leads out of its folder; put the file there.")
        if name not in _CONFIGS:
            with _open(file) as old, create(folder / name) as new:
                if os.fstat(old.fileno()).st_size > (most := TERMS if is_terms(name) else BYTES):
                    raise MespError(f"{file} has more than {most >> 20} MiB; take a smaller one.")
                shutil.copyfileobj(old, new)
            continue
        write_config(folder / name, _read(file))


def configs_naming_code(source: Path, names: Iterable[str]) -> list[str]:
    """Returns the names of the configurations, among `names`, that have a key of `CODE`."""
    configs = {name: _read(source / name) for name in names if name in _CONFIGS}
    return [name for name, config in configs.items() if without_code(config) != config]


def _open(file: Path) -> BinaryIO:
    try:
        return open_regular(file)
    except ValueError as error:
        raise MespError(f"{file} is not a regular file; put one in its place.") from error


def _read(config: Path) -> dict[str, Any]:
    try:
        return read_object(config)
    except ValueError as error:
        raise MespError(f"{config} cannot be read as a JSON object.") from error


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Writes a configuration without the keys in `CODE`. Infinities have transformers' form."""
    valid = _with_tags(without_code(config))
    text = json.dumps(valid, indent=2, ensure_ascii=False, allow_nan=False)
    with create(path) as file:
        file.write(f"{text}\n".encode())


def _with_tags(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tags(each) for key, each in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": json.dumps(value)}
    return [*map(_with_tags, value)] if isinstance(value, list | tuple) else value


def without_code(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_code(each) for key, each in value.items() if key not in CODE}
    return [*map(without_code, value)] if isinstance(value, list) else value
