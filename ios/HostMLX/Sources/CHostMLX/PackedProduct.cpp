#include "PackedProduct.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "Pool.h"
#include "Rows.h"
#include "Vectors.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {

#ifdef HOST_OPENBLAS

extern "C" void scipy_cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
    int ldb, float beta, float *c, int ldc);

namespace {

// Unpacking must not fuse multiplications and additions, so that the weights equal those of MLX's `dequantize`.
#pragma clang fp contract(off)

typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef uint8_t Quads __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Signed __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

using Mode = mx::QuantizationMode;

#define INLINE __attribute__((always_inline)) inline

struct PackedMatrix {
    Mode mode;
    int bits, group_size;
    const uint8_t *codes;
    /// The stride of a row of codes, in bytes, and of a row of scales, in elements.
    ptrdiff_t codes_stride, scales_stride;
    /// Numbers of `dtype` for affine quantization, else 8-bit floats. Only affine quantization has biases.
    const void *scales, *biases;
    mx::Dtype dtype;
    int groups;
};

thread_local std::vector<float> scale_rooms[16], bias_rooms[16];

INLINE const float *in_float32(
    const PackedMatrix &w, const void *numbers, ptrdiff_t index, int count, std::vector<float> &room) {
    if (w.dtype == mx::float32) return static_cast<const float *>(numbers) + index;
    room.resize(count);
    if (w.dtype == mx::bfloat16) {
        const auto *halves = static_cast<const mx::bfloat16_t *>(numbers) + index;
        for (int i = 0; i < count; i++) room[i] = halves[i];
    } else {
        const auto *halves = static_cast<const mx::float16_t *>(numbers) + index;
        for (int i = 0; i < count; i++) room[i] = halves[i];
    }
    return room.data();
}

std::array<float, 256> e4m3_values() {
    std::array<float, 256> values;
    for (int code = 0; code < 256; code++) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        const float magnitude = std::ldexp(mantissa / 8.0f + (exponent > 0), std::max(exponent, 1) - 7);
        values[code] = code & 128 ? -magnitude : magnitude;
    }
    return values;
}
const std::array<float, 256> e4m3 = e4m3_values();

/// Returns the scale of a group without a bias: the value of an E4M3 code, or 2^(e − 127) for an E8M0 code e.
float factor(const PackedMatrix &w, ptrdiff_t index) {
    const uint8_t scale = static_cast<const uint8_t *>(w.scales)[index];
    return w.mode == Mode::Nvfp4 ? e4m3[scale] : std::ldexp(1.0f, scale - 127);
}

/// Reads 16 codes of `bits` bits, the lowest bits first. `last` is true for the last codes of a group.
template <int bits, bool last = true>
INLINE void read_codes(const uint8_t *packed, Words &codes) {
    if constexpr (bits == 2) {
        // All 16 codes are in one 32-bit word.
        uint32_t word;
        std::memcpy(&word, packed, sizeof word);
        Words shifts;
        for (int i = 0; i < 16; i++) shifts[i] = 2 * i;
        codes = (Words{} + word) >> shifts & 3;
        return;
    }
    // Loads a number of bytes that is a power of two, which is faster than two loads. The load may have extra bytes after the codes or, for the last
    // codes of a group, before them.
    constexpr int size = std::bit_ceil(2u * bits), before = last ? size - 2 * bits : 0;
    Bytes bytes{};
    std::memcpy(&bytes, packed - before, size);
    // Makes four bytes for each code. The first contains the code's first bit, and the others contain its last bit.
    Quads quads;
    [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
        quads = (Quads)__builtin_shufflevector(
            bytes, bytes, before + (i / 4 * bits + (i % 4 > 0) * (bits - 1)) / 8 ...);
    }(std::make_integer_sequence<int, 64>());
    Words shifts;
    for (int i = 0; i < 16; i++) shifts[i] = i * bits % 8;
    codes = (Words)quads >> shifts & uint32_t((1 << bits) - 1);
}

template <int bits>
INLINE void unpack_affine(
    const uint8_t *codes, const float *scales, const float *biases, int group_size, int count, float *out) {
    for (int start = 0; start < count; start += group_size, scales++, biases++) {
        const float scale = *scales, bias = *biases;
        const auto write = [=](const Words &sixteen, int i) __attribute__((always_inline)) {
            const Floats values = __builtin_convertvector(sixteen, Floats) * scale + bias;
            std::memcpy(out + i, &values, sizeof values);
        };
        const int last = start + group_size - 16;
        Words sixteen;
        for (int i = start; i < last; i += 16) {
            read_codes<bits, false>(codes + i / 8 * bits, sixteen);
            write(sixteen, i);
        }
        read_codes<bits>(codes + last / 8 * bits, sixteen);
        write(sixteen, last);
    }
}

