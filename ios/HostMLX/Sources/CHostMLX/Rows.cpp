#include "Rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "Pool.h"
#include "Vectors.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {
namespace {

// The compiler must not fuse multiplications and additions, so that results equal those of MLX's separate operations.
#pragma clang fp contract(off)

/// The number of elements that are processed together. 20 intermediate results of this size fit into the L1 cache.
constexpr int chunk = 256;

/// Calls `f(first, count)` for parts of the rows, in parallel if that is faster. `work` is the cost per number, in additions.
template <class F>
void by_rows(int64_t rows, int64_t length, int64_t work, F f) {
    const int64_t some = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, length * work / 4));
    parallel(int((rows + some - 1) / some), rows * length * work > 1 << 19, [&](int part) {
        const int64_t first = part * some;
        f(first, std::min(some, rows - first));
    });
}

bool is_plain(const mx::array &x, mx::Stream s) {
#ifdef __APPLE__
    return false;
#endif
    return s.device == mx::Device::cpu && x.dtype() == mx::float32 && x.size() > 0 && x.ndim() > 0 && !x.is_tracer();
}

}  // namespace

Rows::Rows(const mx::array &a, const mx::Shape &shape)
    : data(a.data<float>()), shape(shape), strides(shape.size(), 0),
      isInOrder(a.flags().row_contiguous && a.shape() == shape) {
    const size_t missing = shape.size() - a.ndim();
    for (size_t i = 0; i < a.ndim(); i++) strides[missing + i] = a.shape(i) == 1 ? 0 : a.strides(i);
    step = strides.back();
}

const float *Rows::row(int64_t index) const {
    ptrdiff_t offset = 0;
    for (int axis = int(shape.size()) - 2; axis >= 0; axis--) {
        offset += index % shape[axis] * strides[axis];
        index /= shape[axis];
    }
    return data + offset;
}

const float *Rows::in_order(std::vector<float> &room) const {
    if (isInOrder) return data;
    size_t rows = 1;
    for (size_t axis = 0; axis + 1 < shape.size(); axis++) rows *= shape[axis];
    const size_t length = shape.back();
    room.resize(rows * length);
    for (size_t index = 0; index < rows; index++) {
        const float *in = row(index);
        for (size_t i = 0; i < length; i++) room[index * length + i] = in[ptrdiff_t(i) * step];
    }
    return room.data();
}

namespace {

// MARK: - Operations on single numbers

/// Runs the statement for each i. The output may overwrite an operand, because the statement uses only the i-th numbers.
#define EACH(statement)                                  \
    _Pragma("clang loop vectorize(assume_safety)")       \
    for (int i = 0; i < count; i++) statement

enum class Operation { add, subtract, multiply, divide, maximum, square, rsqrt, negative, exp, sigmoid, tanh, sum, largest };

bool is_reduction(Operation operation) { return operation == Operation::sum || operation == Operation::largest; }

/// A term of the fused formula: the input array with index `leaf` or, if `leaf` is negative, an operation on the terms with the indices `a` and `b`.
/// An operation on one term has a negative `b`.
struct Term {
    Operation operation{};
    int a = -1, b = -1;
    int leaf = -1;
    /// The pass over the row that computes the term, from 0. A term that uses a reduction needs a later pass than the reduction. `isKept` is true if
    /// a later pass reads the term and the term is no reduction.
    int pass = 0;
    bool isKept = false;

    bool reduces() const { return leaf < 0 && is_reduction(operation); }
};

std::optional<Operation> operation(const mx::array &a) {
    static const std::unordered_map<std::string_view, Operation> names{
        {"Add", Operation::add},         {"Subtract", Operation::subtract}, {"Multiply", Operation::multiply},
        {"Divide", Operation::divide},   {"Maximum", Operation::maximum},   {"Square", Operation::square},
        {"Rsqrt", Operation::rsqrt},     {"Negative", Operation::negative}, {"Tanh", Operation::tanh},
        {"HostExp", Operation::exp},     {"HostSigmoid", Operation::sigmoid}, {"Sum", Operation::sum},
        {"Max", Operation::largest}};
    const auto found = names.find(a.primitive().name());
    if (found == names.end() || a.dtype() != mx::float32) return std::nullopt;
    return found->second;
}

std::optional<mx::Shape> reduced(const mx::array &a) {
    mx::Shape shape = a.inputs()[0].shape(), one = shape;
    if (shape.empty()) return std::nullopt;
    one.back() = 1;
    if (a.shape() != one) return std::nullopt;
    return shape;
}

/// The sum or maximum so far: 16 partial results, and one for the last numbers of the row.
struct Reduction {
    float parts[lanes], rest;

