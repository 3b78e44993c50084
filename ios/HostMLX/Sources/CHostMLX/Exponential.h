// exp, the logistic function and softmax on the CPU.

#ifndef EXPONENTIAL_H
#define EXPONENTIAL_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

enum class Exponential { exp, sigmoid, softmax };

/// Returns f(x), for softmax along the last axis, by MLX's polynomial, with vector instructions and all cores. The wheel's library for x86 computes
/// one number at a time, and is about ten times slower.
///
/// Returns nil if MLX's own function must be used: on another device, for another dtype, or for an empty array.
std::optional<mlx::core::array> exponential(Exponential f, const mlx::core::array &x, mlx::core::Stream s);

}  // namespace host

#endif
