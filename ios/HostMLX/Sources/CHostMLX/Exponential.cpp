#include "Exponential.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "Pool.h"
#include "Vectors.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {
namespace {

// Fused only where MLX's polynomial is.
#pragma clang fp contract(off)

constexpr int lanes = 16;
typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef int32_t Integers __attribute__((vector_size(4 * lanes)));

// Macros, as a vector of another CPU's size can't be given to a function.

/// As simd/math.h of MLX has it: 2^(x / ln 2), the integer part by bits, the fraction by a polynomial of Cephes.
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

/// Up to `lanes` numbers; those that are missing are −∞.
#define LOAD(result, in, count)                                                \
    Floats result = Floats{} - std::numeric_limits<float>::infinity();         \
    std::memcpy(&result, in, sizeof(float) * std::min<size_t>(lanes, count));

#define STORE(out, value, count) std::memcpy(out, &value, sizeof(float) * std::min<size_t>(lanes, count));

FOR_EACH_CPU
void exponentials(const float *x, float *y, size_t count) {
    for (size_t i = 0; i < count; i += lanes) {
        LOAD(in, x + i, count - i)
        EXPONENTIAL(out, in)
        STORE(y + i, out, count - i)
    }
}

FOR_EACH_CPU
void sigmoids(const float *x, float *y, size_t count) {
    for (size_t i = 0; i < count; i += lanes) {
        LOAD(in, x + i, count - i)
        EXPONENTIAL(e, in < 0.0f ? -in : in)
        const Floats small = 1.0f / (1.0f + e);
        const Floats out = in < 0.0f ? small : 1.0f - small;
        STORE(y + i, out, count - i)
    }
}

FOR_EACH_CPU
void softmaxes(const float *x, float *y, size_t rows, size_t length) {
    for (size_t row = 0; row < rows; row++, x += length, y += length) {
        Floats greatest = Floats{} - std::numeric_limits<float>::infinity();
        for (size_t i = 0; i < length; i += lanes) {
            LOAD(in, x + i, length - i)
            greatest = in > greatest ? in : greatest;
        }
        float maximum = greatest[0];
        for (int i = 1; i < lanes; i++) maximum = std::max(maximum, greatest[i]);
        Floats sums = {};
        for (size_t i = 0; i < length; i += lanes) {
            LOAD(in, x + i, length - i)
            EXPONENTIAL(e, in - maximum)
            STORE(y + i, e, length - i)
            sums += e;
        }
        float sum = 0;
        for (int i = 0; i < lanes; i++) sum += sums[i];
        const float factor = 1 / sum;
        for (size_t i = 0; i < length; i++) y[i] *= factor;
    }
}

class ExponentialPrimitive : public mx::UnaryPrimitive {
  public:
    ExponentialPrimitive(mx::Stream s, Exponential f) : UnaryPrimitive(s), f(f) {}

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        const mx::array &x = inputs[0];
        if (x.is_donatable()) {
            out.copy_shared_buffer(x);
        } else {
            out.set_data(mx::allocator::malloc(out.nbytes()));
        }
        const size_t length = x.shape(-1), rows = x.size() / length;
        mx::cpu::get_command_encoder(stream()).dispatch(
            [f = f, length, rows, x = x.data<float>(), y = out.data<float>()] {
                // A number takes some 0.3 ns.
                const size_t worth = 1 << 16;
                const bool isWork = rows * length > 1 << 18;
                if (f == Exponential::softmax) {
                    const size_t some = std::max<size_t>(1, worth / length);
                    parallel((rows + some - 1) / some, isWork, [=](int part) {
                        const size_t first = part * some;
                        softmaxes(x + first * length, y + first * length, std::min(some, rows - first), length);
                    });
                } else {
                    const size_t size = rows * length;
                    parallel((size + worth - 1) / worth, isWork, [=](int part) {
                        const size_t first = part * worth, count = std::min(worth, size - first);
                        (f == Exponential::exp ? exponentials : sigmoids)(x + first, y + first, count);
                    });
                }
            });
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("an exponential for the CPU");
    }

    std::vector<mx::array> vjp(
        const std::vector<mx::array> &, const std::vector<mx::array> &cotangents, const std::vector<int> &,
        const std::vector<mx::array> &outputs) override {
        const auto s = stream();
        const mx::array &y = outputs[0], &dy = cotangents[0];
        const auto product = mx::multiply(dy, y, s);
        switch (f) {
            case Exponential::exp: return {product};
            case Exponential::sigmoid:
                return {mx::multiply(product, mx::subtract(mx::array(1.0f), y, s), s)};
            case Exponential::softmax:
                return {mx::subtract(product, mx::multiply(y, mx::sum(product, -1, true, s), s), s)};
        }
    }

    /// As vjp: the Jacobians are symmetric, softmax's diag(y) − y yᵀ.
    std::vector<mx::array> jvp(
        const std::vector<mx::array> &primals, const std::vector<mx::array> &tangents,
        const std::vector<int> &argnums) override {
        const auto y = mx::array(
            primals[0].shape(), mx::float32, std::make_shared<ExponentialPrimitive>(stream(), f), primals);
        return vjp(primals, tangents, argnums, {y});
    }

    const char *name() const override { return "Exponential"; }

    bool is_equivalent(const mx::Primitive &other) const override {
        const auto *same = dynamic_cast<const ExponentialPrimitive *>(&other);
        return same && f == same->f;
    }

  private:
    const Exponential f;
};

}  // namespace

std::optional<mx::array> exponential(Exponential f, const mx::array &x, mx::Stream s) {
#ifdef __APPLE__
    return std::nullopt;
#endif
    if (s.device != mx::Device::cpu || x.dtype() != mx::float32 || x.size() == 0 || x.ndim() == 0) return std::nullopt;
    return mx::array(
        x.shape(), mx::float32, std::make_shared<ExponentialPrimitive>(s, f),
        std::vector<mx::array>{mx::contiguous(x, false, s)});
}

}  // namespace host
