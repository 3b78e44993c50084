from __future__ import annotations

from typing import Any

from mesp.bundle.manifest import Manifest
from mesp.data.image_encoder import ImageEncoder
from mesp.errors import MespError
from mesp.source_model.find import find_source
from mesp.vision import VisionTower


def open_images(bundle: Manifest, vision: str | None, tokenizer: Any) -> ImageEncoder:
    """`vision` is the model with the vision tower; None: the one that the bundle is of."""
    try:
        source = find_source(vision or bundle.model.id, False)
    except MespError as error:
        raise MespError(
            f"Images need the vision tower of {bundle.model.id}, which is not found: name the "
            "model's folder with --vision."
        ) from error
    if source.folder is None:
        raise MespError(f"{source.name} has no vision tower.")
    return ImageEncoder(VisionTower.open(source.folder), tokenizer)
