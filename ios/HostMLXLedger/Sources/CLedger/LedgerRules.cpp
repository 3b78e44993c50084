// The rules of the ledger. A rule records the buffers and kernels that a primitive's `eval_gpu` uses on Metal.
//
// Comments cite files and lines of MLX 0.32.2 (commit 846d176), below mlx/backend unless they name another folder.

#include "Recorder.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "mlx/backend/common/binary.h"
#include "mlx/backend/common/copy.h"
#include "mlx/backend/common/ternary.h"
#include "mlx/backend/common/unary.h"
#include "mlx/fast_primitives.h"

namespace mx = mlx::core;

namespace ledger {

namespace {

using Arrays = std::vector<mx::array>;

struct Call {
    Recorder &recorder;
    mx::array &arr;
    Arrays &outputs;

    const Arrays &in() const { return arr.inputs(); }
    mx::array &out() const { return outputs[0]; }

    template <class P>
    const P &primitive() const {
        return static_cast<const P &>(arr.primitive());
    }

    void allocate(mx::array &a) const { a.set_data(recorder.take(a.nbytes())); }
    std::function<Allocation(size_t)> take() const {
        return [&r = recorder](size_t size) { return r.take(size); };
    }

    mx::array temporary(mx::Shape shape, mx::Dtype dtype) const {
        mx::array a(std::move(shape), dtype, nullptr, {});
        allocate(a);
        recorder.temporary(a);
        return a;
    }
};

// MARK: Layouts

/// Joins contiguous axes, and drops axes of length 1, as in MLX's common/utils.cpp:20. Returns the joined shape, and the joined strides of each
/// array.
std::pair<mx::Shape, std::vector<mx::Strides>> collapse(
    const mx::Shape &shape, const std::vector<mx::Strides> &strides) {
    mx::Shape joined;
    std::vector<mx::Strides> joined_strides(strides.size());
    for (size_t i = 0; i < shape.size(); i++) {
        if (shape[i] == 1) {
            continue;
        }
        bool contiguous = !joined.empty();
        for (size_t s = 0; s < strides.size() && contiguous; s++) {
            contiguous = strides[s][i] * shape[i] == joined_strides[s].back();
        }
        if (contiguous) {
            joined.back() *= shape[i];
        } else {
            joined.push_back(shape[i]);
        }
        for (size_t s = 0; s < strides.size(); s++) {
            if (contiguous) {
                joined_strides[s].back() = strides[s][i];
            } else {
                joined_strides[s].push_back(strides[s][i]);
            }
        }
    }
    if (!shape.empty() && joined.empty()) {
        joined.push_back(1);
        for (auto &s : joined_strides) {
            s.push_back(0);
        }
    }
    return {joined, joined_strides};
}

// MARK: Copies

/// Follows MLX's gpu/copy.cpp:37.
mx::array contiguous_copy(const Call &call, const mx::array &a) {
    mx::array copy(a.shape(), a.dtype(), nullptr, {});
    call.allocate(copy);
    if (copy.size() > 0) {
        call.recorder.kernel("copy", {a}, {copy});
    }
    return copy;
}

/// Makes a contiguous copy that is kept until the command buffer is complete.
mx::array temporary_copy(const Call &call, const mx::array &a) {
    auto copy = contiguous_copy(call, a);
    call.recorder.temporary(copy);
    return copy;
}

/// Follows MLX's metal/copy.cpp:13.
void copy(const Call &call, const mx::array &in, mx::array &out, mx::CopyType type) {
    const bool donated = mx::set_copy_output_data(in, out, type, call.take());
    if (donated && in.dtype() == out.dtype()) {
        return;
    }
    if (out.size() > 0) {
        call.recorder.kernel("copy", {in}, {out});
    }
}

/// Records a kernel that copies `from` into a part of `to` that has the same number of elements as `from`.
void copy_into(const Call &call, const mx::array &from, mx::array &to) {
    if (from.size() == 0) {
        return;
    }
    mx::array part(from.shape(), to.dtype(), nullptr, {});
    part.copy_shared_buffer(to, to.strides(), to.flags(), part.size());
    call.recorder.kernel("copy", {from}, {part});
}

mx::CopyType vector_or_general(bool vector) { return vector ? mx::CopyType::Vector : mx::CopyType::General; }

// MARK: Views and copies

/// Follows MLX's common/common.cpp and common/slicing.cpp. A view needs no kernel.
void view(const Call &call) { call.arr.primitive().eval_cpu(call.in(), call.outputs); }

/// Follows MLX's gpu/primitives.cpp:28.
void as_type(const Call &call) {
    const auto &in = call.in()[0];
    copy(call, in, call.out(), vector_or_general(in.flags().contiguous));
}

/// Follows MLX's gpu/primitives.cpp:156. `in` is a second reference to the input, as in MLX, so the input's buffer is not donated.
void full(const Call &call) {
    auto in = call.in()[0];
    const auto type = in.data_size() == 1 ? mx::CopyType::Scalar : vector_or_general(in.flags().contiguous);
    copy(call, in, call.out(), type);
}

/// Follows MLX's gpu/primitives.cpp:50.
void contiguous(const Call &call) {
    const auto &in = call.in()[0];
    auto &out = call.out();
    bool fits = in.flags().row_contiguous;
    if (!fits && in.flags().col_contiguous) {
        // The primitive's flag for column-major order is private. `is_equivalent` with a primitive that has the flag reveals it.
        static const mx::array columns = mx::contiguous(mx::zeros({2, 2}), true);
        fits = call.arr.primitive().is_equivalent(columns.primitive());
    }
    if (fits && in.buffer_size() <= out.nbytes() + 16384) {
        out.copy_shared_buffer(in);
    } else {
        copy(call, in, out, mx::CopyType::General);
    }
}

/// Follows MLX's metal/copy.cpp:216 and common/common.cpp:109. The output is a view of the input if the strides allow it, else a copy.
void reshape(const Call &call) {
    const auto &in = call.in()[0];
    auto &out = call.out();
    mx::Strides strides;
    bool needs_copy = false;
    if (in.size() == 0 || in.flags().row_contiguous) {
        strides = out.strides();
    } else if (in.ndim() == 0) {
        strides = mx::Strides(out.ndim(), 0);
    } else {
        auto [shape, joined] = collapse(in.shape(), {in.strides()});
        size_t j = 0;
        for (size_t i = 0; i < out.ndim() && !needs_copy; i++) {
            const int n = out.shape(i);
            if (j < shape.size() && shape[j] % n == 0) {
                shape[j] /= n;
                strides.push_back(shape[j] * joined[0][j]);
                j += shape[j] == 1;
            } else if (n == 1) {
                strides.push_back(strides.back());
            } else {
                needs_copy = true;
            }
        }
    }
    if (needs_copy) {
        call.allocate(out);
        call.recorder.kernel("copy", {in}, {out});
        return;
    }
    auto flags = in.flags();
    if (flags.row_contiguous) {
        const auto longest = std::max_element(out.shape().begin(), out.shape().end());
        flags.col_contiguous = out.size() <= 1 || out.size() == static_cast<size_t>(*longest);
    }
    out.copy_shared_buffer(in, strides, flags, in.data_size());
}

/// Follows MLX's gpu/primitives.cpp:240.
void view_as(const Call &call) {
    const auto &in = call.in()[0];
    auto &out = call.out();
    const size_t from = in.itemsize(), to = out.itemsize();
    if (from == to || (to < from && in.strides().back() == 1) || in.flags().row_contiguous) {
        auto strides = in.strides();
        for (int i = 0; i < static_cast<int>(strides.size()) - 1; i++) {
            strides[i] = strides[i] * from / to;
        }
        out.copy_shared_buffer(in, strides, in.flags(), in.data_size() * from / to);
        return;
    }
    const auto flat = contiguous_copy(call, in);
    out.copy_shared_buffer(flat, out.strides(), flat.flags(), out.size());
}

/// Follows MLX's metal/slicing.cpp:14.
void concatenate(const Call &call) {
    call.allocate(call.out());
    for (const auto &in : call.in()) {
        copy_into(call, in, call.out());
    }
}

/// Follows MLX's metal/indexing.cpp:733.
void slice_update(const Call &call) {
    const auto &in = call.in()[0];
    const auto &update = call.in()[1];
    auto &out = call.out();
    if (out.size() == 0) {
        return call.allocate(out);
    }
    if (update.size() == 0) {
        return out.copy_shared_buffer(in);
    }
    const auto type = vector_or_general(in.flags().contiguous && in.size() == in.data_size());
    copy(call, in, out, in.data_size() == 1 ? mx::CopyType::Scalar : type);
    copy_into(call, update, out);
}

/// Follows MLX's gpu/slicing.cpp:18. Fills the output, then copies the input into it.
void pad(const Call &call) {
    auto &out = call.out();
    call.allocate(out);
    call.recorder.kernel("copy", {call.in()[1]}, {out});
    copy_into(call, call.in()[0], out);
}

/// Follows MLX's common/common.cpp:90. The CPU writes the number, so there is no kernel.
void number_of_elements(const Call &call) { call.allocate(call.out()); }

/// The CPU reads files, so there is no kernel.
void load(const Call &call) { call.allocate(call.out()); }

// MARK: Element by element

/// Follows MLX's metal/unary.cpp:98.
void unary(const Call &call) {
    mx::set_unary_output_data(call.in()[0], call.out(), call.take());
    if (call.out().size() > 0) {
        call.recorder.kernel("unary", {call.in()[0]}, {call.out()});
    }
}

/// Follows MLX's metal/unary.cpp:150. Integers need no rounding.
void round(const Call &call) {
    if (mx::issubdtype(call.in()[0].dtype(), mx::inexact)) {
        unary(call);
    } else {
        call.out().copy_shared_buffer(call.in()[0]);
    }
}

/// Follows MLX's metal/binary.cpp:196.
void binary(const Call &call) {
    const auto &a = call.in()[0];
    const auto &b = call.in()[1];
    mx::set_binary_op_output_data(a, b, call.out(), mx::get_binary_op_type(a, b), call.take());
    if (call.out().size() > 0) {
        call.recorder.kernel("binary", {a, b}, {call.out()});
    }
}

/// Follows MLX's metal/ternary.cpp:135.
void select(const Call &call) {
    const auto &a = call.in()[0];
    const auto &b = call.in()[1];
    const auto &c = call.in()[2];
    mx::set_ternary_op_output_data(a, b, c, call.out(), mx::get_ternary_op_type(a, b, c), call.take());
    if (call.out().size() > 0) {
        call.recorder.kernel("select", {a, b, c}, {call.out()});
    }
}

/// Follows MLX's metal/compiled.cpp:257 and common/compiled.cpp:78 and :168.
void compiled(const Call &call) {
    call.recorder.fused(call.primitive<mx::Compiled>().lib_name());
    const auto &out = call.out();
    const auto is_scalar = [](const mx::array &x) { return x.ndim() == 0; };
    bool contiguous = true, rows = true, columns = true, goes_back = false;
    int count = 0;
    for (const auto &x : call.in()) {
        if (!is_scalar(x)) {
            const bool same = x.shape() == out.shape();
            contiguous &= same && x.flags().contiguous;
            rows &= same && x.flags().row_contiguous;
            columns &= same && x.flags().col_contiguous;
            goes_back |= std::any_of(x.strides().begin(), x.strides().end(), [](auto stride) { return stride < 0; });
            count++;
        }
    }
    contiguous = !goes_back && (count > 1 ? rows || columns : count == 1 ? contiguous : out.ndim() == 0);

    size_t o = 0;
    const mx::array *like = nullptr;
    for (const auto &x : call.in()) {  // :126, :153: overwrites an input that is no longer needed
        if (o < call.outputs.size() && !is_scalar(x) && x.is_donatable() && x.itemsize() == call.outputs[o].itemsize() &&
            (contiguous || (x.flags().row_contiguous && x.size() == call.outputs[o].size()))) {
            call.outputs[o++].copy_shared_buffer(x);
        }
        if (contiguous && !like && x.size() == out.size()) {
            like = &x;
        }
    }
    for (; o < call.outputs.size(); o++) {
        auto &a = call.outputs[o];
        if (like) {
            a.set_data(
                call.recorder.take(like->data_size() * a.itemsize()), like->data_size(), like->strides(), like->flags());
        } else {
            call.allocate(a);
        }
    }
    if (out.size() > 0) {
        call.recorder.kernel("compiled", {call.in().begin(), call.in().end()}, {call.outputs.begin(), call.outputs.end()});
    }
}

/// Follows MLX's metal/primitives.cpp:29.
void arange(const Call &call) {
    call.allocate(call.out());
    if (call.out().size() > 0) {
        call.recorder.kernel("arange", {}, {call.out()});
    }
}

/// Follows MLX's metal/primitives.cpp:134.
void random_bits(const Call &call) {
    call.allocate(call.out());
    if (call.out().size() > 0) {
        call.recorder.kernel("random", {call.in()[0]}, {call.out()});
    }
}

// MARK: Along axes

enum class Reduction { all, rows, columns, general };

/// The kind of a reduction, with the lengths and strides of its joined axes (MLX's common/reduce.cpp:29). The smallest stride other than 0 is last.
struct Plan {
    Reduction kind;
    mx::Shape shape;
    mx::Strides strides;
};

Plan plan_reduction(const mx::array &x, const std::vector<int> &axes) {
    if (x.size() == x.data_size() && axes.size() == x.ndim() && x.flags().contiguous) {
        return {Reduction::all, {}, {}};
    }
    const auto kind = [](const mx::Strides &strides) {
        return strides.back() == 1 ? Reduction::rows : Reduction::columns;
    };
    if (x.flags().row_contiguous) {
        mx::Shape shape{x.shape(axes[0])};
        mx::Strides strides{x.strides()[axes[0]]};
        for (size_t i = 1; i < axes.size(); i++) {
            if (axes[i] - 1 == axes[i - 1] && x.shape(axes[i]) > 1) {
                shape.back() *= x.shape(axes[i]);
                strides.back() = x.strides()[axes[i]];
            } else {
                shape.push_back(x.shape(axes[i]));
                strides.push_back(x.strides()[axes[i]]);
            }
        }
        mx::Shape long_shape;
        mx::Strides long_strides;
        for (size_t i = 0; i < shape.size(); i++) {
            if (shape[i] != 1) {
                long_shape.push_back(shape[i]);
                long_strides.push_back(strides[i]);
            }
        }
        if (!long_strides.empty() && long_strides.back() > 0) {
            return {kind(long_strides), long_shape, long_strides};
        }
    }
    std::vector<std::pair<int, int64_t>> reductions;
    for (int axis : axes) {
        if (x.shape(axis) > 1) {
            reductions.push_back({x.shape(axis), x.strides()[axis]});
        }
    }
    std::sort(reductions.begin(), reductions.end(), [](const auto &a, const auto &b) {
        const bool a_is_zero = a.second == 0;
        const bool b_is_zero = b.second == 0;
        return a_is_zero != b_is_zero ? a.second < b.second : a.second > b.second;
    });
    for (int i = static_cast<int>(reductions.size()) - 1; i >= 1; i--) {
        const auto a = reductions[i];
        const auto b = reductions[i - 1];
        if (b.second == a.first * a.second) {
            reductions.erase(reductions.begin() + i);
            reductions[i - 1] = {a.first * b.first, a.second};
        }
    }
    Plan plan{Reduction::general, {}, {}};
    for (const auto &[length, stride] : reductions) {
        plan.shape.push_back(length);
        plan.strides.push_back(stride);
    }
    if (plan.strides.empty()) {
        return plan;
    }
    if (plan.strides.back() == 1) {
        plan.kind = Reduction::rows;
    } else if (plan.strides.back() > 1) {
        int64_t size = 1;
        bool expanded = false;
        for (int i = static_cast<int>(x.ndim()) - 1; i >= 0; i--) {
            if (axes.back() == i) {
                continue;
            }
            if (x.strides()[i] == 0) {
                if (x.shape(i) == 1) {
                    continue;
                }
                expanded = true;
                break;
            }
            if (x.strides()[i] != size && x.shape(i) != 1) {
                break;
            }
            size *= x.shape(i);
        }
        if (size > plan.strides.back() || (size == plan.strides.back() && !expanded)) {
            plan.kind = Reduction::columns;
        }
    }
    return plan;
}

/// Follows MLX's metal/reduce.cpp:937. Records one kernel, or two kernels with partial results between them.
void reduce_columns(const Call &call, const mx::array &in, mx::array &out, const Plan &plan) {
    const int64_t length = plan.shape.back();
    const int64_t stride = plan.strides.back();
    const int64_t others = std::accumulate(
        plan.shape.begin(), plan.shape.end() - 1, int64_t{1}, [](int64_t a, int b) { return a * b; });
    const int64_t total = length * others;
    int blocks = 0;
    if (total >= 32) {
        if (stride < 32 && total >= 1024) {
            blocks = total >= 32768 ? 128 : 32;
        } else if (total > 256 && out.size() / 32 < 1024) {
            blocks = 32;
        }
    }
    if (blocks == 0) {
        return call.recorder.kernel("reduce", {in}, {out});
    }
    auto shape = out.shape();
    shape.insert(shape.begin(), blocks);
    const auto partial = call.temporary(std::move(shape), out.dtype());
    call.recorder.kernel("reduce", {in}, {partial});
    call.recorder.kernel("reduce", {partial}, {out});
}

/// Follows MLX's metal/reduce.cpp:969.
void reduce(const Call &call) {
    const auto [type, axes] = call.primitive<mx::Reduce>().state();
    auto in = call.in()[0];
    auto &out = call.out();
    if (in.size() > 0 && out.size() == in.size()) {  // of axes of length 1
        return copy(call, in, out, vector_or_general(in.flags().contiguous));
    }
    out.set_data(call.recorder.take(std::max<size_t>(out.nbytes(), 4)));
    if (in.size() == 0) {
        return call.recorder.kernel("reduce", {}, {out});
    }
    auto plan = plan_reduction(in, axes);
    if (plan.kind == Reduction::general) {
        in = temporary_copy(call, in);
        plan = plan_reduction(in, axes);
    }
    switch (plan.kind) {
    case Reduction::all:
        // As in MLX's metal/reduce.cpp:330, one group of 1,024 threads reduces up to 4 elements per thread. A larger input takes two passes.
        if (in.size() <= 4 * 1024) {
            call.recorder.kernel("reduce", {in}, {out});
        } else {
            const int rows = (in.nbytes() <= (1 << 26) ? 32 : 1024) * 4;
            const auto partial = call.temporary({rows}, out.dtype());
            call.recorder.kernel("reduce", {in}, {partial});
            call.recorder.kernel("reduce", {partial}, {out});
        }
        break;
    case Reduction::rows:
        call.recorder.kernel("reduce", {in}, {out});
        break;
    case Reduction::columns:
        reduce_columns(call, in, out, plan);
        break;
    case Reduction::general:
        throw std::runtime_error("[ledger] A contiguous array has no plan of reduction.");
    }
}

/// Follows MLX's metal/primitives.cpp:62.
void arg_reduce(const Call &call) {
    call.allocate(call.out());
    call.recorder.kernel("arg_reduce", {call.in()[0]}, {call.out()});
}

/// Gives the output its memory, and returns the array that the kernel reads. The output takes over the memory of that array if possible.
///
/// With `keeps_layout`, the output gets the layout of `x`. Otherwise it gets the layout of a contiguous copy.
mx::array in_place_or_like(const Call &call, const mx::array &x, bool keeps_layout) {
    auto &out = call.out();
    if (!keeps_layout) {
        auto copied = contiguous_copy(call, x);
        out.copy_shared_buffer(copied);
        return copied;
    }
    if (x.is_donatable()) {
        out.copy_shared_buffer(x);
    } else {
        out.set_data(call.recorder.take(x.data_size() * x.itemsize()), x.data_size(), x.strides(), x.flags());
    }
    return x;
}

/// Follows MLX's metal/softmax.cpp:15.
void softmax(const Call &call) {
    const auto &x = call.in()[0];
    const auto in = in_place_or_like(call, x, x.flags().contiguous && x.strides().back() == 1);
    call.recorder.kernel("softmax", {in}, {call.out()});
}

/// Follows MLX's metal/logsumexp.cpp:14.
void log_sum_exp(const Call &call) {
    const auto &x = call.in()[0];
    auto &out = call.out();
    const auto in = x.flags().contiguous && x.strides().back() == 1 ? x : temporary_copy(call, x);
    if (in.flags().row_contiguous) {
        call.allocate(out);
    } else {
        const int n = in.shape(-1);
        auto flags = in.flags();
        auto strides = in.strides();
        for (auto &s : strides) {
            s /= n;
        }
        bool columns = strides[0] == 1;
        for (size_t i = 1; columns && i < strides.size(); i++) {
            columns = out.shape(i) == 1 || strides[i - 1] == out.shape(i) * strides[i];
        }
        flags.col_contiguous = columns;
        out.set_data(call.recorder.take(in.nbytes() / n), in.data_size() / n, std::move(strides), flags);
    }
    call.recorder.kernel("logsumexp", {in}, {out});
}

/// Follows MLX's metal/scan.cpp:116.
void scan(const Call &call) {
    const auto axis = std::get<1>(call.primitive<mx::Scan>().state());
    auto in = call.in()[0];
    auto &out = call.out();
    // `in` is a second reference to the input, as in MLX, so the input's buffer is not donated.
    if (in.flags().contiguous && in.strides()[axis] != 0) {
        out.set_data(call.recorder.take(in.data_size() * out.itemsize()), in.data_size(), in.strides(), in.flags());
    } else {
        in = contiguous_copy(call, in);
        out.copy_shared_buffer(in);
    }
    call.recorder.kernel("scan", {in}, {out});
}

// MARK: Indexing

/// Follows MLX's metal/indexing.cpp:57 and :441. The kernel reads the indices, and as many bytes of the source as it writes.
void gather(const Call &call) {
    auto &out = call.out();
    call.allocate(out);
    if (out.size() > 0) {
        double indices = 0;
        for (size_t i = 1; i < call.in().size(); i++) {
            indices += static_cast<double>(call.in()[i].nbytes());
        }
        call.recorder.kernel("gather", {call.in()[0]}, {out}, 0, static_cast<double>(out.nbytes()) + indices);
    }
}

/// Follows MLX's metal/indexing.cpp:232 and :522.
void scatter(const Call &call) {
    const auto &in = call.in()[0];
    const auto &updates = call.in().back();
    auto &out = call.out();
    copy(
        call, in, out, in.data_size() == 1 ? mx::CopyType::Scalar : vector_or_general(in.flags().row_contiguous));
    if (updates.size() > 0) {
        mx::array part(updates.shape(), out.dtype(), nullptr, {});
        part.copy_shared_buffer(out, part.strides(), out.flags(), part.size());
        call.recorder.kernel("scatter", {updates}, {part});
    }
}

// MARK: Matrix products

struct Operand {
    bool transposed;
    mx::array array;
};

/// Follows MLX's metal/matmul.cpp:27. Copies a matrix that the kernel cannot read in place.
Operand check_transpose(const Call &call, const mx::array &a, bool is_vector) {
    const auto rows = a.strides()[a.ndim() - 2];
    const auto columns = a.strides()[a.ndim() - 1];
    if (columns == 1 && (!is_vector || rows == a.shape(-1))) {
        return {false, a};
    }
    if (rows == 1 && (!is_vector || columns == a.shape(-2))) {
        return {true, a};
    }
    return {false, temporary_copy(call, a)};
}

int next_power_of_2(int n) {
    int power = 1;
    while (power < n) {
        power *= 2;
    }
    return power;
}

/// Returns whether a product with 2 to 15 rows uses a matrix–vector kernel, as in MLX's metal/matmul.cpp:1299 on GPUs without neural accelerators.
bool is_wide_gemv(
    const Call &call, const mx::array &a, const mx::array &b, int64_t m, int64_t n, int64_t k,
    const std::vector<mx::Strides> &strides_of_batches) {
    const auto is_aligned = [](const mx::Strides &strides) {
        return std::all_of(strides.begin(), strides.end(), [](auto stride) { return stride % 4 == 0; });
    };
    const auto dtype = call.out().dtype();
    return call.recorder.rules.generation >= 15 && m > 1 && m <= 15 && n > 1 && k % 4 == 0 &&
           (dtype == mx::float16 || dtype == mx::bfloat16) && a.offset() % 8 == 0 && b.offset() % 8 == 0 &&
           a.strides(-2) % 4 == 0 && b.strides(-1) % 4 == 0 && is_aligned(strides_of_batches[0]) &&
           is_aligned(strides_of_batches[1]);
}

/// Follows MLX's metal/matmul.cpp:1451 (Matmul) and :1593 (AddMM, which adds a third input).
void matmul(const Call &call) {
    auto &out = call.out();
    const auto &a_in = call.in()[0];
    const auto &b_in = call.in()[1];
    const bool adds = call.in().size() == 3;
    if (out.size() == 0) {
        return call.allocate(out);
    }
    if (a_in.size() == 0 || b_in.size() == 0) {
        call.allocate(out);
        return call.recorder.kernel("copy", {}, {out});
    }
    call.allocate(out);
    int64_t m = a_in.shape(-2);
    const int64_t n = b_in.shape(-1);
    const int64_t k = a_in.shape(-1);
    const auto [a_transposed, a] = check_transpose(call, a_in, m == 1);
    const auto [b_transposed, b] = check_transpose(call, b_in, n == 1);

    // Contiguous batches that share one second matrix become one product (matmul.cpp:1492, :1659).
    auto batch = static_cast<int64_t>(out.size()) / (m * n);
    const double flop = 2.0 * static_cast<double>(batch * m) * static_cast<double>(n * k);
    const auto strides_of_batches = [](const mx::array &x) {
        return mx::Strides(x.strides().begin(), x.strides().end() - 2);
    };
    std::vector<mx::Strides> strides{strides_of_batches(a), strides_of_batches(b)};
    if (adds) {
        strides.push_back(strides_of_batches(call.in()[2]));
    }
    auto [shape, joined] = collapse(mx::Shape(a.shape().begin(), a.shape().end() - 2), strides);
    if (batch > 1 && !a_transposed && shape.size() == 1 && a.strides(-2) == k && joined[0].back() == m * k &&
        joined[1].back() == 0 && (!adds || joined[2].back() == m * call.in()[2].strides(-2))) {
        m *= shape.back();
        batch = 1;
        joined = {{0}, {0}};
    }

    const auto run = [&](const char *kind, mx::array &to) {
        adds ? call.recorder.kernel(kind, {a, b, call.in()[2]}, {to}, flop)
             : call.recorder.kernel(kind, {a, b}, {to}, flop);
    };
    // A dot product of contiguous vectors takes three kernels: sums of 16,384 products each, their total, and a copy (matmul.cpp:1044).
    if (!adds && m == 1 && n == 1 && batch == 1 && a.flags().row_contiguous && b.flags().row_contiguous &&
        a.dtype() != mx::complex64) {
        auto partial = call.temporary({static_cast<int>((k + 16383) / 16384)}, mx::float32);
        run("gemv", partial);
        const auto sum = call.temporary(out.shape(), mx::float32);
        call.recorder.kernel("reduce", {partial}, {sum});
        return copy(call, sum, out, mx::CopyType::Scalar);
    }
    if (std::min(m, n) == 1 || (!a_transposed && b_transposed && is_wide_gemv(call, a, b, m, n, k, joined))) {
        return run("gemv", out);
    }
    // A product with few tiles and a long k is split along k. A second kernel adds the float32 parts (matmul.cpp:923).
    const int64_t tiles = ((m + 15) / 16) * ((n + 15) / 16);
    if (batch == 1 && tiles <= 1024 && k / 16 >= 8 && k >= std::max(m, n)) {
        const auto wide_tiles = static_cast<int>(((m + 31) / 32) * ((n + 31) / 32));
        const int parts = std::min(std::max(2, next_power_of_2(static_cast<int>(k / 16) / wide_tiles)), 32);
        auto partial = call.temporary({parts, static_cast<int>(m), static_cast<int>(n)}, mx::float32);
        run("gemm", partial);
        return call.recorder.kernel("gemm_accumulate", {partial}, {out});
    }
    run("gemm", out);
}

/// Returns `x` if its last two axes are row-contiguous, otherwise a contiguous copy (MLX's metal/quantized.cpp:65).
mx::array contiguous_matrix(const Call &call, const mx::array &x) {
    const bool fits =
        x.ndim() < 2 ? x.strides()[0] == 1 : x.strides(-2) == x.shape(-1) && x.strides(-1) == 1;
    return fits ? x : temporary_copy(call, x);
}

/// Returns the number of rows from which MLX uses a matrix kernel (metal/quantized.cpp:85). Ultra chips have other numbers.
int rows_of_matrix(int generation, int64_t k, int64_t n) {
    const std::array<int, 3> rows = generation >= 17   ? std::array{33, 25, 13}
                                    : generation >= 15 ? std::array{13, 15, 13}
                                    : generation >= 13 ? std::array{14, 10, 6}
                                                       : std::array{18, 12, 10};
    return k <= 2048 && n <= 2048 ? rows[0] : k <= 4096 && n <= 4096 ? rows[1] : rows[2];
}

/// Returns the number of equal parts into which k is split (MLX's metal/quantized.cpp:1134). Few parts are enough for a product with many tiles of 32
/// × 32, because MLX aims at 512 tiles in all parts together.
int64_t parts_of_matrix(int64_t m, int64_t n, int64_t k, int group_size) {
    const int64_t tiles = ((m + 31) / 32) * ((n + 31) / 32);
    const int64_t group = std::max(group_size, 32);
    auto parts = std::min(std::max<int64_t>(1, 512 / tiles), k / group);
    while (parts > 1 && k % (parts * group) != 0) {
        parts--;
    }
    return parts;
}

/// Follows MLX's metal/quantized.cpp:1782.
void quantized_matmul(const Call &call) {
    const auto state = call.primitive<mx::QuantizedMatmul>().state();
    const bool transpose = std::get<3>(state);
    auto &out = call.out();
    call.allocate(out);
    const auto x = contiguous_matrix(call, call.in()[0]);
    const auto w = contiguous_matrix(call, call.in()[1]);
    const auto scales = contiguous_matrix(call, call.in()[2]);
    const auto biases = call.in().size() == 4 ? contiguous_matrix(call, call.in()[3]) : scales;
    if (out.size() == 0) {
        return;
    }
    const bool flat = w.ndim() == 2 && x.flags().row_contiguous;
    const int64_t k = x.shape(-1);
    const int64_t m = flat ? static_cast<int64_t>(x.size()) / k : x.shape(-2);
    const int64_t n = out.shape(-1);
    const double flop = 2.0 * static_cast<double>(out.size()) * static_cast<double>(k);
    const auto run = [&](const char *kind, const mx::array &to) {
        call.in().size() == 4 ? call.recorder.kernel(kind, {x, w, scales, biases}, {to}, flop)
                              : call.recorder.kernel(kind, {x, w, scales}, {to}, flop);
    };
    auto shape = out.shape();
    if (shape.size() == 1) {
        shape.insert(shape.begin(), 1);
    }
    const auto run_in_parts = [&](const char *kind, int64_t parts, int axis) {
        shape.insert(shape.begin() + axis, static_cast<int>(parts));
        const auto partial = call.temporary(shape, x.dtype());
        run(kind, partial);
        reduce_columns(
            call, partial, out, {Reduction::columns, {partial.shape(axis)}, {partial.strides(axis)}});
    };
    if (m >= (transpose ? rows_of_matrix(call.recorder.rules.generation, k, n) : 4)) {
        const bool has_batch = static_cast<int64_t>(out.size()) > m * n;
        const auto parts = transpose && !has_batch ? parts_of_matrix(m, n, k, std::get<0>(state)) : 1;
        return parts > 1 ? run_in_parts("qmm", parts, 0) : run("qmm", out);  // :1120
    }
    if (transpose) {
        return run("qmv", out);
    }
    if (k < 1024) {
        return run("qvm", out);
    }
    run_in_parts("qvm", k > 8192 ? 32 : 8, static_cast<int>(shape.size()) - 2);  // :627
}

/// Follows MLX's metal/quantized.cpp:231, for quantizing and for dequantizing.
void quantize(const Call &call) {
    const bool dequantizes = std::get<4>(call.primitive<mx::fast::Quantize>().state());
    const auto contiguous = [&](const mx::array &x) { return x.flags().row_contiguous ? x : temporary_copy(call, x); };
    call.allocate(call.out());
    const auto w = contiguous(call.in()[0]);
    if (dequantizes) {
        const auto scales = contiguous(call.in()[1]);
        const auto biases = call.in().size() > 2 ? contiguous(call.in()[2]) : scales;
        call.recorder.kernel("dequantize", {w, scales, biases}, {call.out()});
        return;
    }
    for (size_t i = 1; i < call.outputs.size(); i++) {
        call.allocate(call.outputs[i]);
    }
    const auto &last = call.outputs.back();
    call.recorder.kernel("quantize", {w}, {call.out(), call.outputs[1], last});
}

// MARK: Fused operations

/// Follows MLX's metal/normalization.cpp:17.
void rms_norm(const Call &call) {
    const auto &x = call.in()[0];
    bool keeps = x.flags().contiguous && x.strides().back() == 1;
    if (keeps && x.ndim() > 1) {
        const auto rows = x.strides(-2);
        keeps = rows == 0 || rows == x.shape(-1) || x.shape(-2) == 1;
    }
    const auto in = in_place_or_like(call, x, keeps);
    call.recorder.kernel("rms_norm", {in, call.in()[1]}, {call.out()});
}

/// Follows MLX's metal/rope.cpp:14.
void rope(const Call &call) {
    const int dims = std::get<1>(call.primitive<mx::fast::RoPE>().state());
    const auto &in = call.in()[0];
    auto &out = call.out();
    const auto ndim = static_cast<int>(in.ndim());
    const int t = in.shape(-2), d = in.shape(-1);
    int dispatch_ndim = ndim;
    while (dispatch_ndim > 3 && in.shape(-dispatch_ndim) == 1) {
        dispatch_ndim--;
    }
    int64_t n = 1;
    for (int i = 1; i < ndim - 2; i++) {
        n *= in.shape(i);
    }
    bool in_place = false;
    if (dims < d) {
        in_place = true;
        copy(call, in, out, vector_or_general(in.flags().row_contiguous));
    } else if (in.flags().row_contiguous) {
        in_place = in.is_donatable();
        in_place ? out.copy_shared_buffer(in) : call.allocate(out);
    } else if (
        dispatch_ndim == 3 ||
        (ndim == 4 && in.strides(0) == t * n * d && in.strides(1) == d && in.strides(2) == n * d)) {
        call.allocate(out);
    } else {
        in_place = true;
        copy(call, in, out, mx::CopyType::General);
    }
    call.recorder.kernel("rope", {in_place ? out : in, call.in()[1]}, {out});
}

/// Follows MLX's metal/scaled_dot_product_attention.cpp:773.
void attention(const Call &call) {
    const auto state = call.primitive<mx::fast::ScaledDotProductAttention>().state();
    const bool causal = std::get<2>(state), has_sinks = std::get<3>(state);
    const auto &q_in = call.in()[0];
    auto &out = call.out();
    const bool has_mask = call.in().size() > 3u + has_sinks;
    const bool is_vector = q_in.shape(2) <= 8;

    const auto rows_fit = [](const mx::array &a) { return a.strides(-1) == 1; };
    const auto query_fits = [](const mx::array &a) {  // :813
        if (a.flags().row_contiguous) {
            return true;
        }
        if (a.shape(0) != 1 && a.shape(1) != 1) {
            return false;
        }
        const int other = a.shape(0) == 1 ? 1 : 0;
        return a.strides(3) == 1 && a.strides(2) == a.shape(3) * a.shape(other) && a.strides(other) == a.shape(3);
    };
    const auto keys_fit = [&](const mx::array &a) {  // :829
        return rows_fit(a) && (a.shape(0) == 1 || a.shape(1) == 1 || a.strides(0) == a.strides(1) * a.shape(1));
    };
    const auto unless = [&](bool fits, const mx::array &a) { return fits ? a : temporary_copy(call, a); };

    const bool query_stays = is_vector ? query_fits(q_in) : rows_fit(q_in);
    // The products q·kᵀ and p·v skip the keys that a causal mask hides.
    const double rows = q_in.shape(2), keys = call.in()[1].shape(2);
    const double seen = causal ? rows * keys - rows * (rows - 1) / 2 : rows * keys;
    const double flop = 2.0 * q_in.shape(0) * q_in.shape(1) * seen * (q_in.shape(3) + call.in()[2].shape(3));

    if (!is_vector) {
        const auto q = unless(query_stays, q_in);
        const auto k = unless(rows_fit(call.in()[1]), call.in()[1]);
        const auto v = unless(rows_fit(call.in()[2]), call.in()[2]);
        // The output's memory layout is (batch, sequence, heads, dims).
        const int64_t head = out.shape(3), row = out.shape(1) * head, batch = out.shape(2) * row;
        out.set_data(
            call.recorder.take(out.nbytes()), out.shape(0) * batch, {batch, head, row, 1},
            {/* contiguous */ true, /* row */ false, /* col */ false});
        const auto mask = has_mask ? unless(rows_fit(call.in()[3]), call.in()[3]) : q;
        return call.recorder.kernel("attention", {q, k, v, mask}, {out}, flop);
    }

    {
        const mx::array q = query_stays ? q_in : contiguous_copy(call, q_in);
        const auto k = unless(keys_fit(call.in()[1]), call.in()[1]);
        const auto v = unless(keys_fit(call.in()[2]), call.in()[2]);
        // The output may overwrite a copy of the query, but not the query itself.
        if (!query_stays && q.flags().row_contiguous && q.size() == out.size()) {
            out.copy_shared_buffer(q);
        } else {
            call.allocate(out);
            if (!query_stays) {
                call.recorder.temporary(q);
            }
        }
        const auto &m = has_mask ? call.in()[3] : q;
        const bool mask_fits = !has_mask || m.flags().row_contiguous || q.shape(0) == 1 || q.shape(1) == 1 ||
                               m.strides(0) == m.strides(1) * m.shape(1);
        const auto mask = unless(mask_fits, m);
        if (!(k.shape(1) < q.shape(1) && k.shape(2) >= 4096)) {
            return call.recorder.kernel("attention", {q, k, v, mask}, {out}, flop);
        }
        // The first pass reads the keys in 64 blocks, or in 32 blocks if there are fewer than 4 queries per key head. The second pass combines the
        // results.
        const int blocks = q.shape(1) / k.shape(1) * q.shape(2) >= 4 ? 64 : 32;
        auto shape = out.shape();
        shape.back() = blocks;
        const auto sums = call.temporary(shape, mx::float32);
        const auto maxima = call.temporary(shape, mx::float32);
        shape.push_back(out.shape(-1));
        const auto partial = call.temporary(shape, q.dtype());
        call.recorder.kernel("attention", {q, k, v, mask}, {partial, sums, maxima}, flop);
        call.recorder.kernel("attention", {partial, sums, maxima}, {out});
    }
}

// MARK: The table

using Rule = void (*)(const Call &);

const std::unordered_map<std::string, Rule> &rules() {
    static const auto table = [] {
        std::unordered_map<std::string, Rule> table{
            {"AsType", as_type},
            {"Compiled", compiled},
            {"Full", full},
            {"Contiguous", contiguous},
            {"Reshape", reshape},
            {"Flatten", reshape},
            {"Unflatten", reshape},
            {"View", view_as},
            {"Concatenate", concatenate},
            {"SliceUpdate", slice_update},
            {"Pad", pad},
            {"NumberOfElements", number_of_elements},
            {"Load", load},
            {"Round", round},
            {"Select", select},
            {"Arange", arange},
            {"RandomBits", random_bits},
            {"ArgReduce", arg_reduce},
            {"Softmax", softmax},
            {"LogSumExp", log_sum_exp},
            {"Gather", gather},
            {"GatherAxis", gather},
            {"Scatter", scatter},
            {"ScatterAxis", scatter},
            {"Matmul", matmul},
            {"AddMM", matmul},
            {"QuantizedMatmul", quantized_matmul},
            {"Quantize", quantize},
            {"RMSNorm", rms_norm},
            {"RoPE", rope},
            {"ScaledDotProductAttention", attention},
        };
        for (const char *name :
             {"AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Slice",
              "Split", "Squeeze", "StopGradient", "Transpose"}) {
            table[name] = view;
        }
        for (const char *name :
             {"Abs",   "ArcCos",   "ArcCosh", "ArcSin", "ArcSinh", "ArcTan",  "ArcTanh", "BitwiseInvert", "Ceil",
              "Cos",   "Cosh",     "Erf",     "ErfInv", "Exp",     "Expm1",   "Floor",   "Imag",          "Log",
              "Log10", "Log1p",    "Log2",    "Real",   "Rsqrt",   "Sigmoid", "Sign",    "Sin",           "Sinh",
              "Sqrt",  "Square",   "Tan",     "Tanh",   "Negative", "LogicalNot", "Conjugate"}) {
            table[name] = unary;
        }
        for (const char *name :
             {"Add",      "ArcTan2",   "BitwiseAnd", "BitwiseOr",  "BitwiseXor", "Divide",     "Equal",
              "Greater",  "GreaterEqual", "LeftShift", "Less",     "LessEqual",  "LogAddExp",  "LogicalAnd",
              "LogicalOr", "Maximum",  "Minimum",    "Multiply",   "NaNEqual",   "NotEqual",   "Power",
              "Remainder", "RightShift", "Subtract"}) {
            table[name] = binary;
        }
        // MLX names a reduction or a scan after its operation.
        for (const char *name : {"And", "Or", "Sum", "Prod", "Min", "Max"}) {
            table[name] = reduce;
        }
        for (const char *name : {"CumSum", "CumProd", "CumMin", "CumMax", "CumLogAddExp"}) {
            table[name] = scan;
        }
        return table;
    }();
    return table;
}

}  // namespace

void apply_rule(Recorder &recorder, mx::array &arr, Arrays &outputs) {
    const mx::Primitive &primitive = arr.primitive();
    std::string name = primitive.name();
    name = name.substr(0, name.find(' '));
    if (typeid(primitive) == typeid(mx::Compiled)) {  // its name consists of its operations
        name = "Compiled";
    }
    const auto rule = rules().find(name);
    if (rule == rules().end()) {
        throw std::runtime_error("[ledger] There is no rule for the primitive " + name + ".");
    }
    rule->second({recorder, arr, outputs});
}

}  // namespace ledger
