#ifndef TF32_H
#define TF32_H

#include <atomic>

namespace host {

extern std::atomic<bool> rounds_to_tf32;

/// Returns whether float32 matrix products round their operands to TF32. MLX_ENABLE_TF32=0 switches TF32 off, as in MLX.
bool has_tf32();

}  // namespace host

#endif
