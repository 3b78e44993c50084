#ifndef VECTORS_H
#define VECTORS_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

/// Compiles a function for several CPUs. The program chooses the clone when it starts.
#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

namespace host {

constexpr int lanes = 16;
typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef int32_t Integers __attribute__((vector_size(4 * lanes)));

// EXPONENTIAL and LOAD are macros, because a function cannot take or return vectors of another CPU's size.

/// Computes exp as MLX's simd/math.h does: 2^(x / ln 2), with a polynomial of Cephes for the fraction.
#define EXPONENTIAL(result, in)                                                              \
    Floats result;                                                                           \
    {                                                                                        \
        const Floats argument = in, scaled = argument * 1.442695f;                           \
        const Floats whole = __builtin_elementwise_floor(scaled + 0.5f);                     \
        const Floats fraction = scaled - whole;                                              \
        Floats sum = Floats{} + 1.535336188319500e-4f;                                       \
        for (float c : {1.339887440266574e-3f, 9.618437357674640e-3f, 5.550332471162809e-2f, \
                        2.402264791363012e-1f, 6.931472028550421e-1f, 1.0f}) {               \
            sum = __builtin_elementwise_fma(sum, fraction, Floats{} + c);                    \
        }                                                                                    \
        const Integers bits = (__builtin_convertvector(whole, Integers) + 127) << 23;        \
        Floats power;                                                                        \
        std::memcpy(&power, &bits, sizeof power);                                            \
        power = argument != argument ? argument : power * sum;                               \
        power = argument > 88.0f ? Floats{} + std::numeric_limits<float>::infinity() : power; \
        result = argument < -88.0f ? Floats{} : power;                                       \
    }

/// Loads up to `lanes` numbers, and fills missing ones with −∞. Whole vectors are a separate case, because `memcpy` of a variable size is a function
/// call.
#define LOAD(result, in, count)                                            \
    Floats result;                                                         \
    if (size_t(count) >= lanes) {                                          \
        std::memcpy(&result, in, sizeof result);                           \
    } else {                                                               \
        result = Floats{} - std::numeric_limits<float>::infinity();        \
        std::memcpy(&result, in, sizeof(float) * size_t(count));           \
    }

#define STORE(out, value, count)                                           \
    if (size_t(count) >= lanes) {                                          \
        std::memcpy(out, &value, sizeof value);                            \
    } else {                                                               \
        std::memcpy(out, &value, sizeof(float) * size_t(count));           \
    }

/// Computes y[i] = FUNCTION(x[i]) with a macro of this file. y may be x.
#define EACH_VECTOR(FUNCTION, x, y, count)                                 \
    for (size_t each = 0; each < size_t(count); each += lanes) {           \
        LOAD(numbers, (x) + each, (count) - each)                          \
        FUNCTION(results, numbers)                                         \
        STORE((y) + each, results, (count) - each)                         \
    }

#define SIGMOID(result, in)                                    \
    Floats result;                                             \
    {                                                          \
        const Floats x = in;                                   \
        EXPONENTIAL(e, x < 0.0f ? -x : x)                      \
        const Floats small = 1.0f / (1.0f + e);                \
        result = x < 0.0f ? small : 1.0f - small;              \
    }

}  // namespace host

#endif