/// Unpacks `count` weights of a row, from the `begin`-th on. Both numbers are multiples of the group size.
FOR_EACH_CPU
void unpack(const PackedMatrix &w, ptrdiff_t row, int begin, int count, float *out) {
    const uint8_t *codes = w.codes + row * w.codes_stride + begin / 8 * w.bits;
    const ptrdiff_t group = row * w.scales_stride + begin / w.group_size;
    if (w.mode == Mode::Affine) {
        const float *scales = in_float32(w, w.scales, group, count / w.group_size, scale_rooms[0]);
        const float *biases = in_float32(w, w.biases, group, count / w.group_size, bias_rooms[0]);
        switch (w.bits) {
            case 2: return unpack_affine<2>(codes, scales, biases, w.group_size, count, out);
            case 3: return unpack_affine<3>(codes, scales, biases, w.group_size, count, out);
            case 4: return unpack_affine<4>(codes, scales, biases, w.group_size, count, out);
            case 5: return unpack_affine<5>(codes, scales, biases, w.group_size, count, out);
            case 6: return unpack_affine<6>(codes, scales, biases, w.group_size, count, out);
            default: return unpack_affine<8>(codes, scales, biases, w.group_size, count, out);
        }
    }
    for (int start = 0; start < count; start += w.group_size) {
        const float scale = factor(w, group + start / w.group_size);
        for (int i = start; i < start + w.group_size; i += 16) {
            if (w.mode != Mode::Mxfp8) {
                // The nibbles of the constant are twice the values of the codes: 0, ½, 1, 1½, 2, 3, 4 and 6.
                Words four;
                read_codes<4>(codes + i / 2, four);
                const Words doubled = (Words{} + 0xC8643210u) >> ((four & 7) << 2) & 15;
                const Floats sign = 0.5f - __builtin_convertvector(four >> 3, Floats);
                const Floats values = __builtin_convertvector(doubled, Floats) * sign * scale;
                std::memcpy(out + i, &values, sizeof values);
            } else {
                for (int j = i; j < i + 16; j++) out[j] = e4m3[codes[j]] * scale;
            }
        }
    }
}

// MARK: - Few rows of x

/// Sums 16 numbers. This is a macro, because functions cannot take or return vectors of another CPU's size.
#define SUM(result, vector)                                             \
    float result;                                                       \
    {                                                                   \
        float parts[16];                                                \
        std::memcpy(parts, &vector, sizeof parts);                      \
        for (int width = 8; width > 0; width /= 2) {                    \
            for (int i = 0; i < width; i++) parts[i] += parts[i + width]; \
        }                                                               \
        result = parts[0];                                              \
    }

/// Returns the number of rows of W that are processed together with up to `most` rows of x. Their sums fit into AVX2's 16 registers.
constexpr int rows_at_once(int most) { return most > 1 ? 1 : 2; }

/// The layout of codes in 32-bit words of W.
///
/// A code that crosses from one word into the next makes two fields. The values of these fields add up to the code. Each word is shifted, so that its
/// first `whole` fields have the same places in all words. After them, some words have one more complete code, the `extra` one. The last field
/// reaches up to the word's end.
template <int bits>
struct Fields {
    static constexpr int period = bits / std::gcd(bits, 32);
    static constexpr int whole = 31 / bits, most_shifted = bits - std::gcd(bits, 32);
    static constexpr int extra_bit = whole * bits - most_shifted, extra = 32 - extra_bit > bits, slots = whole + extra + 1;

    static constexpr int shift(int word) { return 32 * word % bits; }
    static constexpr bool has_extra(int word) { return extra && shift(word) == most_shifted; }
    static constexpr int last_bit(int word) { return whole * bits - shift(word) + has_extra(word) * bits; }
};

/// x, rearranged for products with blocks of 16 words of W.
///
/// The numbers of x for the first field of each word come first, then those for the second field, and so on. The last field of a word is shifted to
/// bit 0, because the highest bit of an integer is its sign. The other fields keep their places, so the value of such a field is the code times a
/// power of two. The number of x is divided by this power. The last block of a row is the row's last 16 words. Words that are also in the block
/// before are multiplied by zeros. A row of W has at least 16 words.
struct FewRows {
    struct alignas(64) Sixteen {
        float numbers[16] = {};
    };

    int words = 0, blocks = 0;
    /// The rearranged numbers of x, [m, blocks, slots].
    std::vector<Sixteen> numbers;
    /// For each word, the sum of the numbers of x whose codes begin in this word, [m, blocks].
    std::vector<Sixteen> sums;

