// Streams as in mlx-swift. MLX gives each thread its own default streams, on which no other thread may evaluate. mlx-swift creates streams that every
// thread may use, and names them in each operation.

#ifndef STREAMS_H
#define STREAMS_H

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

/// Creates a stream that every thread may use, but only one at a time.
mlx::core::Stream new_stream(mlx::core::Device device);

/// Returns the stream of `make_gpu_stream` in LedgerHooks.h, if it exists.
std::optional<mlx::core::Stream> gpu_stream();

/// Prepares the calling thread before calls of MLX. If C++'s default device is to be a missing GPU, a stream of the CPU stands for it.
void enter();

// MARK: C++'s default device on Metal, which is the GPU

/// Begins or ends the rule that the default device of C++ is the GPU. On a machine without a GPU, work on that device fails.
void set_gpu_is_default(bool is_default);

/// Returns whether the default device of C++ is the GPU by that rule.
bool gpu_is_default();

/// Sets the default device of C++.
void set_default_device(mlx::core::Device device);

/// Throws if the rule applies and an operation that `outputs` need would run on the GPU.
void refuse_gpu_work(const std::vector<mlx::core::array> &outputs);

/// Returns whether a primitive reads a file or a constant of an imported function, for which MLX uses the CPU's default stream (load.cpp,
/// export.cpp).
bool is_load(const mlx::core::Primitive &primitive);

}  // namespace host

#endif
