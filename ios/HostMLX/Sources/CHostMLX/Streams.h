// The default streams, which all threads share.

#ifndef STREAMS_H
#define STREAMS_H

#include "mlx/mlx.h"

namespace host {

/// Makes the shared streams the calling thread's default streams. Since 0.31.2 MLX gives each thread default streams of its own, on
/// which no other thread may evaluate, and a Swift task may change threads.
void share_default_streams();

/// Makes a stream of the CPU the default of all threads.
void set_default_cpu_stream(mlx::core::Stream stream);

/// A new stream that every thread may use, though not two at once.
mlx::core::Stream new_shared_stream(mlx::core::Device device);

}  // namespace host

#endif
