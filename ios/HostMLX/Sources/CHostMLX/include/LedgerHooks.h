// What a ledger of a phone's GPU (ios/HostMLXLedger) does in MLX's place, in C++. Without one nothing is registered here.

#ifndef LEDGER_HOOKS_H
#define LEDGER_HOOKS_H

#ifdef __cplusplus

#include <optional>
#include <vector>

#include "mlx/mlx.h"

namespace host {

class LedgerHooks {
   public:
    // MARK: In the place of MLX's functions, while the ledger records

    virtual bool is_recording() = 0;
    virtual void evaluate(std::vector<mlx::core::array> outputs, bool async) = 0;
    virtual void wait(mlx::core::array &a) = 0;
    virtual void synchronize(mlx::core::Stream stream) = 0;
    /// MLX's own figures as they would be on the phone, in bytes.
    struct Memory {
        size_t active, cache, peak, limit;
    };
    virtual Memory memory() = 0;
    virtual void reset_peak_memory() = 0;

    // MARK: In the place of functions that make plain operations where there is no GPU, for a graph on the GPU's stream

    virtual mlx::core::array rms_norm(
        const mlx::core::array &x, const mlx::core::array &weight, float eps, mlx::core::Stream stream) = 0;
    virtual mlx::core::array rope(
        const mlx::core::array &x, int dimensions, bool traditional, std::optional<float> base, float scale, int offset,
        const std::optional<mlx::core::array> &frequencies, mlx::core::Stream stream) = 0;

    // MARK: Events, also while nothing is recorded

    /// An array was made from data in memory.
    virtual void created(mlx::core::array &a) = 0;
    /// Memory that MLX did not allocate is now the data of an array, or no longer is.
    virtual void adopted(const void *buffer, size_t bytes) = 0;
    virtual void released(const void *buffer) = 0;
    virtual void set_memory_limit(size_t limit) = 0;
    virtual void set_cache_limit(size_t limit) = 0;
    virtual void clear_cache() = 0;

   protected:
    ~LedgerHooks() = default;
};

/// The hooks of the one ledger that is linked into the program, which registers them before `main`; null where none is.
extern LedgerHooks *ledger_hooks;

/// The hooks while their ledger records; else null.
LedgerHooks *recording_ledger();

/// Makes a stream for the GPU of a machine that has none, unless it is there: graphs on it can be built, but not computed.
void make_gpu_stream();

}  // namespace host

#endif

#endif
