#ifndef TF32_H
#define TF32_H

#include <atomic>

namespace host {

/// Whether matrix products behave as on a GPU with neural accelerators.
extern std::atomic<bool> rounds_to_tf32;

/// Returns whether float32 matrix products round their operands to TF32: if `rounds_to_tf32` is set, unless MLX_ENABLE_TF32 is 0 (MLX's utils.h:163).
bool has_tf32();

}  // namespace host

#endif