    FewRows() = default;

    template <int bits>
    FewRows(const float *x, int stride, int m, int columns, std::integral_constant<int, bits>)
        : words(columns * bits / 32), blocks((words + 15) / 16), numbers(size_t(m) * blocks * Fields<bits>::slots),
          sums(size_t(m) * blocks) {
        using Fields = Fields<bits>;
        float factors[Fields::whole + 1];
        for (int slot = 0; slot < Fields::whole; slot++) factors[slot] = std::ldexp(1.0f, -bits * slot);
        factors[Fields::whole] = std::ldexp(1.0f, -Fields::extra_bit);
        Sixteen *out = numbers.data(), *sum = sums.data();
        for (int row = 0; row < m; row++) {
            for (int block = 0; block < blocks; block++, out += Fields::slots, sum++) {
                for (int word = block * 16; word < std::min(words, block * 16 + 16); word++) {
                    const int lane = word - first_word(block), before_last = Fields::whole + Fields::has_extra(word);
                    const float *in = x + ptrdiff_t(row) * stride + 32 * word / bits;
                    for (int slot = 0; slot < before_last; slot++) out[slot].numbers[lane] = in[slot] * factors[slot];
                    out[Fields::slots - 1].numbers[lane] = in[before_last];
                    for (int code = Fields::shift(word) > 0; code <= before_last; code++) sum->numbers[lane] += in[code];
                }
            }
        }
    }

    int first_word(int block) const { return std::min(block * 16, words - 16); }
};

