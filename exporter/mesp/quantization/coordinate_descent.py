from __future__ import annotations

import mlx.core as mx
import numpy as np

from mesp.block_function.dequantize import pack, unpack
from mesp.models.quantization_formats import Quantization
from mesp.quantization.least_squares import damp

SWEEPS = 2  # passes over all codes; more passes change little
# The fraction by which the off-diagonal products are reduced. Their estimates from few tokens are
# less accurate than the estimates of the squares on the diagonal.
SHRINKAGE = 0.2


def shrink(moments: mx.array) -> np.ndarray:
    """Returns the argument `products` [in, in] of `descend`, from sums of x xᵀ over the matrix's
    inputs x.
    """
    squares = mx.diag(moments)
    products = np.array((1 - SHRINKAGE) / mx.maximum(squares.mean(), 1e-30) * moments)
    np.fill_diagonal(products, damp(squares, len(squares)))
    return products


def descend(
    matrix: mx.array, packed: mx.array, scales: mx.array, biases: mx.array, products: np.ndarray,
    quantization: Quantization,
) -> mx.array:  # fmt: skip
    """Returns better codes of W [out, in], packed.

    Each code in turn is set to the value that minimizes eᵀ P e. Here e is the error of the code's
    row, P is `products`, and the other codes are fixed.
    """
    size, levels = quantization.group_size, 2**quantization.bits - 1
    squares = np.diagonal(products)
    codes = unpack(packed, quantization.bits).reshape(matrix.shape)
    # The arrays are transposed, so that the codes of a column of W are contiguous.
    W, q, s, b = (
        np.array(mx.contiguous(each.astype(mx.float32).T))
        for each in (matrix, codes, scales, biases)
    )
    error = W - (np.repeat(s, size, axis=0) * q + np.repeat(b, size, axis=0))
    gradient = products @ error  # half the gradient of eᵀ P e
    inverse = np.divide(1, s, out=np.zeros_like(s), where=np.abs(s) > 1e-30)
    for _ in range(SWEEPS):
        for group in range(len(s)):
            columns = slice(group * size, (group + 1) * size)
            within, own, change = products[columns, columns], gradient[columns].copy(), []
            for j, column in enumerate(range(columns.start, columns.stop)):
                step = own[j] * (inverse[group] / squares[column])
                better = np.clip(np.rint(q[column] + step), 0, levels)
                change.append((q[column] - better) * s[group])
                q[column] = better
                own += within[:, j, None] * change[-1]
            gradient += products[:, columns] @ np.stack(change)
    return pack(mx.array(q.T).astype(mx.uint32), quantization.bits)
