#include "Streams.h"

#include <atomic>

namespace mx = mlx::core;

namespace host {

namespace {

/// The index of the CPU's shared stream.
std::atomic<int> &cpu_stream() {
    static std::atomic<int> index = [] {
        if (!mx::is_available(mx::Device::gpu)) {
            // Since 0.32 MLX caches 32 MB of freed memory on the CPU, which no phone has.
            mx::set_cache_limit(0);
        }
        return new_shared_stream(mx::Device::cpu).index;
    }();
    return index;
}

}  // namespace

mx::Stream new_shared_stream(mx::Device device) {
    return mx::new_thread_unsafe_stream(device);
}

void share_default_streams() {
    thread_local int current = -1;
    const int index = cpu_stream();
    if (current != index) {
        mx::set_default_stream(mx::Stream(index, mx::Device::cpu));
        current = index;
    }
    static const bool hasGPU = mx::is_available(mx::Device::gpu);
    if (hasGPU) {
        static const auto gpu = new_shared_stream(mx::Device::gpu);
        thread_local const bool is_set = (mx::set_default_stream(gpu), true);
        (void)is_set;
    }
}

void set_default_cpu_stream(mx::Stream stream) {
    cpu_stream() = stream.index;
    share_default_streams();
}

}  // namespace host
