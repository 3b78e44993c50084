from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mesp.errors import MespError
from mesp.files import parse_json, read_object
from mesp.models.architecture import Architecture
from mesp.models.layout import DTYPES, KEPT_WIDE
from mesp.models.mlps import MOST_EXPERTS
from mesp.models.tensor_names import CONVOLUTIONS, changes_nothing, name_of_expert, names_here

# NumPy has no bfloat16.
TENSOR_DTYPES = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}
FLOATS = ("F32", "F16", "BF16")


HEADER = 16 << 20  # maximum header size in bytes, enough for 100,000 tensors
ROWS = 1 << 12
_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."


class SafetensorsWeights:
    def __init__(self, folder: Path, arch: Architecture):
        """Raises MespError if files are missing or damaged, or do not fit the architecture."""
        self.folder, self.arch = folder, arch
        self.is_converted = False
        self.left_out = 0  # unused tensors, for example of a vision encoder
        self.tensors: dict[str, tuple[np.ndarray, mx.Dtype]] = {}
        self.expected = _names(arch)
        for file in _files(folder):
            self._map(file)
        self._find_head()
        self._check_types()
        if missing := self.expected - self.tensors.keys():
            raise MespError(
                f"The weights in {folder} lack {min(missing)}, which its config.json asks for; "
                "take all files of the model, unchanged."
            )

    def _map(self, file: Path) -> None:
        """Adds a file's tensors.

        The safetensors package is not used, because it cannot read part of a bfloat16 tensor.
        """
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise ValueError("not a regular file")
            with open(file, "rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
                if start > HEADER:
                    raise ValueError("a header that is too long")
                header = parse_json(opened.read(start - 8), strict=True)
            data = np.memmap(file, mode="r", offset=start)
            header.pop("__metadata__", None)
            for theirs, tensor in header.items():
                if not changes_nothing(theirs, self.arch):
                    self._add(theirs, tensor, data)
        except MespError:
            raise
        except OSError as error:
            raise MespError(
                f"The weights {file} cannot be read ({error.strerror}); download the model again."
            ) from error
        except Exception as error:  # a damaged header can cause any error
            raise MespError(
                f"The weights {file} are truncated or damaged; download the model again."
            ) from error

    def _add(self, theirs: str, tensor: dict[str, Any], data: np.ndarray) -> None:
        names = names_here(theirs, self.arch)
        if not names:
            self.left_out += 1
            return
        if not all(map(self._is_known, names)):
            raise self._unused(theirs)
        if tensor["dtype"] not in TENSOR_DTYPES:
            raise MespError(
                f"{theirs} in {self.folder} is of type {tensor['dtype']}, which is not "
                f"supported; take a model of one of {', '.join(TENSOR_DTYPES)}."
            )
        stored, dtype = TENSOR_DTYPES[tensor["dtype"]]
        begin, end = tensor["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *tensor["shape"])):
            raise ValueError("a shape or an offset that is no count")
        array = data[begin:end].view(stored).reshape(tensor["shape"])
        if names[0].endswith(CONVOLUTIONS) and array.ndim == 3:
            # [channels, 1, kernel], or [channels, kernel, 1] in mlx-lm's models
            self.is_converted = array.shape[2] == 1
            array = array.reshape(len(array), -1)
        are_stacked = ".switch_mlp." in names[0] and array.ndim == 3
        if are_stacked and len(array) > MOST_EXPERTS:
            raise ValueError("more experts than a block may have")
        axis = 1 if are_stacked else 0
        if len(names) > 1 and (array.ndim <= axis or array.shape[axis] % len(names)):
            raise MespError(
                f"The weights in {self.folder} do not fit its config.json: {theirs} is "
                f"{list(array.shape)}, and does not hold {len(names)} equal parts."
            )
        parts = np.split(array, len(names), axis) if len(names) > 1 else [array]
        for name, part in zip(names, parts, strict=True):
            found = {name: (part, dtype)}
            if are_stacked:
                matrices, _, kind = name.rpartition(".")
                found = {
                    f"{name_of_expert(matrices, e)}.{kind}": (each, dtype)
                    for e, each in enumerate(part)
                }
            for each, its in found.items():
                if not self._is_known(each):
                    raise self._unused(theirs)
                if each in self.tensors:
                    raise MespError(
                        f"The weights in {self.folder} hold {theirs} twice; take the files of one "
                        "model."
                    )
                self.tensors[each] = its

    def _is_known(self, name: str) -> bool:
        stem, _, part = name.rpartition(".")
        if part in ("scales", "biases"):
            name = f"{stem}.weight"
        if name in self.expected or name == f"{_HEAD}weight":
            return True
        return f"{name_of_expert(stem, 0)}.weight" in self.expected  # a stack of experts' matrices

    def _unused(self, name: str) -> MespError:
        if name.startswith("language_model."):
            return MespError(
                f"The weights in {self.folder} are part of a multimodal model; take a text-only "
                "one."
            )
        return MespError(
            f"The weights in {self.folder} have {name}, which a {self.arch.model_type} model with "
            "its config.json does not use; take a model without it."
        )

    def _find_head(self) -> None:
        """Chooses the tensors of head and embedding.

        If config.json ties both, one may be missing, or both may be stored and differ.
        """
        embedding, head = (
            {name.removeprefix(its): a for name, a in self.tensors.items() if name.startswith(its)}
            for its in (_EMBEDDING, _HEAD)
        )
        if not self.arch.tie_word_embeddings or not head:
            return
        for part in head:
            del self.tensors[_HEAD + part]
        if not embedding:
            self.tensors |= {_EMBEDDING + part: array for part, array in head.items()}
        elif head.keys() != embedding.keys() or not all(
            _are_equal(embedding[part], head[part]) for part in head
        ):
            self.tensors |= {_HEAD + part: array for part, array in head.items()}
            self.arch = replace(self.arch, tie_word_embeddings=False)

    def _check_types(self) -> None:
        """Raises MespError for a tensor of a wrong type."""
        for name, (_, dtype) in self.tensors.items():
            stem, _, part = name.rpartition(".")
            allowed = FLOATS
            if part == "weight" and self.is_quantized(stem):
                allowed = ("U32",)
            elif part == "scales" and f"{stem}.biases" not in self.tensors:
                allowed = ("U8",)
            its = next(theirs for theirs, (_, each) in TENSOR_DTYPES.items() if each == dtype)
            if its not in allowed:
                raise MespError(
                    f"The weights in {self.folder} do not fit its config.json: {name} is of type "
                    f"{its}, not {' or '.join(allowed)}."
                )

    def is_quantized(self, name: str) -> bool:
        return name + ".scales" in self.tensors

    def is_stored_unquantized(self, name: str) -> bool:
        return name + ".weight" in self.tensors and not self.is_quantized(name)

    @property
    def dtype(self) -> str | None:
        if not any(name.endswith(".scales") for name in self.tensors):
            return None
        held = {
            dtype
            for name, (_, dtype) in self.tensors.items()
            if mx.issubdtype(dtype, mx.floating) and not name.endswith(KEPT_WIDE)
        }
        return next((name for name, dtype in DTYPES.items() if held == {dtype}), "float32")

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        if name not in self.tensors:
            raise MespError(
                f"The weights in {self.folder} lack {name}; take all files of the model, unchanged."
            )
        array, dtype = self.tensors[name]
        if array.shape != shape:
            raise MespError(
                f"The weights in {self.folder} do not fit its config.json: {name} is "
                f"{list(array.shape)}, not {list(shape)}."
            )
        return mx.array(array[rows]).view(dtype)


def _files(folder: Path) -> list[Path]:
    """Returns the weight files of a folder.

    These are model.safetensors if it exists, otherwise the files in the index. Without an index,
    these are all files model*.safetensors.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        return [whole]
    if not index.is_file():
        if files := sorted(folder.glob("model*.safetensors")):
            return files
        raise MespError(f"{folder} holds no weights (model*.safetensors).")
    try:
        names = set(read_object(index)["weight_map"].values())
        if not names or not all(_is_name(name) for name in names):
            raise ValueError("it names no files beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MespError(f"{index} cannot be read; download the model again.") from error
    for name in sorted(names):
        if not (folder / name).exists():
            raise MespError(f"{index} names {name}, which is not in the folder; add that file.")
    return [folder / name for name in sorted(names)]


def _names(arch: Architecture) -> set[str]:
    names = set()
    for name, (count, *_) in arch.tensors().items():
        if ".switch_mlp." in name:
            stacked, _, kind = name.rpartition(".")
            names |= {f"{name_of_expert(stacked, number)}.{kind}" for number in range(count)}
        else:
            names.add(name)
    return names


def _are_equal(one: tuple[np.ndarray, mx.Dtype], other: tuple[np.ndarray, mx.Dtype]) -> bool:
    (a, dtype), (b, other_dtype) = one, other
    return (dtype, a.shape) == (other_dtype, b.shape) and all(
        np.array_equal(a[i : i + ROWS], b[i : i + ROWS]) for i in range(0, len(a), ROWS)
    )


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not {*"/\0"} & {*name}
