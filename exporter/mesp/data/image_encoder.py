"""Puts images into encoded conversations.

The chat template writes one image token for an image. The tokens of the image's tiles take its
place, and the rows of the image take the place of their embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mesp.data.images import Image
from mesp.data.loss_mask import Encoded
from mesp.errors import MespError
from mesp.vision import VisionTower


def name_of(rows: mx.array) -> str:
    return str(rows.dtype).rpartition(".")[2]


class _Place(NamedTuple):
    ids: list[int]
    first: int  # the image's first row in the table


class ImageEncoder:
    """Puts images' tokens and rows into conversations. Equal images share rows."""

    def __init__(self, tower: VisionTower, tokenizer: Any) -> None:
        self.tower, self._tokenizer = tower, tokenizer
        self._parts: list[mx.array] = []
        self._places: dict[int, _Place] = {}  # by the identities of the parts
        self._count = 0

    @property
    def rows(self) -> mx.array | None:
        return mx.concatenate(self._parts) if self._parts else None

    def _place(self, image: Image) -> _Place:
        features = self.tower.features(image)
        if id(features.rows) not in self._places:
            ids = self._tokenizer.encode(features.text, add_special_tokens=False)
            self._places[id(features.rows)] = _Place(list(ids), self._count)
            self._parts.append(features.rows)
            self._count += features.rows.shape[0]
        return self._places[id(features.rows)]

    def add(self, images: Iterable[Image]) -> None:
        for image in images:
            self._place(image)

    @contextmanager
    def rows_file(self) -> Iterator[dict[str, Any] | None]:
        """Writes the rows of all images so far for the engine, as in a bundle."""
        rows = self.rows
        if rows is None:
            yield None
            return
        with NamedTemporaryFile() as file:
            file.write(bytes(memoryview(rows)))  # type: ignore[arg-type]
            file.flush()
            yield {"file": file.name, "count": rows.shape[0], "dtype": name_of(rows)}

    def prompt(self, ids: list[int], images: Sequence[Image]) -> list[int]:
        """Returns a prompt's ids, with -1 - r for a token whose embedding is row r."""
        encoded = self.put(Encoded(ids, np.zeros(len(ids), bool)), images)
        assert encoded.places is not None
        return [
            -int(place) if place else id
            for id, place in zip(encoded.ids, encoded.places, strict=True)
        ]

    def put(self, encoded: Encoded, images: Sequence[Image]) -> Encoded:
        """Replaces each image token by the tokens of its image, which are never in the loss.

        Raises MespError if there are not as many image tokens as images.
        """
        token = self.tower.image_token_id
        at = [index for index, id in enumerate(encoded.ids) if id == token]
        if len(at) != len(images):
            raise MespError(
                f"it has {len(images)} images, and {len(at)} times {self.tower.image_token} in the "
                "chat template: write images as parts of content, and the token nowhere."
            )
        ids: list[int] = []
        masks, places, start = [], [], 0
        for stop, image in zip([*at, len(encoded.ids)], [*images, None], strict=True):
            ids += encoded.ids[start:stop]
            masks.append(encoded.mask[start:stop])
            places.append(np.zeros(stop - start, np.uint32))
            start = stop + 1
            if image is not None:
                own, first = self._place(image)
                is_row = np.array(own) == token
                ids += own
                masks.append(np.zeros(len(own), bool))
                places.append(np.where(is_row, first + np.cumsum(is_row), 0).astype(np.uint32))
        return replace(encoded, ids=ids, mask=np.concatenate(masks), places=np.concatenate(places))
