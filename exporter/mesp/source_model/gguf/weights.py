from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mesp.block_function.dequantize import pack
from mesp.errors import MespError
from mesp.models.architecture import Architecture, Block
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import name_of_stacked
from mesp.quantization import least_squares
from mesp.source_model.gguf.blocks import CARRIED, REQUANTIZED, UNQUANTIZED, WIDE, arrays, numbers
from mesp.source_model.gguf.header import GGUF, Tensor
from mesp.source_model.gguf.tensor_names import Names

_PARTS = ("weight", "scales", "biases")


class GGUFWeights:
    is_converted = True

    def __init__(self, file: GGUF, arch: Architecture):
        """Raises MespError if a tensor is missing or unknown, or has an unsupported type or the
        wrong shape."""
        self.file, self.arch, self.names = file, arch, Names(arch)
        self.quantized: tuple[Any, tuple[mx.array, ...]] = (None, ())
        self.blocks = {f"model.layers.{i}.": block for i, block in enumerate(arch.blocks)}
        self.matrices = list(arch.columns)
        self.types = Counter()
        for name in self.matrices:
            tensor = self._tensor(f"{name}.weight")
            self.types[tensor.type] += math.prod(tensor.shape)
        shapes = arch.tensors()
        known = {self.names.tensor(name) for name in shapes}
        for name in file.tensors:
            layer = name.removeprefix("blk.").partition(".")[0]
            is_behind = re.fullmatch("[0-9]{1,9}", layer) and int(layer) >= arch.num_hidden_layers
            if name not in known and not is_behind and not name.startswith("rope_f"):
                raise MespError(
                    f"{file.path} has a tensor {name!r:.80}, which its architecture does not have "
                    "here; take another file of the model."
                )
        for name, shape in shapes.items():
            if (found := self._tensor(name).shape) != shape:
                raise MespError(
                    f"{file.path} does not fit its metadata: {name} is {list(found)}, not "
                    f"{list(shape)}."
                )

    @property
    def is_quantized_file(self) -> bool:
        return any(kind not in UNQUANTIZED for kind in self.types)

    @property
    def dtype(self) -> str | None:
        # A scale of a K type is a product of a float16 number and an integer.
        return "float32" if self.is_quantized_file else None

    def quantization(self) -> dict[str, Any]:
        sizes: Counter[Quantization] = Counter()
        for kind, size in self.types.items():
            sizes[_quantization(kind)] += size
        main = sizes.most_common(1)[0][0]
        entries: dict[str, Any] = _entry(main)
        prefix = self.arch.mlx_root
        for name in self.matrices:
            quantization = _quantization(self._tensor(f"{name}.weight").type)
            if quantization != main:
                entries[prefix + name] = _entry(quantization)
                if name == "model.embed_tokens" and not self.arch.is_tied_in_mlx_lm:
                    entries.setdefault(f"{prefix}lm_head", _entry(quantization))
        return entries

    def describe(self) -> str:
        total = sum(self.types.values())

        def share(kinds: tuple[str, ...]) -> str:
            here = [kind for kind in kinds if self.types[kind]]
            part = sum(self.types[kind] for kind in here) / total
            return f"{part:.1%} of the weights ({', '.join(here)})" if here else ""

        if not self.is_quantized_file:
            return f"{share(UNQUANTIZED)} quantized"
        parts = {
            "carried over exactly": share(tuple(CARRIED)),
            f"quantized again to {WIDE.bits} bits": share(REQUANTIZED),
            f"quantized to {WIDE.bits} bits": share(UNQUANTIZED),
        }
        return "; ".join(f"{part} {how}" for how, part in parts.items() if part)

    def is_quantized(self, name: str) -> bool:
        return self.is_quantized_file

    def is_stored_unquantized(self, name: str) -> bool:
        return not self.is_quantized_file

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        module, _, part = name.rpartition(".")
        module, expert = name_of_stacked(module)
        if expert is not None:
            first, name = expert * shape[0], f"{module}.{part}"
            rows = slice(first + rows.start, first + rows.stop)
        if self.is_quantized_file and module in self.matrices and part in _PARTS:
            return self._quantized(module, rows)[_PARTS.index(part)]
        return self._floats(name, self._tensor(name), rows)

    def _tensor(self, name: str) -> Tensor:
        theirs = self.names.tensor(name)
        tensor = self.file.tensors.get(theirs)
        if tensor is None:
            raise MespError(f"{self.file.path} lacks the tensor {theirs}; download it again.")
        if tensor.type not in (*CARRIED, *REQUANTIZED, *UNQUANTIZED):
            raise MespError(
                f"{self.file.path} has {theirs} in blocks of type {tensor.type}, which is not "
                "supported; take a file of Q4_K_M, Q8_0 or F16."
            )
        if len(tensor.shape) > (3 if ".switch_mlp." in name else 2):
            raise MespError(f"{self.file.path} has {theirs} of {len(tensor.shape)} dimensions.")
        return tensor

    def _order(
        self, name: str, find: Callable[[Block, str], np.ndarray | None]
    ) -> np.ndarray | None:
        for prefix, block in self.blocks.items():
            if name.startswith(prefix):
                return find(block, name.removeprefix(prefix))
        return None

    def _data(self, name: str, tensor: Tensor, rows: slice) -> np.ndarray:
        order = self._order(name, self.names.rows)
        if order is None:
            return tensor.data[rows]
        if len(order) != len(tensor.data):
            raise MespError(f"{self.file.path} does not fit its metadata: {name} has other rows.")
        return tensor.data[order[rows]]

    def _quantized(self, module: str, rows: slice) -> tuple[mx.array, ...]:
        """Returns the packed codes, the scales and, if the type has them, the biases of rows.

        The last result is cached, because each of the arrays is requested separately.
        """
        key = (module, rows.start, rows.stop)
        if self.quantized[0] != key:
            tensor = self._tensor(f"{module}.weight")
            if tensor.type in CARRIED:
                bits = CARRIED[tensor.type][1].bits
                codes, *others = self._decode(module, tensor, rows)
                found = (pack(mx.array(codes), bits), *map(mx.array, others))
            else:
                matrix = self._floats(f"{module}.weight", tensor, rows)
                if matrix.shape[1] % WIDE.group_size:
                    raise MespError(
                        f"{self.file.path} has {module} with rows of {matrix.shape[1]:,}, which "
                        f"groups of {WIDE.group_size} do not divide."
                    )
                found = least_squares.quantize(matrix, WIDE, None, mx.float32)
            self.quantized = (key, found)
        return self.quantized[1]

    def _decode(self, module: str, tensor: Tensor, rows: slice) -> tuple[np.ndarray, ...]:
        codes, *others = arrays(tensor.type, self._data(f"{module}.weight", tensor, rows))
        order = self._order(module, self.names.columns)
        if order is None:
            return codes, *others
        group = codes.shape[1] // others[0].shape[1]
        groups = order[: len(order) // group * group].reshape(-1, group)
        together = (np.diff(groups) == 1).all() and not (groups[:, 0] % group).any()
        if len(order) != codes.shape[1] or not together:
            raise MespError(
                f"{self.file.path} has {module} in groups of {group}, which are not within its "
                "heads; take a file of Q8_0 or F16."
            )
        return codes[:, order], *(each[:, groups[:, 0] // group] for each in others)

    def _floats(self, name: str, tensor: Tensor, rows: slice) -> mx.array:
        if len(tensor.shape) == 1:
            array = _numbers(tensor, tensor.data)[0]
            order = self._order(name, self.names.rows)
            if order is not None and len(order) == len(array):
                array = array[mx.array(order)]
            array = array[rows]
            return mx.log(-array) if name.endswith("A_log") else array
        array = _numbers(tensor, self._data(name, tensor, rows))
        order = self._order(name.removesuffix(".weight"), self.names.columns)
        if order is not None and len(order) == array.shape[1]:
            array = array[:, mx.array(order)]
        return array


def _numbers(tensor: Tensor, data: np.ndarray) -> mx.array:
    data = np.ascontiguousarray(data)
    if tensor.type == "BF16":
        return mx.array(data.view("<u2")).view(mx.bfloat16)
    if tensor.type in UNQUANTIZED:
        return mx.array(data.view("<f4" if tensor.type == "F32" else "<f2"))
    return mx.array(numbers(tensor.type, data))


def _quantization(kind: str) -> Quantization:
    return CARRIED[kind][1] if kind in CARRIED else WIDE


def _entry(quantization: Quantization) -> dict[str, Any]:
    entry = {"group_size": quantization.group_size, "bits": quantization.bits}
    return entry if quantization.mode == "affine" else {**entry, "mode": quantization.mode}
