// Records the work that MLX would do on a phone's GPU.
//
// The evaluated graphs are MLX's own. While a ledger records, an evaluation visits the graph's primitives in MLX's order. For each primitive, a rule
// reproduces the effects of its `eval_gpu` on Metal: the allocated buffers, the overwritten input and the encoded kernels. Outputs have the layout
// that they would have on Metal. They hold zeros, unless the values are also computed.
//
// Comments cite files and lines of MLX 0.32.2 (commit 846d176).

#include "Recorder.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <stack>
#include <unordered_set>
#include <utility>

#include "CLedger.h"
#include "LedgerHooks.h"
#include "FusedPrimitives.h"
#include "mlx/backend/common/buffer_cache.h"

namespace mx = mlx::core;

namespace ledger {

namespace {

std::recursive_mutex mutex;
std::shared_ptr<Recorder> current;

/// Memory that an array uses but that MLX's allocator did not allocate.
struct Adopted {
    size_t bytes;
    bool is_wired = false;
};

std::unordered_map<const void *, Adopted> adopted_buffers;
size_t adopted_bytes = 0;
size_t memory_limit = SIZE_MAX;
size_t cache_limit = INT64_MAX;  // a Swift Int

constexpr size_t page_size = 16384;

struct Counted {
    std::shared_ptr<Recorder> recorder;
    Block *block;
    /// The bytes of an array that MLX allocated; 0 if the ledger created the buffer.
    size_t tracked;
};

thread_local Recorder *taking = nullptr;
// The counted buffers need their own mutex. MLX's threads free buffers while a thread that holds `mutex` waits for them.
std::mutex counted_mutex;
std::unordered_map<const void *, Counted> counted_buffers;
std::atomic<size_t> counted_count = 0;

void count_buffer(const void *place, Counted buffer) {
    std::lock_guard lock(counted_mutex);
    counted_buffers.emplace(place, std::move(buffer));
    counted_count++;
}

std::optional<Counted> forget_buffer(const void *place) {
    if (counted_count == 0) {
        return std::nullopt;
    }
    std::lock_guard lock(counted_mutex);
    const auto it = counted_buffers.find(place);
    if (it == counted_buffers.end()) {
        return std::nullopt;
    }
    auto buffer = std::move(it->second);
    counted_buffers.erase(it);
    counted_count--;
    return buffer;
}

}  // namespace

// MARK: Memory

struct Block {
    size_t length;
};

/// With `metal`, reproduces the buffer sizes, the cache and the limits of MLX's metal/allocator.cpp. Otherwise sizes are exact, and there is no
/// cache.
class Recorder::Allocator {
   public:
    explicit Allocator(bool metal) : metal_(metal) {}

    Block *take(size_t size, size_t others, HostLedgerCounts &counts) {
        if (metal_ && size > page_size) {  // allocator.cpp:124
            size = page_size * ((size + page_size - 1) / page_size);
        }
        Block *block = metal_ ? cache_.reuse_from_cache(size) : nullptr;
        if (!block) {
            const size_t required = active_ + others + cache_.cache_size() + size;  // allocator.cpp:132
            if (required >= memory_limit && cache_.cache_size() > 0) {
                cache_.release_cached_buffers(required - memory_limit);
            }
            block = new Block{size};
            counts.new_buffers++;
            counts.new_buffer_bytes += static_cast<double>(size);
        }
        active_ += block->length;
        if (cache_.cache_size() > cache_limit) {  // allocator.cpp:170
            cache_.release_cached_buffers(cache_.cache_size() - cache_limit);
        }
        return block;
    }

    void give(Block *block) {
        active_ -= block->length;
        if (metal_ && cache_.cache_size() < cache_limit) {  // allocator.cpp:190
            cache_.recycle_to_cache(block);
        } else {
            delete block;
        }
    }

    void clear_cache() { cache_.clear(); }

    size_t active() const { return active_; }
    size_t cached() const { return cache_.cache_size(); }

