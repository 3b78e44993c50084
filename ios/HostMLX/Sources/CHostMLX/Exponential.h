// exp, the logistic function and softmax on the CPU.

#ifndef EXPONENTIAL_H
#define EXPONENTIAL_H

#include <optional>

#include "mlx/mlx.h"

namespace host {

enum class Exponential { exp, sigmoid, softmax };

/// f(x), of softmax along the last axis, by MLX's own polynomial, with vector instructions and all cores: the wheel's library for x86
/// computes one number at a time, some ten times slower.
///
/// nil where MLX's is to be taken: on another device, for another dtype, for no number at all.
std::optional<mlx::core::array> exponential(Exponential f, const mlx::core::array &x, mlx::core::Stream s);

}  // namespace host

#endif
