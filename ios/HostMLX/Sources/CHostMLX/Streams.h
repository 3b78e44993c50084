// Streams as in mlx-swift, which every thread may use. In MLX's C++ library, each thread has its own default streams.

#ifndef STREAMS_H
#define STREAMS_H

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

mlx::core::Stream new_stream(mlx::core::Device device);

std::optional<mlx::core::Stream> gpu_stream();

/// Prepares the calling thread for calls of MLX. While `gpu_is_default()`, a CPU stream of this thread takes the place of the GPU's default stream.
void enter();

extern thread_local bool has_entered;

// MARK: C++'s default device on Metal, which is the GPU

/// Sets or ends the rule that C++'s default device is the GPU. On a machine without a GPU, work on that device fails.
void set_gpu_is_default(bool is_default);

bool gpu_is_default();

void set_default_device(mlx::core::Device device);

/// Throws if the rule of `set_gpu_is_default` applies, and `outputs` need an operation on the GPU.
void refuse_gpu_work(const std::vector<mlx::core::array> &outputs);

/// Returns whether a primitive reads a file or a constant of an imported function. MLX runs such primitives on the CPU's default stream (load.cpp,
/// export.cpp).
bool is_load(const mlx::core::Primitive &primitive);

}  // namespace host

#endif
