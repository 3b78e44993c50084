// The ledger's hooks, called by CHostMLX.cpp; the C interface to it is in include/CHostMLX.h.

#ifndef LEDGER_H
#define LEDGER_H

#include <optional>

#include "mlx/mlx.h"

namespace ledger {

/// Whether something is being recorded.
bool recording();

// MARK: In the place of MLX's functions, while something is recorded

void evaluate(std::vector<mlx::core::array> outputs, bool async);
void wait(mlx::core::array &a);
void synchronize(mlx::core::Stream stream);

// MARK: Events that the ledger records

/// An array was made from data in memory.
void created(mlx::core::array &a);
/// Bytes outside of MLX's allocator became the data of an array, or ceased to be.
void adopted(const void *buffer, size_t bytes);
void released(const void *buffer);
void set_memory_limit(size_t limit);
void set_cache_limit(size_t limit);
void clear_cache();

/// MLX's own figures as they would be, while something is recorded.
struct Memory {
    size_t active, cache, peak, limit;
};
Memory memory();
void reset_peak_memory();

/// The stream for the GPU of a machine that has none: its graphs can be built and recorded, but not computed.
std::optional<mlx::core::Stream> gpu_stream();
/// Makes that stream, unless it is there.
void make_gpu_stream();

}  // namespace ledger

#endif