    /// A maximum starts with the row's first number, so that a leading NaN is kept.
    void begin(Operation operation, float first) {
        rest = operation == Operation::sum ? 0 : first;
        std::fill_n(parts, lanes, rest);
    }

    float result(Operation operation) const {
        float y = rest;
        for (float part : parts) y = operation == Operation::sum ? y + part : std::max(y, part);
        return y;
    }
};

/// Computes the terms of one pass for `count` numbers of a row. `x[t]` points to the numbers of the t-th term, and `reductions[t]` is its reduction.
/// For a strided array, `at[leaf]` points to its numbers, and `steps[leaf]` is the stride.
FOR_EACH_CPU
void compute(
    const std::vector<Term> &terms, int pass, bool isFirst, const float *const *at, const int *steps, int count,
    float *const *x, Reduction *reductions) {
    for (size_t t = 0; t < terms.size(); t++) {
        const Term &term = terms[t];
        if (term.pass != pass) continue;
        float *y = x[t];
        if (term.leaf >= 0) {
            const int step = steps[term.leaf];
            if (step == 0 && isFirst) std::fill_n(y, count, *at[term.leaf]);
            if (step > 1 || step < 0) {
                for (int i = 0; i < count; i++) y[i] = at[term.leaf][ptrdiff_t(i) * step];
            }
            continue;
        }
        const float *a = x[term.a], *b = x[std::max(term.b, 0)];
        if (isFirst && term.reduces()) reductions[t].begin(term.operation, a[0]);
        switch (term.operation) {
            case Operation::add:
                EACH(y[i] = a[i] + b[i];)
                break;
            case Operation::subtract:
                EACH(y[i] = a[i] - b[i];)
                break;
            case Operation::multiply:
                EACH(y[i] = a[i] * b[i];)
                break;
            case Operation::divide:
                EACH(y[i] = a[i] / b[i];)
                break;
            case Operation::maximum:
                EACH(y[i] = a[i] > b[i] || a[i] != a[i] ? a[i] : b[i];)
                break;
            case Operation::square:
                EACH(y[i] = a[i] * a[i];)
                break;
            case Operation::rsqrt:
                for (int i = 0; i < count; i += lanes) {
                    LOAD(in, a + i, count - i)
                    const Floats r = 1.0f / __builtin_elementwise_sqrt(in);
                    STORE(y + i, r, count - i)
                }
                break;
            case Operation::negative:
                EACH(y[i] = -a[i];)
                break;
            case Operation::tanh:
                for (int i = 0; i < count; i++) y[i] = std::tanh(a[i]);
                break;
            case Operation::exp:
                EACH_VECTOR(EXPONENTIAL, a, y, count)
                break;
            case Operation::sigmoid:
                EACH_VECTOR(SIGMOID, a, y, count)
                break;
            case Operation::sum: {
                Floats sums;
                std::memcpy(&sums, reductions[t].parts, sizeof sums);
                int i = 0;
                for (; i + lanes <= count; i += lanes) {
                    LOAD(in, a + i, lanes)
                    sums += in;
                }
                for (; i < count; i++) reductions[t].rest += a[i];
                std::memcpy(reductions[t].parts, &sums, sizeof sums);
                break;
            }
            case Operation::largest: {
                Floats most;
                std::memcpy(&most, reductions[t].parts, sizeof most);
                int i = 0;
                for (; i + lanes <= count; i += lanes) {
                    LOAD(in, a + i, lanes)
                    most = most < in ? in : most;
                }
                for (; i < count; i++) reductions[t].rest = std::max(reductions[t].rest, a[i]);
                std::memcpy(reductions[t].parts, &most, sizeof most);
                break;
            }
        }
    }
}

/// A fused operation on the rows of a shape. The result has one number for each row, or has the shape itself.
class FusedPrimitive : public mx::UnaryPrimitive {
  public:
    FusedPrimitive(mx::Stream s, std::vector<Term> terms, mx::Shape shape)
        : UnaryPrimitive(s), terms(std::move(terms)), shape(std::move(shape)) {}

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        const bool reduces = std::any_of(terms.begin(), terms.end(), [](const Term &term) { return term.reduces(); });
        const bool isFlat = !reduces && std::all_of(inputs.begin(), inputs.end(), [&](const mx::array &a) {
            return a.size() == 1 || (a.shape() == shape && a.flags().row_contiguous);
        });
        std::vector<Rows> arrays;
        for (const auto &a : inputs) {
            arrays.emplace_back(a, shape);
            if (isFlat) arrays.back().step = a.size() == 1 ? 0 : 1;
        }
        const auto spare = std::find_if(inputs.begin(), inputs.end(), [&](const mx::array &a) {
            return a.is_donatable() && a.shape() == out.shape() && a.flags().row_contiguous && a.dtype() == mx::float32;
        });
        if (spare != inputs.end()) {
            out.copy_shared_buffer(*spare);
        } else {
            out.set_data(mx::allocator::malloc(out.nbytes()));
        }
        const bool isOne = out.shape() != shape;
        int64_t size = 1;
        for (int n : shape) size *= n;
        // With `isFlat`, all numbers form one row, which is cut into several.
        const int64_t length = isFlat ? std::min<int64_t>(size, 16 * chunk) : shape.back();
        const int64_t rows = (size + length - 1) / length;
        mx::cpu::get_command_encoder(stream()).dispatch(
            [terms = terms, arrays = std::move(arrays), isFlat, isOne, size, rows, length, y = out.data<float>()] {
                std::vector<int> steps;
                for (const auto &a : arrays) steps.push_back(a.step);
                by_rows(rows, length, terms.size(), [&](int64_t first, int64_t count) {
                    Row row(terms, steps, length);
                    for (int64_t index = first; index < first + count; index++) {
                        for (size_t i = 0; i < arrays.size(); i++) {
                            row.starts[i] = isFlat ? arrays[i].data + index * length * steps[i] : arrays[i].row(index);
                        }
                        row.compute(std::min(length, size - index * length), isOne, y + index * (isOne ? 1 : length));
                    }
                });
            });
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("fused for the CPU");
    }
    const char *name() const override { return "HostFused"; }

