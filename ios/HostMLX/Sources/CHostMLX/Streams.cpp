#include "Streams.h"

#include <optional>

#include "Metal.h"

namespace mx = mlx::core;

namespace host {

namespace {

/// The stream that stands for the GPU on this thread, once there is one, and the thread's default stream meanwhile.
thread_local std::optional<mx::Stream> instead_of_gpu, own;

}  // namespace

mx::Stream new_stream(mx::Device device) { return mx::new_thread_unsafe_stream(device); }

void enter() {
    // Without a GPU MLX caches 32 MB of freed memory, as on no phone.
    [[maybe_unused]] static const bool is_without_cache =
        !mx::is_available(mx::Device::gpu) && (mx::set_cache_limit(0), true);
    const bool is_gpu = metal::default_is_gpu();
    if (is_gpu == own.has_value()) {
        return;
    }
    if (!is_gpu) {
        mx::set_default_stream(*own);
        own.reset();
        return;
    }
    own = mx::default_stream(mx::Device::cpu);
    if (!instead_of_gpu) {
        instead_of_gpu = mx::new_stream(mx::Device::cpu);
    }
    mx::set_default_stream(*instead_of_gpu);
}

bool stands_for_gpu(mx::Stream stream) { return instead_of_gpu == stream; }

}  // namespace host
