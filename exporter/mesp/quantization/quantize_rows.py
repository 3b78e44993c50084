from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import cycle

import mlx.core as mx

from mesp.block_function.dequantize import pack, unpack
from mesp.block_function.tiles import cut
from mesp.errors import MespError
from mesp.models.layout import DTYPES, Layout, Piece
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import name_of_expert
from mesp.models.weights import Weights
from mesp.quantization import least_squares
from mesp.quantization.choose import Quantizations, not_quantized
from mesp.quantization.coordinate_descent import descend, shrink

TILE = 1 << 18  # elements that are quantized at a time; they fit into a core's cache
MOST_STREAMS = 8  # streams that quantize in parallel; each takes about 20 MB

Quantizer = Callable[[mx.array, Quantization, mx.Dtype], tuple[mx.array, ...]]


def nearest(matrix: mx.array, quantization: Quantization, dtype: mx.Dtype) -> tuple[mx.array, ...]:
    """Returns rows as MLX quantizes them: each weight is rounded to the nearest value of its
    group's grid.
    """
    return mx.quantize(matrix.astype(mx.float32), **asdict(quantization))


def least_squares_of(moments: mx.array | None) -> Quantizer:
    """Returns a quantizer that fits scales and biases by `least_squares.quantize`.

    With moments [in, in], `descend` then improves the codes. In modes other than ``affine``, the
    quantizer is `nearest`.
    """
    products = None
    if moments is not None and moments.ndim == 2:
        products, moments = shrink(moments), mx.diag(moments)

    def quantize(
        matrix: mx.array, quantization: Quantization, dtype: mx.Dtype
    ) -> tuple[mx.array, ...]:
        if quantization.mode != "affine":
            return nearest(matrix, quantization, dtype)
        found = least_squares.quantize(matrix, quantization, moments, dtype)
        if products is None:
            return found
        return (descend(matrix, *found, products, quantization), *found[1:])

    return quantize


def matrix_pieces(
    weights: Weights, source: str, layout: Layout, prefix: str, quantizations: Quantizations,
    quantize: Quantizer, expert: int | None = None,
) -> Iterator[Piece]:  # fmt: skip
    """Yields the quantized matrix `source`, a few rows at a time."""
    quantization, in_files = quantizations.of(source), quantizations.in_files(source)
    parts = quantization.parts
    shapes = [layout[prefix + part].shape[-2:] for part in parts]
    first = 0
    if expert is not None:
        first, source = expert * shapes[0][0], name_of_expert(source, expert)
    count, columns = shapes[0][0], shapes[0][1] * 32 // quantization.bits
    if quantizations.config and weights.is_stored_unquantized(source):
        raise not_quantized(source)
    dtype = DTYPES[layout[prefix + "scales"].dtype]

    def of_rows(rows: slice) -> tuple[mx.array, ...]:
        if weights.is_quantized(source):
            return read_rows(weights, source, (count, columns), in_files, rows)
        matrix = weights.rows(f"{source}.weight", (count, columns), rows)
        return quantize(matrix, quantization, dtype)

    tiles = cut(count, max(TILE // columns, 1))
    for rows, arrays in _on_every_core(of_rows, tiles):
        for part, array in zip(parts, arrays, strict=True):
            yield prefix + part, first + rows.start, array


def read_rows(
    weights: Weights, name: str, shape: tuple[int, int], in_files: Quantization, rows: slice
) -> tuple[mx.array, ...]:
    """Returns the arrays of some rows of a quantized matrix, in the bundle's format.

    1-bit codes are stored with 2 bits. Raises MespError for affine arrays of another mode.
    """
    packed, *others = (
        weights.rows(array, its_shape, rows)
        for array, its_shape, _ in in_files.arrays(f"{name}.", *shape, "float32")
    )
    if in_files.mode != "affine" and others[0].dtype != mx.uint8:
        raise MespError(
            f"{name} has biases in the files, but config.json gives it the mode {in_files.mode}, "
            "which has none; take an unchanged config.json."
        )
    if in_files != in_files.in_bundle:
        packed = pack(unpack(packed, in_files.bits), in_files.in_bundle.bits)
    return packed, *others


def _on_every_core(
    compute: Callable[[slice], tuple[mx.array, ...]], tiles: Iterable[slice]
) -> Iterator[tuple[slice, tuple[mx.array, ...]]]:
    """Several streams are used, because MLX runs each CPU stream on one thread."""
    pending: deque[tuple[slice, tuple[mx.array, ...]]] = deque()
    for tile, stream in zip(tiles, cycle(_streams()), strict=False):
        with mx.stream(stream):
            arrays = compute(tile)
            mx.async_eval(arrays)
        pending.append((tile, arrays))
        if len(pending) == len(_streams()):
            yield pending.popleft()
    yield from pending


@cache
def _streams() -> list[mx.Stream]:
    device = mx.default_device()
    count = os.cpu_count() or 1 if device == mx.cpu else 1
    return [mx.new_stream(device) for _ in range(min(count, MOST_STREAMS))]