/// Loads one number for each of the 16 words of a block, from one number for each of the block's `groups` groups. `of_word` is the group of the i-th
/// word.
#define BY_WORD(result, numbers, groups, of_word)                                                             \
    {                                                                                                         \
        constexpr int size = int(std::bit_floor(unsigned(groups))), rest = groups - size;                     \
        Floats read{}, other{};                                                                               \
        std::memcpy(&read, numbers, size * sizeof(float));                                                    \
        if (rest > 0) std::memcpy(&other, numbers + rest, size * sizeof(float));                              \
        [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {                      \
            result = __builtin_shufflevector(read, other, (of_word < size ? of_word : 16 + of_word - rest)...); \
        }(std::make_integer_sequence<int, 16>());                                                             \
    }

/// Multiplies a block of rows of W, from `row` on, by `count` ≤ `most` rows of x, from `first` on. `y` has `rows` numbers per row.
///
///     Σ (scale · code + bias) x = scale Σ code · x + bias Σ x
///
/// The order of a sum does not depend on `most`, so a row's result does not depend on the other rows of x.
template <int bits, int group_size, int most>
INLINE void multiply_block(
    const PackedMatrix &w, ptrdiff_t row, ptrdiff_t end, const FewRows &x, int first, int count, float *y,
    ptrdiff_t rows) {
    using Fields = Fields<bits>;
    constexpr int block = rows_at_once(most), slots = Fields::slots, group_words = group_size * bits / 32;
    const uint8_t *packed[block];
    const float *scales[block], *biases[block];
    static_assert(block <= std::size(scale_rooms));
    for (int r = 0; r < block; r++) {
        const ptrdiff_t index = std::min(row + r, end - 1);
        packed[r] = w.codes + index * w.codes_stride;
        scales[r] = in_float32(w, w.scales, index * w.scales_stride, w.groups, scale_rooms[r]);
        biases[r] = in_float32(w, w.biases, index * w.scales_stride, w.groups, bias_rooms[r]);
    }
    const FewRows::Sixteen *inputs[most], *input_sums[most];
    for (int i = 0; i < most; i++) {
        const ptrdiff_t index = ptrdiff_t(first + std::min(i, count - 1)) * x.blocks;
        inputs[i] = x.numbers.data() + index * slots;
        input_sums[i] = x.sums.data() + index;
    }
    Floats sums[block][most] = {};
    const auto add_block = [&]<int variant>(int b, std::integral_constant<int, variant>) __attribute__((always_inline)) {
#pragma clang fp contract(fast)
        const int first_word = x.first_word(b), group = first_word / group_words;
        Words shifts, lasts;
        [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
            shifts = Words{uint32_t(Fields::shift(16 * variant + i))...};
            lasts = Words{uint32_t(Fields::last_bit(16 * variant + i))...};
        }(std::make_integer_sequence<int, 16>());
        Words sixteen[block], shifted[block];
        Floats products[block][most] = {};
#pragma unroll
        for (int r = 0; r < block; r++) {
            std::memcpy(&sixteen[r], packed[r] + first_word * 4, 64);
            shifted[r] = sixteen[r] << shifts;
            // Prefetches the following rows, because hardware prefetching stops at the end of a memory page.
            __builtin_prefetch(packed[r] + first_word * 4 + block * w.codes_stride);
            __builtin_prefetch(scales[r] + group + block * w.scales_stride);
            __builtin_prefetch(biases[r] + group + block * w.scales_stride);
        }
        const auto add = [&](int slot) __attribute__((always_inline)) {
            constexpr uint32_t mask = (1u << bits) - 1;
            Floats weights[block];
#pragma unroll
            for (int r = 0; r < block; r++) {
                const Words one = slot < Fields::whole ? shifted[r] & mask << bits * slot
                                  : slot < slots - 1   ? sixteen[r] & mask << Fields::extra_bit
                                                       : sixteen[r] >> lasts;
                weights[r] = __builtin_convertvector((Signed)one, Floats);
            }
#pragma unroll
            for (int i = 0; i < most; i++) {
                Floats in;
                std::memcpy(&in, inputs[i] + slot, sizeof in);
#pragma unroll
                for (int r = 0; r < block; r++) products[r][i] = weights[r] * in + products[r][i];
            }
        };
        if constexpr (most == 1) {
#pragma unroll
            for (int slot = 0; slot < Fields::whole; slot++) add(slot);
        } else {
            // Unrolled, the weights of several slots would not fit into the registers.
#pragma clang loop unroll(disable)
            for (int slot = 0; slot < Fields::whole; slot++) add(slot);
        }
#pragma unroll
        for (int slot = Fields::whole; slot < slots; slot++) add(slot);
#pragma unroll
        for (int r = 0; r < block; r++) {
            constexpr int start = 16 * variant % group_words, groups = (start + 15) / group_words + 1;
            Floats scale, bias;
            BY_WORD(scale, (scales[r] + group), groups, ((start + i) / group_words))
            BY_WORD(bias, (biases[r] + group), groups, ((start + i) / group_words))
#pragma unroll
            for (int i = 0; i < most; i++) {
                Floats sum;
                std::memcpy(&sum, input_sums[i], sizeof sum);
                sums[r][i] = scale * products[r][i] + (bias * sum + sums[r][i]);
            }
        }
        for (int i = 0; i < most; i++) {
            inputs[i] += slots;
            input_sums[i]++;
        }
    };
    for (int b = 0; b < x.blocks - 1;) {
        [&]<int... variant>(std::integer_sequence<int, variant...>) __attribute__((always_inline)) {
            ((b < x.blocks - 1 ? add_block(b++, std::integral_constant<int, variant>()) : void()), ...);
        }(std::make_integer_sequence<int, Fields::period>());
    }
    // The last block of a row has the same shifts as the last block of a period, because both end with a group.
    add_block(x.blocks - 1, std::integral_constant<int, Fields::period - 1>());
    for (int r = 0; r < std::min<ptrdiff_t>(block, end - row); r++) {
        for (int i = 0; i < count; i++) {
            SUM(sum, sums[r][i])
            y[i * rows + row + r] = sum;
        }
    }
}

template <int bits, int group_size>
INLINE void multiply_rows(
    const PackedMatrix &w, int first, int end, const FewRows &x, int m, float *y, int rows) {
    const auto multiply = [&]<int most>(int i, std::integral_constant<int, most>) __attribute__((always_inline)) {
        for (ptrdiff_t row = first; row < end; row += rows_at_once(most)) {
            multiply_block<bits, group_size, most>(
                w, row, end, x, i, std::min(m - i, most), y + ptrdiff_t(i) * rows, rows);
        }
    };
    for (int i = 0; i < m; i += 4) {
        if (m - i == 1) {
            multiply(i, std::integral_constant<int, 1>());
        } else {
            multiply(i, std::integral_constant<int, 4>());
        }
    }
}

template <int bits>
INLINE void multiply_groups(
    const PackedMatrix &w, int first, int end, const FewRows &x, int m, float *y, int rows) {
    switch (w.group_size) {
        case 32: return multiply_rows<bits, 32>(w, first, end, x, m, y, rows);
        case 64: return multiply_rows<bits, 64>(w, first, end, x, m, y, rows);
        default: return multiply_rows<bits, 128>(w, first, end, x, m, y, rows);
    }
}

/// Defines a function that computes y for the rows of W from `first` to `end`.
#define MULTIPLY_FEW(name)                                                                                        \
    void name(const PackedMatrix &w, int first, int end, const FewRows &x, int m, float *y, int rows) {           \
        switch (w.bits) {                                                                                         \
            case 2: return multiply_groups<2>(w, first, end, x, m, y, rows);                                      \
            case 3: return multiply_groups<3>(w, first, end, x, m, y, rows);                                      \
            case 4: return multiply_groups<4>(w, first, end, x, m, y, rows);                                      \
            case 5: return multiply_groups<5>(w, first, end, x, m, y, rows);                                      \
            case 6: return multiply_groups<6>(w, first, end, x, m, y, rows);                                      \
            default: return multiply_groups<8>(w, first, end, x, m, y, rows);                                     \
        }                                                                                                         \
    }
// Its variants are most of this file's code. An x86 CPU without AVX2 has none: its vectors are too short for them.
#if defined(__x86_64__) && defined(__linux__)
__attribute__((target("arch=x86-64-v3"))) MULTIPLY_FEW(multiply_few_v3)
__attribute__((target("arch=x86-64-v4"))) MULTIPLY_FEW(multiply_few_v4)
const auto multiply_few = __builtin_cpu_supports("x86-64-v4")   ? multiply_few_v4
                          : __builtin_cpu_supports("x86-64-v3") ? multiply_few_v3
                                                                : nullptr;
#else
MULTIPLY_FEW(multiply_few_here)
const auto multiply_few = multiply_few_here;
#endif

/// Computes y for the rows of W from `first` to `end`, with weights that are unpacked first.
FOR_EACH_CPU
void multiply_unpacked(
    const PackedMatrix &w, int first, int end, const float *x, int stride, int m, int columns, float *y, int rows) {
    float *weights = scratch(columns);
    for (int row = first; row < end; row++) {
        unpack(w, row, 0, columns, weights);
        for (int i = 0; i < m; i++) {
            Floats sums{};
            for (int j = 0; j < columns; j += 16) {
                Floats in, weight;
                std::memcpy(&in, x + ptrdiff_t(i) * stride + j, sizeof in);
                std::memcpy(&weight, weights + j, sizeof weight);
                sums += weight * in;
            }
            SUM(sum, sums)
            y[ptrdiff_t(i) * rows + row] = sum;
        }
    }
}

FewRows few_rows(const float *x, int stride, int m, int columns, int bits) {
    const auto of = [&]<int bits>(std::integral_constant<int, bits> width) {
        return FewRows(x, stride, m, columns, width);
    };
    switch (bits) {
        case 2: return of(std::integral_constant<int, 2>());
        case 3: return of(std::integral_constant<int, 3>());
        case 4: return of(std::integral_constant<int, 4>());
        case 5: return of(std::integral_constant<int, 5>());
        case 6: return of(std::integral_constant<int, 6>());
        default: return of(std::integral_constant<int, 8>());
    }
}

/// The maximum number of rows of x for which `FewRows` is faster than OpenBLAS.
constexpr int few = 16;

// MARK: - By OpenBLAS

constexpr int row_major = 101, plain = 111, transposed = 112;
/// The number of rows or columns that are unpacked at a time. A tile fits into a core's own cache.
constexpr int tile_length = 512;

/// Returns the bounds of the parts of a product, in rows or columns of W. The lengths of the parts are multiples of `unit`, except for the last one.
/// Most parts have between 128 and 256 rows or columns. Shorter parts would cost more time in OpenBLAS, which packs x again for each part.
std::vector<int> bounds(int count, int unit) {
    const int size = std::clamp((count / 4 + unit - 1) / unit * unit, 128, 256);
    std::vector<int> bounds{0};
    while (count - bounds.back() >= 2 * size) {
        bounds.push_back(bounds.back() + size);
        bounds.push_back(bounds.back() + size);
    }
    const int rest = count - bounds.back(), half = (rest / 2 + unit - 1) / unit * unit;
    if (half > 0 && half < rest) bounds.push_back(bounds.back() + half);
    if (rest > 0) bounds.push_back(count);
    return bounds;
}

/// Returns whether a product is long enough for several threads. Unpacking a weight takes as long as multiplying it by some 16 rows of x.
bool is_work(int outputs, int inputs, int m) { return int64_t(outputs) * inputs * (m + 16) > 1 << 23; }

struct LowRank {
    struct Matrix {
        const float *data;
        int order, stride;

        Matrix(const Rows &a, std::vector<float> &room) {
            const int rows = a.shape[0], columns = a.shape[1];
            const auto is = [](int count, ptrdiff_t step, int others, ptrdiff_t stride) {
                return (count == 1 || step == 1) && (others == 1 || stride >= count);
            };
            if (is(columns, a.strides[1], rows, a.strides[0])) {
                data = a.data, order = plain, stride = std::max<int>(columns, a.strides[0]);
            } else if (is(rows, a.strides[0], columns, a.strides[1])) {
                data = a.data, order = transposed, stride = std::max<int>(rows, a.strides[1]);
            } else {
                data = a.in_order(room), order = plain, stride = columns;
            }
        }
    };
    Matrix a, b;
    int rank;
    float alpha;
};

/// Terms that are added to a product. If `inPlace` is set, y already contains `sum`.
struct Addends {
    std::optional<Rows> sum;
    bool inPlace = false;
    std::optional<LowRank> lowRank;

    bool none() const { return !sum && !lowRank; }

    void write(int first, int count, int m, float *y, int columns) const {
        if (sum && !inPlace) {
            for (int i = 0; i < m; i++) {
                const float *in = sum->row(i) + ptrdiff_t(first) * sum->step;
                float *out = y + ptrdiff_t(i) * columns + first;
                if (sum->step == 1) {
                    std::memcpy(out, in, count * sizeof(float));
                } else {
                    for (int j = 0; j < count; j++) out[j] = in[ptrdiff_t(j) * sum->step];
                }
            }
        }
        if (!lowRank) return;
        const auto &[a, b, rank, alpha] = *lowRank;
        scipy_cblas_sgemm(
            row_major, a.order, b.order, m, count, rank, alpha, a.data, a.stride,
            b.data + (b.order == plain ? first : ptrdiff_t(first) * b.stride), b.stride, sum ? 1 : 0, y + first, columns);
    }
};

/// Calls `multiply(first, count, start, length, beta, tile)` for each tile of a product. A tile has `count` outputs and `length` inputs. The result
/// replaces y [m, outputs] if `beta` is 0, and is added to y if `beta` is 1. `tile` has room for the tile's weights.
template <class F>
void by_tiles(int outputs, int unit, int inputs, int m, const Addends &addends, float *y, F multiply) {
    const std::vector<int> parts = bounds(outputs, unit);
    parallel(int(parts.size()) - 1, is_work(outputs, inputs, m), [&](int part) {
        const int first = parts[part], count = parts[part + 1] - first;
        addends.write(first, count, m, y, outputs);
        float *tile = scratch(size_t(count) * std::min(tile_length, inputs));
        for (int start = 0; start < inputs; start += tile_length) {
            const float beta = start > 0 || !addends.none();
            multiply(first, count, start, std::min(tile_length, inputs - start), beta, tile);
        }
    });
}

/// Computes y = x Wᵀ + addends. x is [m, columns], with rows `stride` numbers apart, and y is [m, rows]. If m ≤ `few` and W is affine, there are no
/// addends.
void by_rows(
    const PackedMatrix &w, int rows, int columns, const float *x, int stride, int m, const Addends &addends, float *y) {
    if (m <= few && w.mode == Mode::Affine) {
        const int part = 64;
        const bool isArranged = multiply_few && columns * w.bits >= 16 * 32;
        const FewRows arranged = isArranged ? few_rows(x, stride, m, columns, w.bits) : FewRows();
        parallel((rows + part - 1) / part, int64_t(rows) * columns * (m + 3) > 1 << 20, [&](int index) {
            const int first = index * part, end = std::min(rows, first + part);
            if (isArranged) {
                multiply_few(w, first, end, arranged, m, y, rows);
            } else {
                multiply_unpacked(w, first, end, x, stride, m, columns, y, rows);
            }
        });
        return;
    }
    by_tiles(rows, 16, columns, m, addends, y, [&](int first, int count, int start, int length, float beta, float *tile) {
        for (int row = 0; row < count; row++) unpack(w, first + row, start, length, tile + size_t(row) * length);
        scipy_cblas_sgemm(
            row_major, plain, transposed, m, count, length, 1, x + start, stride, tile, length, beta, y + first, rows);
    });
}

/// Computes y = x W + addends. x is [m, rows], with rows `stride` numbers apart, and y is [m, columns].
void by_columns(
    const PackedMatrix &w, int rows, int columns, const float *x, int stride, int m, const Addends &addends, float *y) {
    const int unit = w.group_size;
    by_tiles(columns, unit, rows, m, addends, y, [&](int first, int count, int start, int length, float beta, float *tile) {
        for (int row = 0; row < length; row++) {
            // Prefetches later rows. The parts of rows are too short for the CPU's own prefetching.
            const uint8_t *later = w.codes + (start + row + 8) * w.codes_stride + first / 8 * w.bits;
            const int bytes = count * w.bits / 8;
            for (int byte = 0; byte < bytes; byte += 64) __builtin_prefetch(later + byte);
            __builtin_prefetch(later + bytes - 1);
            unpack(w, start + row, first, count, tile + size_t(row) * count);
        }
        scipy_cblas_sgemm(
            row_major, plain, plain, m, count, length, 1, x + start, stride, tile, count, beta, y + first, columns);
    });
}

class PackedProduct : public mx::UnaryPrimitive {
  public:
    /// The options of a product. Its inputs are x, W, scales, biases if W has any, and optionally a, b and the sum.
    struct Options {
        int group_size, bits;
        Mode mode;
        bool transpose, hasLowRank = false, hasSum = false;
        float alpha = 1;

        bool operator==(const Options &) const = default;
    };

    PackedProduct(mx::Stream s, Options options) : UnaryPrimitive(s), options(options) {}

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        const mx::array &x = inputs[0], &w = inputs[1], &scales = inputs[2];
        const bool hasBiases = options.mode == Mode::Affine;
        if (w.strides(1) != 1 || scales.strides(1) != 1 || (hasBiases && inputs[3].strides() != scales.strides())) {
            throw std::runtime_error(
                "[quantized_matmul] the rows of a quantized matrix must lie in one piece: take its contiguous()");
        }
        const mx::array *sum = options.hasSum ? &inputs.back() : nullptr;
        const bool inPlace = sum && sum->shape() == out.shape() && sum->flags().row_contiguous && sum->is_donatable();
        if (inPlace) {
            out.copy_shared_buffer(*sum);
        } else {
            out.set_data(mx::allocator::malloc(out.nbytes()));
        }
        const PackedMatrix packed{
            options.mode, options.bits, options.group_size, w.data<uint8_t>(), w.strides(0) * 4, scales.strides(0),
            scales.data<void>(), hasBiases ? inputs[3].data<void>() : nullptr, scales.dtype(), scales.shape(1)};
        const int rows = w.shape(0), columns = scales.shape(1) * options.group_size;
        const int m = x.size() / x.shape(-1);
        // A slice of a matrix is read without a copy.
        const bool isRead = x.ndim() == 2 && x.strides(1) == 1 && x.strides(0) >= x.shape(1);
        const int stride = isRead ? int(x.strides(0)) : x.shape(-1);
        const auto added = sum ? std::make_optional(Rows(*sum, out.shape())) : std::nullopt;
        std::vector<Rows> lowRank;
        if (options.hasLowRank) lowRank = {Rows(inputs[hasBiases ? 4 : 3]), Rows(inputs[hasBiases ? 5 : 4])};
        mx::cpu::get_command_encoder(stream()).dispatch(
            [packed, rows, columns, m, product = options.transpose ? by_rows : by_columns, x = Rows(x), isRead, stride,
             added, inPlace, lowRank, alpha = options.alpha, y = out.data<float>()] {
                std::vector<float> room, ofA, ofB;
                Addends addends{added, inPlace, std::nullopt};
                if (!lowRank.empty()) {
                    addends.lowRank = {{lowRank[0], ofA}, {lowRank[1], ofB}, lowRank[0].shape[1], alpha};
                }
                product(packed, rows, columns, isRead ? x.data : x.in_order(room), stride, m, addends, y);
            });
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("[quantized_matmul] a product for the CPU");
    }

    std::vector<mx::array> vjp(
        const std::vector<mx::array> &primals, const std::vector<mx::array> &cotangents,
        const std::vector<int> &argnums, const std::vector<mx::array> &) override {
        if (argnums != std::vector<int>{0}) {
            throw std::runtime_error("[quantized_matmul] no gradient by the quantized weights");
        }
        return {product(!options.transpose, cotangents[0], primals, primals[0].shape())};
    }

    const char *name() const override { return "PackedProduct"; }

    bool is_equivalent(const mx::Primitive &other) const override {
        const auto *same = dynamic_cast<const PackedProduct *>(&other);
        return same && options == same->options;
    }

    const Options options;

  private:
    mx::array product(bool transpose, const mx::array &x, std::vector<mx::array> inputs, mx::Shape shape) {
        inputs[0] = x;
        Options options = this->options;
        options.transpose = transpose;
        return mx::array(shape, mx::float32, std::make_shared<PackedProduct>(stream(), options), inputs);
    }
};

