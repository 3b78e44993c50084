"""Turns images into rows of embeddings with the frozen vision tower of a model."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from mesp.errors import MespError, plain_errors, plain_os_errors
from mesp.files import read_bytes, read_object

FAMILIES = ("idefics3", "lfm2_vl", "smolvlm")
# Without one of these files, mlx-vlm's processors assume settings or ask for PyTorch.
_NEEDED_FILES = (("tokenizer.json",), ("preprocessor_config.json", "processor_config.json"))
# Formats that Pillow decodes itself. For EPS, as an example of others, it runs Ghostscript.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
SIZE = 20 << 20  # bytes of a file
PIXELS = 50_000_000
RATIO = 200  # of the sides of an image


@dataclass(frozen=True)
class ImageFeatures:
    """What a text model reads of an image.

    `text` takes the place of one image token in a rendered chat template. It has n image tokens.
    `rows` [n, hidden], in the dtype of the model's embedding, take the places of their embedding
    rows, in the same order.
    """

    text: str
    rows: mx.array


class VisionTower:
    """The vision tower and projector of a model, in memory without the text model."""

    def __init__(self, model: Any, processor: Any) -> None:
        """`model` and `processor` are mlx-vlm's. The text model is removed from `model`."""
        self.image_token: str = processor.image_token
        self.image_token_id: int = model.config.image_token_index
        of_tokenizer = processor.tokenizer.convert_tokens_to_ids(self.image_token)
        if of_tokenizer != self.image_token_id:
            raise MespError(
                f"The image token is {self.image_token_id} in config.json and {of_tokenizer} in "
                "the tokenizer."
            )
        self._model, self._processor = model, processor
        self._cache: dict[bytes, ImageFeatures] = {}
        _drop_text_model(model)
        mx.eval(model.parameters())

    @classmethod
    def open(cls, folder: Path) -> VisionTower:
        """Opens a model folder as on the Hub. Does not run code from the folder."""
        try:
            config = read_object(folder / "config.json")
        except (OSError, ValueError) as error:
            raise MespError(f"{folder} has no config.json that is a JSON object.") from error
        _require_family(str(config.get("model_type")))
        for names in _NEEDED_FILES:
            if not any((folder / name).is_file() for name in names):
                raise MespError(f"{folder} lacks {' or '.join(names)}; download it whole.")
        utils = _import_mlx_vlm()
        with plain_errors(f"Cannot open the vision tower of {folder}"), _quiet():
            _require_family(utils.get_model_type(config))
            if config.get("model_file"):
                raise MespError(f"{folder} brings its own Python file, which is not run.")
            # Lazy, so the weights of the text model are never read.
            model = utils.load_model(folder, lazy=True)
            processor = utils.load_processor(
                folder, add_detokenizer=False, trust_remote_code=False, local_files_only=True
            )
            return cls(model, processor)

    def features(self, image: Path | bytes) -> ImageFeatures:
        """Reads an image file, or its bytes, as the model's processor and mlx-vlm do.

        Of a file with several frames, reads the first one. An orientation in the EXIF data is
        applied, and transparency is dropped. The result for equal bytes is computed once and kept.
        """
        name, data = (
            ("the image", image) if isinstance(image, bytes) else (str(image), _read(image))
        )
        if len(data) > SIZE:
            raise MespError(f"Cannot read {name}: it has more than {SIZE >> 20} MiB.")
        digest = hashlib.sha256(data).digest()
        if digest not in self._cache:
            decoded = _decode(data, name)
            with plain_errors(f"Cannot read {name} with the vision tower"):
                self._cache[digest] = self._compute(decoded)
        return self._cache[digest]

    def _compute(self, image: Any) -> ImageFeatures:
        """`image` is Pillow's, in RGB."""
        from mlx_vlm.models.base import to_mlx

        inputs = to_mlx(
            self._processor(text=[self.image_token], images=[image], add_special_tokens=False)
        )
        tokens = inputs["input_ids"][0].tolist()
        tokenizer = self._processor.tokenizer
        text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        if tokenizer.encode(text, add_special_tokens=False) != tokens:
            raise MespError(
                "The text of an image's tokens does not encode back to these tokens; the model's "
                "tokenizer and processor do not fit together."
            )
        places = [i for i, token in enumerate(tokens) if token == self.image_token_id]
        rows = self._model.get_input_embeddings(**inputs).inputs_embeds[0][mx.array(places)]
        mx.eval(rows)
        return ImageFeatures(text, rows)


def _require_family(model_type: str) -> None:
    name = model_type.lower().replace("-", "_")
    if name in FAMILIES:
        return
    needs = "parts that are not known"
    if name.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")):
        needs = "positions of rows and columns (M-RoPE)"
    elif name == "gemma3":
        needs = "attention in both directions within an image"
    raise MespError(
        f"Images for models of type {model_type} would need {needs}. Only models of the types "
        f"{', '.join(FAMILIES)} read images here."
    )


def _import_mlx_vlm() -> Any:
    try:
        from mlx_vlm import utils
    except ImportError as error:
        needed = f"Reading images needs mlx-vlm ({error}): pip install 'mesp[vision]'."
        raise MespError(needed) from error
    return utils


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the warnings of transformers about how mlx-vlm calls it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _drop_text_model(model: Any) -> None:
    """Puts an embedding of zeros in place of the text model.

    The image's rows overwrite these zeros. They have the embedding's width and dtype, known
    without reading its weights.
    """
    text = model.language_model
    row = getattr(text, "model", text).embed_tokens(mx.zeros((1, 1), mx.int32))
    hidden, dtype = row.shape[-1], row.dtype

    def embed(tokens: mx.array) -> mx.array:
        return mx.zeros((*tokens.shape, hidden), dtype)

    # Idefics3 has the embedding in the text model itself, LFM2-VL in its `model`.
    model.language_model = SimpleNamespace(embed_tokens=embed)
    model.language_model.model = model.language_model


def _read(path: Path) -> bytes:
    with plain_os_errors(f"Cannot read {path}"):
        try:
            return read_bytes(path, SIZE)
        except ValueError as error:
            raise MespError(f"Cannot read the image: {error}.") from error


def _decode(data: bytes, name: str) -> Any:
    """Returns Pillow's image in RGB. Checks its sides in the header, before its pixels."""
    from mlx_vlm.utils import load_image
    from PIL import Image

    large = f"Cannot read {name}: it has more than {PIXELS // 1_000_000} megapixels."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise MespError(large) from error
    except Exception as error:
        raise MespError(
            f"Cannot read {name}: it is no image in one of the formats {', '.join(FORMATS)}."
        ) from error
    if image.width * image.height > PIXELS:
        raise MespError(large)
    if max(image.size) > RATIO * min(image.size):
        raise MespError(f"Cannot read {name}: one side is over {RATIO} times as long as the other.")
    with plain_errors(f"Cannot decode {name}"):
        return load_image(image)
