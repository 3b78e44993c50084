"""Coordinate descent over the codes of a matrix: each makes up for the errors of the others."""

from __future__ import annotations

import numpy as np

from mesp.quantization.modes import Quantization

SWEEPS = 2  # over all codes; more change little
# By how much the mean products of two different inputs are made smaller: few tokens say less of
# them than of squares.
SHRINKAGE = 0.2


def descend(
    matrix: np.ndarray, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray,
    products: np.ndarray, quantization: Quantization,
) -> np.ndarray:  # fmt: skip
    """Better codes [out, in] for W [out, in], whose scales and biases [out, groups] stay.

    Each in its turn becomes the one that minimizes eᵀ P e of its row's errors e, all else as it is,
    where P [in, in] are the `products`: the sums of x xᵀ of what W multiplies.
    """
    size, levels = quantization.group_size, 2**quantization.bits - 1
    squares = np.diagonal(products).copy()
    P = (1 - SHRINKAGE) * products
    np.fill_diagonal(P, squares)

    # By columns of W, so that all rows' codes of one lie together.
    q, s, b = (np.ascontiguousarray(each.T, np.float32) for each in (codes, scales, biases))
    error = matrix.T - (np.repeat(s, size, axis=0) * q + np.repeat(b, size, axis=0))
    gradient = P @ error  # half of that of eᵀ P e
    used = np.abs(s) > 1e-30
    inverse = np.divide(1, s, out=np.zeros_like(s), where=used)
    for _ in range(SWEEPS):
        for group in range(len(s)):
            columns = slice(group * size, (group + 1) * size)
            within, own, change = P[columns, columns], gradient[columns].copy(), []
            for j, column in enumerate(range(columns.start, columns.stop)):
                step = own[j] * (inverse[group] / squares[column])
                better = np.clip(np.rint(q[column] + step), 0, levels)
                change.append((q[column] - better) * s[group])
                q[column] = better
                own += within[:, j, None] * change[-1]
            gradient += P[:, columns] @ np.stack(change)
    return np.ascontiguousarray(q.T)
