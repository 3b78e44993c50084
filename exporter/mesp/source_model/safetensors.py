"""Reads the weights of a model folder, `model*.safetensors`."""

from __future__ import annotations

import stat
from pathlib import Path

import mlx.core as mx
import numpy as np

from mesp.errors import MespError
from mesp.files import parse_json, read_object
from mesp.models.architecture import Architecture
from mesp.models.mlps import MOST_EXPERTS
from mesp.models.names import CONVOLUTIONS, name_of_expert, names_here

# Types in a safetensors file: as NumPy reads them (it has no bfloat16), and what they are.
TENSOR_DTYPES = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}


HEADER = 16 << 20  # bytes: of a file with 100,000 tensors


class SafetensorsWeights:
    """The tensors of a model folder, mapped, and read by rows; see `Weights`."""

    def __init__(self, folder: Path, arch: Architecture):
        """Raises MespError where a file is missing or truncated."""
        self.folder, self.arch = folder, arch
        self.is_converted = False
        self.left_out = 0  # tensors that take no part, of vision for example
        self.tensors: dict[str, tuple[np.ndarray, mx.Dtype]] = {}
        self.unreadable: dict[str, str] = {}  # the dtypes of those that cannot be used
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(read_object(index)["weight_map"].values())
                if not all(_is_name(name) for name in names):
                    raise ValueError("it names no files beside it")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise MespError(f"{index} cannot be read; download the model again.") from error
            files = [folder / name for name in sorted(names)]
        else:
            files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise MespError(f"{folder} holds no weights (model*.safetensors).")
        for file in files:
            self._map(file)

    def _map(self, file: Path) -> None:
        """Adds a file's tensors: after its length, a JSON header says where in the rest each lies.

        The safetensors package is not used as it cannot read part of a bfloat16 tensor.
        """
        try:
            if not stat.S_ISREG(file.stat().st_mode):
                raise ValueError("not a regular file")
            with open(file, "rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
                if start > HEADER:
                    raise ValueError("a header that is too long")
                header = parse_json(opened.read(start - 8))
            data = np.memmap(file, mode="r", offset=start)
            header.pop("__metadata__", None)
            for theirs, tensor in header.items():
                names = names_here(theirs, self.arch)
                if not names:
                    self.left_out += 1
                    continue
                if tensor["dtype"] not in TENSOR_DTYPES:
                    self.unreadable |= dict.fromkeys(names, tensor["dtype"])
                    continue
                stored, dtype = TENSOR_DTYPES[tensor["dtype"]]
                begin, end = tensor["data_offsets"]
                array = data[begin:end].view(stored).reshape(tensor["shape"])
                if names[0].endswith(CONVOLUTIONS) and array.ndim == 3:
                    # [channels, 1, kernel], or as mlx-lm has it [channels, kernel, 1]
                    self.is_converted = array.shape[2] == 1
                    array = array.reshape(len(array), -1)
                are_stacked = ".switch_mlp." in names[0] and array.ndim == 3
                if are_stacked and len(array) > MOST_EXPERTS:
                    raise ValueError("more experts than a block may have")
                parts = np.split(array, len(names), axis=1 if are_stacked else 0)
                for name, part in zip(names, parts, strict=True):
                    if are_stacked:
                        stacked, _, kind = name.rpartition(".")
                        self.tensors |= {
                            f"{name_of_expert(stacked, e)}.{kind}": (each, dtype)
                            for e, each in enumerate(part)
                        }
                    else:
                        self.tensors[name] = part, dtype
        except OSError as error:
            raise MespError(
                f"The weights {file} cannot be read ({error.strerror}); download the model again."
            ) from error
        except Exception as error:  # a damaged header can say anything
            raise MespError(
                f"The weights {file} are truncated or damaged; download the model again."
            ) from error

    def is_quantized(self, name: str) -> bool:
        return name + ".scales" in self.tensors

    def is_stored_unquantized(self, name: str) -> bool:
        return name + ".weight" in self.tensors and not self.is_quantized(name)

    @property
    def has_float16_scales(self) -> bool:
        return any(
            dtype == mx.float16 and name.endswith(".scales")
            for name, (_, dtype) in self.tensors.items()
        )

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        if name in self.unreadable:
            raise MespError(
                f"{name} in {self.folder} is of type {self.unreadable[name]}, which is not "
                f"supported; take a model of one of {', '.join(TENSOR_DTYPES)}."
            )
        if name not in self.tensors:
            if any(each.startswith("language_model.") for each in self.tensors):
                raise MespError(
                    f"The weights in {self.folder} are part of a multimodal model; take a "
                    "text-only one."
                )
            raise MespError(f"The weights in {self.folder} lack {name}; download the model again.")
        array, dtype = self.tensors[name]
        if array.shape != shape:
            raise MespError(
                f"The weights in {self.folder} do not fit its config.json: {name} is "
                f"{list(array.shape)}, not {list(shape)}."
            )
        return mx.array(array[rows]).view(dtype)


def _is_name(name: object) -> bool:
    """Whether it is a file's name, without a folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {*"/\0"} & {*name}
