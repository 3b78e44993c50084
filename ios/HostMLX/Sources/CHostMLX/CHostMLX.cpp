#include "CHostMLX.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "Attention.h"
#include "Exponential.h"
#include "FailingCommandBuffers.h"
#include "LedgerHooks.h"
#include "Lookup.h"
#include "PackedProduct.h"
#include "Rows.h"
#include "Streams.h"
#include "TF32.h"
#include "mlx/compile_impl.h"
#include "mlx/mlx.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace mx = mlx::core;

host::LedgerHooks *host::ledger_hooks = nullptr;

host::LedgerHooks *host::recording_ledger() {
    return ledger_hooks && ledger_hooks->is_recording() ? ledger_hooks : nullptr;
}

// MARK: Helpers

namespace {

using Arrays = std::vector<mx::array>;

void (*error_handler)(const char *) = nullptr;

void report(const char *message) {
    if (!error_handler) {
        std::fprintf(stderr, "MLX error: %s\n", message);
        std::abort();
    }
    error_handler(message);
}

/// Runs `f`, and returns its result. Reports an exception and then returns zero. If `f` creates arrays, `guarded` must be used instead.
template <class F>
auto reported(F &&f) -> decltype(f()) {
    try {
        return f();
    } catch (const std::exception &e) {
        report(e.what());
    } catch (...) {
        report("unknown C++ exception");
    }
    return decltype(f())();
}

template <class F>
auto guarded(F &&f) -> decltype(f()) {
    return reported([&] {
        host::enter();
        return f();
    });
}

template <class F>
bool done(F &&f) {
    return guarded([&] {
        f();
        return true;
    });
}

mx::array &get(HostArray a) {
    if (!a) {
        throw std::runtime_error("expected a non-empty array");
    }
    return *reinterpret_cast<mx::array *>(a);
}

Arrays &get(HostVector v) {
    if (!v) {
        throw std::runtime_error("expected a list of arrays");
    }
    return *reinterpret_cast<Arrays *>(v);
}

std::optional<mx::array> maybe(HostArray a) { return a ? std::make_optional(get(a)) : std::nullopt; }
std::optional<int> maybe(HostOptionalInt i) { return i.has_value ? std::make_optional<int>(i.value) : std::nullopt; }

HostArray wrap(mx::array a) { return reinterpret_cast<HostArray>(new mx::array(std::move(a))); }
HostVector wrap(Arrays v) { return reinterpret_cast<HostVector>(new Arrays(std::move(v))); }

#define WRAP(expression) guarded([&] { return wrap(expression); })

mx::Device device(int32_t type) { return type == 1 ? mx::Device::gpu : mx::Device::cpu; }
mx::Stream get(HostStream s) {
    // Without a GPU, the stream of `make_gpu_stream` replaces every stream of the GPU.
    if (auto gpu = s.device == 1 ? host::gpu_stream() : std::nullopt) {
        return *gpu;
    }
    return mx::Stream(s.index, device(s.device));
}
HostStream wrap(mx::Stream s) { return {s.device == mx::Device::gpu ? 1 : 0, s.index}; }

mx::Shape shape(const int32_t *values, size_t count) { return mx::Shape(values, values + count); }
std::vector<int> list(const int32_t *values, size_t count) { return std::vector<int>(values, values + count); }

mx::Dtype dtype(int32_t value) {
    static const mx::Dtype all[] = {mx::bool_,   mx::uint8,   mx::uint16,  mx::uint32,   mx::uint64,
                                    mx::int8,    mx::int16,   mx::int32,   mx::int64,    mx::float16,
                                    mx::float32, mx::float64, mx::bfloat16, mx::complex64};
    if (value < 0 || value >= static_cast<int32_t>(std::size(all))) {
        throw std::invalid_argument("unknown dtype");
    }
    return all[value];
}

/// A Swift function as a C++ function. Destroying the last copy releases the Swift function.
class Closure {
   public:
    explicit Closure(HostClosure f) : call_(f.call), context_(f.context, f.release) {}

    Arrays operator()(const Arrays &arguments) const {
        auto handle = reinterpret_cast<HostVector>(const_cast<Arrays *>(&arguments));
        HostVector result = call_(context_.get(), handle);
        Arrays values = std::move(get(result));
        host_vector_free(result);
        return values;
    }

