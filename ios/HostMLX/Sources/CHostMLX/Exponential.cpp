#include "Exponential.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "Pool.h"
#include "Vectors.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {
namespace {

// The compiler must not fuse other multiplications and additions than MLX does.
#pragma clang fp contract(off)

FOR_EACH_CPU
void exponentials(const float *x, float *y, size_t count) {
    EACH_VECTOR(EXPONENTIAL, x, y, count)
}

FOR_EACH_CPU
void sigmoids(const float *x, float *y, size_t count) {
    EACH_VECTOR(SIGMOID, x, y, count)
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
                // Each number takes about 0.3 ns.
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

    const char *name() const override {
        return f == Exponential::exp ? "HostExp" : f == Exponential::sigmoid ? "HostSigmoid" : "HostSoftmax";
    }

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
