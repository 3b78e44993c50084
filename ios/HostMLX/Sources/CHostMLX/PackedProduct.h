// Products with a quantized matrix on the CPU.

#ifndef PACKED_PRODUCT_H
#define PACKED_PRODUCT_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// The result of `mlx::core::quantized_matmul` for float32 x `[…, m, k]`, as soon as OpenBLAS multiplies: W is unpacked a tile at a time,
/// between the caches, for all rows of x. MLX's own kernel unpacks each weight again for each row, some 50 times slower. Up to 16 rows of
/// x times an affine Wᵀ are summed in registers while W is unpacked, each with the same numbers whichever others come with it.
///
/// nil where this does not serve: without OpenBLAS, on another device, for another dtype or a stack of matrices.
std::optional<mlx::core::array> packed_product(
    const mlx::core::array &x, const mlx::core::array &w, const mlx::core::array &scales,
    const std::optional<mlx::core::array> &biases, bool transpose, int group_size, int bits, const std::string &mode,
    mlx::core::Stream s);

/// sum + y for a `packed_product` y that is not computed yet, as one operation: each tile is added to its part of the sum, in its memory
/// where nobody else has that. nil where y is no such product, has a sum already or has few rows.
std::optional<mlx::core::array> packed_sum(const mlx::core::array &sum, const mlx::core::array &y, mlx::core::Stream s);

/// y + alpha a b alike, for a `[m, r]`, b `[r, n]` and a small r, before it is added to a sum.
std::optional<mlx::core::array> packed_sum(
    const mlx::core::array &y, const mlx::core::array &a, const mlx::core::array &b, float alpha, mlx::core::Stream s);

}  // namespace host

#endif