   private:
    HostVector (*call_)(void *, HostVector);
    std::shared_ptr<void> context_;
};

using ArrayMap = std::unordered_map<std::string, mx::array>;

ArrayMap array_map(const char *const *names, size_t count, HostVector arrays) {
    ArrayMap map;
    for (size_t i = 0; i < count; i++) {
        map.insert({names[i], get(arrays).at(i)});
    }
    return map;
}

void copy_in_order(const char *source, char *&destination, const mx::array &a, int axis) {
    const auto item = static_cast<int64_t>(a.itemsize());
    if (axis == static_cast<int>(a.ndim())) {
        std::memcpy(destination, source, item);
        destination += item;
        return;
    }
    for (int i = 0; i < a.shape(axis); i++) {
        copy_in_order(source + i * a.strides(axis) * item, destination, a, axis + 1);
    }
}

}  // namespace

#ifdef __GLIBC__
// Settings of glibc's malloc that return freed memory to the system. Blocks of 8 MiB or more are returned at once. All threads share one arena, which
// host_clear_cache trims. A lower limit than 8 MiB would slow down a step by a fifth, because of page faults.
__attribute__((constructor)) static void set_up_malloc() {
    mallopt(M_MMAP_THRESHOLD, 8 << 20);
    mallopt(M_TRIM_THRESHOLD, 32 << 20);
    mallopt(M_ARENA_MAX, 1);
}
#endif

void host_set_error_handler(void (*handler)(const char *)) { error_handler = handler; }

// MARK: Arrays

HostArray host_array_new(const void *data, const int32_t *dims, size_t ndim, int32_t type) {
    return guarded([&] {
        mx::Shape s = shape(dims, ndim);
        size_t bytes = dtype(type).size();
        for (int dim : s) {
            bytes *= dim;
        }
        mx::array a(mx::allocator::malloc(bytes), std::move(s), dtype(type));
        if (bytes > 0) {
            std::memcpy(a.data<char>(), data, bytes);
        }
        if (host::ledger_hooks) {
            host::ledger_hooks->created(a);
        }
        return wrap(std::move(a));
    });
}

namespace {

/// Returns whether MLX uses its plain CPU allocator, which stores a block's size in a word before the data.
bool size_word_precedes_data() {
    static const bool answer = [] {
        if (mx::is_available(mx::Device::gpu)) {
            return false;
        }
        auto &allocator = mx::allocator::allocator();
        auto buffer = allocator.malloc(40);
        auto *words = static_cast<size_t *>(buffer.ptr());
        // MLX may reuse a cached block that is longer than the requested 40 bytes.
        bool answer = buffer.raw_ptr() == words + 1 && *words >= 40 && *words < 80;
        allocator.free(buffer);
        return answer;
    }();
    return answer;
}

/// Returns the word before `data`, or nothing if it cannot be read. The word goes through a pipe, because `write` fails with EFAULT for unreadable
/// memory.
std::optional<size_t> word_before(const void *data) {
    int ends[2];
    if (pipe(ends) != 0) {
        return std::nullopt;
    }
    size_t word = 0;
    const auto size = static_cast<ssize_t>(sizeof(word));
    bool read_it = write(ends[1], static_cast<const size_t *>(data) - 1, sizeof(word)) == size &&
                   read(ends[0], &word, sizeof(word)) == size;
    close(ends[0]);
    close(ends[1]);
    return read_it ? std::make_optional(word) : std::nullopt;
}

/// Makes an array with `block` as its data. MLX 0.32.4 changed the constructor's arguments.
template <class Free, class Array = mx::array>
Array array_of(mx::allocator::Buffer block, mx::Shape shape, mx::Dtype type, Free free) {
    if constexpr (std::is_constructible_v<Array, mx::allocator::Buffer, mx::Shape, mx::Dtype, Free>) {
        return Array(block, std::move(shape), type, free);
    } else {
        return Array(typename Array::Data(block, free), std::move(shape), type);
    }
}

}  // namespace

