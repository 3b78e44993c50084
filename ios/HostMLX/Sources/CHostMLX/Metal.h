// The hooks of the Metal mode, called by CHostMLX.cpp; the C interface to it is in include/CHostMLX.h.

#ifndef METAL_H
#define METAL_H

#include <functional>
#include <vector>

#include "mlx/mlx.h"

namespace metal {

/// Calls `evaluate`, which computes `outputs`, by the rules: throws where work is for the GPU, or an error is due.
void evaluate(const std::vector<mlx::core::array> &outputs, const std::function<void()> &evaluate);

/// Throws an error that is still to come; called when a stream was waited for.
void synchronized();

/// Whether C++'s default device is a GPU by the rules.
bool default_is_gpu();

/// Sets the default device of C++.
void set_default_device(mlx::core::Device device);

/// Notes that data of an array was read which was never computed; mlx-swift dereferences a null pointer there.
/// \returns zeros in its place, as many bytes as the array has.
const void *data_of_failed(const mlx::core::array &a);

}  // namespace metal

#endif
