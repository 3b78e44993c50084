// Simulates failures of command buffers as in MLX 0.32.2 on Metal (line numbers of commit 846d176).
//
// A command buffer's completion handler stores its error (metal/device.cpp:521). The error is thrown and cleared when the stream is synchronized
// (device.cpp:571) or the next kernels are encoded (device.cpp:578). `Event::wait` may return before the handler runs. So `eval` can return with
// arrays that count as evaluated.
//
// An allocation fails if Metal returns no buffer (metal/allocator.cpp:153). The call that needs the memory throws an error: the creation of an array,
// or an evaluation, which may have computed other arrays before.

#include "FailingCommandBuffers.h"

#ifdef __linux__
#include <dlfcn.h>
#endif

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_set>

#include "CHostMLX.h"
#include "Streams.h"
#include "TF32.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace failing {

namespace {

std::mutex mutex;
std::atomic<bool> is_on = false;
HostMetalRules rules;
std::string message;
/// The number of command buffers: evaluations, and waits for a stream, which commit an empty one. If allocations fail, their number.
size_t buffers = 0;
/// The number of failed buffers or allocations. `has_error` is true while an error is pending. A wait throws the error, as does the evaluation that follows
/// `evaluations_until_error` other ones.
size_t failed_buffers = 0;
bool has_error = false;
size_t evaluations_until_error = 0;
std::map<std::string, size_t> faults;
std::vector<std::vector<char>> zeros;

void note(const std::string &fault) {
    const std::lock_guard lock(mutex);
    faults[fault] += 1;
}

/// The arrays that a command buffer computes, and its inputs. Arrays that are loaded from files count as inputs.
struct CommandBuffer {
    std::vector<mx::array> made, inputs;

    explicit CommandBuffer(std::vector<mx::array> pending) {
        std::unordered_set<std::uintptr_t> seen;
        while (!pending.empty()) {
            auto a = pending.back();
            pending.pop_back();
            if (!seen.insert(a.id()).second) {
                continue;
            }
            if (a.status() != mx::array::Status::unscheduled || (a.has_primitive() && host::is_load(a.primitive()))) {
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

    /// Fills the computed arrays with NaN or zeros. Integers become zeros, which are valid indices. Views of the inputs are left unchanged.
    void fill_with_garbage(bool zeros) const {
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

bool fails() {
    if (rules.first_failing == 0 || buffers < rules.first_failing || failed_buffers == rules.failing_count ||
        (buffers - rules.first_failing) % rules.period != 0) {
        return false;
    }
    failed_buffers += 1;
    return true;
}

/// Counts a command buffer, and throws a pending error that is due.
///
/// \returns whether the buffer fails, so that its error is pending.
bool next_buffer_fails(const std::vector<mx::array> &outputs) {
    const std::lock_guard lock(mutex);
    if (rules.of_allocations) {
        host::refuse_gpu_work(outputs);
        return false;
    }
    buffers += 1;
    if (has_error && evaluations_until_error == 0) {
        throw_error();
    }
    host::refuse_gpu_work(outputs);
    if (has_error) {
        evaluations_until_error -= 1;
        return false;
    }
    has_error = fails();
    evaluations_until_error = rules.delay;
    return has_error;
}

}  // namespace

void evaluate(const std::vector<mx::array> &outputs, const std::function<void()> &evaluate) {
    bool is_needed = false;
    for (const auto &a : outputs) {
        // Evaluations that only wait for arrays do not count, because their number depends on timing.
        is_needed = is_needed || a.status() == mx::array::Status::unscheduled;
    }
    if (!is_on || !is_needed || !next_buffer_fails(outputs)) {
        return evaluate();
    }
    const CommandBuffer buffer(outputs);
    mx::eval(outputs);
    buffer.fill_with_garbage(rules.leaves_zeros);
}

void wait() {
    const std::lock_guard lock(mutex);
    if (!is_on || rules.of_allocations) {
        return;
    }
    buffers += 1;
    if (has_error || fails()) {
        throw_error();
    }
}

void allocate(size_t bytes) {
    // MLX takes arrays of less than 256 bytes from a heap that it has already (metal/allocator.h:60). Here only single numbers count as that small,
    // because the tests' models are small.
    if (!is_on || bytes <= 8 || !host::has_entered) {
        return;
    }
    {
        const std::lock_guard lock(mutex);
        if (!rules.of_allocations) {
            return;
        }
        buffers += 1;
        if (!fails()) {
            return;
        }
    }
    // The operation that needs the memory may already compute some of its arrays, which are freed when it throws. A command buffer keeps them until it
    // completes, but the CPU's thread does not (cpu/eval.cpp:58).
    mx::synchronize(mx::default_stream(mx::Device::cpu));
    throw std::runtime_error("[malloc] Unable to allocate " + std::to_string(bytes) + " bytes.");
}

const void *data_never_computed(const mx::array &a) {
    if (!is_on) {
        throw std::runtime_error("the data of an array is read that was never computed");
    }
    note("The data of an array was read that was never computed.");
    const std::lock_guard lock(mutex);
    return zeros.emplace_back(a.nbytes()).data();
}

}  // namespace failing

// MARK: MLX's allocator

#ifdef __linux__
namespace {

class FailingAllocator : public mx::allocator::Allocator {
   public:
    mx::allocator::Buffer malloc(size_t size) override {
        failing::allocate(size);
        return mlx_.malloc(size);
    }
    void free(mx::allocator::Buffer buffer) override { mlx_.free(buffer); }
    size_t size(mx::allocator::Buffer buffer) const override { return mlx_.size(buffer); }
    mx::allocator::Buffer make_buffer(void *data, size_t size) override { return mlx_.make_buffer(data, size); }
    void release(mx::allocator::Buffer buffer) override { mlx_.release(buffer); }

   private:
    using Function = mx::allocator::Allocator &();
    mx::allocator::Allocator &mlx_ =
        reinterpret_cast<Function *>(dlsym(RTLD_NEXT, "_ZN3mlx4core9allocator9allocatorEv"))();
};

}  // namespace

/// Replaces MLX's function of this name. On Linux, libmlx resolves the name in the executable first. A program with the ledger has the ledger's
/// function instead.
__attribute__((weak)) mx::allocator::Allocator &mx::allocator::allocator() {
    static auto *allocator = new FailingAllocator;  // it frees arrays that live until the end
    return *allocator;
}
#endif

// MARK: The C interface

bool host_metal_begin(HostMetalRules rules) {
    const std::lock_guard lock(failing::mutex);
    if (failing::is_on) {
        return false;
    }
    failing::rules = rules;
    failing::message = rules.message ? rules.message : "";
    failing::rules.message = failing::message.c_str();
    failing::buffers = 0;
    failing::failed_buffers = 0;
    failing::has_error = false;
    failing::faults.clear();
    host::set_gpu_is_default(rules.gpu_by_default);
    host::rounds_to_tf32 = rules.tf32;
    failing::is_on = true;
    return true;
}

size_t host_metal_end(void *context, void (*fault)(void *context, const char *text, size_t count)) {
    const std::lock_guard lock(failing::mutex);
    failing::is_on = false;
    host::set_gpu_is_default(false);
    host::rounds_to_tf32 = false;
    for (const auto &[text, count] : failing::faults) {
        fault(context, text.c_str(), count);
    }
    failing::zeros.clear();
    return failing::buffers;
}
