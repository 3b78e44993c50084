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

/// Returns an array of `size` float32 that depends on the inputs and is evaluated like an `Arange`, into a new buffer.
ProbeArray probe_source(ProbeVector inputs, int32_t size);
/// Returns the "sum" of two arrays of one shape, evaluated like an `Add`, in the memory of one of them if MLX does that.
ProbeArray probe_add(ProbeArray a, ProbeArray b);

/// Copies the sizes of the probes that MLX has evaluated since the last call, in order. Returns their number, at most `capacity`.
size_t probe_log(size_t *sizes, size_t capacity);

const char *probe_mlx_version(void);

#ifdef __cplusplus
}
#endif

#endif
