#ifndef FAILING_COMMAND_BUFFERS_H
#define FAILING_COMMAND_BUFFERS_H

#include <functional>
#include <vector>

#include "mlx/mlx.h"

namespace failing {

/// Runs `evaluate`, which computes `outputs`, as one command buffer. If the buffer fails, the arrays that it computes get garbage. Throws the error
/// of a failed buffer if that error is due.
void evaluate(const std::vector<mlx::core::array> &outputs, const std::function<void()> &evaluate);

/// Counts the empty command buffer that a wait for a stream commits. Throws its error if it fails, or the pending error of an earlier buffer. It is
/// called after the stream was synchronized.
void wait();

/// Counts an allocation of the calling thread, and throws an error if it fails. Threads that do not call MLX, such as those that run kernels, allocate
/// nothing on Metal.
void allocate(size_t bytes);

/// Counts a read of an array that was never computed, where mlx-swift would dereference a null pointer. Throws an error if no rules of Metal apply.
///
/// \returns zeros for all bytes of the array.
const void *data_never_computed(const mlx::core::array &a);

}  // namespace failing

#endif
