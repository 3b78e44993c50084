// Operations by rows on the CPU, over all cores.

#ifndef ROWS_H
#define ROWS_H

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

/// The places of the numbers in a float32 array that is broadcast to a shape: in each row they are `step` numbers apart. The numbers are not read
/// before the array is computed.
struct Rows {
    const float *data;
    mlx::core::Shape shape;
    mlx::core::Strides strides;
    int step;
    /// Whether all numbers are contiguous.
    bool isInOrder;

    Rows(const mlx::core::array &a, const mlx::core::Shape &shape);
    explicit Rows(const mlx::core::array &a) : Rows(a, a.shape()) {}

    const float *row(int64_t index) const;

    /// Returns all numbers contiguously, in `room` unless they already are. MLX's `contiguous` would be a separate operation.
    const float *in_order(std::vector<float> &room) const;
};

/// Returns `result` with fused elementwise operations. A few hundred numbers at a time go through all operations while they are in a cache, without
/// an array for each operation. With sums or maxima over rows, whole rows go through. `inputs` and other operations' results are read from memory.
/// The numbers equal those of separate operations except for the order of a sum.
///
/// \returns `result` itself on another device, for another dtype, and if it is differentiated.
mlx::core::array fused(const mlx::core::array &result, const std::vector<mlx::core::array> &inputs);

/// Returns y = x r w with r = 1 / √(mean(x²) + ε); nil if MLX's own function must be used.
std::optional<mlx::core::array> rms_norm(
    const mlx::core::array &x, const mlx::core::array &weight, float eps, mlx::core::Stream s);

/// Returns x with rotary position embedding: the first 2n numbers of each row form n pairs, one pair for each of the n periods. Pair i has the
/// numbers i and i + n, and is rotated by position / period. Other numbers are unchanged. Positions begin at `offset`. Returns nil if MLX's own
/// function must be used.
std::optional<mlx::core::array> rope(
    const mlx::core::array &x, int offset, const mlx::core::array &periods, mlx::core::Stream s);

/// Returns x with rotary position embedding, with one offset for each index of x's first axis, or one for all. `offsets` is int32.
std::optional<mlx::core::array> rope(
    const mlx::core::array &x, const mlx::core::array &offsets, const mlx::core::array &periods, mlx::core::Stream s);

}  // namespace host

#endif