// With a GPU, the constructor for foreign memory wraps pages without a copy. The CPU allocator can only copy. A block of the CPU allocator is a size
// word followed by the data. So a caller can map a file after an anonymous page, and write the length into the last word of that page, to get an
// array without a copy. Other data is copied.
//
// An adopted array must outlive the evaluations that read it, because MLX overwrites inputs without other references.
HostArray host_array_adopt(
    void *data, const int32_t *dims, size_t ndim, int32_t type, void *context, void (*release)(void *)) {
    return guarded([&] {
        mx::Shape s = shape(dims, ndim);
        size_t bytes = dtype(type).size();
        for (int dim : s) {
            bytes *= dim;
        }
        const bool aligned = reinterpret_cast<uintptr_t>(data) % getpagesize() == 0;
        if (aligned && bytes > 0 && size_word_precedes_data() && word_before(data) == bytes) {
            // Metal may refuse to wrap the memory, and then also the memory for a copy.
            failing::allocate(bytes);
            mx::allocator::Buffer block(static_cast<size_t *>(data) - 1);
            if (host::ledger_hooks) {
                host::ledger_hooks->adopted(block.ptr(), bytes);
            }
            const auto free = [=](mx::allocator::Buffer) {
                if (host::ledger_hooks) {
                    host::ledger_hooks->released(block.ptr());
                }
                release(context);
            };
            return wrap(array_of(block, std::move(s), dtype(type), free));
        }
        return wrap(mx::array(data, std::move(s), dtype(type), [=](void *) { release(context); }));
    });
}

void host_array_free(HostArray a) { delete reinterpret_cast<mx::array *>(a); }

void host_array_assign(HostArray *a, HostArray other) {
    done([&] {
        if (*a) {
            get(*a) = get(other);
        } else {
            *a = wrap(get(other));
        }
    });
}

size_t host_array_ndim(HostArray a) {
    return reported([&] { return get(a).ndim(); });
}
size_t host_array_size(HostArray a) {
    return reported([&] { return get(a).size(); });
}
size_t host_array_nbytes(HostArray a) {
    return reported([&] { return get(a).nbytes(); });
}
int32_t host_array_dtype(HostArray a) {
    return reported([&] { return static_cast<int32_t>(get(a).dtype().val()); });
}
int32_t host_array_dim(HostArray a, int32_t axis) {
    return reported([&] { return get(a).shape(axis); });
}
const int32_t *host_array_shape(HostArray a) {
    return reported([&] { return static_cast<const int32_t *>(get(a).shape().data()); });
}
const int64_t *host_array_strides(HostArray a) {
    return reported([&] { return static_cast<const int64_t *>(get(a).strides().data()); });
}
size_t host_dtype_size(int32_t type) {
    return reported([&] { return static_cast<size_t>(dtype(type).size()); });
}

void host_array_eval(HostArray a) {
    done([&] {
        if (auto *ledger = host::recording_ledger()) {
            ledger->wait(get(a));
            return;
        }
        failing::evaluate({get(a)}, [&] { get(a).eval(); });
    });
}
const void *host_array_data(HostArray a) {
    return guarded([&] {
        return get(a).is_available() ? static_cast<const void *>(get(a).data<char>()) : failing::data_never_computed(get(a));
    });
}
void host_array_copy_bytes(HostArray handle, void *destination) {
    done([&] {
        const mx::array &a = get(handle);
        if (!a.is_available()) {
            std::memcpy(destination, failing::data_never_computed(a), a.nbytes());
        } else if (a.flags().row_contiguous) {
            std::memcpy(destination, a.data<char>(), a.nbytes());
        } else {
            auto *out = static_cast<char *>(destination);
            copy_in_order(a.data<char>(), out, a, 0);
        }
    });
}
char *host_array_description(HostArray a) {
    return guarded([&] {
        std::ostringstream text;
        text << get(a);
        return strdup(text.str().c_str());
    });
}

HostVector host_vector_new(const HostArray *arrays, size_t count) {
    return guarded([&] {
        Arrays values;
        values.reserve(count);
        for (size_t i = 0; i < count; i++) {
            values.push_back(get(arrays[i]));
        }
        return wrap(std::move(values));
    });
}
void host_vector_free(HostVector v) { delete reinterpret_cast<Arrays *>(v); }
size_t host_vector_count(HostVector v) { return v ? get(v).size() : 0; }
HostArray host_vector_get(HostVector v, size_t index) { return WRAP(get(v).at(index)); }

// MARK: Operations

