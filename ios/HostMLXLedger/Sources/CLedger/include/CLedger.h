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
    bool compute;
    bool metal;
    int32_t operations_per_buffer;
    int32_t mega_elements_per_buffer;
    int32_t run_ahead;  // command buffers that may run while the next is encoded; 0: none
    int32_t generation;
    bool gpu_only;     // work on a CPU's stream takes memory, but no kernels or command buffers
    int32_t late_handlers;
} HostLedgerRules;

typedef struct {
    size_t evals, async_evals, waits;
    size_t kernels, command_buffers;
    size_t most_in_flight;
    double flop, read_bytes, written_bytes;
    size_t new_buffers;
    double new_buffer_bytes;
    size_t peak_bytes, peak_active_bytes;
    size_t peak_arrays;
    size_t spins;
    size_t spin_kernels;
    double spin_flop, spin_bytes;
    size_t first_kernels, most_first_kernels;
    size_t mappings;
    double wired_bytes;
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
void host_ledger_restart(void);
void host_ledger_boundary(void);
/// Calls `trace` for each evaluated primitive, in order, with the number of elements in its output.
void host_ledger_trace(void *context, void (*trace)(void *context, const char *primitive, size_t size));

#ifdef __cplusplus
}
#endif

#endif
