// Hooks with which a ledger of a phone's GPU (ios/HostMLXLedger) replaces functions of MLX.

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

    virtual void created(mlx::core::array &a) = 0;
    /// Called when memory that MLX did not allocate becomes the data of an array. `released` is called when the array no longer needs it.
    virtual void adopted(const void *buffer, size_t bytes) = 0;
    virtual void released(const void *buffer) = 0;
    virtual void set_memory_limit(size_t limit) = 0;
    virtual size_t set_cache_limit(size_t limit) = 0;  // returns the former limit
    virtual void clear_cache() = 0;

   protected:
    ~LedgerHooks() = default;
};

/// The hooks of the linked ledger, or null without a ledger. The ledger registers them before `main`.
extern LedgerHooks *ledger_hooks;

LedgerHooks *recording_ledger();

/// Makes a stream for the GPU on a Linux machine without one, unless the stream exists. Graphs on the stream can be built, but not computed.
void make_gpu_stream();

}  // namespace host

#endif

#endif
