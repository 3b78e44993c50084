#include "Lookup.h"

#include <algorithm>

#include "Pool.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"

namespace mx = mlx::core;

namespace host {
namespace {

template <class Index, class Entry>
void look_up(const mx::array &table, const mx::array &indices, mx::array &out, mx::Stream s) {
    mx::cpu::get_command_encoder(s).dispatch(
        [table = table.data<Entry>(), in = indices.data<Index>(), out = out.data<Entry>(), size = indices.size()] {
            const size_t some = 1 << 16;
            parallel(int((size + some - 1) / some), size > 1 << 17, [=](int part) {
                const size_t first = part * some, end = std::min(size, first + some);
                for (size_t i = first; i < end; i++) out[i] = table[in[i]];
            });
        });
}

class LookupPrimitive : public mx::UnaryPrimitive {
  public:
    using UnaryPrimitive::UnaryPrimitive;

    void eval_cpu(const std::vector<mx::array> &inputs, mx::array &out) override {
        const mx::array &table = inputs[0], &indices = inputs[1];
        out.set_data(mx::allocator::malloc(out.nbytes()));
        const bool isWide = indices.itemsize() == 2;
        if (table.itemsize() == 1) {
            (isWide ? look_up<uint16_t, uint8_t> : look_up<uint8_t, uint8_t>)(table, indices, out, stream());
        } else {
            (isWide ? look_up<uint16_t, uint32_t> : look_up<uint8_t, uint32_t>)(table, indices, out, stream());
        }
    }
    void eval_gpu(const std::vector<mx::array> &, mx::array &) override {
        throw std::runtime_error("a lookup for the CPU");
    }

    const char *name() const override { return "HostLookup"; }
    bool is_equivalent(const mx::Primitive &) const override { return true; }
};

}  // namespace

std::optional<mx::array> lookup(const mx::array &table, const mx::array &indices, mx::Stream s) {
    if (s.device != mx::Device::cpu || (indices.dtype() != mx::uint8 && indices.dtype() != mx::uint16)) return std::nullopt;
    if (table.ndim() != 1 || table.size() < size_t(1) << 8 * indices.itemsize() || table.is_tracer()) return std::nullopt;
    if (table.itemsize() != 1 && table.itemsize() != 4) return std::nullopt;
    return mx::array(
        indices.shape(), table.dtype(), std::make_shared<LookupPrimitive>(s),
        std::vector<mx::array>{mx::contiguous(table, false, s), mx::contiguous(indices, false, s)});
}

}  // namespace host
