// Products with a quantized matrix on the CPU.

#ifndef PACKED_PRODUCT_H
#define PACKED_PRODUCT_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// Returns the result of `mlx::core::quantized_matmul` for float32 x `[…, m, k]`, nearly as fast as OpenBLAS multiplies. W is unpacked one tile at a
/// time, within the caches, for all rows of x. MLX's own kernel unpacks each weight again for each row, and is about 50 times slower. Products of up
/// to 16 rows of x and an affine Wᵀ are summed in registers while W is unpacked. Then the results of a row of x do not depend on the other rows.
///
/// Returns nil without OpenBLAS, on another device, and for a dtype, a quantization or shapes that it does not support, such as a stack of matrices.
std::optional<mlx::core::array> packed_product(
    const mlx::core::array &x, const mlx::core::array &w, const mlx::core::array &scales,
    const std::optional<mlx::core::array> &biases, bool transpose, int group_size, int bits, const std::string &mode,
    mlx::core::Stream s);

/// Returns sum + y as one operation, for a `packed_product` y that is not computed yet. Each tile is added to its part of the sum, in the memory of
/// `sum` if nothing else holds this memory. Returns nil if y is not such a product, already has a sum or has few rows, or if `sum` does not fit y or
/// is not float32; also for tracers.
std::optional<mlx::core::array> packed_sum(const mlx::core::array &sum, const mlx::core::array &y, mlx::core::Stream s);

/// Returns y + alpha a b as one operation, for a `[m, r]`, b `[r, n]` and r up to 64. y must be such a product without a sum. Returns nil in the
/// cases of the other `packed_sum`, for a larger r, and if y already has such an addend.
std::optional<mlx::core::array> packed_sum(
    const mlx::core::array &y, const mlx::core::array &a, const mlx::core::array &b, float alpha, mlx::core::Stream s);

}  // namespace host

#endif
