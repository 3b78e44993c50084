#include "FusedPrimitives.h"

#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

namespace mx = mlx::core;

namespace ledger {

namespace {

/// A writer of the `.mlxfn` format, which MLX's export.cpp defines.
struct FunctionFile {
    std::string bytes;

    template <class T>
    FunctionFile &put(T value) {
        bytes.append(reinterpret_cast<const char *>(&value), sizeof(T));
        return *this;
    }
    FunctionFile &text(const std::string &value) {
        put<uint64_t>(value.size()).bytes += value;
        return *this;
    }
    FunctionFile &shape(const mx::array &a) {
        put<uint64_t>(a.ndim());
        for (int n : a.shape()) {
            put<int32_t>(n);
        }
        return put<int32_t>(static_cast<int32_t>(a.dtype().val())).put<uint8_t>(a.dtype().size());
    }
    FunctionFile &ids(size_t count) {
        put<uint64_t>(count);
        for (uint64_t id = 1; id <= count; id++) {
            put(id);
        }
        return *this;
    }
};

}  // namespace

/// Returns the output of a fused primitive, with the shape and dtype of the first input.
///
/// MLX's library does not export the primitives' classes. Importing a `.mlxfn` file creates such a primitive, so this function writes a file and
/// imports it.
static mx::array fused(const char *name, const std::string &state, const std::vector<mx::array> &inputs) {
    FunctionFile file;
    const uint64_t out = inputs.size() + 1;
    file.text(mx::version()).put<int32_t>(1).put(false).text("");  // the last one is metadata
    file.put<uint64_t>(0).ids(inputs.size());
    file.put<uint64_t>(inputs.size());
    for (const auto &in : inputs) {
        file.shape(in);
    }
    file.put<uint64_t>(1).put(out).put<uint64_t>(out);
    for (uint64_t id = 1; id < out; id++) {
        file.put(id).put(false).put(false);
    }
    file.put(out).put(true).ids(inputs.size());
    file.put<int32_t>(0).put<int32_t>(1).put<int32_t>(0);  // the stream: its index, and the GPU
    file.text(name).bytes += state;
    file.put<uint64_t>(0).shape(inputs[0]);

    std::string path = "/tmp/HostMLX.XXXXXX";
    const int descriptor = mkstemp(path.data());
    const bool written = descriptor >= 0 && write(descriptor, file.bytes.data(), file.bytes.size()) ==
                                                static_cast<ssize_t>(file.bytes.size());
    if (descriptor >= 0) {
        close(descriptor);
    }
    if (!written) {
        throw std::runtime_error("cannot write " + path);
    }
    try {
        auto output = mx::import_function(path)(inputs)[0];
        unlink(path.c_str());
        return output;
    } catch (...) {
        unlink(path.c_str());
        throw;
    }
}

mx::array rms_norm(const mx::array &x, const mx::array &weight, float eps, mx::Stream stream) {
    return fused("RMSNorm", FunctionFile().put(eps).bytes, {x, mx::astype(weight, x.dtype(), stream)});
}

mx::array rope(
    const mx::array &x, int dimensions, bool traditional, std::optional<float> base, float scale, int offset,
    const std::optional<mx::array> &frequencies, mx::Stream stream) {
    FunctionFile state;
    state.put<int32_t>(dimensions).put(traditional).put(base.value_or(1.0f)).put(scale).put(true);
    std::vector<mx::array> inputs{x, mx::array(offset, mx::int32)};
    if (frequencies) {
        inputs.push_back(mx::astype(*frequencies, mx::float32, stream));
    }
    return fused("RoPE", state.bytes, inputs);
}

}  // namespace ledger
