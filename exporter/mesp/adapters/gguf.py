from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mesp.adapters.fuse import BFLOAT16
from mesp.adapters.load import AdapterSum
from mesp.bundle.manifest import ModelName
from mesp.bundle.reader import Bundle
from mesp.errors import MespError
from mesp.folders import check_disk
from mesp.models.architecture import Architecture

if TYPE_CHECKING:
    from mesp.source_model.gguf.header import GGUF

# The value of --bits -> the type that a matrix with fused adapters has in the GGUF file.
TYPES = {4: "Q4_1", 6: "Q8_0", 8: "Q8_0", BFLOAT16: "BF16"}


def write_gguf(
    path: Path, adapters: AdapterSum, arch: Architecture, model: ModelName | None = None
) -> None:
    """Writes `path`, a GGUF file of the type `adapter`.

    For each module, the file has `blk.N.….lora_a` [rank, in] and `….lora_b` [out, rank]; the
    matrices of experts are stacked. Names, keys and the order of rows are those of llama.cpp's
    convert_lora_to_gguf.py. Raises MespError if the gguf package is missing, if adapters of this
    architecture cannot be written for llama.cpp, or if adapters have magnitudes, which such a file
    cannot hold.
    """
    if adapters.gains:
        raise MespError(
            "The adapters have DoRA's magnitudes, for which llama.cpp's files of adapters have no "
            "place; leave out --gguf, or write them into the weights with --gguf-base."
        )
    gguf = _package()
    tensors = _tensors(adapters, arch)
    check_disk(path.parent, sum(a.nbytes + b.nbytes for _, a, b, _ in tensors.values()))
    writer = gguf.GGUFWriter(path, _names(arch).architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapters.scale * adapters.rank)
    if model is not None:
        for key in ("license", "license_name", "license_link"):
            if value := getattr(model, key):
                writer.add_string(f"general.{key.replace('_', '.')}", value)
    for tensor, (_, down, up, _) in tensors.items():
        writer.add_tensor(f"{tensor}.lora_a", down)
        writer.add_tensor(f"{tensor}.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_base(path: Path, bundle: Bundle) -> GGUF:
    """Reads `path`, the GGUF file that a bundle was exported from.

    Raises MespError if the gguf package is missing, if `path` cannot be read or does not fit the
    bundle, or if a tensor in the file has an unknown type.
    """
    _package()
    from mesp.source_model.gguf.blocks import CARRIED
    from mesp.source_model.gguf.config import config_of
    from mesp.source_model.gguf.header import GGUF
    from mesp.source_model.gguf.weights import GGUFWeights

    file, arch = GGUF.read(path), bundle.architecture
    same = Architecture.from_config(config_of(file), max(bundle.manifest.seq_lens)) == arch
    if same:
        weights = GGUFWeights(file, arch)
        tables = {"model.embed_tokens": bundle.embedding()["weight"]}
        tables |= {
            f"model.layers.0.{name}": bundle.block(0)[f"{name}.weight"]
            for name in arch.blocks[0].modules
        }
        for name, expected in tables.items():
            rows = slice(0, min(64, len(expected)))
            if file.tensors[weights.names.tensor(f"{name}.weight")].type in CARRIED:
                found = weights.rows(f"{name}.weight", expected.shape, rows)
                same = same and bool(mx.array_equal(found, expected[rows]))
    if not same:
        raise MespError(f"{path} is not the file that {bundle.path} was exported from; name that.")
    for name, tensor in file.tensors.items():
        if tensor.data is None:
            raise MespError(
                f"{path} has {name!r:.80} in blocks of an unknown type ({tensor.type}), which "
                "cannot be copied; leave out --gguf-base."
            )
    return file


def write_fused_gguf(
    path: Path, base: GGUF, adapters: AdapterSum, arch: Architecture, bits: int
) -> None:
    """Writes to `path` a copy of `base` in which the adapters are fused into the weights.

    A matrix with adapters becomes G ∘ W + scale · (A B)ᵀ, in the type for `bits` in `TYPES`.
    """
    from gguf import GGMLQuantizationType

    from mesp.source_model.gguf.header import copy

    def fuse(tensor: _Tensor, weight: np.ndarray) -> np.ndarray:
        scale, down, up, gains = tensor
        weight = weight.astype(np.float32)
        if gains is not None:
            weight = gains[:, None] * weight
        return weight + scale * (up @ down).reshape(weight.shape)

    tensors = _tensors(adapters, arch)
    changed = {name: partial(fuse, tensor) for name, tensor in tensors.items()}
    copy(base, path, changed, GGMLQuantizationType[TYPES[bits]])


# (scale, Aᵀ [rank, in], Bᵀ [out, rank], G [out] or None). None stands for G = 1. For experts, the
# second and third item are A [experts, rank, in] and B [experts, out, rank].
_Tensor = tuple[float, np.ndarray, np.ndarray, np.ndarray | None]


def _tensors(adapters: AdapterSum, arch: Architecture) -> dict[str, _Tensor]:
    names, found = _names(arch), {}
    for path, (a, b) in adapters.matrices.items():
        layer, _, module = path.removeprefix(f"{arch.mlx_root}model.layers.").partition(".")
        block, down, up = arch.blocks[int(layer)], np.array(a), np.array(b)
        # experts' A [experts, rank, in] and B [experts, out, rank] are not transposed
        if a.ndim == 2:
            down, up = down.T, up.T
        gains = np.array(adapters.gains[path]) if path in adapters.gains else None
        if (rows := names.rows(block, module)) is not None:
            order = np.argsort(rows)
            up, gains = up[order], None if gains is None else gains[order]
        if (columns := names.columns(block, module)) is not None:
            down = down[:, np.argsort(columns)]
        tensor = names.tensor(f"model.layers.{layer}.{module}.weight")
        whole = np.ascontiguousarray(down), np.ascontiguousarray(up)
        found[tensor] = adapters.scale, *whole, gains
    return found


def _names(arch: Architecture):
    from mesp.source_model.gguf.tensor_names import ARCHITECTURES, Names

    granite = arch.model_type == "granitemoehybrid" and arch.has_experts
    if arch.model_type not in ARCHITECTURES or granite:
        raise MespError(
            f"Adapters of {arch.model_type} cannot be written for llama.cpp; leave out --gguf."
        )
    return Names(arch)


def _package():
    try:
        import gguf
    except ImportError as error:
        raise MespError(
            "Writing for llama.cpp needs the gguf package: pip install 'mesp[gguf]'."
        ) from error
    return gguf
