// Attention on the CPU. The scores stay in the CPU's caches.

#ifndef ATTENTION_H
#define ATTENTION_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// Returns softmax(scale q kᵀ) v for q `[1, heads, n, d]` and k and v `[1, kv_heads, N, d]`. A query attends to all keys, to those up to its own
/// position (the queries are the last n), or to those of a Boolean mask `[n, N]`. The scores are computed for some rows and keys at a time, and the
/// derivative recomputes them. The result and the derivative do not depend on the number of threads. Returns nil if MLX's own function must be used:
/// on another device, or for another dtype or mask.
std::optional<mlx::core::array> attention(
    const mlx::core::array &q, const mlx::core::array &k, const mlx::core::array &v, float scale, bool isCausal,
    const std::optional<mlx::core::array> &mask, mlx::core::Stream s);

}  // namespace host

#endif