   private:
    bool metal_;
    size_t active_ = 0;
    mx::BufferCache<Block> cache_{
        page_size, [](Block *b) { return b->length; }, [](Block *b) { delete b; }};
};

Recorder::Recorder(HostLedgerRules rules) : rules(rules), allocator_(new Allocator(rules.metal)) {
    counts = {};
    mark();
}

Recorder::~Recorder() = default;

/// Returns the bytes of arrays that MLX itself allocated on this machine and that the ledger does not track, for example from before the recording.
size_t Recorder::foreign() const {
    const size_t active = foreign_override_.value_or(mx::get_active_memory());
    return active > tracked_ ? active - tracked_ : 0;
}

void Recorder::mark() {
    const size_t active = allocator_->active() + foreign();
    counts.peak_active_bytes = std::max(counts.peak_active_bytes, active);
    counts.peak_bytes = std::max(counts.peak_bytes, active + allocator_->cached());
    counts.peak_arrays = std::max(counts.peak_arrays, alive_);
    peak_ = std::max(peak_, active + adopted_bytes);
}

/// Returns a block of memory: a word with `length`, which `buffer_size` reads, and then `length` zero bytes.
static void *map_zeros(size_t length) {
    const size_t bytes = length + sizeof(size_t);
    void *place = bytes <= 4096 ? std::calloc(1, bytes)
                                : mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!place || place == MAP_FAILED) {
        throw std::bad_alloc();
    }
    *static_cast<size_t *>(place) = length;
    return place;
}

static void unmap_zeros(void *place, size_t length) {
    const size_t bytes = length + sizeof(size_t);
    if (bytes <= 4096) {
        std::free(place);
    } else {
        munmap(place, bytes);
    }
}

Allocation Recorder::take(size_t size) {
    taking = this;
    return mx::allocator::malloc(size);
}

mx::allocator::Buffer Recorder::buffer(size_t size) {
    if (size == 0) {  // allocator.cpp:109
        return mx::allocator::Buffer(nullptr);
    }
    Block *block = allocator_->take(size, foreign() + adopted_bytes, counts);
    alive_++;
    mark();
    void *place = map_zeros(block->length);
    count_buffer(place, {shared_from_this(), block, 0});
    return mx::allocator::Buffer(place);
}

void Recorder::track(mx::array &a) {
    if (!rules.metal || a.nbytes() == 0) {
        return;
    }
    const size_t bytes = a.buffer_size();
    Block *block = allocator_->take(bytes, foreign() + adopted_bytes, counts);
    tracked_ += bytes;
    alive_++;
    mark();
    count_buffer(a.buffer().ptr(), {shared_from_this(), block, bytes});
}

void Recorder::give(Block *block, size_t tracked) {
    tracked_ -= tracked;
    alive_--;
    allocator_->give(block);
}

}  // namespace ledger

#ifdef __linux__
namespace {

/// Replaces MLX's allocator. It also provides the ledger's buffers, because MLX 0.32.4 donates only buffers that its allocator made.
class LedgerAllocator : public mx::allocator::Allocator {
   public:
    mx::allocator::Buffer malloc(size_t size) override {
        auto *recorder = std::exchange(ledger::taking, nullptr);
        return recorder ? recorder->buffer(size) : mlx_.malloc(size);
    }

    void free(mx::allocator::Buffer buffer) override {
        const auto counted = ledger::forget_buffer(buffer.ptr());
        if (!counted) {
            return mlx_.free(buffer);
        }
        std::lock_guard lock(ledger::mutex);
        if (counted->tracked > 0) {
            mlx_.free(buffer);
        } else {
            ledger::unmap_zeros(buffer.ptr(), mlx_.size(buffer));
        }
        counted->recorder->give(counted->block, counted->tracked);
    }

    size_t size(mx::allocator::Buffer buffer) const override { return mlx_.size(buffer); }
    mx::allocator::Buffer make_buffer(void *data, size_t size) override { return mlx_.make_buffer(data, size); }
    void release(mx::allocator::Buffer buffer) override { mlx_.release(buffer); }

   private:
    using Function = mx::allocator::Allocator &();
    mx::allocator::Allocator &mlx_ =
        reinterpret_cast<Function *>(dlsym(RTLD_NEXT, "_ZN3mlx4core9allocator9allocatorEv"))();
};

}  // namespace

