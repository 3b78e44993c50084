"""Finds the model to export: a folder, a model on the Hugging Face Hub, a short name or `demo`."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesp.errors import MespError
from mesp.files import read_object
from mesp.hub_download import download
from mesp.models.short_names import KNOWN
from mesp.source_model.texts import TOKENIZER_FILES

DEMO = Path(__file__).parents[1] / "demo_model"


@dataclass(frozen=True)
class Source:
    """Where a model comes from; `folder` is None for random weights of a known geometry."""

    name: str
    id: str
    config: dict[str, Any]
    folder: Path | None = None
    revision: str | None = None
    license: str | None = None


def find_source(model: str, random_weights: bool) -> Source:
    """Finds a model by short name, folder, Hub id or ``demo``, downloading it where need be.

    With `random_weights` only its geometry and tokenizer are needed, and for a short name nothing
    is downloaded. Raises MespError where there is no such model.
    """
    if model == "demo":
        return replace(_local_source(DEMO), name="demo", id="demo")
    if os.path.isdir(model):
        return _local_source(Path(model))
    for short, (repo, _, config) in KNOWN.items():
        if model.lower() in (short.lower(), repo.lower()):
            return Source(short, repo, config) if random_weights else _hub_source(repo)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _hub_source(model, random_weights)
    raise MespError(
        f"There is no model {model}; name a folder, a model on the Hugging Face Hub such as "
        "Qwen/Qwen2.5-0.5B, demo, or a short name that --list-models prints."
    )


def _local_source(folder: Path) -> Source:
    try:
        config = read_object(folder / "config.json")
    except FileNotFoundError as error:
        raise MespError(f"{folder} is not a Hugging Face model: it has no config.json.") from error
    except (OSError, ValueError) as error:
        raise MespError(f"{folder / 'config.json'} cannot be read as a JSON object.") from error
    name = folder.resolve().name
    return Source(name, name, config, folder, license=_license(folder / "README.md"))


def _hub_source(repo: str, random_weights: bool = False) -> Source:
    patterns = ["config.json", *TOKENIZER_FILES, "README.md", "LICENSE*"]
    if not random_weights:
        patterns += ["model*.safetensors", "*.safetensors.index.json"]
    folder = download("model", repo, patterns)
    return replace(_local_source(folder), name=repo.split("/")[1], id=repo, revision=folder.name)


def _license(model_card: Path) -> str | None:
    from huggingface_hub import ModelCard

    try:
        return ModelCard(model_card.read_text(encoding="utf-8")).data.get("license")
    except Exception:  # there is no model card, or it is not in order: it only informs
        return None
