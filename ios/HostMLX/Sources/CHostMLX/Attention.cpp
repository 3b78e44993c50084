#include "Attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "Pool.h"
#include "Rows.h"
#include "Vectors.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {
namespace {

/// Inlines a function into each clone of its caller, so that the function is compiled for the clone's CPU.
#define INLINE __attribute__((always_inline)) inline

// MARK: - Products

/// A matrix with contiguous rows, which begin `stride` numbers apart, or the transpose of such a matrix.
struct Matrix {
    const float *data;
    ptrdiff_t stride;
};

/// Computes c = a b, or c += a b if `adds` is set. c is [rows, 16], and its sums stay in registers. b is stored by rows. a is stored by rows, or by
/// columns if `transposed` is set.
template <int rows, bool transposed>
INLINE void multiply_tile(Matrix a, Matrix b, int depth, bool adds, float *c, ptrdiff_t c_stride) {
    Floats sums[rows] = {};
    if (adds) {
#pragma unroll
        for (int i = 0; i < rows; i++) std::memcpy(&sums[i], c + i * c_stride, sizeof(Floats));
    }
    for (int k = 0; k < depth; k++) {
        Floats in;
        std::memcpy(&in, b.data + k * b.stride, sizeof in);
#pragma unroll
        for (int i = 0; i < rows; i++) {
            const Floats factor = a.data[transposed ? i + k * a.stride : i * a.stride + k] - Floats{};
            sums[i] = __builtin_elementwise_fma(factor, in, sums[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < rows; i++) std::memcpy(c + i * c_stride, &sums[i], sizeof(Floats));
}

/// Computes c = a b, or c += a b if `adds` is set. c is [rows, columns], with a multiple of 16 columns. The sums of six rows take 12 of AVX2's 16
/// registers.
template <bool transposed = false>
INLINE void multiply(Matrix a, Matrix b, int rows, int columns, int depth, bool adds, float *c, ptrdiff_t c_stride) {
    int i = 0;
    const auto take = [&]<int count>(std::integral_constant<int, count>) __attribute__((always_inline)) {
        for (int j = 0; j < columns; j += lanes) {
            multiply_tile<count, transposed>(
                {a.data + (transposed ? i : i * a.stride), a.stride}, {b.data + j, b.stride}, depth, adds,
                c + i * c_stride + j, c_stride);
        }
        i += count;
    };
    while (i + 6 <= rows) take(std::integral_constant<int, 6>());
    while (i + 2 <= rows) take(std::integral_constant<int, 2>());
    while (i < rows) take(std::integral_constant<int, 1>());
}

// MARK: - Queries

/// An array [1, heads, n, d] with contiguous rows: the array itself, or a copy in `room`.
struct Heads {
    const float *data;
    ptrdiff_t head, row;

    Heads(const Rows &x, std::vector<float> &room)
        : data(x.step == 1 ? x.data : x.in_order(room)), head(x.strides[1]), row(x.strides[2]) {
        if (x.step != 1) head = ptrdiff_t(x.shape[2]) * x.shape[3], row = x.shape[3];
    }
    const float *at(int h, int position) const { return data + h * head + position * row; }
};

struct Problem {
    int heads, groups, queries, keys, d;
    float scale;
    bool isCausal;
    const bool *mask = nullptr;
    ptrdiff_t mask_row = 0, mask_column = 0;

    int per_group() const { return heads / groups; }
    /// Each part has up to 8 heads, which share the group's keys.
    int head_parts() const { return (per_group() + 7) / 8; }
    int heads_together() const { return (per_group() + head_parts() - 1) / head_parts(); }
    int positions() const { return std::max(1, 4 / heads_together()) * lanes; }
    int parts() const { return (queries + positions() - 1) / positions() * head_parts(); }
    int most_rows() const { return positions() * heads_together(); }
};

/// A part of a group's queries that is processed together. Each row is one position of one head.
struct Queries {
    const Problem &problem;
    int group, first_head, heads, position, positions, rows;
    /// A range that contains all keys to which the queries attend.
    int begin = 0, end;

    Queries(const Problem &problem, int group, int index) : problem(problem), group(group), positions(problem.positions()) {
        const int part = index % problem.head_parts() * problem.heads_together();
        first_head = group * problem.per_group() + part;
        heads = std::min(problem.heads_together(), problem.per_group() - part);
        position = index / problem.head_parts() * positions;
        rows = heads * positions;
        const int last = std::min(position + positions, problem.queries);
        end = problem.isCausal ? problem.keys - problem.queries + last : problem.keys;
        if (!problem.mask) return;
        int first = end, behind = 0;
        for (int i = position; i < last; i++) {
            for (int key = 0; key < first; key++) {
                if (sees(i, key)) first = key;
            }
            for (int key = end; key > behind; key--) {
                if (sees(i, key - 1)) behind = key;
            }
        }
        begin = std::min(first, behind), end = behind;
    }

    int head(int row) const { return first_head + row / positions; }
    /// Whether a row has a query. The last positions of each head may have none.
    bool exists(int row) const { return position + row % positions < problem.queries; }
    int query(int row) const { return std::min(position + row % positions, problem.queries - 1); }
    bool sees(int query, int key) const { return problem.mask[query * problem.mask_row + key * problem.mask_column]; }

    /// Reads the queries' rows of x, multiplied by a factor, into `out` [rows, d], unless it is null, and into `transposed` [d, rows]. Rows without a
    /// query become 0.
    void read(const Heads &x, float factor, float *out, float *transposed) const {
        for (int row = 0; row < rows; row++) {
            const float *in = x.at(head(row), query(row));
            for (int i = 0; i < problem.d; i++) {
                const float value = exists(row) ? in[i] * factor : 0;
                if (out) out[row * problem.d + i] = value;
                transposed[i * rows + row] = value;
            }
        }
    }
};

/// Sets the scores [keys, rows] of hidden keys in `first` ..< `end` to −∞.
INLINE void hide(const Queries &q, int first, int end, float *scores) {
    const int before = q.problem.keys - q.problem.queries;
    const bool *mask = q.problem.mask;
    if (!mask && !q.problem.isCausal) return;
    Integers lane;
    for (int i = 0; i < lanes; i++) lane[i] = i;
    for (int start = 0; start < q.positions; start += lanes) {
        const int own = before + q.position + start;
        for (int key = mask ? first : std::max(first, own + 1); key < end; key++) {
            Integers sees = lane >= key - own;
            for (int i = 0; mask && i < lanes; i++) sees[i] = q.sees(q.query(start + i), key) ? -1 : 0;
            for (int row = start; row < q.rows; row += q.positions) {
                float *score = scores + ptrdiff_t(key - first) * q.rows + row;
                Floats value;
                std::memcpy(&value, score, sizeof value);
                value = sees ? value : Floats{} - std::numeric_limits<float>::infinity();
                std::memcpy(score, &value, sizeof value);
            }
        }
    }
}

// MARK: - Softmax

constexpr int keys_together = 128;

/// A lower bound of all finite scores, so that the maximum is finite even if all keys are hidden.
constexpr float lowest = -std::numeric_limits<float>::max();

/// Running values of each row over the keys: the maximum score, Σ exp(S − maximum) and Σ exp(S − maximum) dP. See Milakov and Gimelshein, arXiv
/// 1805.02867.
struct Sums {
    float *largest, *totals, *weighted;

    void begin(int rows) const {
        std::fill_n(largest, rows, lowest);
        std::fill_n(totals, rows, 0);
        if (weighted) std::fill_n(weighted, rows, 0);
    }
};

/// Replaces the scores S [keys, rows] by exp(S − maximum), and adds the results to the sums. The maximum is over all keys so far. `dp` is dP, or
/// null. `factors`, unless null, become exp(m − maximum), where m is the maximum before the call.
INLINE void exponentiate(float *scores, const float *dp, int keys, int rows, const Sums &sums, float *factors) {
    for (int row = 0; row < rows; row += lanes) {
        Floats before, most, total, weighted{};
        std::memcpy(&before, sums.largest + row, sizeof before);
        std::memcpy(&total, sums.totals + row, sizeof total);
        if (dp) std::memcpy(&weighted, sums.weighted + row, sizeof weighted);
        most = before;
        for (int k = 0; k < keys; k++) {
            Floats score;
            std::memcpy(&score, scores + k * rows + row, sizeof score);
            most = __builtin_elementwise_max(most, score);
        }
        EXPONENTIAL(factor, before - most)
        total *= factor;
        weighted *= factor;
        for (int k = 0; k < keys; k++) {
            Floats score;
            std::memcpy(&score, scores + k * rows + row, sizeof score);
            EXPONENTIAL(e, score - most)
            std::memcpy(scores + k * rows + row, &e, sizeof e);
            total += e;
            if (dp) {
                Floats by;
                std::memcpy(&by, dp + k * rows + row, sizeof by);
                weighted = __builtin_elementwise_fma(e, by, weighted);
            }
        }
        std::memcpy(sums.largest + row, &most, sizeof most);
        std::memcpy(sums.totals + row, &total, sizeof total);
        if (dp) std::memcpy(sums.weighted + row, &weighted, sizeof weighted);
        if (factors) std::memcpy(factors + row, &factor, sizeof factor);
    }
}

// MARK: - Forward

FOR_EACH_CPU
void attend(
    const Queries &q, const Heads &query, const Heads &key, const Heads &value, float *y, ptrdiff_t y_head,
    ptrdiff_t y_row) {
    const int d = q.problem.d, rows = q.rows;
    float *columns = scratch(size_t(rows) * (2 * d + keys_together + 3));
    float *out = columns + rows * d, *scores = out + rows * d, *factors = scores + rows * keys_together;
    const Sums sums{factors + rows, factors + 2 * rows, nullptr};
    q.read(query, q.problem.scale, nullptr, columns);
    sums.begin(rows);
    std::fill_n(out, rows * d, 0);
    for (int first = q.begin; first < q.end; first += keys_together) {
        const int keys = std::min(keys_together, q.end - first);
        multiply({key.at(q.group, first), key.row}, {columns, rows}, keys, rows, d, false, scores, rows);
        hide(q, first, first + keys, scores);
        exponentiate(scores, nullptr, keys, rows, sums, factors);
        for (int row = 0; row < rows; row++) {
            for (int i = 0; i < d; i++) out[row * d + i] *= factors[row];
        }
        multiply<true>({scores, rows}, {value.at(q.group, first), value.row}, rows, d, keys, true, out, d);
    }
    for (int row = 0; row < rows; row++) {
        if (!q.exists(row)) continue;
        float *place = y + q.head(row) * y_head + q.query(row) * y_row;
        for (int i = 0; i < d; i++) place[i] = out[row * d + i] / sums.totals[row];
    }
}

// MARK: - Backward

struct Pass {
    Queries q;
    /// The number of keys in a part, a multiple of `keys_together`.
    int part;
    /// q multiplied by the scale, and dO, both [rows, d], with their transposes.
    float *q_rows, *q_columns, *d_rows, *d_columns;
    /// exp(S − maximum) and dP, later P and dS, [keys, rows]. `largest` has the maxima [rows] that were used for each block of `keys_together` keys.
    float *e, *dp, *largest;
    /// `sums` has the three arrays [rows] of `Sums` for each part of the keys. `dq` has each part's term of dq / scale, [rows, d].
    float *sums, *dq;

    Pass(const Queries &q, int part, float *room) : q(q), part(part) {
        const Problem &problem = q.problem;
        const auto take = [&](size_t count) { return std::exchange(room, room + problem.most_rows() * count); };
        q_rows = take(problem.d), q_columns = take(problem.d), d_rows = take(problem.d), d_columns = take(problem.d);
        e = take(problem.keys), dp = take(problem.keys), largest = take(parts(problem, keys_together));
        sums = take(3 * parts(problem, part)), dq = take(parts(problem, part) * problem.d);
    }
    static size_t parts(const Problem &problem, int part) { return (problem.keys + part - 1) / part; }
    static size_t size(const Problem &problem, int part) {
        return problem.most_rows() * (4 * problem.d + 2 * problem.keys + parts(problem, keys_together) +
                                      parts(problem, part) * (3 + problem.d));
    }

    /// Calls `f(i, first, keys)` for each block of `keys_together` keys in a part. i is the block's index over all parts. The block's keys are the
    /// `keys` keys from `first` on. Keys outside `q.begin` ..< `q.end` are left out.
    template <class F>
    INLINE void each(int index, F f) const {
        const int end = std::min(q.end, (index + 1) * part);
        for (int i = index * part / keys_together; i * keys_together < end; i++) {
            const int first = std::max(q.begin, i * keys_together), last = std::min(end, (i + 1) * keys_together);
            if (first < last) f(i, first, last - first);
        }
    }
    Sums of(int index) const {
        float *at = sums + ptrdiff_t(index) * 3 * q.rows;
        return {at, at + q.rows, at + 2 * q.rows};
    }
    int begin() const { return q.begin / part; }
    int end() const { return (q.end + part - 1) / part; }
};

/// Computes exp(S − maximum) and dP = dO vᵀ for a part of the keys.
FOR_EACH_CPU
void scores(const Pass &pass, int index, const Heads &key, const Heads &value) {
    const int rows = pass.q.rows, d = pass.q.problem.d;
    const Sums sums = pass.of(index);
    sums.begin(rows);
    pass.each(index, [&](int i, int first, int keys) __attribute__((always_inline)) {
        float *e = pass.e + ptrdiff_t(first) * rows, *dp = pass.dp + ptrdiff_t(first) * rows;
        multiply({key.at(pass.q.group, first), key.row}, {pass.q_columns, rows}, keys, rows, d, false, e, rows);
        multiply({value.at(pass.q.group, first), value.row}, {pass.d_columns, rows}, keys, rows, d, false, dp, rows);
        hide(pass.q, first, first + keys, e);
        exponentiate(e, dp, keys, rows, sums, nullptr);
        std::copy_n(sums.largest, rows, pass.largest + ptrdiff_t(i) * rows);
    });
}

/// Computes P and dS = P ∘ (dP − rowsum(P ∘ dP)) for a part of the keys. Adds Pᵀ dO to dv and dSᵀ q · scale to dk, and stores dS k as the part's term
/// of dq / scale.
FOR_EACH_CPU
void gradients(const Pass &pass, int index, const Heads &key, float *dk, float *dv) {
    const int rows = pass.q.rows, d = pass.q.problem.d;
    float *dq = pass.dq + ptrdiff_t(index) * rows * d;
    float *most = scratch(3 * rows), *totals = most + rows, *means = totals + rows;
    for (int row = 0; row < rows; row += lanes) {
        Floats largest = Floats{} + lowest, sum{}, mean{};
        for (int i = pass.begin(); i < pass.end(); i++) {
            Floats other;
            std::memcpy(&other, pass.of(i).largest + row, sizeof other);
            largest = __builtin_elementwise_max(largest, other);
        }
        for (int i = pass.begin(); i < pass.end(); i++) {
            Floats other, total, weighted;
            std::memcpy(&other, pass.of(i).largest + row, sizeof other);
            std::memcpy(&total, pass.of(i).totals + row, sizeof total);
            std::memcpy(&weighted, pass.of(i).weighted + row, sizeof weighted);
            EXPONENTIAL(factor, other - largest)
            sum = __builtin_elementwise_fma(total, factor, sum);
            mean = __builtin_elementwise_fma(weighted, factor, mean);
        }
        mean /= sum;
        std::memcpy(most + row, &largest, sizeof largest);
        std::memcpy(totals + row, &sum, sizeof sum);
        std::memcpy(means + row, &mean, sizeof mean);
    }
    bool adds = false;
    pass.each(index, [&](int i, int first, int keys) __attribute__((always_inline)) {
        float *p = pass.e + ptrdiff_t(first) * rows, *ds = pass.dp + ptrdiff_t(first) * rows;
        for (int row = 0; row < rows; row += lanes) {
            Floats own, largest, total, mean;
            std::memcpy(&own, pass.largest + ptrdiff_t(i) * rows + row, sizeof own);
            std::memcpy(&largest, most + row, sizeof largest);
            std::memcpy(&total, totals + row, sizeof total);
            std::memcpy(&mean, means + row, sizeof mean);
            EXPONENTIAL(factor, own - largest)
            factor /= total;
            for (int k = 0; k < keys; k++) {
                Floats e, difference;
                std::memcpy(&e, p + k * rows + row, sizeof e);
                std::memcpy(&difference, ds + k * rows + row, sizeof difference);
                e *= factor;
                difference = e * (difference - mean);
                std::memcpy(p + k * rows + row, &e, sizeof e);
                std::memcpy(ds + k * rows + row, &difference, sizeof difference);
            }
        }
        multiply({p, rows}, {pass.d_rows, d}, keys, d, rows, true, dv + ptrdiff_t(first) * d, d);
        multiply({ds, rows}, {pass.q_rows, d}, keys, d, rows, true, dk + ptrdiff_t(first) * d, d);
        multiply<true>({ds, rows}, {key.at(pass.q.group, first), key.row}, rows, d, keys, adds, dq, d);
        adds = true;
    });
}

void finish(const Pass &pass, float *dq) {
    const Queries &q = pass.q;
    const int d = q.problem.d;
    for (int row = 0; row < q.rows; row++) {
        if (!q.exists(row)) continue;
        float *out = dq + (ptrdiff_t(q.head(row)) * q.problem.queries + q.query(row)) * d;
        std::fill_n(out, d, 0);
        for (int part = pass.begin(); part < pass.end(); part++) {
            const float *in = pass.dq + (ptrdiff_t(part) * q.rows + row) * d;
            for (int i = 0; i < d; i++) out[i] += in[i];
        }
        for (int i = 0; i < d; i++) out[i] *= q.problem.scale;
    }
}

/// Computes dq, dk and dv. dk and dv [groups, keys, d] must be 0 before the call. The order of the sums does not depend on the number of threads.
void backward(
    const Problem &problem, const Heads &query, const Heads &key, const Heads &value, const Heads &d_out, float *dq,
    float *dk, float *dv) {
    // At most 16 parts. For short sequences, several groups are processed in parallel.
    const int part = ((problem.keys + 15) / 16 + keys_together - 1) / keys_together * keys_together;
    const int parts = Pass::parts(problem, part), together = std::clamp(2048 / problem.keys, 1, problem.groups);
    const size_t size = Pass::size(problem, part);
    const auto room = std::make_unique_for_overwrite<float[]>(size * together + lanes);
    float *aligned = room.get() + (lanes - reinterpret_cast<uintptr_t>(room.get()) / sizeof(float) % lanes) % lanes;
    for (int group = 0; group < problem.groups; group += together) {
        const int count = std::min(together, problem.groups - group);
        std::vector<Pass> passes;
        for (int index = 0; index <= problem.parts(); index++) {
            const auto before = std::move(passes);
            passes.clear();
            for (int i = 0; i < count && index < problem.parts(); i++) {
                passes.emplace_back(Queries(problem, group + i, index), part, aligned + i * size);
            }
            parallel(count, true, [&](int i) {
                if (index > 0) finish(before[i], dq);
                if (index == problem.parts()) return;
                passes[i].q.read(query, problem.scale, passes[i].q_rows, passes[i].q_columns);
                passes[i].q.read(d_out, 1, passes[i].d_rows, passes[i].d_columns);
            });
            const auto each = [&](auto f) {
                parallel(count * parts, true, [&](int i) {
                    const Pass &pass = passes[i / parts];
                    if (i % parts >= pass.begin() && i % parts < pass.end()) f(pass, i % parts);
                });
            };
            if (index == problem.parts()) break;
            each([&](const Pass &pass, int i) { scores(pass, i, key, value); });
            each([&](const Pass &pass, int i) {
                const ptrdiff_t place = ptrdiff_t(pass.q.group) * problem.keys * problem.d;
                gradients(pass, i, key, dk + place, dv + place);
            });
        }
    }
}

// MARK: - One query

typedef float Four __attribute__((vector_size(16)));

/// Computes softmax(scale q kᵀ) v of one query over `length` keys.
FOR_EACH_CPU
void attend_one(const float *q, Matrix k, Matrix v, int length, int d, float scale, float *scores, float *out) {
    // Keys are processed four at a time. The last key is repeated to fill four.
    for (int n = 0; n < length; n += 4) {
        const float *keys[4];
        for (int j = 0; j < 4; j++) {
            keys[j] = k.data + std::min(n + j, length - 1) * k.stride;
            for (int m = 0; m < d; m += lanes) __builtin_prefetch(keys[j] + 8 * k.stride + m);
        }
        Floats sums[4] = {};
        int i = 0;
        for (; i + lanes <= d; i += lanes) {
            Floats a;
            std::memcpy(&a, q + i, sizeof a);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                Floats b;
                std::memcpy(&b, keys[j] + i, sizeof b);
                sums[j] = __builtin_elementwise_fma(a, b, sums[j]);
            }
        }
        Four parts[4], rest{};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const auto eight = __builtin_shufflevector(sums[j], sums[j], 0, 1, 2, 3, 4, 5, 6, 7) +
                               __builtin_shufflevector(sums[j], sums[j], 8, 9, 10, 11, 12, 13, 14, 15);
            parts[j] = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
            for (int m = i; m < d; m++) rest[j] += q[m] * keys[j][m];
        }
        const Four first = __builtin_shufflevector(parts[0], parts[1], 0, 1, 4, 5) +
                           __builtin_shufflevector(parts[0], parts[1], 2, 3, 6, 7);
        const Four second = __builtin_shufflevector(parts[2], parts[3], 0, 1, 4, 5) +
                            __builtin_shufflevector(parts[2], parts[3], 2, 3, 6, 7);
        const Four sum = (__builtin_shufflevector(first, second, 0, 2, 4, 6) +
                          __builtin_shufflevector(first, second, 1, 3, 5, 7) + rest) * scale;
        std::memcpy(scores + n, &sum, sizeof(float) * std::min(4, length - n));
    }
    Floats most = Floats{} - std::numeric_limits<float>::infinity();
    for (int n = 0; n < length; n += lanes) {
        LOAD(in, scores + n, length - n)
        most = __builtin_elementwise_max(most, in);
    }
    float largest = most[0];
    for (int j = 1; j < lanes; j++) largest = std::max(largest, most[j]);
    Floats total{};
    for (int n = 0; n < length; n += lanes) {
        LOAD(in, scores + n, length - n)
        EXPONENTIAL(e, in - largest)
        STORE(scores + n, e, length - n)
        total += e;
    }
    float sum = 0;
    for (int j = 0; j < lanes; j++) sum += total[j];
    // 64 columns of v are processed at a time, so that the sums fit into registers.
    int i = 0;
    const auto weigh = [&]<int count>(std::integral_constant<int, count>) __attribute__((always_inline)) {
        Floats sums[count] = {};
        for (int n = 0; n < length; n++) {
            const float *value = v.data + n * v.stride + i;
            __builtin_prefetch(value + 16 * v.stride);
#pragma unroll
            for (int j = 0; j < count; j++) {
                Floats some;
                std::memcpy(&some, value + j * lanes, sizeof some);
                sums[j] = __builtin_elementwise_fma(some, Floats{} + scores[n], sums[j]);
            }
        }
        for (int j = 0; j < count; j++, i += lanes) {
            sums[j] = sums[j] / sum;
            std::memcpy(out + i, &sums[j], sizeof sums[j]);
        }
    };
    while (i + 4 * lanes <= d) weigh(std::integral_constant<int, 4>());
    while (i + lanes <= d) weigh(std::integral_constant<int, 1>());
    for (; i < d; i++) {
        float result = 0;
        for (int n = 0; n < length; n++) result += scores[n] * v.data[n * v.stride + i];
        out[i] = result / sum;
    }
}

// MARK: - Operations

Problem problem_of(const mx::array &q, const mx::array &k, float scale, bool isCausal, const mx::array *mask) {
    Problem problem{q.shape(1), k.shape(1), q.shape(2), k.shape(2), q.shape(3), scale, isCausal};
    if (mask) problem.mask = mask->data<bool>(), problem.mask_row = mask->strides(0), problem.mask_column = mask->strides(1);
    return problem;
}

class AttentionGradient : public mx::Primitive {
  public:
    AttentionGradient(mx::Stream s, float scale, bool isCausal) : Primitive(s), scale(scale), isCausal(isCausal) {}

    void eval_cpu(const std::vector<mx::array> &inputs, std::vector<mx::array> &outputs) override {
        for (auto &out : outputs) out.set_data(mx::allocator::malloc(out.nbytes()));
        const auto problem = problem_of(inputs[0], inputs[1], scale, isCausal, inputs.size() > 4 ? &inputs[4] : nullptr);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [problem, q = Rows(inputs[0]), k = Rows(inputs[1]), v = Rows(inputs[2]), d_out = Rows(inputs[3]),
             dq = outputs[0].data<float>(), dk = outputs[1].data<float>(), dv = outputs[2].data<float>()] {
                std::vector<float> rooms[4];
                const size_t size = size_t(problem.groups) * problem.keys * problem.d;
                std::fill_n(dk, size, 0);
                std::fill_n(dv, size, 0);
                backward(
                    problem, Heads(q, rooms[0]), Heads(k, rooms[1]), Heads(v, rooms[2]), Heads(d_out, rooms[3]), dq, dk,
                    dv);
            });
    }
    void eval_gpu(const std::vector<mx::array> &, std::vector<mx::array> &) override {
        throw std::runtime_error("attention for the CPU");
    }
    const char *name() const override { return "HostAttentionGradient"; }

  private:
    const float scale;
    const bool isCausal;
};

/// The attention of q, k, v and an optional mask. In the output, the numbers of all heads at a position are contiguous.
class Attention : public mx::UnaryPrimitive {
  public:
    Attention(mx::Stream s, float scale, bool isCausal) : UnaryPrimitive(s), scale(scale), isCausal(isCausal) {}

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        const int heads = out.shape(1), queries = out.shape(2), d = out.shape(3);
        const mx::Strides strides{out.strides(0), d, ptrdiff_t(heads) * d, 1};
        const bool isInOrder = heads == 1 || queries == 1;
        out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, {true, isInOrder, false});
        const auto problem = problem_of(inputs[0], inputs[1], scale, isCausal, inputs.size() > 3 ? &inputs[3] : nullptr);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [problem, q = Rows(inputs[0]), k = Rows(inputs[1]), v = Rows(inputs[2]), y = out.data<float>(), strides] {
                std::vector<float> rooms[3];
                const Heads query(q, rooms[0]), key(k, rooms[1]), value(v, rooms[2]);
                if (problem.queries == 1 && !problem.mask) {
                    const auto &[heads, groups, queries, keys, d, scale, isCausal, mask, mask_row, mask_column] = problem;
                    return parallel(heads, int64_t(heads) * keys * d > 1 << 18, [&](int head) {
                        const int group = head / problem.per_group();
                        attend_one(
                            query.at(head, 0), {key.at(group, 0), key.row}, {value.at(group, 0), value.row}, keys, d,
                            scale, scratch(keys), y + head * strides[1]);
                    });
                }
                const int parts = problem.parts();
                parallel(problem.groups * parts, true, [&](int index) {
                    // Queries with the most keys come first.
                    const Queries queries(problem, index % problem.groups, parts - 1 - index / problem.groups);
                    attend(queries, query, key, value, y, strides[1], strides[2]);
                });
            });
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("attention for the CPU");
    }

    std::vector<mx::array> vjp(
        const std::vector<mx::array> &primals, const std::vector<mx::array> &cotangents,
        const std::vector<int> &argnums, const std::vector<mx::array> &) override {
        std::vector<mx::array> inputs(primals.begin(), primals.begin() + 3), gradients;
        inputs.push_back(cotangents[0]);
        inputs.insert(inputs.end(), primals.begin() + 3, primals.end());
        const auto all = mx::array::make_arrays(
            {primals[0].shape(), primals[1].shape(), primals[2].shape()}, {mx::float32, mx::float32, mx::float32},
            std::make_shared<AttentionGradient>(stream(), scale, isCausal), inputs);
        for (int i : argnums) {
            if (i > 2) throw std::runtime_error("[scaled_dot_product_attention] no gradient by the mask");
            gradients.push_back(all[i]);
        }
        return gradients;
    }

    const char *name() const override { return "HostAttention"; }

  private:
    const float scale;
    const bool isCausal;
};

}  // namespace