namespace {

thread_local bool is_exporting = false;
struct Exporting {
    Exporting() { is_exporting = true; }
    ~Exporting() { is_exporting = false; }
};

/// Returns whether MLX's own operations must be used: during an export, and while the ledger records.
bool needs_mlx() { return is_exporting || host::recording_ledger(); }

std::optional<mx::array> vectorized(host::Exponential f, const mx::array &x, mx::Stream s) {
    return needs_mlx() ? std::nullopt : host::exponential(f, x, s);
}

// These overloads take precedence over MLX's functions, which take a `StreamOrDevice`.
mx::array add(const mx::array &a, const mx::array &b, mx::Stream s) {
    if (needs_mlx()) return mx::add(a, b, s);
    if (const auto sum = host::packed_sum(a, b, s)) return *sum;
    if (const auto sum = host::packed_sum(b, a, s)) return *sum;
    return mx::add(a, b, s);
}
mx::array exp(const mx::array &x, mx::Stream s) {
    const auto y = vectorized(host::Exponential::exp, x, s);
    return y ? *y : mx::exp(x, s);
}
mx::array sigmoid(const mx::array &x, mx::Stream s) {
    const auto y = vectorized(host::Exponential::sigmoid, x, s);
    return y ? *y : mx::sigmoid(x, s);
}
mx::array take(const mx::array &a, const mx::array &indices, mx::Stream s) {
    const auto y = needs_mlx() ? std::nullopt : host::lookup(a, indices, s);
    return y ? *y : mx::take(a, indices, s);
}

}  // namespace

#define HOST_DEFINE(name) \
    HostArray host_##name(HostArray a, HostStream s) { return WRAP(name(get(a), get(s))); }
HOST_UNARY_OPERATIONS(HOST_DEFINE)
#undef HOST_DEFINE

#define HOST_DEFINE(name) \
    HostArray host_##name(HostArray a, HostArray b, HostStream s) { return WRAP(name(get(a), get(b), get(s))); }
HOST_BINARY_OPERATIONS(HOST_DEFINE)
#undef HOST_DEFINE

#define HOST_DEFINE(name) \
    HostArray host_##name(HostArray a, const int32_t *axes, ptrdiff_t count, bool keep_dims, HostStream s) { \
        return count < 0 ? WRAP(mx::name(get(a), keep_dims, get(s))) \
                         : WRAP(mx::name(get(a), list(axes, count), keep_dims, get(s))); \
    }
HOST_REDUCTIONS(HOST_DEFINE)
#undef HOST_DEFINE

HostArray host_cumsum(HostArray a, int32_t axis, bool reverse, bool inclusive, HostStream s) {
    return WRAP(mx::cumsum(get(a), axis, reverse, inclusive, get(s)));
}

HostArray host_argsort(HostArray a, int32_t axis, HostStream s) { return WRAP(mx::argsort(get(a), axis, get(s))); }

#define HOST_DEFINE(name) \
    HostArray host_##name(HostArray a, int32_t first, int32_t second, HostStream s) { \
        return WRAP(mx::name(get(a), first, second, get(s))); \
    }
HOST_INT2_OPERATIONS(HOST_DEFINE)
#undef HOST_DEFINE

struct IntList {
    const int32_t *values;
    size_t count;
    operator mx::Shape() const { return shape(values, count); }
    operator std::vector<int>() const { return list(values, count); }
};

#define HOST_DEFINE(name) \
    HostArray host_##name##_list(HostArray a, const int32_t *values, size_t count, HostStream s) { \
        return WRAP(mx::name(get(a), IntList{values, count}, get(s))); \
    }
HOST_LIST_OPERATIONS(HOST_DEFINE)
#undef HOST_DEFINE

HostArray host_addmm(HostArray c, HostArray a, HostArray b, float alpha, float beta, HostStream s) {
    return WRAP([&] {
        const auto sum = beta == 1 && !needs_mlx() && !host::has_tf32()
                             ? host::packed_sum(get(c), get(a), get(b), alpha, get(s)) : std::nullopt;
        return sum ? *sum : mx::addmm(get(c), get(a), get(b), alpha, beta, get(s));
    }());
}
HostArray host_array_equal(HostArray a, HostArray b, bool equal_nan, HostStream s) {
    return WRAP(mx::array_equal(get(a), get(b), equal_nan, get(s)));
}
HostArray host_argmax(HostArray a, HostOptionalInt axis, bool keep_dims, HostStream s) {
    return axis.has_value ? WRAP(mx::argmax(get(a), axis.value, keep_dims, get(s)))
                          : WRAP(mx::argmax(get(a), keep_dims, get(s)));
}
HostArray host_astype(HostArray a, int32_t type, HostStream s) { return WRAP(mx::astype(get(a), dtype(type), get(s))); }
HostArray host_view(HostArray a, int32_t type, HostStream s) { return WRAP(mx::view(get(a), dtype(type), get(s))); }
HostArray host_contiguous(HostArray a, bool allow_col_major, HostStream s) {
    return WRAP(mx::contiguous(get(a), allow_col_major, get(s)));
}
HostArray host_where(HostArray condition, HostArray a, HostArray b, HostStream s) {
    return WRAP(mx::where(get(condition), get(a), get(b), get(s)));
}
HostArray host_softmax(HostArray a, const int32_t *axes, ptrdiff_t count, bool precise, HostStream s) {
    return WRAP([&] {
        if (count == 1 && (axes[0] == -1 || axes[0] + 1 == int(get(a).ndim()))) {
            if (const auto y = vectorized(host::Exponential::softmax, get(a), get(s))) return *y;
        }
        return count < 0 ? mx::softmax(get(a), precise, get(s)) : mx::softmax(get(a), list(axes, count), precise, get(s));
    }());
}

