// Attention on the CPU, whose scores stay in the caches.

#ifndef ATTENTION_H
#define ATTENTION_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

/// softmax(scale q kᵀ) v over the keys that a query sees, q `[1, heads, n, d]` over k and v `[1, kv_heads, N, d]`: all, those up to its own position,
/// where the queries are the last n, or those of a mask `[n, N]` of truth values. The scores are made some rows and keys at a time, and again
/// for the derivative, which does not depend on the number of threads either. nil where MLX's own is to be taken: on another device, for
/// another dtype or mask.
std::optional<mlx::core::array> attention(
    const mlx::core::array &q, const mlx::core::array &k, const mlx::core::array &v, float scale, bool isCausal,
    const std::optional<mlx::core::array> &mask, mlx::core::Stream s);

}  // namespace host

#endif
