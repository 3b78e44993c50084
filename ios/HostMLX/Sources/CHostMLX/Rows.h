#ifndef ROWS_H
#define ROWS_H

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

/// A float32 array, broadcast to a shape. The numbers of a row are `step` numbers apart in memory. The constructor reads no numbers, because the
/// array may not be computed yet.
struct Rows {
    const float *data;
    mlx::core::Shape shape;
    mlx::core::Strides strides;
    int step;
    bool isInOrder;

    Rows(const mlx::core::array &a, const mlx::core::Shape &shape);
    explicit Rows(const mlx::core::array &a) : Rows(a, a.shape()) {}

    const float *row(int64_t index) const;

    /// Returns all numbers contiguously. They are copied to `room` if necessary.
    const float *in_order(std::vector<float> &room) const;
};

/// Returns `result` with fused elementwise operations and reductions over rows. Intermediate results stay in the cache. The numbers equal those of
/// separate operations, except that sums add their terms in another order.
///
/// \returns `result` itself if it cannot be fused, for example on another device or while it is differentiated.
mlx::core::array fused(const mlx::core::array &result, const std::vector<mlx::core::array> &inputs);

/// Returns y = x r w with r = 1 / √(mean(x²) + ε), or `nullopt` if MLX's own function must be used.
std::optional<mlx::core::array> rms_norm(
    const mlx::core::array &x, const mlx::core::array &weight, float eps, mlx::core::Stream s);

/// Applies rotary position embedding. The first 2n numbers of each row are rotated, where n is the number of periods. Numbers i and i + n are a pair,
/// which is rotated by position / period. Positions begin at `offset`. Returns `nullopt` if MLX's own function must be used.
std::optional<mlx::core::array> rope(
    const mlx::core::array &x, int offset, const mlx::core::array &periods, mlx::core::Stream s);

/// Applies rotary position embedding with int32 `offsets`: one for each index of x's first axis, or one for all. Returns `nullopt` if MLX's own
/// function must be used.
std::optional<mlx::core::array> rope(
    const mlx::core::array &x, const mlx::core::array &offsets, const mlx::core::array &periods, mlx::core::Stream s);

}  // namespace host

#endif
