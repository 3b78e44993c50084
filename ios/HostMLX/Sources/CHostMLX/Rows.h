// Operations by rows on the CPU, over all cores.

#ifndef ROWS_H
#define ROWS_H

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

/// The places of the numbers of a float32 array that is broadcast to a shape: from each row's first number, `step` numbers apart. They are
/// not read before the array is computed.
struct Rows {
    const float *data;
    mlx::core::Shape shape;
    mlx::core::Strides strides;
    int step;
    /// Whether they lie one after the other.
    bool isInOrder;

    Rows(const mlx::core::array &a, const mlx::core::Shape &shape);
    explicit Rows(const mlx::core::array &a) : Rows(a, a.shape()) {}

    const float *row(int64_t index) const;

    /// All of them, one after the other: in `room` unless they lie so. MLX's `contiguous` would be an operation more for these, too.
    const float *in_order(std::vector<float> &room) const;
};

/// `result`, whose operations on single numbers are computed together: a few hundred numbers at a time go through all of them while they
/// are in a cache, in place of an array for each; whole rows where there are sums or maxima over rows. `inputs` and other operations'
/// results are read from memory. The numbers are those of the operations one by one, but for the order of a sum.
///
/// \returns `result` itself on another device, for another dtype, and where it is differentiated.
mlx::core::array fused(const mlx::core::array &result, const std::vector<mlx::core::array> &inputs);

/// y = x r w,  r = 1 / √(mean(x²) + ε);  nil where MLX's own is to be taken.
std::optional<mlx::core::array> rms_norm(
    const mlx::core::array &x, const mlx::core::array &weight, float eps, mlx::core::Stream s);

/// The two halves of the first numbers of each row turned by position / period, one period for each pair; positions from `offset`, and
/// the other numbers as they are. nil where MLX's own is to be taken.
std::optional<mlx::core::array> rope(
    const mlx::core::array &x, int offset, const mlx::core::array &periods, mlx::core::Stream s);

/// The same from a position of its own for each of x's first axis; `offsets`: int32, as many or one.
std::optional<mlx::core::array> rope(
    const mlx::core::array &x, const mlx::core::array &offsets, const mlx::core::array &periods, mlx::core::Stream s);

}  // namespace host

#endif
