from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from mesp.bundle.reader import Bundle, block_file
from mesp.models.architecture import PER_LAYER_PROJECTION
from mesp.models.layout import DTYPES
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import name_of_stacked
from mesp.quantization.choose import Quantizations
from mesp.source_model.forward_pass import SourceModel


class BundleWeights:
    is_converted = True  # norms include the family's offset

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        self.layouts = bundle.weight_files()
        self.dtype = bundle.manifest.dtype

    def is_quantized(self, name: str) -> bool:
        return True

    def is_stored_unquantized(self, name: str) -> bool:
        return False

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        name, expert = name_of_stacked(name)
        file, array = self._place(name)
        spec = self.layouts[file][array]
        dtype = DTYPES[spec.dtype]
        row = spec.shape[1:] if expert is None else spec.shape[2:]
        first = rows.start + (expert or 0) * shape[0]
        size = (rows.stop - rows.start) * math.prod(row) * dtype.size
        data = np.memmap(self.bundle.path / file, np.uint8, "r", spec.place(first), (size,))
        found = mx.array(data).view(dtype).reshape(-1, *row)
        if name == "model.norm.weight":
            found = found * self.bundle.architecture.logits_scaling
        return found

    def quantizations(self) -> Quantizations:
        arch = self.bundle.architecture
        found: dict[str, Quantization | None] = {}
        for name, size in ({"lm_head": arch.hidden_size} | arch.columns).items():
            file, array = self._place(f"{name}.weight")
            prefix = array.removesuffix("weight")
            found[name] = Quantization.of(self.layouts[file], prefix, size)
        return Quantizations(self.bundle.manifest.quantization, found)

    def _place(self, name: str) -> tuple[str, str]:
        if name.startswith("model.layers."):
            _, _, index, array = name.split(".", 3)
            return block_file(int(index)), array
        for matrix, entry in self.bundle.manifest.per_layer.items():
            if name.startswith(f"{matrix}."):
                return entry.file, name.removeprefix(f"{matrix}.")
        if name == "model.per_layer_projection_norm.weight":
            return self.bundle.manifest.per_layer[PER_LAYER_PROJECTION].file, "norm"
        table = "embedding" if name.startswith("model.embed_tokens.") else "head"
        array = "norm" if name == "model.norm.weight" else name.rpartition(".")[2]
        return getattr(self.bundle.manifest, table).file, array


def to_source_model(bundle: Bundle) -> SourceModel:
    weights = BundleWeights(bundle)
    return SourceModel(weights, bundle.architecture, weights.quantizations())
