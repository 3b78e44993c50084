// A primitive that records when MLX evaluates it, for tests of the ledger.

#ifndef C_LEDGER_PROBE_H
#define C_LEDGER_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// These are the types of CHostMLX.h.
typedef struct HostArrayStorage *ProbeArray;
typedef struct HostVectorStorage *ProbeVector;

/// Returns a float32 array of `size` elements. MLX evaluates it after the inputs, into a new buffer.
ProbeArray probe_source(ProbeVector inputs, int32_t size);
/// Returns a probe whose evaluation chooses the output's buffer as `Add` does: a new one, or that of an input.
ProbeArray probe_add(ProbeArray a, ProbeArray b);

/// Copies the sizes of the probes evaluated since the last call into `sizes`, in order. Returns the number of copied sizes, at most `capacity`.
size_t probe_log(size_t *sizes, size_t capacity);

const char *probe_mlx_version(void);

#ifdef __cplusplus
}
#endif

#endif
