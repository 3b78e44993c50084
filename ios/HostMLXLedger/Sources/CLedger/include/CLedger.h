// The C interface to the ledger, for Swift's `Ledger`.

#ifndef C_LEDGER_H
#define C_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// The device of the recorded work.
typedef struct {
    bool compute;                      // also compute the values, on the CPU; else they are zeros
    bool metal;                        // Metal's allocator and cache; else the CPU's, which has exact sizes and no cache
    int32_t operations_per_buffer;     // a command buffer is committed after more kernels than this,
    int32_t mega_elements_per_buffer;  // or when it uses buffers of more elements than this, in units of 2^20
    int32_t run_ahead;                 // command buffers that may run while the next is encoded; 0: none
    int32_t generation;                // of the GPU's architecture: 15 in `applegpu_g15p`
    bool gpu_only;                     // what is on a CPU's stream takes memory, and no kernels or command buffers
    int32_t late_handlers;             // command buffers whose arrays are freed after the wait for them returns
} HostLedgerRules;

typedef struct {
    size_t evals, async_evals, waits;  // waits: for arrays of an asynchronous evaluation, and for a stream
    size_t kernels, command_buffers;
    size_t most_in_flight;  // command buffers whose handlers have not run
    double flop, read_bytes, written_bytes;
    size_t new_buffers;
    double new_buffer_bytes;
    size_t peak_bytes, peak_active_bytes;  // with and without the cache; neither has adopted memory
    size_t peak_arrays;                    // buffers of arrays
    size_t spins;                          // waits for memory with one task active, in which `eval` polls
    size_t spin_kernels;                   // what the GPU runs during them
    double spin_flop, spin_bytes;
    size_t first_kernels, most_first_kernels;  // used for the first time; the most between two boundaries
    size_t mappings;                           // arrays made of memory that the caller owns
    double wired_bytes;                        // of that memory, what kernels are given
} HostLedgerCounts;

typedef struct {
    size_t kernels;
    double flop, read_bytes, written_bytes;
} HostLedgerKind;

/// Begins to record what is evaluated; returns null or a message to be released with free().
char *host_ledger_begin(HostLedgerRules rules);
/// Ends it; returns null or why an evaluation failed, to be released with free().
char *host_ledger_end(
    HostLedgerCounts *counts, void *context, void (*kind)(void *context, const char *name, HostLedgerKind kind));
/// Begins the counts again, but for those of kernels that are used for the first time.
void host_ledger_restart(void);
/// Marks a point at which the work may pause, for `most_first_kernels`.
void host_ledger_boundary(void);
/// Calls `trace` for each primitive that is evaluated, in order, with the number of elements of its output.
void host_ledger_trace(void *context, void (*trace)(void *context, const char *primitive, size_t size));

#ifdef __cplusplus
}
#endif

#endif
