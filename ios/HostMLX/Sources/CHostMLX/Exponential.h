// exp, sigmoid and softmax on the CPU.

#ifndef EXPONENTIAL_H
#define EXPONENTIAL_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

enum class Exponential { exp, sigmoid, softmax };

/// Returns f(x), with softmax along the last axis. MLX's polynomial is computed with vector instructions on several cores.
///
/// Returns nil if MLX's own function must be used: on Apple's systems, on another device, for another dtype, or for an empty array or a scalar.
std::optional<mlx::core::array> exponential(Exponential f, const mlx::core::array &x, mlx::core::Stream s);

}  // namespace host

#endif