/// Replaces MLX's function of this name. On Linux, libmlx resolves the name in the executable first.
mx::allocator::Allocator &mx::allocator::allocator() {
    static auto *allocator = new LedgerAllocator;  // it frees arrays that live until the end
    return *allocator;
}
#endif

namespace ledger {

// MARK: Command buffers

void Recorder::kernel(
    const char *kind, const References &inputs,
    const References &outputs, double flop, double gathered) {
    if (is_on_cpu_) {
        return;
    }
    HostLedgerKind &entry = kinds[kind];
    const auto bytes = [](const mx::array &a) {
        return static_cast<double>(std::min(a.size(), a.data_size()) * a.itemsize());
    };
    double read = gathered;
    for (const mx::array &a : inputs) {
        read += gathered > 0 ? 0 : bytes(a);
        touch(a);
    }
    double written = 0;
    for (const mx::array &a : outputs) {
        written += bytes(a);
        touch(a);
    }
    entry.kernels++;
    entry.flop += flop;
    entry.read_bytes += read;
    entry.written_bytes += written;
    counts.kernels++;
    counts.flop += flop;
    counts.read_bytes += read;
    counts.written_bytes += written;
    encoding_.operations++;
    encoding_.flop += flop;
    encoding_.bytes += read + written;
    name_kernel(kind, inputs, outputs);
}

/// Names a kernel by its operation, dtypes and layouts. MLX's own names also distinguish block sizes and alignments, so MLX may compile more kernels
/// than these names show.
void Recorder::name_kernel(const char *kind, const References &inputs, const References &outputs) {
    std::string name = encoded_ + ' ' + kind;
    const auto add = [&](const mx::array &a) {
        name += ' ' + std::to_string(static_cast<int>(a.dtype().val()));
        if (a.data_size() == 1) {
            name += 's';
        } else if (!a.flags().contiguous) {
            name += 'g' + std::to_string(a.ndim());
        }
    };
    for (const mx::array &a : inputs) {
        add(a);
    }
    name += " >";
    for (const mx::array &a : outputs) {
        add(a);
    }
    if (kernel_names_.insert(std::move(name)).second) {
        counts.first_kernels++;
        counts.most_first_kernels = std::max(counts.most_first_kernels, ++first_since_boundary_);
    }
}

/// Counts the elements of each buffer that the command buffer uses, as in MLX's metal/device.cpp:349.
void Recorder::touch(const mx::array &a) {
    if (encoding_.used.insert(a.buffer().ptr()).second) {
        encoding_.elements += a.data_size();
    }
    // Metal keeps a whole buffer in memory even if a kernel uses only a part.
    auto adopted = adopted_buffers.find(a.buffer().ptr());
    if (adopted != adopted_buffers.end() && !adopted->second.is_wired) {
        adopted->second.is_wired = true;
        counts.wired_bytes += static_cast<double>(adopted->second.bytes);
    }
}

void Recorder::temporary(mx::array a) { encoding_.temporaries.push_back(std::move(a)); }

void Recorder::commit(bool counted) {
    run_handlers(std::max(rules.late_handlers, 1) - 1);
    encoding_.counted = counted;
    encoding_.serial = ++committed_;
    running_.push_back(std::move(encoding_));
    encoding_ = {};
    counts.command_buffers++;
    counts.most_in_flight = std::max(counts.most_in_flight, running_.size());
    active_tasks_ += counted;
    if (rules.run_ahead == 0) {
        finish(committed_);
    }
}

/// Runs the completion handlers of the oldest command buffer. The handlers end the buffer's task and free its arrays (metal/eval.cpp:64).
void Recorder::run_oldest_handlers() {
    CommandBuffer done = std::move(running_.front());
    running_.pop_front();
    finished_ = std::max(finished_, done.serial);
    active_tasks_ -= done.counted;
}

/// Runs the completion handlers of finished command buffers in order, except the handlers of the last `late` finished buffers that have kernels.
void Recorder::run_handlers(size_t late) {
    size_t behind = std::count_if(running_.begin(), running_.end(), [&](const CommandBuffer &buffer) {
        return buffer.serial <= finished_ && buffer.operations > 0;
    });
    while (!running_.empty() && running_.front().serial <= finished_) {
        const size_t own = running_.front().operations > 0;
        if (behind < late + own) {
            return;
        }
        behind -= own;
        run_oldest_handlers();
    }
}

/// Marks the command buffers up to `serial` as finished. Handlers run on another thread, so those of the last `late_handlers` buffers have not run
/// yet.
void Recorder::finish(size_t serial) {
    finished_ = std::max(finished_, serial);
    run_handlers(rules.late_handlers);
}

/// Waits for the stream (metal/device.cpp:564). All handlers have run when it returns.
void Recorder::synchronize() {
    commit(false);
    counts.waits++;
    finished_ = committed_;
    run_handlers(0);
}

/// Waits until one of the counted tasks is complete (scheduler.h:56).
void Recorder::complete_one() {
    while (!running_.empty()) {
        const bool counted = running_.front().counted;
        run_oldest_handlers();
        if (counted) {
            return;
        }
    }
}

// MARK: Evaluation

namespace {

/// The primitive that ends an evaluation, as in MLX's transforms.cpp:51.
class Synchronizer : public mx::Primitive {
   public:
    using Primitive::Primitive;
    void eval_cpu(const std::vector<mx::array> &, std::vector<mx::array> &) override {}
    void eval_gpu(const std::vector<mx::array> &, std::vector<mx::array> &) override {}
    const char *name() const override { return "Synchronize"; }
};

/// Follows MLX's utils.h:177.
int max_tape_width() {
    const char *value = std::getenv("MLX_BFS_MAX_WIDTH");
    return value ? std::atoi(value) : 20;
}

bool is_unscheduled(const mx::array &a) { return a.status() == mx::array::Status::unscheduled; }

/// Returns the arrays in the order of evaluation of MLX's `eval_impl` (transforms.cpp:110-225), the last array first.
std::deque<mx::array> make_tape(mx::array synchronizer, bool async) {
    std::unordered_map<std::uintptr_t, int> degree;
    std::stack<std::pair<std::reference_wrapper<mx::array>, int>> stack;
    stack.emplace(synchronizer, 0);
    while (!stack.empty()) {
        auto &[reference, index] = stack.top();
        mx::array &a = reference.get();
        if (index < static_cast<int>(a.inputs().size())) {
            mx::array &in = a.inputs()[index++];
            if (is_unscheduled(in)) {
                if (async && in.is_tracer()) {
                    throw std::invalid_argument("[async_eval] Not allowed inside a graph transformation.");
                }
                if (!in.has_primitive()) {
                    throw std::runtime_error("[eval] Attempting to eval an array without a primitive.");
                }
            }
            if (auto it = degree.find(in.id()); it == degree.end()) {
                stack.emplace(in, 0);
                degree.insert({in.id(), 1});
                for (auto &s : in.siblings()) {
                    degree.insert({s.id(), 1});
                }
            } else {
                it->second++;
                for (auto &s : in.siblings()) {
                    degree[s.id()]++;
                }
            }
            continue;
        }
        if (!is_unscheduled(a) && !a.is_tracer() && a.has_primitive()) {
            a.detach();
        }
        stack.pop();
    }

    std::deque<mx::array> tape{synchronizer};
    const int max_width = max_tape_width();
    stack = {};
    for (size_t i = 0; !degree.empty() && (i < tape.size() || !stack.empty());) {
        const bool from_stack = i >= tape.size();
        mx::array &a = from_stack ? stack.top().first.get() : tape[i];
        int j = 0;
        if (from_stack) {
            j = stack.top().second;
            stack.pop();
        } else {
            i++;
        }
        for (; j < static_cast<int>(a.inputs().size()); j++) {
            mx::array &in = a.inputs()[j];
            if (!is_unscheduled(in)) {
                continue;
            }
            if (static_cast<int>(tape.size() - i) >= max_width) {
                stack.emplace(a, j);
                break;
            }
            auto it = degree.find(in.id());
            it->second--;
            if (it->second != 0) {
                for (auto &s : in.siblings()) {
                    degree[s.id()]--;
                }
                continue;
            }
            degree.erase(it);
            for (auto &s : in.siblings()) {
                degree.erase(s.id());
            }
            tape.push_back(in);
        }
    }
    return tape;
}

void copy_elements(const char *&source, char *destination, const mx::array &out, int axis) {
    const auto item = static_cast<int64_t>(out.itemsize());
    if (axis == static_cast<int>(out.ndim())) {
        std::memcpy(destination, source, item);
        source += item;
        return;
    }
    for (int i = 0; i < out.shape(axis); i++) {
        copy_elements(source, destination + i * out.strides(axis) * item, out, axis + 1);
    }
}

}  // namespace

/// Evaluates the primitive's values in a separate graph, so that `arr` keeps its inputs.
std::vector<mx::array> Recorder::compute(mx::array &arr) {
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (const auto &out : arr.outputs()) {
        shapes.push_back(out.shape());
        dtypes.push_back(out.dtype());
    }
    auto values = mx::array::make_arrays(shapes, dtypes, arr.primitive_ptr(), arr.inputs());
    mx::eval(values);
    for (auto &value : values) {
        value = mx::contiguous(value, false, arr.primitive().stream());
    }
    mx::eval(values);
    return values;
}

void Recorder::encode(mx::array &arr) {
    auto outputs = arr.outputs();
    std::vector<mx::array> values;
    if (rules.compute) {
        foreign_override_ = mx::get_active_memory();
        values = compute(arr);
    }
    {
        // A tracer's inputs are held, so that the primitive cannot overwrite them (metal/eval.cpp:37).
        std::vector<mx::array> held;
        if (arr.is_tracer()) {
            held = arr.inputs();
        }
        const auto kernels = counts.kernels;
        encoded_ = arr.primitive().name();
        apply_rule(*this, arr, outputs);
        for (size_t i = 0; i < values.size(); i++) {
            const auto shares = [&](const mx::array &in) {
                return in.data_shared_ptr() == outputs[i].data_shared_ptr();
            };
            const bool is_view =
                counts.kernels == kernels && std::any_of(arr.inputs().begin(), arr.inputs().end(), shares);
            if (!is_view && outputs[i].size() > 0) {
                const char *source = values[i].data<char>();
                copy_elements(source, outputs[i].data<char>(), outputs[i], 0);
            }
        }
    }
    values.clear();
    foreign_override_.reset();
    if (trace) {
        trace(trace_context, arr.primitive().name(), arr.size());
    }
}

/// Follows MLX's metal/eval.cpp:47-69.
void Recorder::hold(mx::array &arr) {
    if (is_on_cpu_) {
        return;
    }
    for (auto &in : arr.inputs()) {
        if (in.data_shared_ptr() != arr.data_shared_ptr()) {
            encoding_.held.insert(in.data_shared_ptr());
        }
    }
    for (auto &s : arr.siblings()) {
        if (s.data_shared_ptr() != arr.data_shared_ptr()) {
            encoding_.held.insert(s.data_shared_ptr());
        }
    }
    // A command buffer is committed above the same two limits as in MLX's metal/device.cpp:511.
    if (encoding_.operations > static_cast<size_t>(rules.operations_per_buffer) ||
        (encoding_.elements >> 20) > static_cast<size_t>(rules.mega_elements_per_buffer)) {
        commit(true);
    }
}

/// Waits while too many tasks are active or memory is short, as in MLX's transforms.cpp:271-285. MLX sleeps while two or more tasks are active, but
/// polls during the last one.
void Recorder::back_pressure() {
    const auto above_limit = [&] { return allocator_->active() + foreign() + adopted_bytes > memory_limit; };
    if (active_tasks_ > rules.run_ahead || (above_limit() && active_tasks_ > 0)) {
        commit(false);
        if (active_tasks_ > 1) {
            complete_one();
        }
        while (above_limit() && active_tasks_ > 0) {
            if (active_tasks_ == 1) {
                counts.spins++;
                for (const auto &buffer : running_) {
                    if (buffer.serial > finished_) {
                        counts.spin_kernels += buffer.operations;
                        counts.spin_flop += buffer.flop;
                        counts.spin_bytes += buffer.bytes;
                    }
                    if (buffer.counted) {
                        break;
                    }
                }
            }
            complete_one();
        }
    }
}

void Recorder::evaluate(std::vector<mx::array> outputs, bool async) {
    if (std::none_of(outputs.begin(), outputs.end(), is_unscheduled)) {  // transforms.cpp:355, :369
        if (!async) {
            for (auto &a : outputs) {
                wait(a);
            }
        }
        return;
    }
    const auto is_on_cpu = [&](const mx::array &a) {
        return rules.gpu_only && a.primitive().device() == mx::Device::cpu;
    };
    // The evaluation ends on the stream of the first unscheduled output (transforms.cpp:84).
    const auto first = std::find_if(outputs.begin(), outputs.end(), is_unscheduled);
    const bool ends_on_cpu = first->has_primitive() && is_on_cpu(*first);
    bool uses_gpu = !ends_on_cpu;
    std::vector<std::weak_ptr<mx::array::Data>> scheduled;
    mx::Stream stream = mx::default_stream(mx::Device::cpu);
    {
        auto tape = make_tape(
            mx::array({}, mx::bool_, std::make_shared<Synchronizer>(stream), std::move(outputs)), async);
        while (!tape.empty()) {
            auto arr = std::move(tape.back());
            tape.pop_back();
            const bool last = tape.empty();
            is_on_cpu_ = last ? ends_on_cpu : is_on_cpu(arr);
            uses_gpu |= !is_on_cpu_;
            if (!last) {
                encode(arr);
            }
            hold(arr);
            back_pressure();
            const auto finish = [&](const mx::array &a) {
                a.set_status(mx::array::Status::available);
                if (async) {
                    scheduled.push_back(a.data_shared_ptr());
                }
            };
            finish(arr);
            for (auto &s : arr.siblings()) {
                finish(s);
            }
            if (!arr.is_tracer()) {
                arr.detach();
            }
        }
    }
    if (!uses_gpu) {
        return;
    }
    async ? counts.async_evals++ : counts.evals++;
    commit(false);  // transforms.cpp:343: finalize
    if (async) {
        for (const auto &data : scheduled) {
            if (auto alive = data.lock()) {
                pending_[alive.get()] = {data, committed_};
            }
        }
    } else {
        finish(committed_);
        pending_.clear();
    }
}

/// Evaluates an unscheduled array. For another array, waits for all command buffers of the array's `async_eval` (array.cpp:145).
void Recorder::wait(mx::array &a) {
    if (is_unscheduled(a)) {
        return evaluate({a}, false);
    }
    auto it = pending_.find(a.data_shared_ptr().get());
    if (it == pending_.end()) {
        return;
    }
    if (it->second.first.lock() == a.data_shared_ptr() && finished_ < it->second.second) {
        counts.waits++;
        finish(it->second.second);
    }
    pending_.erase(it);
}

void Recorder::restart() {
    for (auto &[buffer, adopted] : adopted_buffers) {
        adopted.is_wired = false;
    }
    const auto [first, most] = std::pair(counts.first_kernels, counts.most_first_kernels);
    counts = {};
    counts.first_kernels = first;
    counts.most_first_kernels = most;
    kinds.clear();
    mark();
}

void Recorder::boundary() { first_since_boundary_ = 0; }

void Recorder::close() {
    finished_ = committed_;
    run_handlers(0);
    encoding_ = {};
    allocator_->clear_cache();
}

host::LedgerHooks::Memory Recorder::memory() const {
    return {allocator_->active() + foreign() + adopted_bytes, allocator_->cached(), peak_, memory_limit};
}

// MARK: Hooks

void Recorder::clear_cache() { allocator_->clear_cache(); }

namespace {

class Hooks final : public host::LedgerHooks {
   public:
    bool is_recording() override {
        std::lock_guard lock(mutex);
        return current != nullptr;
    }

