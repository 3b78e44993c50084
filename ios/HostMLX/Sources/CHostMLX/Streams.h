// Streams. MLX gives each thread default streams of its own, on which no other thread may evaluate; mlx-swift makes streams that every
// thread may use, and names them in each operation.

#ifndef STREAMS_H
#define STREAMS_H

#include "mlx/mlx.h"

namespace host {

/// A new stream that every thread may use, though not two at once.
mlx::core::Stream new_stream(mlx::core::Device device);

/// Prepares the calling thread; called before MLX is. While C++'s default device is to be a GPU that there is not, a stream of the CPU
/// stands for it.
void enter();

/// Whether the stream stands for the GPU on this thread.
bool stands_for_gpu(mlx::core::Stream stream);

}  // namespace host

#endif
