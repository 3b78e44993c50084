#ifndef RECORDER_H
#define RECORDER_H

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>

#include "CLedger.h"
#include "LedgerHooks.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace ledger {

struct Block;

using Allocation = decltype(mlx::core::allocator::malloc(0));
using References = std::vector<std::reference_wrapper<const mlx::core::array>>;

class Recorder : public std::enable_shared_from_this<Recorder> {
   public:
    explicit Recorder(HostLedgerRules rules);
    ~Recorder();

    const HostLedgerRules rules;
    HostLedgerCounts counts;
    std::map<std::string, HostLedgerKind> kinds;
    std::string failure;
    void (*trace)(void *context, const char *primitive, size_t size) = nullptr;
    void *trace_context = nullptr;

    // MARK: For the rules

    Allocation take(size_t size);
    /// Records a kernel. `gathered` is the number of bytes read, if the kernel does not read its whole inputs.
    void kernel(
        const char *kind, const References &inputs,
        const References &outputs, double flop = 0,
        double gathered = 0);
    /// Keeps an array until the command buffer is complete (device.cpp:471).
    void temporary(mlx::core::array a);
    void fused(std::string name) { encoded_ = std::move(name); }

    // MARK: For the hooks

    void evaluate(std::vector<mlx::core::array> outputs, bool async);
    void wait(mlx::core::array &a);
    void synchronize();
    void track(mlx::core::array &a);
    mlx::core::allocator::Buffer buffer(size_t size);
    void give(Block *block, size_t tracked);
    void clear_cache();
    host::LedgerHooks::Memory memory() const;
    void reset_peak() { peak_ = 0; }
    void restart();
    void boundary();
    void close();

   private:
    class Allocator;

    struct CommandBuffer {
        size_t operations = 0;
        size_t elements = 0;
        std::unordered_set<const void *> used;
        std::unordered_set<std::shared_ptr<mlx::core::array::Data>> held;
        std::vector<mlx::core::array> temporaries;
        bool counted = false;
        size_t serial = 0;
        double flop = 0, bytes = 0;
    };

    void mark();
    void name_kernel(const char *kind, const References &inputs, const References &outputs);
    size_t foreign() const;
    void touch(const mlx::core::array &a);
    std::vector<mlx::core::array> compute(mlx::core::array &arr);
    void encode(mlx::core::array &arr);
    void hold(mlx::core::array &arr);
    void commit(bool counted);
    void run_oldest_handlers();
    void run_handlers(size_t late);
    void finish(size_t serial);
    void complete_one();
    void back_pressure();

    std::unique_ptr<Allocator> allocator_;
    size_t alive_ = 0;
    size_t tracked_ = 0;
    size_t peak_ = 0;
    std::optional<size_t> foreign_override_;
    CommandBuffer encoding_;
    /// The command buffers whose completion handlers have not run.
    std::deque<CommandBuffer> running_;
    int active_tasks_ = 0;
    size_t committed_ = 0;
    /// The serial number of the last command buffer that the GPU has finished.
    size_t finished_ = 0;
    /// For each array of an asynchronous evaluation, the last command buffer of that evaluation.
    std::unordered_map<const void *, std::pair<std::weak_ptr<mlx::core::array::Data>, size_t>> pending_;
    std::unordered_set<std::string> kernel_names_;
    size_t first_since_boundary_ = 0;
    std::string encoded_;
    bool is_on_cpu_ = false;
};

void apply_rule(Recorder &recorder, mlx::core::array &arr, std::vector<mlx::core::array> &outputs);

}  // namespace ledger

#endif
