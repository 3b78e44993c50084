// How MLX 0.31.1 and mlx-swift behave on Metal where a CPU is kinder. Line numbers are those of MLX v0.31.1.

#include "Metal.h"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "CHostMLX.h"
#include "Ledger.h"
#include "Streams.h"
#include "TF32.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace metal {

namespace {

std::mutex mutex;
std::atomic<bool> is_on = false;
HostMetalRules rules;
size_t evaluations = 0;
/// The number of times that each fault occurred.
std::map<std::string, size_t> faults;
std::vector<std::vector<char>> zeros;
/// The CPU's default streams of Swift and, in the GPU's place, of C++.
mx::Stream cpu_stream(0, mx::Device::cpu), gpu_stream(0, mx::Device::cpu);

void note(const std::string &fault) {
    const std::lock_guard lock(mutex);
    faults[fault] += 1;
}

/// Throws where something that `outputs` need would run on the GPU.
void check_streams(const std::vector<mx::array> &outputs) {
    std::unordered_set<std::uintptr_t> seen;
    auto pending = outputs;
    while (!pending.empty()) {
        auto a = pending.back();
        pending.pop_back();
        if (!seen.insert(a.id()).second || a.is_available() || !a.has_primitive()) {
            continue;
        }
        auto &primitive = a.primitive();
        // Files are read by the CPU's default stream (load.cpp), which here is the one in the GPU's place.
        const bool is_load = std::strcmp(primitive.name(), "Load") == 0;
        if (!is_load && (primitive.stream() == gpu_stream || primitive.device() == mx::Device::gpu)) {
            throw std::runtime_error(std::string(primitive.name()) + " runs on the GPU, the default device");
        }
        pending.insert(pending.end(), a.inputs().begin(), a.inputs().end());
    }
}

}  // namespace

mx::Stream default_cpu_stream() { return is_on && rules.gpu_by_default ? cpu_stream : mx::default_stream(mx::Device::cpu); }

mx::Device default_device() {
    if (is_on && rules.gpu_by_default) {
        return mx::default_stream(mx::Device::cpu) == gpu_stream ? mx::Device::gpu : mx::Device::cpu;
    }
    return mx::default_device();
}

void set_default_device(mx::Device device) {
    if (is_on && rules.gpu_by_default) {
        host::set_default_cpu_stream(device == mx::Device::gpu ? gpu_stream : cpu_stream);
    } else {
        mx::set_default_device(device);
    }
}

void begin_evaluation(const std::vector<mx::array> &outputs) {
    if (!is_on) {
        return;
    }
    bool is_needed = false;
    for (const auto &a : outputs) {
        // Not one that is being computed: whether that is done already depends on the machine.
        is_needed = is_needed || a.status() == mx::array::Status::unscheduled;
    }
    if (!is_needed) {
        return;
    }
    const std::lock_guard lock(mutex);
    evaluations += 1;
    if (rules.failing_evaluation > 0 && evaluations >= rules.failing_evaluation) {
        throw std::runtime_error("[metal::malloc] Unable to allocate 16777216 bytes.");
    }
    if (rules.gpu_by_default) {
        check_streams(outputs);
    }
}

const void *data_of_failed(const mx::array &a) {
    if (!is_on) {
        throw std::runtime_error("the data of an array is read that was never computed");
    }
    note("The data of an array was read that was never computed.");
    const std::lock_guard lock(mutex);
    return zeros.emplace_back(a.nbytes()).data();
}

bool has_rope_of_one_token() { return is_on && rules.rope_of_one_token; }

mx::array rope(const mx::array &x, const mx::array &rotated, mx::Stream s) {
    if (x.shape(-2) != 1 || x.shape(0) == 1) {
        return rotated;
    }
    // Other kernels serve what is not contiguous (rope.cpp:94), which only an evaluated array tells.
    if (!x.is_tracer()) {
        auto evaluated = x;
        evaluated.eval();
        if (!evaluated.flags().row_contiguous) {
            return rotated;
        }
    }
    auto start = mx::Shape(x.ndim(), 0), end = x.shape();
    end[0] = 1;
    const auto first = mx::slice(rotated, start, end, s);
    start[0] = 1;
    return mx::concatenate({first, mx::slice(x, start, x.shape(), s)}, 0, s);
}

}  // namespace metal

// MARK: The C interface

bool host_metal_begin(HostMetalRules rules) {
    const std::lock_guard lock(metal::mutex);
    if (metal::is_on) {
        return false;
    }
    metal::rules = rules;
    metal::evaluations = 0;
    metal::faults.clear();
    if (rules.gpu_by_default) {
        host::share_default_streams();
        ledger::make_gpu_stream();
        metal::cpu_stream = mx::default_stream(mx::Device::cpu);
        static const auto instead_of_gpu = host::new_shared_stream(mx::Device::cpu);
        metal::gpu_stream = instead_of_gpu;
        host::set_default_cpu_stream(metal::gpu_stream);
    }
    host::rounds_to_tf32 = rules.tf32;
    metal::is_on = true;
    return true;
}

size_t host_metal_end(void *context, void (*fault)(void *context, const char *text, size_t count)) {
    const std::lock_guard lock(metal::mutex);
    metal::is_on = false;
    host::rounds_to_tf32 = false;
    if (metal::rules.gpu_by_default) {
        host::set_default_cpu_stream(metal::cpu_stream);
    }
    for (const auto &[text, count] : metal::faults) {
        fault(context, text.c_str(), count);
    }
    metal::zeros.clear();
    return metal::evaluations;
}
