// The machine's cores, for work that falls into independent parts.

#ifndef POOL_H
#define POOL_H

#include <cstddef>
#include <functional>

namespace host {

/// Calls `part(0)` … `part(count - 1)`, on as many threads as the process may use cores, up to 8: products have few parts, and each thread
/// has buffers of some 2 MB. `OPENBLAS_NUM_THREADS` says another number.
///
/// On the caller's thread alone where all parts are less work than it takes to wake another: `isWork` says whether they are more than
/// some 100 µs.
///
/// Threads take one part after the other, so that one whose core is busy with another program takes fewer, and sleep when there are
/// none left. A part does not throw. What the parts are must not depend on the number of threads: results don't then either.
void parallel(int count, bool isWork, const std::function<void(int)> &part);

/// The thread's own memory for so many numbers, of any value, until its next call.
float *scratch(size_t count);

}  // namespace host

#endif
