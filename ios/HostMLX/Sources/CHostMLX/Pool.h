#ifndef POOL_H
#define POOL_H

#include <cstddef>
#include <functional>

namespace host {

/// Calls `part(0)` … `part(count - 1)` on up to 8 threads, at most one for each core. `OPENBLAS_NUM_THREADS` sets another number.
///
/// `isWork` says whether all parts together take more than about 100 µs. If not, or if another thread uses the pool, the caller's thread runs all
/// parts.
///
/// A part must not throw. The division into parts must not depend on the number of threads, so that the results do not depend on it either.
void parallel(int count, bool isWork, const std::function<void(int)> &part);

/// Returns memory of the calling thread for `count` numbers, with arbitrary contents. It is valid until the thread's next call.
float *scratch(size_t count);

}  // namespace host

#endif
