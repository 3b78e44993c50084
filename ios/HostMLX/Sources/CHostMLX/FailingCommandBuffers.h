// Command buffers that fail as on Metal, called by CHostMLX.cpp; the C interface to it is in include/CHostMLX.h.

#ifndef FAILING_COMMAND_BUFFERS_H
#define FAILING_COMMAND_BUFFERS_H

#include <functional>
#include <vector>

#include "mlx/mlx.h"

namespace failing {

/// Calls `evaluate`, which computes `outputs`, as one command buffer. Where that buffer is one that fails, its arrays get garbage. Throws
/// the error of an earlier one that is due.
void evaluate(const std::vector<mlx::core::array> &outputs, const std::function<void()> &evaluate);

/// Throws the error of a buffer that failed, where it is still to come; called when a stream was waited for.
void throw_error_after_wait();

/// Notes that data of an array was read which was never computed; mlx-swift dereferences a null pointer there.
/// \returns zeros in its place, as many bytes as the array has.
const void *data_never_computed(const mlx::core::array &a);

}  // namespace failing

#endif
