#ifndef EXPONENTIAL_H
#define EXPONENTIAL_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

enum class Exponential { exp, sigmoid, softmax };

/// Returns f(x), with softmax along the last axis. MLX's polynomial is computed with vector instructions, and on several cores for large arrays.
///
/// Returns `nullopt` if MLX's own function must be used: on Apple's systems, on a device other than the CPU, for another dtype than float32, or for
/// an empty array or a scalar.
std::optional<mlx::core::array> exponential(Exponential f, const mlx::core::array &x, mlx::core::Stream s);

}  // namespace host

#endif