/// Returns the primitive of y if y is a product on stream `s` that is not yet computed and can include `terms`, else null.
const PackedProduct *open(const mx::array &y, std::initializer_list<const mx::array *> terms, mx::Stream s) {
    if (y.status() != mx::array::Status::unscheduled || !y.has_primitive() || y.primitive().stream() != s) return nullptr;
    if (y.shape().empty() || y.size() == 0 || y.size() / y.shape(-1) <= few || y.is_tracer()) return nullptr;
    for (const mx::array *term : terms) {
        if (term->dtype() != mx::float32 || term->is_tracer()) return nullptr;
    }
    return dynamic_cast<const PackedProduct *>(&y.primitive());
}

mx::array closed(const mx::array &y, PackedProduct::Options options, const std::vector<mx::array> &terms) {
    auto inputs = y.inputs();
    inputs.insert(inputs.end(), terms.begin(), terms.end());
    return mx::array(y.shape(), y.dtype(), std::make_shared<PackedProduct>(y.primitive().stream(), options), inputs);
}

}  // namespace

std::optional<mx::array> packed_product(
    const mx::array &x, const mx::array &w, const mx::array &scales, const std::optional<mx::array> &biases,
    bool transpose, int group_size, int bits, const std::string &mode, mx::Stream s) {
    if (s.device != mx::Device::cpu || x.dtype() != mx::float32 || x.ndim() < 1 || w.ndim() != 2) return std::nullopt;
    // MLX's own function reports errors for arrays that do not fit.
    const bool is_affine = mode == "affine";
    if (!is_affine && mode != "mxfp4" && mode != "nvfp4" && mode != "mxfp8") return std::nullopt;
    if (bits < 2 || bits > 8 || bits == 7) return std::nullopt;
    if (w.dtype() != mx::uint32 || group_size % (is_affine ? 32 : 16) != 0 || group_size > 128 || group_size == 96 || biases.has_value() != is_affine ||
        scales.dtype() != (biases ? biases->dtype() : mx::uint8) || (is_affine && !mx::issubdtype(scales.dtype(), mx::floating))) {
        return std::nullopt;
    }
    if (scales.ndim() != 2 || scales.shape(0) != w.shape(0) || (biases && biases->shape() != scales.shape()) ||
        int64_t(w.shape(1)) * 32 != int64_t(scales.shape(1)) * group_size * bits) {
        return std::nullopt;
    }
    const Mode packing = is_affine         ? Mode::Affine
                         : mode == "mxfp4" ? Mode::Mxfp4
                         : mode == "nvfp4" ? Mode::Nvfp4
                                           : Mode::Mxfp8;
    const int columns = scales.shape(1) * group_size;
    mx::Shape shape = x.shape();
    if (shape.back() != (transpose ? columns : w.shape(0))) return std::nullopt;
    shape.back() = transpose ? w.shape(0) : columns;
    std::vector<mx::array> inputs = {x, w};
    inputs.push_back(scales);
    if (biases) inputs.push_back(*biases);
    const PackedProduct::Options options{group_size, bits, packing, transpose};
    return mx::array(shape, mx::float32, std::make_shared<PackedProduct>(s, options), inputs);
}

