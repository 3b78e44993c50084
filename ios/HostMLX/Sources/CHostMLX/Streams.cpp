#include "Streams.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "LedgerHooks.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {

namespace {

std::mutex gpu_stream_mutex;
std::optional<mx::Stream> made_gpu_stream;

/// `instead_of_gpu` is this thread's CPU stream that replaces the GPU's. While it is the default stream, `own` is the thread's former default stream.
thread_local std::optional<mx::Stream> instead_of_gpu, own;

/// Whether the rule of `set_gpu_is_default` applies. `is_gpu_default` is false if the default device was set to the CPU.
std::atomic<bool> has_gpu_rule = false;
std::atomic<bool> is_gpu_default = true;

}  // namespace

mx::Stream new_stream(mx::Device device) { return mx::new_thread_unsafe_stream(device); }

std::optional<mx::Stream> gpu_stream() {
    const std::lock_guard lock(gpu_stream_mutex);
    return made_gpu_stream;
}

/// Makes a stream for a missing GPU on Linux, for which `mx::new_stream` would throw an error. A graph for the GPU can be imported only if there is
/// such a stream (export.cpp:495).
void make_gpu_stream() {
#ifdef __linux__
    const std::lock_guard lock(gpu_stream_mutex);
    if (mx::is_available(mx::Device::gpu) || made_gpu_stream) {
        return;
    }
    try {
        mx::new_stream(mx::Device::gpu);
    } catch (const std::exception &) {  // MLX adds the stream to its list before it throws
    }
    for (const auto &stream : mx::get_streams()) {
        if (stream.device == mx::Device::gpu) {
            made_gpu_stream = stream;
        }
    }
#endif
}

thread_local bool has_entered = false;

void enter() {
    has_entered = true;
    // Without a GPU, switches off MLX's cache of up to 32 MB of freed memory.
    [[maybe_unused]] static const bool is_without_cache =
        !mx::is_available(mx::Device::gpu) && (mx::set_cache_limit(0), true);
    const bool is_gpu = gpu_is_default();
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

void set_gpu_is_default(bool is_default) {
    if (is_default) {
        make_gpu_stream();
        is_gpu_default = true;
    }
    has_gpu_rule = is_default;
}

bool gpu_is_default() { return has_gpu_rule && is_gpu_default; }

void set_default_device(mx::Device device) {
    if (has_gpu_rule) {
        is_gpu_default = device == mx::Device::gpu;
        enter();
    } else {
        mx::set_default_device(device);
    }
}

void refuse_gpu_work(const std::vector<mx::array> &outputs) {
    if (!has_gpu_rule) {
        return;
    }
    std::unordered_set<std::uintptr_t> seen;
    auto pending = outputs;
    while (!pending.empty()) {
        auto a = pending.back();
        pending.pop_back();
        if (!seen.insert(a.id()).second || a.is_available() || !a.has_primitive()) {
            continue;
        }
        auto &primitive = a.primitive();
        // The stream that replaces the GPU's counts as the GPU.
        if (!is_load(primitive) && (instead_of_gpu == primitive.stream() || primitive.device() == mx::Device::gpu)) {
            throw std::runtime_error(std::string(primitive.name()) + " runs on the GPU, the default device");
        }
        pending.insert(pending.end(), a.inputs().begin(), a.inputs().end());
    }
}

bool is_load(const mx::Primitive &primitive) { return std::strcmp(primitive.name(), "Load") == 0; }

}  // namespace host