  private:
    struct Row {
        const std::vector<Term> &terms;
        const std::vector<int> &steps;
        std::vector<const float *> starts, at;
        /// The memory of each term's row, and of its present chunk. `isWhole` says whether the term's whole row is stored.
        std::vector<float *> row, x;
        std::vector<char> isWhole;
        std::vector<Reduction> reductions;

        Row(const std::vector<Term> &terms, const std::vector<int> &steps, int64_t length)
            : terms(terms), steps(steps), starts(steps.size()), at(steps.size()), row(terms.size()), x(terms.size()),
              reductions(terms.size()) {
            std::vector<size_t> places;
            size_t total = 0;
            for (const Term &term : terms) {
                isWhole.push_back(term.isKept && (term.leaf < 0 || steps[term.leaf] != 0));
                places.push_back(total);
                total += isWhole.back() ? length : std::min<int64_t>(chunk, length);
            }
            float *all = scratch(total);
            for (size_t t = 0; t < terms.size(); t++) row[t] = all + places[t];
        }

        void compute(int64_t length, bool isOne, float *y) {
            const Term &result = terms.back();
            for (size_t t = 0; t < terms.size(); t++) {
                if (terms[t].leaf < 0 || steps[terms[t].leaf] != 1) continue;
                row[t] = const_cast<float *>(starts[terms[t].leaf]);
                isWhole[t] = true;
            }
            for (int pass = 0; pass <= result.pass; pass++) {
                const bool isLast = pass == result.pass && !result.reduces();
                const int64_t end = isLast && isOne ? 1 : length;
                for (int64_t column = 0; column < end; column += chunk) {
                    for (size_t i = 0; i < at.size(); i++) at[i] = starts[i] + column * steps[i];
                    for (size_t t = 0; t < terms.size(); t++) x[t] = row[t] + (isWhole[t] ? column : 0);
                    if (isLast) x.back() = y + column;
                    host::compute(
                        terms, pass, column == 0, at.data(), steps.data(), int(std::min<int64_t>(chunk, end - column)),
                        x.data(), reductions.data());
                }
                for (size_t t = 0; t < terms.size(); t++) {
                    if (terms[t].pass != pass || !terms[t].reduces()) continue;
                    std::fill_n(row[t], std::min<int64_t>(chunk, length), reductions[t].result(terms[t].operation));
                }
            }
            if (result.reduces()) *y = *row.back();
        }
    };

    const std::vector<Term> terms;
    const mx::Shape shape;
};

}  // namespace