// MARK: Fused operations

static host::LedgerHooks *ledger_of_gpu(mx::Stream s) {
    const bool is_missing_gpu = s.device == mx::Device::gpu && !mx::is_available(mx::Device::gpu);
    return is_missing_gpu ? host::ledger_hooks : nullptr;
}

HostArray host_rms_norm(HostArray x, HostArray weight, float eps, HostStream s) {
    return guarded([&] {
        const auto stream = get(s);
        if (auto *ledger = ledger_of_gpu(stream)) {
            return wrap(ledger->rms_norm(get(x), get(weight), eps, stream));
        }
        if (const auto y = needs_mlx() ? std::nullopt : host::rms_norm(get(x), get(weight), eps, stream)) {
            return wrap(*y);
        }
        return wrap(mx::fast::rms_norm(get(x), get(weight), eps, stream));
    });
}
HostArray host_rope(
    HostArray x, int dimensions, bool traditional, bool has_base, float base, float scale, int offset,
    HostArray frequencies, HostStream s) {
    return guarded([&] {
        const auto stream = get(s);
        const auto freqs = frequencies ? std::optional(get(frequencies)) : std::nullopt;
        const auto optional_base = has_base ? std::optional(base) : std::nullopt;
        if (auto *ledger = ledger_of_gpu(stream)) {
            return wrap(ledger->rope(get(x), dimensions, traditional, optional_base, scale, offset, freqs, stream));
        }
        const bool isOwn = freqs && !traditional && scale == 1 && !needs_mlx();
        if (const auto y = isOwn ? host::rope(get(x), offset, *freqs, stream) : std::nullopt) {
            return wrap(*y);
        }
        return wrap(mx::fast::rope(get(x), dimensions, traditional, optional_base, scale, offset, freqs, stream));
    });
}
HostArray host_rope_dynamic(
    HostArray x, int dimensions, bool traditional, bool has_base, float base, float scale, HostArray offsets,
    HostArray frequencies, HostStream s) {
    return guarded([&] {
        const auto stream = get(s);
        const auto freqs = frequencies ? std::optional(get(frequencies)) : std::nullopt;
        if (freqs && !traditional && scale == 1 && !needs_mlx()) {
            if (const auto y = host::rope(get(x), get(offsets), *freqs, stream)) return wrap(*y);
        }
        return wrap(mx::fast::rope(
            get(x), dimensions, traditional, has_base ? std::optional(base) : std::nullopt, scale, get(offsets), freqs,
            stream));
    });
}
HostArray host_scaled_dot_product_attention(
    HostArray queries, HostArray keys, HostArray values, float scale, bool is_causal, HostArray mask, HostStream s) {
    return guarded([&] {
        const auto &q = get(queries), &k = get(keys), &v = get(values);
        if (!needs_mlx()) {
            if (const auto y = host::attention(q, k, v, scale, is_causal, maybe(mask), get(s))) return wrap(*y);
        }
        const std::string mode = is_causal ? "causal" : mask ? "array" : "";
        return wrap(mx::fast::scaled_dot_product_attention(
            q, k, v, scale, mode, maybe(mask), std::nullopt, false, get(s)));
    });
}
HostArray host_concatenate(HostVector arrays, int32_t axis, HostStream s) {
    return WRAP(mx::concatenate(get(arrays), axis, get(s)));
}
HostArray host_stack(HostVector arrays, int32_t axis, HostStream s) {
    return WRAP(mx::stack(get(arrays), axis, get(s)));
}
HostVector host_split_parts(HostArray a, int32_t parts, int32_t axis, HostStream s) {
    return WRAP(mx::split(get(a), parts, axis, get(s)));
}
HostVector host_depends(HostVector inputs, HostVector dependencies) {
    return WRAP(mx::depends(get(inputs), get(dependencies)));
}
HostArray host_take_axis(HostArray a, HostArray indices, int32_t axis, HostStream s) {
    return WRAP(mx::take(get(a), get(indices), axis, get(s)));
}
HostArray host_take_along_axis(HostArray a, HostArray indices, int32_t axis, HostStream s) {
    return WRAP(mx::take_along_axis(get(a), get(indices), axis, get(s)));
}
HostArray host_gather(
    HostArray a, HostVector indices, const int32_t *axes, size_t count, const int32_t *slice_sizes, HostStream s) {
    return WRAP(mx::gather(get(a), get(indices), list(axes, count), shape(slice_sizes, get(a).ndim()), get(s)));
}
HostArray host_scatter_add(HostArray a, HostArray indices, HostArray updates, HostStream s) {
    return WRAP(mx::scatter_add(get(a), get(indices), get(updates), 0, get(s)));
}
HostArray host_slice(HostArray a, const int32_t *start, const int32_t *end, const int32_t *strides, HostStream s) {
    return guarded([&] {
        const size_t n = get(a).ndim();
        return wrap(mx::slice(get(a), shape(start, n), shape(end, n), shape(strides, n), get(s)));
    });
}
HostArray host_slice_update(
    HostArray a, HostArray update, const int32_t *start, const int32_t *end, const int32_t *strides, HostStream s) {
    return guarded([&] {
        const size_t n = get(a).ndim();
        return wrap(
            mx::slice_update(get(a), get(update), shape(start, n), shape(end, n), shape(strides, n), get(s)));
    });
}

