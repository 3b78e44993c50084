#ifndef ATTENTION_H
#define ATTENTION_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// Returns softmax(scale q kᵀ) v for q `[1, heads, n, d]` and k and v `[1, kv_heads, N, d]`.
///
/// With `isCausal`, the queries are the last n positions, and each attends to the keys up to its own position. A Boolean mask `[n, N]` selects keys.
/// Results do not depend on the number of threads. Returns `nullopt` on Apple's systems, on a device other than the CPU, and for other dtypes, shapes
/// or masks. The caller then uses MLX's own function.
std::optional<mlx::core::array> attention(
    const mlx::core::array &q, const mlx::core::array &k, const mlx::core::array &v, float scale, bool isCausal,
    const std::optional<mlx::core::array> &mask, mlx::core::Stream s);

}  // namespace host

#endif
