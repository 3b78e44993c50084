// How MLX 0.32.2 and mlx-swift behave on Metal where a CPU is kinder. Line numbers are those of MLX 0.32.2
// (commit 846d176 of 22 August 2026).

#include "Metal.h"

#include <atomic>
#include <cstring>
#include <functional>
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
std::string message;
size_t evaluations = 0;
/// The number of buffers that failed, whether the error of the last is still to be thrown, and after how many evaluations.
size_t failures = 0;
bool has_error = false;
size_t delay = 0;
/// The number of times that each fault occurred.
std::map<std::string, size_t> faults;
std::vector<std::vector<char>> zeros;
/// Whether nobody has made the CPU C++'s default device.
std::atomic<bool> is_gpu_default = true;

void note(const std::string &fault) {
    const std::lock_guard lock(mutex);
    faults[fault] += 1;
}

/// Whether it reads a file or a constant of an imported function, which the CPU's default stream does (load.cpp, export.cpp).
bool is_load(const mx::Primitive &primitive) { return std::strcmp(primitive.name(), "Load") == 0; }

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
        // The stream in the GPU's place counts as the GPU.
        if (!is_load(primitive) && (host::stands_for_gpu(primitive.stream()) || primitive.device() == mx::Device::gpu)) {
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

namespace {

/// What an evaluation computes, and the buffers that are there before it.
struct Work {
    std::vector<mx::array> made, inputs;

    explicit Work(std::vector<mx::array> pending) {
        std::unordered_set<std::uintptr_t> seen;
        while (!pending.empty()) {
            auto a = pending.back();
            pending.pop_back();
            if (!seen.insert(a.id()).second) {
                continue;
            }
            if (a.status() != mx::array::Status::unscheduled || (a.has_primitive() && is_load(a.primitive()))) {
                a.eval();
                inputs.push_back(a);
                continue;
            }
            made.push_back(a);
            for (const auto &next : {a.inputs(), a.siblings()}) {
                pending.insert(pending.end(), next.begin(), next.end());
            }
        }
    }

    /// Fills the arrays that were made with NaN or zeros; integers become zeros, which are indices that exist. An array that is a view
    /// of one that was there before stays. As this holds the inputs, no array that was made has taken their place.
    void spoil(bool zeros) const {
        std::unordered_set<const void *> good;
        for (const auto &a : inputs) {
            good.insert(a.buffer().ptr());
        }
        for (auto a : made) {
            if (a.data_shared_ptr() && !good.count(a.buffer().ptr())) {
                const bool is_nan = !zeros && mx::issubdtype(a.dtype(), mx::inexact);
                std::memset(a.buffer().raw_ptr(), is_nan ? 0xff : 0, a.buffer_size());
            }
        }
    }
};

void throw_error() {
    has_error = false;
    throw std::runtime_error(rules.message);
}

/// Counts an evaluation, and throws the error that is due.
/// \returns whether its command buffer fails.
bool begin(const std::vector<mx::array> &outputs) {
    const std::lock_guard lock(mutex);
    evaluations += 1;
    if (has_error && delay == 0) {
        throw_error();
    }
    if (rules.gpu_by_default) {
        check_streams(outputs);
    }
    if (has_error) {
        delay -= 1;
        return false;
    }
    if (rules.failing_buffer == 0 || evaluations < rules.failing_buffer || failures == rules.failures) {
        return false;
    }
    failures += 1;
    if (rules.fails_at_once) {
        throw_error();
    }
    has_error = true;
    delay = rules.delay;
    return true;
}

}  // namespace

// In MLX 0.32.2 a command buffer's completion handler stores its error (metal/device.cpp:521). It is thrown, and cleared, where a stream is
// waited for (device.cpp:571) or the next kernels are encoded (device.cpp:578). `Event::wait` asks for it too, but the GPU has signalled
// the event before the handler runs: `eval` can return, with arrays that count as evaluated.
void evaluate(const std::vector<mx::array> &outputs, const std::function<void()> &evaluate) {
    bool is_needed = false;
    for (const auto &a : outputs) {
        // Not one that is being computed: whether that is done already depends on the machine.
        is_needed = is_needed || a.status() == mx::array::Status::unscheduled;
    }
    if (!is_on || !is_needed || !begin(outputs)) {
        return evaluate();
    }
    const Work work(outputs);
    mx::eval(outputs);
    work.spoil(rules.leaves_zeros);
}

void synchronized() {
    const std::lock_guard lock(mutex);
    if (is_on && has_error) {
        throw_error();
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
    metal::message = rules.message ? rules.message : "";
    metal::rules.message = metal::message.c_str();
    metal::evaluations = 0;
    metal::failures = 0;
    metal::has_error = false;
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
