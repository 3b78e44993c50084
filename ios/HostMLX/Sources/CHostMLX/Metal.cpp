// How MLX 0.32.2 and mlx-swift behave on Metal where a CPU is kinder. Line numbers are those of MLX v0.32.2.

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
/// Whether nobody has made the CPU C++'s default device.
std::atomic<bool> is_gpu_default = true;

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
        // A function's constants are read by the CPU's default stream (export.cpp:1155), which here stands for the GPU.
        const bool is_load = std::strcmp(primitive.name(), "Load") == 0;
        if (!is_load && (host::stands_for_gpu(primitive.stream()) || primitive.device() == mx::Device::gpu)) {
            throw std::runtime_error(std::string(primitive.name()) + " runs on the GPU, the default device");
        }
        pending.insert(pending.end(), a.inputs().begin(), a.inputs().end());
    }
}

}  // namespace

bool default_is_gpu() { return is_on && rules.gpu_by_default && is_gpu_default; }

void set_default_device(mx::Device device) {
    if (is_on && rules.gpu_by_default) {
        is_gpu_default = device == mx::Device::gpu;
        host::enter();
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
        ledger::make_gpu_stream();
        metal::is_gpu_default = true;
    }
    host::rounds_to_tf32 = rules.tf32;
    metal::is_on = true;
    return true;
}

size_t host_metal_end(void *context, void (*fault)(void *context, const char *text, size_t count)) {
    const std::lock_guard lock(metal::mutex);
    metal::is_on = false;
    host::rounds_to_tf32 = false;
    for (const auto &[text, count] : metal::faults) {
        fault(context, text.c_str(), count);
    }
    metal::zeros.clear();
    return metal::evaluations;
}