    void evaluate(std::vector<mx::array> outputs, bool async) override {
        on_recorder([&](Recorder &r) { r.evaluate(std::move(outputs), async); });
    }

    void wait(mx::array &a) override {
        on_recorder([&](Recorder &r) { r.wait(a); });
    }

    void synchronize(mx::Stream stream) override {
        on_recorder([&](Recorder &r) {
            if (stream.device == mx::Device::gpu || !r.rules.gpu_only) {
                r.synchronize();
            }
        });
    }

    Memory memory() override {
        std::lock_guard lock(mutex);
        return current->memory();
    }

    void reset_peak_memory() override {
        std::lock_guard lock(mutex);
        current->reset_peak();
    }

    mx::array rms_norm(const mx::array &x, const mx::array &weight, float eps, mx::Stream stream) override {
        return ledger::rms_norm(x, weight, eps, stream);
    }

    mx::array rope(
        const mx::array &x, int dimensions, bool traditional, std::optional<float> base, float scale, int offset,
        const std::optional<mx::array> &frequencies, mx::Stream stream) override {
        return ledger::rope(x, dimensions, traditional, base, scale, offset, frequencies, stream);
    }

    void created(mx::array &a) override {
        std::lock_guard lock(mutex);
        if (current) {
            current->track(a);
        }
    }