std::optional<mx::array> packed_sum(const mx::array &sum, const mx::array &y, mx::Stream s) {
    const PackedProduct *product = open(y, {&sum}, s);
    if (!product || product->options.hasSum || mx::broadcast_shapes(sum.shape(), y.shape()) != y.shape()) return std::nullopt;
    auto options = product->options;
    options.hasSum = true;
    return closed(y, options, {sum});
}

std::optional<mx::array> packed_sum(
    const mx::array &y, const mx::array &a, const mx::array &b, float alpha, mx::Stream s) {
    const PackedProduct *product = open(y, {&a, &b}, s);
    if (!product || product->options.hasLowRank || product->options.hasSum) return std::nullopt;
    // For more columns of a, a b is large enough to be a separate product.
    if (y.ndim() != 2 || a.ndim() != 2 || b.ndim() != 2 || a.shape(1) > 64) return std::nullopt;
    if (a.shape(0) != y.shape(0) || b.shape(1) != y.shape(1) || a.shape(1) != b.shape(0)) return std::nullopt;
    auto options = product->options;
    options.hasLowRank = true;
    options.alpha = alpha;
    return closed(y, options, {a, b});
}

#else

std::optional<mx::array> packed_product(
    const mx::array &, const mx::array &, const mx::array &, const std::optional<mx::array> &, bool, int, int,
    const std::string &, mx::Stream) {
    return std::nullopt;
}
std::optional<mx::array> packed_sum(const mx::array &, const mx::array &, mx::Stream) { return std::nullopt; }
std::optional<mx::array> packed_sum(
    const mx::array &, const mx::array &, const mx::array &, float, mx::Stream) {
    return std::nullopt;
}

#endif

}  // namespace host
