from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mesp.errors import MespError, plain_os_errors
from mesp.files import read_object
from mesp.hub_download import (
    choose_gguf_file,
    download_gguf_file,
    download_model,
    list_gguf_files,
    refuse_path,
)
from mesp.license import UNKNOWN, License, is_terms
from mesp.models.architecture import Architecture
from mesp.models.short_names import KNOWN
from mesp.source_model.copied_files import copy_files

if TYPE_CHECKING:
    from mesp.source_model.gguf.header import GGUF

DEMO = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True)
class Source:
    """A model to export. `folder` is None for a known model with random weights.

    For a GGUF file, `folder` is the path of the folder `temporary`, which contains the tokenizer
    and the licence terms.
    """

    name: str
    id: str
    config: dict[str, Any]
    folder: Path | None = None
    revision: str | None = None
    license: License = UNKNOWN
    gguf: GGUF | None = None
    temporary: TemporaryDirectory[str] | None = None


def find_source(model: str, random_weights: bool) -> Source:
    """Finds a model by short name, folder, GGUF file, Hub id or ``demo``, and downloads it if
    necessary.

    A GGUF file on the Hub is ``owner/name/file.gguf`` or, by its quantization,
    ``owner/name:Q4_K_M``. With `random_weights`, a model in safetensors needs no weights. Raises
    MespError if there is no such model, or if it cannot be used.
    """
    if model == "demo":
        return replace(_local_source(DEMO), name="demo", id="demo")
    if os.path.isdir(model):
        folder = Path(model)
        if not _has_model(folder, random_weights):
            _refuse_gguf(model, [str(file) for file in sorted(folder.glob("*.[gG][gG][uU][fF]"))])
        return _local_source(folder)
    if os.path.exists(model) and model.lower().endswith(".gguf"):
        return _gguf_source(Path(model), Path(model).parent)
    refuse_path(model)
    for short, (repo, _, config) in KNOWN.items():
        if model.lower() in (short.lower(), repo.lower()):
            return Source(short, repo, config) if random_weights else _hub_source(repo)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not model.lower().endswith(".gguf"):
        return _hub_source(model, random_weights)
    if match := re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/([\w./-]+\.gguf)|:([\w.-]+))", model, re.I):
        repo, file, quantization = match.groups()
        file = file or choose_gguf_file(repo, quantization)
        folder = download_gguf_file(repo, file)
        source = _gguf_source(folder / file, folder)
        return replace(source, id=f"{repo}/{file}", revision=folder.name)
    raise MespError(
        f"There is no model {model}; name a folder, a GGUF file, a model on the Hugging Face Hub "
        "such as Qwen/Qwen2.5-0.5B, demo, or a short name that `mesp models` lists."
    )


def _has_model(folder: Path, random_weights: bool) -> bool:
    has_weights = random_weights or any(folder.glob("model*.safetensors"))
    return has_weights and (folder / "config.json").exists()


def _refuse_gguf(name: str, files: list[str]) -> None:
    if files:
        raise MespError(
            f"{name} holds its model as GGUF files; name the one to read: --model {files[0]}"
            + (f", or {', '.join(files[1:])}." if files[1:] else ".")
        )


def _local_source(folder: Path) -> Source:
    try:
        config = read_object(folder / "config.json")
    except FileNotFoundError as error:
        raise MespError(f"{folder} is not a Hugging Face model: it has no config.json.") from error
    except (OSError, ValueError) as error:
        raise MespError(f"{folder / 'config.json'} cannot be read as a JSON object.") from error
    name = folder.resolve().name
    if not name.isprintable():
        raise MespError(f"{folder} has characters in its name that cannot be shown; rename it.")
    return Source(name, name, config, folder, license=License.of_card(folder / "README.md"))


def _hub_source(repo: str, random_weights: bool = False) -> Source:
    folder = download_model(repo, with_weights=not random_weights)
    if not _has_model(folder, random_weights):
        _refuse_gguf(repo, [f"{repo}/{name}" for name in list_gguf_files(repo)])
    return replace(_local_source(folder), name=repo.split("/")[1], id=repo, revision=folder.name)


def _gguf_source(file: Path, repository: Path) -> Source:
    try:
        from mesp.source_model.gguf.config import config_of
        from mesp.source_model.gguf.header import GGUF
        from mesp.source_model.gguf.tokenizer import write_tokenizer
        from mesp.source_model.gguf.weights import GGUFWeights
    except ImportError as error:
        raise MespError(
            "Reading a GGUF file needs the gguf package: pip install 'mesp[gguf]'."
        ) from error
    gguf = GGUF.read(file)
    config = config_of(gguf)
    weights = GGUFWeights(gguf, Architecture.from_config(config))
    if weights.is_quantized_file:
        config["quantization"] = weights.quantization()
    temporary = TemporaryDirectory(prefix="mesp-")
    folder = Path(temporary.name)
    write_tokenizer(gguf, folder)
    with plain_os_errors(f"Cannot read {repository}"):
        files = [each.name for each in repository.iterdir() if each.is_file()]
        copy_files(repository, filter(is_terms, files), folder)
    license = License.of(lambda key: gguf.text(f"general.{key.replace('_', '.')}"))
    if license == UNKNOWN:
        license = License.of_card(repository / "README.md")
    name = file.name[: -len(".gguf")]
    return Source(name, name, config, folder, None, license, gguf, temporary)