mx::array fused(const mx::array &result, const std::vector<mx::array> &inputs) {
    const auto s = result.has_primitive() ? result.primitive().stream() : mx::default_stream(mx::Device::cpu);
    if (!result.has_primitive() || !is_plain(result, s)) return result;
    std::vector<Term> terms;
    std::vector<mx::array> leaves;
    std::unordered_map<uintptr_t, int> places;
    const auto is_input = [&](const mx::array &a) {
        return std::any_of(inputs.begin(), inputs.end(), [&](const auto &in) { return in.id() == a.id(); });
    };
    mx::Shape shape = result.shape();
    bool isPossible = true, hasReductions = false;
    const auto are_rows = [&](const std::optional<mx::Shape> &rows) {
        if (!rows || (hasReductions && *rows != shape)) return false;
        mx::Shape one = *rows;
        one.back() = 1;
        if (*rows != result.shape() && one != result.shape()) return false;
        shape = *rows;
        return hasReductions = true;
    };
    const auto visit = [&](const auto &self, const mx::array &a) -> int {
        if (const auto known = places.find(a.id()); known != places.end()) return known->second;
        Term term;
        const bool isResult = !is_input(a) && a.has_primitive() && !a.is_available();
        if (isResult) {
            const std::string_view name = a.primitive().name();
            if ((name == "Broadcast" || name == "Contiguous") && a.inputs()[0].dtype() == mx::float32) {
                return places[a.id()] = self(self, a.inputs()[0]);
            }
        }
        auto found = isResult ? operation(a) : std::nullopt;
        if (found && is_reduction(*found) && !are_rows(reduced(a))) found = std::nullopt;
        if (found) {
            term.operation = *found;
            term.a = self(self, a.inputs()[0]);
            if (a.inputs().size() > 1) term.b = self(self, a.inputs()[1]);
            for (const int operand : {term.a, term.b}) {
                if (operand >= 0) term.pass = std::max(term.pass, terms[operand].pass + terms[operand].reduces());
            }
            for (const int operand : {term.a, term.b}) {
                if (operand >= 0 && terms[operand].pass < term.pass) terms[operand].isKept = !terms[operand].reduces();
            }
        } else {
            isPossible = isPossible && a.dtype() == mx::float32;
            term.leaf = int(leaves.size());
            leaves.push_back(a);
        }
        terms.push_back(term);
        return places[a.id()] = int(terms.size()) - 1;
    };
    visit(visit, result);
    if (!isPossible || terms.back().leaf >= 0 || terms.size() > 64) return result;
    return mx::array(result.shape(), mx::float32, std::make_shared<FusedPrimitive>(s, std::move(terms), shape), leaves);
}

// MARK: - Norm

namespace {

FOR_EACH_CPU
void normalize(const float *x, const float *weight, float eps, int64_t length, float *y) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= length; i += 16) {
        for (int lane = 0; lane < 16; lane++) sums[lane] += x[i + lane] * x[i + lane];
    }
    float sum = 0;
    for (; i < length; i++) sum += x[i] * x[i];
    for (float part : sums) sum += part;
    const float r = 1.0f / std::sqrt(sum / float(length) + eps);
    for (i = 0; i < length; i++) y[i] = weight[i] * (x[i] * r);
}

class RMSNormPrimitive : public mx::UnaryPrimitive {
  public:
    RMSNormPrimitive(mx::Stream s, float eps) : UnaryPrimitive(s), eps(eps) {}

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        out.set_data(mx::allocator::malloc(out.nbytes()));
        const int64_t length = out.shape(-1), rows = out.size() / length;
        mx::cpu::get_command_encoder(stream()).dispatch(
            [x = Rows(inputs[0]), weight = Rows(inputs[1]), eps = eps, rows, length, y = out.data<float>()] {
                std::vector<float> xs, weights;
                const float *in = x.in_order(xs), *factors = weight.in_order(weights);
                by_rows(rows, length, 4, [&](int64_t first, int64_t count) {
                    for (int64_t row = first; row < first + count; row++) {
                        normalize(in + row * length, factors, eps, length, y + row * length);
                    }
                });
            });
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("a norm for the CPU");
    }
    const char *name() const override { return "HostRMSNorm"; }

  private:
    const float eps;
};

}  // namespace

std::optional<mx::array> rms_norm(const mx::array &x, const mx::array &weight, float eps, mx::Stream s) {
    if (!is_plain(x, s) || weight.is_tracer() || weight.dtype() != mx::float32) return std::nullopt;
    return mx::array(
        x.shape(), mx::float32, std::make_shared<RMSNormPrimitive>(s, eps), std::vector<mx::array>{x, weight});
}

// MARK: - Rotation

