// Runs work with independent parts on the machine's cores.

#ifndef POOL_H
#define POOL_H

#include <cstddef>
#include <functional>

namespace host {

/// Calls `part(0)` … `part(count - 1)` on one thread for each core that the process may use, at most 8 threads. The number is limited because
/// products have few parts, and each thread has buffers of about 2 MB. `OPENBLAS_NUM_THREADS` sets another number of threads.
///
/// Uses only the caller's thread if all parts together take less time than waking another thread. `isWork` says whether the parts together take more
/// than about 100 µs.
///
/// Threads take one part after another, so a thread whose core is busy with another program takes fewer parts. Threads sleep when no parts are left.
/// A part must not throw. The division into parts must not depend on the number of threads, because the results must not depend on this number.
void parallel(int count, bool isWork, const std::function<void(int)> &part);

/// Returns the thread's own memory for `count` numbers of any value, valid until its next call.
float *scratch(size_t count);

}  // namespace host

#endif
