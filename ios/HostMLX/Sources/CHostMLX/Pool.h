// Runs work with independent parts on the machine's cores.

#ifndef POOL_H
#define POOL_H

#include <cstddef>
#include <functional>

namespace host {

/// Calls `part(0)` … `part(count - 1)` on as many threads as the process may use cores, up to 8. Products have few parts, and each thread has buffers
/// of some 2 MB. `OPENBLAS_NUM_THREADS` sets another number.
///
/// Uses only the caller's thread if all parts together take less time than waking another. `isWork` says whether they take more than some 100 µs.
///
/// Threads take one part after another, so a thread whose core is busy with another program takes fewer. They sleep when no parts are left. A part
/// must not throw. The division into parts must not depend on the number of threads, so that the results do not.
void parallel(int count, bool isWork, const std::function<void(int)> &part);

/// Returns the thread's own memory for `count` numbers of any value, valid until its next call.
float *scratch(size_t count);

}  // namespace host

#endif