namespace {

/// Computes cos and sin of position × frequency, by series around the nearest multiple of π / 2. The product is in float32, as in MLX.
FOR_EACH_CPU
void turns(float position, const float *frequencies, int count, float *cos, float *sin) {
    for (int i = 0; i < count; i++) {
        const double angle = position * frequencies[i], quarters = __builtin_rint(angle * 0.6366197723675814);
        const double r = angle - quarters * 1.5707963267948966, r2 = r * r;
        const double s =
            r * (1 + r2 * (-1.0 / 6 + r2 * (1.0 / 120 + r2 * (-1.0 / 5040 + r2 * (1.0 / 362880 - r2 / 39916800)))));
        const double c =
            1 + r2 * (-1.0 / 2 + r2 * (1.0 / 24 + r2 * (-1.0 / 720 + r2 * (1.0 / 40320 - r2 / 3628800))));
        const double halves = __builtin_floor(quarters / 2), sign = 1 - 2 * (halves - 2 * __builtin_floor(halves / 2));
        const bool isOdd = quarters != 2 * halves;
        cos[i] = float(sign * (isOdd ? -s : c));
        sin[i] = float(sign * (isOdd ? c : s));
    }
}

FOR_EACH_CPU
void turn(const float *x, int step, const float *cos, const float *sin, int half, int length, float *y) {
    for (int i = 0; i < half; i++) {
        const float a = x[ptrdiff_t(i) * step], b = x[ptrdiff_t(i + half) * step];
        y[i] = a * cos[i] - b * sin[i];
        y[i + half] = a * sin[i] + b * cos[i];
    }
    for (int i = 2 * half; i < length; i++) y[i] = x[ptrdiff_t(i) * step];
}

class RoPEPrimitive : public mx::UnaryPrimitive {
  public:
    /// Without an `offset`, the third input has the offsets: one for each index of the first axis, or one for all.
    RoPEPrimitive(mx::Stream s, std::optional<int> offset) : UnaryPrimitive(s), offset(offset) {}

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        out.set_data(mx::allocator::malloc(out.nbytes()));
        const int length = out.shape(-1), positions = out.shape(-2), half = inputs[1].shape(-1);
        const int sequences = offset ? 1 : out.shape(0);
        const int64_t heads = out.size() / length / positions / sequences;
        const int *offsets = offset ? nullptr : inputs[2].data<int>();
        const ptrdiff_t step = offset || inputs[2].size() == 1 ? 0 : inputs[2].strides(0);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [x = Rows(inputs[0], out.shape()), periods = Rows(inputs[1]), offset = offset, offsets, step, sequences,
             heads, positions, half, length, y = out.data<float>()] {
                std::vector<float> room, frequencies(half);
                const float *period = periods.in_order(room);
                for (int i = 0; i < half; i++) frequencies[i] = 1.0f / period[i];
                by_rows(sequences * positions, heads * length, 4, [&](int64_t first, int64_t count) {
                    std::vector<float> cos(half), sin(half);
                    for (int64_t index = first; index < first + count; index++) {
                        const int64_t sequence = index / positions, position = index % positions;
                        const int64_t start = offset ? *offset : offsets[sequence * step];
                        turns(float(start + position), frequencies.data(), half, cos.data(), sin.data());
                        const int64_t begin = sequence * heads * positions, end = begin + heads * positions;
                        for (int64_t row = begin + position; row < end; row += positions) {
                            turn(x.row(row), x.step, cos.data(), sin.data(), half, length, y + row * length);
                        }
                    }
                });
            });
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("a rotation for the CPU");
    }
    const char *name() const override { return "HostRoPE"; }

  private:
    const std::optional<int> offset;
};

}  // namespace

std::optional<mx::array> rope(const mx::array &x, int offset, const mx::array &periods, mx::Stream s) {
    if (!is_plain(x, s) || x.ndim() < 2 || periods.dtype() != mx::float32) return std::nullopt;
    return mx::array(
        x.shape(), mx::float32, std::make_shared<RoPEPrimitive>(s, offset),
        std::vector<mx::array>{x, periods});
}

std::optional<mx::array> rope(const mx::array &x, const mx::array &offsets, const mx::array &periods, mx::Stream s) {
    const bool fits = x.ndim() > 2 && (offsets.size() == 1 || offsets.shape() == mx::Shape{x.shape(0)});
    if (!fits || !is_plain(x, s) || offsets.dtype() != mx::int32 || periods.dtype() != mx::float32) return std::nullopt;
    return mx::array(
        x.shape(), mx::float32, std::make_shared<RoPEPrimitive>(s, std::nullopt),
        std::vector<mx::array>{x, periods, offsets});
}

}  // namespace host
