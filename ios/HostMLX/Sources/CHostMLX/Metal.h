// The hooks of the Metal mode, called by CHostMLX.cpp; the C interface to it is in include/CHostMLX.h.

#ifndef METAL_H
#define METAL_H

#include <vector>

#include "mlx/mlx.h"

namespace metal {

/// Called before each evaluation of `outputs`; throws in place of those that are to fail, or run on the GPU.
void begin_evaluation(const std::vector<mlx::core::array> &outputs);

/// Whether C++'s default device is a GPU by the rules.
bool default_is_gpu();

/// Sets the default device of C++.
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
