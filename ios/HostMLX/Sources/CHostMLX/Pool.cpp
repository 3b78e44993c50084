#include "Pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace host {
namespace {

int threads() {
    const char *asked = std::getenv("OPENBLAS_NUM_THREADS");
    if (asked && std::atoi(asked) > 0) return std::atoi(asked);
#ifdef __linux__
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return std::clamp(CPU_COUNT(&allowed), 1, 8);
#endif
    return std::clamp(int(std::thread::hardware_concurrency()), 1, 8);
}

class Pool {
  public:
    explicit Pool(int threads) {
        try {
            for (; helpers < threads - 1; helpers++) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error &) {
            // The system allows no more threads.
        }
    }

    void run(int count, const std::function<void(int)> &part) {
        std::unique_lock lock(mutex);
        this->part = &part;
        next = 0;
        unfinished = count;
        this->count = count;
        for (int i = 0; i < std::min(helpers, count - 1); i++) work.notify_one();
        take(lock);
        wait(lock, done, [this] { return unfinished == 0; });
    }

    /// Held by the thread that uses the pool. MLX has a thread for each stream.
    std::mutex inUse;

  private:
    void serve() {
        std::unique_lock lock(mutex);
        while (true) {
            wait(lock, work, [this] { return next < count; });
            take(lock);
        }
    }

    /// Waits for a condition. Polls for 100 µs before it sleeps, because most waits are shorter than waking a thread.
    template <class Condition>
    void wait(std::unique_lock<std::mutex> &lock, std::condition_variable &changed, Condition condition) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
        lock.unlock();
        while (!condition() && std::chrono::steady_clock::now() < end) {
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
        lock.lock();
        changed.wait(lock, condition);
    }

    void take(std::unique_lock<std::mutex> &lock) {
        while (next < count) {
            const int index = next++;
            lock.unlock();
            (*part)(index);
            lock.lock();
            if (--unfinished == 0) done.notify_one();
        }
    }

    std::mutex mutex;
    std::condition_variable work, done;
    const std::function<void(int)> *part = nullptr;
    int helpers = 0;
    std::atomic<int> next = 0, count = 0, unfinished = 0;
};

}  // namespace

void parallel(int count, bool isWork, const std::function<void(int)> &part) {
    if (isWork && count > 1) {
        // The pool is never destroyed, because its threads run until the process ends.
        static Pool &pool = *new Pool(threads());
        std::unique_lock lock(pool.inUse, std::try_to_lock);
        if (lock.owns_lock()) return pool.run(count, part);
    }
    for (int i = 0; i < count; i++) part(i);
}

float *scratch(size_t count) {
    static thread_local std::vector<float> numbers;
    if (numbers.size() < count) numbers.resize(count);
    return numbers.data();
}

}  // namespace host
