#ifndef PACKED_PRODUCT_H
#define PACKED_PRODUCT_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// Returns the result of `mlx::core::quantized_matmul` for float32 x `[…, k]`.
///
/// Each weight is unpacked once for several rows of x. MLX's own kernel unpacks each weight again for each row, and is about 50 times slower. For up
/// to 16 rows of x and an affine Wᵀ, a row's result does not depend on the other rows.
///
/// Returns `nullopt` if MLX's own function must be used: without OpenBLAS, on a device other than the CPU, or for an unsupported dtype, quantization
/// or shape.
std::optional<mlx::core::array> packed_product(
    const mlx::core::array &x, const mlx::core::array &w, const mlx::core::array &scales,
    const std::optional<mlx::core::array> &biases, bool transpose, int group_size, int bits, const std::string &mode,
    mlx::core::Stream s);

/// Returns sum + y as one operation, for a `packed_product` y that is not computed yet.
///
/// The result may use the memory of `sum` if nothing else holds that memory. Returns `nullopt` if y cannot include `sum`.
std::optional<mlx::core::array> packed_sum(const mlx::core::array &sum, const mlx::core::array &y, mlx::core::Stream s);

/// Returns y + alpha a b as one operation, for a `packed_product` y that is not computed yet, a `[m, r]` and b `[r, n]`.
///
/// Returns `nullopt` if y cannot include the product a b, for example if r is above 64.
std::optional<mlx::core::array> packed_sum(
    const mlx::core::array &y, const mlx::core::array &a, const mlx::core::array &b, float alpha, mlx::core::Stream s);

}  // namespace host

#endif
