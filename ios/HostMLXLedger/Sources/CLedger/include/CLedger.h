// The C interface to the ledger, for Swift's `Ledger`.

#ifndef C_LEDGER_H
#define C_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    bool compute;                      // also compute the values, on the CPU; else they are zeros
    bool metal;                        // Metal's allocator and cache; else the CPU's, which has exact sizes and no cache
    int32_t operations_per_buffer;     // a command buffer is committed after more kernels than this,
    int32_t mega_elements_per_buffer;  // or when it uses buffers of more elements than this, in units of 2^20
    int32_t run_ahead;                 // command buffers that may run while the next is encoded; 0: none
    int32_t generation;                // the generation of the GPU's architecture: 15 in `applegpu_g15p`
    bool gpu_only;                     // work on a CPU's stream takes memory, but no kernels or command buffers
    int32_t late_handlers;             // command buffers whose arrays are freed after the wait for them returns
} HostLedgerRules;

typedef struct {
    size_t evals, async_evals, waits;  // `waits`: waits for arrays of an asynchronous evaluation, and for a stream
    size_t kernels, command_buffers;
    size_t most_in_flight;  // the largest number of command buffers whose handlers had not run
    double flop, read_bytes, written_bytes;
    size_t new_buffers;
    double new_buffer_bytes;
    size_t peak_bytes, peak_active_bytes;  // with the cache, and without it; both without adopted memory
    size_t peak_arrays;                    // buffers of arrays
    size_t spins;                          // waits for memory with one task active, in which `eval` polls
    size_t spin_kernels;                   // the GPU's kernels during these waits
    double spin_flop, spin_bytes;
    size_t first_kernels, most_first_kernels;  // kernels at their first use; the largest number between two boundaries
    size_t mappings;                           // arrays that use the caller's memory
    double wired_bytes;                        // the bytes of the caller's memory that kernels use
} HostLedgerCounts;

typedef struct {
    size_t kernels;
    double flop, read_bytes, written_bytes;
} HostLedgerKind;

/// Begins to record evaluations. Returns null, or a message to release with free().
char *host_ledger_begin(HostLedgerRules rules);
/// Ends the recording. Returns null, or the reason for a failure, to release with free().
char *host_ledger_end(
    HostLedgerCounts *counts, void *context, void (*kind)(void *context, const char *name, HostLedgerKind kind));
/// Resets the counts, except those of first-used kernels.
void host_ledger_restart(void);
/// Begins a new interval for `most_first_kernels`.
void host_ledger_boundary(void);
/// Calls `trace` for each evaluated primitive, in order, with the number of elements in its output.
void host_ledger_trace(void *context, void (*trace)(void *context, const char *primitive, size_t size));

#ifdef __cplusplus
}
#endif

#endif