HostVector host_quantize(
    HostArray w, HostOptionalInt group_size, HostOptionalInt bits, const char *mode, HostArray global_scale,
    HostStream s) {
    return WRAP(mx::quantize(get(w), maybe(group_size), maybe(bits), mode, maybe(global_scale), get(s)));
}
HostArray host_dequantize(
    HostArray w, HostArray scales, HostArray biases, HostOptionalInt group_size, HostOptionalInt bits,
    const char *mode, HostArray global_scale, HostOptionalInt type, HostStream s) {
    return WRAP(mx::dequantize(
        get(w), get(scales), maybe(biases), maybe(group_size), maybe(bits), mode, maybe(global_scale),
        type.has_value ? std::make_optional(dtype(type.value)) : std::nullopt, get(s)));
}
HostArray host_quantized_matmul(
    HostArray x, HostArray w, HostArray scales, HostArray biases, bool transpose, HostOptionalInt group_size,
    HostOptionalInt bits, const char *mode, HostStream s) {
    return WRAP([&] {
        // As in MLX (metal/quantized.cpp:1042), TF32 applies to products of several rows only.
        if (host::has_tf32() && transpose && get(x).dtype() == mx::float32 && get(x).size() > get(x).shape(-1)) {
            const auto dense = mx::dequantize(
                get(w), get(scales), maybe(biases), maybe(group_size), maybe(bits), mode, std::nullopt, mx::float32, get(s));
            return mx::matmul(get(x), mx::swapaxes(dense, -1, -2, get(s)), get(s));
        }
        if (group_size.has_value && bits.has_value && !needs_mlx()) {
            const auto packed = host::packed_product(
                get(x), get(w), get(scales), maybe(biases), transpose, group_size.value, bits.value, mode, get(s));
            if (packed) return *packed;
        }
        return mx::quantized_matmul(
            get(x), get(w), get(scales), maybe(biases), transpose, maybe(group_size), maybe(bits), mode, get(s));
    }());
}

HostArray host_arange(double start, double stop, double step, int32_t type, HostStream s) {
    return WRAP(mx::arange(start, stop, step, dtype(type), get(s)));
}
HostArray host_eye(int32_t n, int32_t m, int32_t k, int32_t type, HostStream s) {
    return WRAP(mx::eye(n, m, k, dtype(type), get(s)));
}
HostArray host_full(const int32_t *dims, size_t ndim, HostArray values, int32_t type, HostStream s) {
    return WRAP(mx::full(shape(dims, ndim), get(values), dtype(type), get(s)));
}
HostArray host_zeros(const int32_t *dims, size_t ndim, int32_t type, HostStream s) {
    return WRAP(mx::zeros(shape(dims, ndim), dtype(type), get(s)));
}
HostArray host_ones(const int32_t *dims, size_t ndim, int32_t type, HostStream s) {
    return WRAP(mx::ones(shape(dims, ndim), dtype(type), get(s)));
}

