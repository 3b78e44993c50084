from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mesp.bundle.export_options import ExportOptions
from mesp.bundle.manifest import PER_LAYER
from mesp.models.architecture import Architecture, Block
from mesp.models.layout import DTYPES, Layout, Piece, block_layout, per_layer_layout, table_layout
from mesp.models.weights import Weights, read_norm
from mesp.quantization.choose import Quantizations
from mesp.quantization.quantize_rows import Quantizer, least_squares_of, matrix_pieces, nearest
from mesp.source_model.calibration import Moments

# The files of the per-layer embeddings. A GPU keeps a whole file in memory. Only some rows of the
# embedding table are needed, so the table has a separate file.
PER_LAYER_FILES = {name: f"{key}.bin" for key, name in PER_LAYER.items()}
WeightFiles = dict[str, tuple[Layout, Iterable[Piece]]]


def weight_files(
    weights: Weights | None,
    arch: Architecture,
    options: ExportOptions,
    moments: Moments | None = None,
) -> WeightFiles:
    """Returns the layout of every weight file and, if `weights` are given, its content.

    With `moments`, matrices in the affine mode are quantized by least squares, except the per-layer
    embeddings. Matrices that the source stores quantized keep their codes.
    """
    quantizations = options.quantizations
    files: WeightFiles = {}
    for i, block in enumerate(arch.blocks):
        its = {name: quantizations.of(f"model.layers.{i}.{name}") for name in block.matrices()}
        layout = block_layout(block, its, options.dtype)
        pieces = block_pieces(weights, i, layout, block, quantizations, moments) if weights else ()
        files[f"blocks/{i:02d}.bin"] = layout, pieces
    tied = arch.tie_word_embeddings
    tables = [("embedding.bin", "model.embed_tokens", tied)]
    if not tied:
        tables.append(("head.bin", "lm_head", True))
    for file, name, is_head in tables:
        layout = table_layout(arch, quantizations.of(name), options.dtype, norm=is_head)
        pieces = (
            table_pieces(weights, name, layout, arch, quantizations, moments) if weights else ()
        )
        files[file] = layout, pieces
    for name in arch.per_layer_shapes:
        layout = per_layer_layout(arch, name, quantizations.of(name), options.dtype)
        pieces = per_layer_pieces(weights, name, layout, arch, quantizations) if weights else ()
        files[PER_LAYER_FILES[name]] = layout, pieces
    return files


def weight_bytes(files: WeightFiles) -> int:
    return sum(layout.words * 4 for layout, _ in files.values())


def block_pieces(
    weights: Weights, index: int, layout: Layout, block: Block, quantizations: Quantizations,
    moments: Moments | None,
) -> Iterator[Piece]:  # fmt: skip
    prefix = f"model.layers.{index}."
    for name in block.norms():
        yield name, 0, read_norm(weights, prefix + name, layout[name].shape, block.arch)
    for name, shape in block.vectors().items():
        yield name, 0, weights.rows(prefix + name, shape, slice(0, shape[0]))
    for name in block.biases():
        shape = layout[f"{name}.bias"].shape
        yield f"{name}.bias", 0, weights.rows(f"{prefix}{name}.bias", shape, slice(0, *shape))
    found = moments.of_block(index) if moments else {}
    for name in (*block.modules, *block.frozen()):
        quantize = least_squares_of(found[name]) if moments else nearest
        yield from matrix_pieces(
            weights, prefix + name, layout, f"{name}.", quantizations, quantize
        )
    # Too few calibration tokens reach each expert, so experts are quantized without moments.
    quantize = least_squares_of(None) if moments else nearest
    for expert in range(block.num_experts):
        for name in block.stacked():
            yield from matrix_pieces(
                weights, prefix + name, layout, f"{name}.", quantizations, quantize, expert
            )


def table_pieces(
    weights: Weights, source: str, layout: Layout, arch: Architecture, quantizations: Quantizations,
    moments: Moments | None,
) -> Iterator[Piece]:  # fmt: skip
    """Yields the arrays of the embedding's or the head's weight file. The head's file includes the
    final norm.
    """
    is_head = "norm" in layout
    quantize: Quantizer = nearest
    if moments:
        quantize = least_squares_of(moments.of_head() if is_head else None)
    yield from matrix_pieces(weights, source, layout, "", quantizations, quantize)
    if is_head:
        final = read_norm(weights, "model.norm.weight", layout["norm"].shape, arch)
        yield "norm", 0, final / arch.logits_scaling


def per_layer_pieces(
    weights: Weights, name: str, layout: Layout, arch: Architecture, quantizations: Quantizations
) -> Iterator[Piece]:
    yield from matrix_pieces(weights, name, layout, "", quantizations, nearest)
    if "norm" in layout:
        its = "model.per_layer_projection_norm.weight"
        yield "norm", 0, read_norm(weights, its, layout["norm"].shape, arch)


def write_weights(
    path: Path, layout: Layout, pieces: Iterable[Piece], progress: Callable[[int], Any]
) -> None:
    """`progress` gets a number of bytes after each piece."""
    with open(path, "xb") as file:
        file.truncate(layout.words * 4)
        for name, row, array in pieces:
            spec = layout[name]
            data = np.array(array.astype(DTYPES[spec.dtype]).flatten().view(mx.uint8))
            file.seek(spec.place(row))
            file.write(data.data)
            progress(data.size)
