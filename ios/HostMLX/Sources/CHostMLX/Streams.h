// Streams. MLX gives each thread default streams of its own, on which no other thread may evaluate; mlx-swift makes streams that every
// thread may use, and names them in each operation.

#ifndef STREAMS_H
#define STREAMS_H

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

/// A new stream that every thread may use, though not two at once.
mlx::core::Stream new_stream(mlx::core::Device device);

/// The stream of `make_gpu_stream` in LedgerHooks.h, once there is one.
std::optional<mlx::core::Stream> gpu_stream();

/// Prepares the calling thread; called before MLX is. While C++'s default device is to be a GPU that there is not, a stream of the CPU
/// stands for it.
void enter();

// MARK: C++'s default device on Metal, which is the GPU

/// Begins or ends the rule that the default device of C++ is the GPU. On a machine without one, the work for it fails.
void set_gpu_is_default(bool is_default);

/// Whether the default device of C++ is the GPU by that rule.
bool gpu_is_default();

/// Sets the default device of C++.
void set_default_device(mlx::core::Device device);

/// Throws where the rule is in force and something that `outputs` need would run on the GPU.
void refuse_gpu_work(const std::vector<mlx::core::array> &outputs);

/// Whether it reads a file or a constant of an imported function, which the CPU's default stream does (load.cpp, export.cpp).
bool is_load(const mlx::core::Primitive &primitive);

}  // namespace host

#endif