// MARK: Random numbers

HostArray host_random_key(uint64_t seed) { return WRAP(mx::random::key(seed)); }
HostArray host_random_split(HostArray key, int32_t count, HostStream s) {
    return WRAP(mx::random::split(get(key), count, get(s)));
}
HostVector host_random_split_pair(HostArray key, HostStream s) {
    return guarded([&] {
        auto [first, second] = mx::random::split(get(key), get(s));
        return wrap(Arrays{first, second});
    });
}
HostArray host_random_uniform(
    HostArray low, HostArray high, const int32_t *dims, size_t ndim, int32_t type, HostArray key, HostStream s) {
    return WRAP(mx::random::uniform(get(low), get(high), shape(dims, ndim), dtype(type), get(key), get(s)));
}
HostArray host_random_normal(
    const int32_t *dims, size_t ndim, int32_t type, float loc, float scale, HostArray key, HostStream s) {
    return WRAP(mx::random::normal(shape(dims, ndim), dtype(type), loc, scale, get(key), get(s)));
}
HostArray host_random_randint(
    HostArray low, HostArray high, const int32_t *dims, size_t ndim, int32_t type, HostArray key, HostStream s) {
    return WRAP(mx::random::randint(get(low), get(high), shape(dims, ndim), dtype(type), get(key), get(s)));
}
HostArray host_random_categorical(HostArray logits, int32_t axis, HostArray key, HostStream s) {
    return WRAP(mx::random::categorical(get(logits), axis, get(key), get(s)));
}

// MARK: Evaluation, transformations, exported functions

bool host_eval(HostVector arrays) {
    return done([&] {
        if (auto *ledger = host::recording_ledger()) {
            ledger->evaluate(get(arrays), false);
            return;
        }
        failing::evaluate(get(arrays), [&] { mx::eval(get(arrays)); });
    });
}
bool host_async_eval(HostVector arrays) {
    return done([&] {
        if (auto *ledger = host::recording_ledger()) {
            ledger->evaluate(get(arrays), true);
            return;
        }
        failing::evaluate(get(arrays), [&] { mx::async_eval(get(arrays)); });
    });
}

bool host_vjp(HostClosure f, HostVector primals, HostVector cotangents, HostVector *values, HostVector *gradients) {
    Closure function(f);
    return done([&] {
        auto [outputs, vjps] = mx::vjp(function, get(primals), get(cotangents));
        *values = wrap(std::move(outputs));
        *gradients = wrap(std::move(vjps));
    });
}

HostVector host_compiled_call(HostClosure f, uintptr_t id, HostVector inputs) {
    Closure function(f);
    return guarded([&] {
        if (needs_mlx() || host::gpu_is_default() || mx::default_device() == mx::Device::gpu) {
            return wrap(mx::detail::compile(function, id)(get(inputs)));
        }
        // Switches the fusion of operations off, because MLX would call a C++ compiler for it.
        struct WithoutFusing {
            WithoutFusing() { mx::set_compile_mode(mx::CompileMode::no_fuse); }
            ~WithoutFusing() { mx::set_compile_mode(mx::CompileMode::enabled); }
        } without_fusing;
        Arrays results = mx::detail::compile(function, id)(get(inputs));
        for (auto &result : results) {
            result = host::fused(result, get(inputs));
        }
        return wrap(results);
    });
}
void host_compile_erase(uintptr_t id) {
    done([&] {
        mx::detail::compile_erase(mx::detail::compile_cache(), id);  // other threads keep their code
    });
}

HostFunction host_import_function(const char *path) {
    return guarded([&] {
        return reinterpret_cast<HostFunction>(new mx::ImportedFunction(mx::import_function(path)));
    });
}
void host_function_free(HostFunction f) { delete reinterpret_cast<mx::ImportedFunction *>(f); }
HostVector host_function_call(
    HostFunction f, HostVector arguments, const char *const *names, size_t count, HostVector named) {
    return guarded([&] {
        auto &function = *reinterpret_cast<mx::ImportedFunction *>(f);
        return wrap(function(get(arguments), array_map(names, count, named)));
    });
}
bool host_export_function(
    const char *path, HostClosure f, HostVector arguments, const char *const *names, size_t count, HostVector named,
    bool shapeless) {
    Closure function(f);
    return done([&] {
        std::vector<std::string> order(names, names + count);
        std::function<Arrays(const mx::Args &, const mx::Kwargs &)> both = [&](const auto &args, const auto &kwargs) {
            Arrays all = args;
            for (const auto &name : order) {
                all.push_back(kwargs.at(name));
            }
            return function(all);
        };
        const Exporting exporting;
        mx::export_function(path, both, get(arguments), array_map(names, count, named), shapeless);
    });
}