    void adopted(const void *buffer, size_t bytes) override {
        std::lock_guard lock(mutex);
        adopted_buffers[buffer] = {bytes};
        adopted_bytes += bytes;
        if (current) {
            current->counts.mappings++;
        }
    }

    void released(const void *buffer) override {
        std::lock_guard lock(mutex);
        adopted_bytes -= adopted_buffers.at(buffer).bytes;
        adopted_buffers.erase(buffer);
    }

    void set_memory_limit(size_t limit) override {
        std::lock_guard lock(mutex);
        memory_limit = limit;
    }

    size_t set_cache_limit(size_t limit) override {
        std::lock_guard lock(mutex);
        return std::exchange(cache_limit, limit);
    }

    void clear_cache() override {
        std::lock_guard lock(mutex);
        if (current) {
            current->clear_cache();
        }
    }

   private:
    template <class F>
    static void on_recorder(F &&f) {
        std::lock_guard lock(mutex);
        auto recorder = current;
        try {
            f(*recorder);
        } catch (const std::exception &e) {
            if (recorder->failure.empty()) {
                recorder->failure = e.what();
            }
            throw;
        }
    }
};

/// The hooks are never destroyed, because arrays that live until the process ends use them.
[[maybe_unused]] const auto *registered = host::ledger_hooks = new Hooks;

}  // namespace

}  // namespace ledger