std::optional<mx::array> attention(
    const mx::array &q, const mx::array &k, const mx::array &v, float scale, bool isCausal,
    const std::optional<mx::array> &mask, mx::Stream s) {
#ifdef __APPLE__
    return std::nullopt;
#endif
    const auto is_read = [&](const mx::array &x) {
        return x.dtype() == mx::float32 && x.ndim() == 4 && x.shape(0) == 1 && x.shape(3) == q.shape(3) && x.size() > 0;
    };
    if (s.device != mx::Device::cpu || !is_read(q) || !is_read(k) || !is_read(v) || k.shape() != v.shape() ||
        q.shape(1) % k.shape(1) != 0 || (isCausal && q.shape(2) > k.shape(2))) {
        return std::nullopt;
    }
    if (mask && (mask->dtype() != mx::bool_ || mask->shape() != mx::Shape{q.shape(2), k.shape(2)})) return std::nullopt;
    // A single query without a mask may have rows of any length. Other queries and derivatives need a multiple of `lanes`.
    const bool isOne = q.shape(2) == 1 && !mask && !q.is_tracer() && !k.is_tracer() && !v.is_tracer();
    const int missing = isOne ? 0 : (lanes - q.shape(3) % lanes) % lanes;
    if (missing > 0) {
        // The padding names all axes, because its derivative in MLX 0.32.2 reads the widths by axis.
        const auto padded = [&](const mx::array &x) {
            return mx::pad(x, {{0, 0}, {0, 0}, {0, 0}, {0, missing}}, mx::array(0.0f), "constant", s);
        };
        const auto y = attention(padded(q), padded(k), padded(v), scale, isCausal, mask, s);
        return y ? std::optional(mx::slice(*y, {0, 0, 0, 0}, q.shape(), s)) : std::nullopt;
    }
    std::vector<mx::array> inputs{q, k, v};
    if (mask) inputs.push_back(*mask);
    return mx::array(q.shape(), mx::float32, std::make_shared<Attention>(s, scale, isCausal), inputs);
}

}  // namespace host
