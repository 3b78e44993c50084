// The hooks of the Metal mode, called by CHostMLX.cpp; the C interface to it is in include/CHostMLX.h.

#ifndef METAL_H
#define METAL_H

#include <functional>
#include <vector>

#include "mlx/mlx.h"

namespace metal {

/// Calls `evaluate`, which computes `outputs`, by the rules: throws where work is for the GPU, or an error is due.
void evaluate(const std::vector<mlx::core::array> &outputs, const std::function<void()> &evaluate);

/// Called when a stream was waited for; throws an error that is still to come.
void synchronized();

/// The CPU's default stream, which with a GPU is not the default of C++.
mlx::core::Stream default_cpu_stream();

/// The default device of C++.
mlx::core::Device default_device();
/// Sets it.
void set_default_device(mlx::core::Device device);

/// Notes that data of an array was read which was never computed; mlx-swift dereferences a null pointer there.
/// \returns zeros in its place, as many bytes as the array has.
const void *data_of_failed(const mlx::core::array &a);

/// Whether RoPE follows the kernel for one token a row: see `rope`.
bool has_rope_of_one_token();

/// x [B, …, N, 1, d] after RoPE, `rotated`, as MLX 0.31.1's kernel for one token leaves it (metal/rope.cpp:94, 134): its grid leaves out
/// B, so that only the first of B is rotated.
mlx::core::array rope(const mlx::core::array &x, const mlx::core::array &rotated, mlx::core::Stream s);

}  // namespace metal

#endif