// MARK: The C interface

char *host_ledger_begin(HostLedgerRules rules) {
    std::lock_guard lock(ledger::mutex);
    if (ledger::current) {
        return strdup("a ledger is being recorded already");
    }
#ifndef __linux__
    return strdup("a ledger is recorded on Linux only");
#endif
    try {
        host::make_gpu_stream();
        ledger::current = std::make_shared<ledger::Recorder>(rules);
    } catch (const std::exception &e) {
        return strdup(e.what());
    }
    return nullptr;
}

char *host_ledger_end(
    HostLedgerCounts *counts, void *context, void (*kind)(void *context, const char *name, HostLedgerKind kind)) {
    std::lock_guard lock(ledger::mutex);
    auto recorder = std::move(ledger::current);
    ledger::current = nullptr;
    if (!recorder) {
        return strdup("no ledger is being recorded");
    }
    recorder->close();
    *counts = recorder->counts;
    for (const auto &[name, entry] : recorder->kinds) {
        kind(context, name.c_str(), entry);
    }
    return recorder->failure.empty() ? nullptr : strdup(recorder->failure.c_str());
}

void host_ledger_restart(void) {
    std::lock_guard lock(ledger::mutex);
    if (ledger::current) {
        ledger::current->restart();
    }
}

void host_ledger_boundary(void) {
    std::lock_guard lock(ledger::mutex);
    if (ledger::current) {
        ledger::current->boundary();
    }
}

void host_ledger_trace(void *context, void (*trace)(void *context, const char *primitive, size_t size)) {
    std::lock_guard lock(ledger::mutex);
    if (ledger::current) {
        ledger::current->trace = trace;
        ledger::current->trace_context = context;
    }
}
