// Attention on the CPU.

#ifndef ATTENTION_H
#define ATTENTION_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// Returns softmax(scale q kᵀ) v for q `[1, heads, n, d]` and k and v `[1, kv_heads, N, d]`.
///
/// With `isCausal`, the queries are the last n positions, and each attends to the keys up to its own position. A Boolean mask `[n, N]` selects the
/// keys instead. The backward pass recomputes the scores. Results do not depend on the number of threads. Returns nil if MLX's own function must be
/// used: on Apple's systems, on another device, or for another dtype, shape or mask.
std::optional<mlx::core::array> attention(
    const mlx::core::array &q, const mlx::core::array &k, const mlx::core::array &v, float scale, bool isCausal,
    const std::optional<mlx::core::array> &mask, mlx::core::Stream s);

}  // namespace host

#endif
