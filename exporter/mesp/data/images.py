"""Images of records.

A message's text has `IMAGE` in the place of each image.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from mesp.errors import MespError

Image = Path | bytes
IMAGE = "\U0010fffe"  # a noncharacter, which no text has
PARTS = ("image", "input_image", "image_url")  # the types of an image in content
SOURCES = (*PARTS, "path", "url", "bytes")
KEYS = ("type", "detail", *SOURCES)


def read_image(where: str, source: Any, folder: Path | None) -> Image:
    """Returns an image's bytes or path, from a value of a part of content or of a column.

    Raises MespError if it is neither a path, bytes, nor a data URL.
    """
    if isinstance(source, dict):  # {"url": …}, or the datasets library's {"bytes": …, "path": …}
        source = next((source[key] for key in ("bytes", "path", "url") if source.get(key)), None)
    if isinstance(source, bytes):
        return source
    if isinstance(source, str) and source.startswith("data:"):
        try:
            return base64.b64decode(source.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise MespError(f"{where} with an image whose data URL is damaged.") from error
    if not isinstance(source, str) or "://" in source.removeprefix("file://"):
        raise MespError(f"{where} with an image that is no file: save it, and write its path.")
    return (folder or Path()) / source.removeprefix("file://")
