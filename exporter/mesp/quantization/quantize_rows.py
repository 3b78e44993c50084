"""Quantizes the matrices of a source model, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import mlx.core as mx

from mesp.block_function.tiles import cut
from mesp.bundle.layout import Layout, Piece
from mesp.quantization.choose import Quantizations, not_quantized
from mesp.source_model.weights import Weights

TILE = 1 << 22  # elements of a matrix that are quantized at a time


def matrix_pieces(
    weights: Weights, source: str, layout: Layout, prefix: str, quantizations: Quantizations
) -> Iterator[Piece]:
    """The matrix `source` quantized, some rows at a time; as it is where it comes quantized.

    A bfloat16 bundle rounds float16 scales and biases, by 3 bits of their mantissa.
    """
    quantization = quantizations.of(source)
    parts = quantization.parts
    shapes = [layout[prefix + part].shape for part in parts]
    count, columns = shapes[0][0], shapes[0][1] * 32 // quantization.bits
    if quantizations.config and weights.is_stored_unquantized(source):
        raise not_quantized(source)
    for rows in cut(count, TILE // columns):
        if weights.is_quantized(source):
            arrays = [
                weights.rows(f"{source}.{part}", shape, rows)
                for part, shape in zip(parts, shapes, strict=True)
            ]
        else:
            matrix = weights.rows(f"{source}.weight", (count, columns), rows)
            arrays = mx.quantize(matrix.astype(mx.float32), **asdict(quantization))
        for part, array in zip(parts, arrays, strict=True):
            yield prefix + part, rows.start, array