// MARK: Files

bool host_save_safetensors(
    const char *path, const char *const *names, size_t count, HostVector arrays, const char *const *keys,
    const char *const *values, size_t metadata_count) {
    return done([&] {
        std::unordered_map<std::string, std::string> metadata;
        for (size_t i = 0; i < metadata_count; i++) {
            metadata[keys[i]] = values[i];
        }
        mx::save_safetensors(path, array_map(names, count, arrays), metadata);
    });
}
bool host_load_safetensors(
    const char *path, HostStream s, void *context, void (*array)(void *, const char *, HostArray),
    void (*metadata)(void *, const char *, const char *)) {
    return done([&] {
        auto [arrays, texts] = mx::load_safetensors(path, get(s));
        for (auto &[name, value] : arrays) {
            array(context, name.c_str(), wrap(value));
        }
        for (auto &[key, value] : texts) {
            metadata(context, key.c_str(), value.c_str());
        }
    });
}

// MARK: Memory, devices, streams

size_t host_active_memory(void) {
    auto *ledger = host::recording_ledger();
    return ledger ? ledger->memory().active : mx::get_active_memory();
}
size_t host_cache_memory(void) {
    auto *ledger = host::recording_ledger();
    return ledger ? ledger->memory().cache : mx::get_cache_memory();
}
size_t host_peak_memory(void) {
    auto *ledger = host::recording_ledger();
    return ledger ? ledger->memory().peak : mx::get_peak_memory();
}
void host_reset_peak_memory(void) {
    auto *ledger = host::recording_ledger();
    ledger ? ledger->reset_peak_memory() : mx::reset_peak_memory();
}
size_t host_memory_limit(void) {
    auto *ledger = host::recording_ledger();
    return ledger ? ledger->memory().limit : mx::get_memory_limit();
}
void host_set_memory_limit(size_t limit) {
    if (host::ledger_hooks) {
        host::ledger_hooks->set_memory_limit(limit);
    }
    mx::set_memory_limit(limit);
}
size_t host_set_cache_limit(size_t limit) {
    size_t former = host::ledger_hooks ? host::ledger_hooks->set_cache_limit(limit) : 0;
    return mx::is_available(mx::Device::gpu) ? mx::set_cache_limit(limit) : former;
}
void host_clear_cache(void) {
    if (host::ledger_hooks) {
        host::ledger_hooks->clear_cache();
    }
    mx::clear_cache();
#ifdef __GLIBC__
    // Returning memory costs page faults when the memory is allocated again, about 0.25 ms per MiB. Up to 4 MiB are always kept. Up to 32 MiB are
    // kept if the faults would take at least a fiftieth of the processor time since the last call.
    static std::atomic<std::clock_t> last{0};
    std::clock_t now = std::clock();
    double seconds = double(now - last.exchange(now)) / CLOCKS_PER_SEC;
    size_t free = mallinfo2().fordblks;
    if (free > 32 << 20 || (free > 4 << 20 && 0.25e-3 * (free >> 20) < seconds / 50)) malloc_trim(0);
#endif
}

const char *host_version(void) { return mx::version(); }

int32_t host_default_device(void) { return mx::default_device() == mx::Device::gpu ? 1 : 0; }
void host_set_default_device(int32_t type) {
    done([&] { host::set_default_device(device(type)); });
}
bool host_new_stream(int32_t type, HostStream *stream) {
    return done([&] {
        // Without a GPU, the stream of `make_gpu_stream` replaces a new stream of the GPU.
        const auto gpu = type == 1 ? host::gpu_stream() : std::nullopt;
        *stream = wrap(gpu ? *gpu : host::new_stream(device(type)));
    });
}
void host_make_gpu_stream(void) {
    done([&] { host::make_gpu_stream(); });
}
void host_synchronize(HostStream s) {
    done([&] {
        const auto stream = get(s);
        if (auto *ledger = host::recording_ledger()) {
            ledger->synchronize(stream);
        } else if (host::gpu_stream() != stream) {  // nothing is computed on that stream
            mx::synchronize(stream);
        }
        failing::wait();
    });
}
