// A C interface to the parts of MLX's C++ library that the module `MLX` needs.
//
// A handle owns its object. The matching `…_free` frees it. A function that fails passes a message to the handler of `host_set_error_handler`, and
// returns null, zero or false. No C++ exception leaves this library.

#ifndef C_HOST_MLX_H
#define C_HOST_MLX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "LedgerHooks.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct HostArrayStorage *HostArray;        // mlx::core::array
typedef struct HostVectorStorage *HostVector;      // std::vector<mlx::core::array>
typedef struct HostFunctionStorage *HostFunction;  // mlx::core::ImportedFunction

typedef struct {
    int32_t device;  // 0: CPU, 1: GPU
    int32_t index;
} HostStream;

typedef struct {
    int32_t value;
    bool has_value;
} HostOptionalInt;

/// A Swift function. A C function that takes this structure by value takes ownership of `context`, and releases it.
typedef struct {
    void *context;
    HostVector (*call)(void *context, HostVector arguments);  // returns a new vector, or null on failure
    void (*release)(void *context);
} HostClosure;

void host_set_error_handler(void (*handler)(const char *message));

// MARK: Arrays

/// Creates an array with a copy of `data`. `dtype` is a value of MLX's Dtype::Val.
HostArray host_array_new(const void *data, const int32_t *shape, size_t ndim, int32_t dtype);
/// Creates an array that uses the caller's memory if possible, or else a copy.
HostArray host_array_adopt(
    void *data, const int32_t *shape, size_t ndim, int32_t dtype, void *context, void (*release)(void *context));
void host_array_free(HostArray a);
void host_array_assign(HostArray *a, HostArray other);

size_t host_array_ndim(HostArray a);
size_t host_array_size(HostArray a);
size_t host_array_nbytes(HostArray a);
int32_t host_array_dtype(HostArray a);
int32_t host_array_dim(HostArray a, int32_t axis);
const int32_t *host_array_shape(HostArray a);
const int64_t *host_array_strides(HostArray a);
size_t host_dtype_size(int32_t dtype);

void host_array_eval(HostArray a);
const void *host_array_data(HostArray a);
void host_array_copy_bytes(HostArray a, void *destination);
/// Returns a string that the caller must free().
char *host_array_description(HostArray a);

HostVector host_vector_new(const HostArray *arrays, size_t count);
void host_vector_free(HostVector v);
size_t host_vector_count(HostVector v);
HostArray host_vector_get(HostVector v, size_t index);

// MARK: Operations

#define HOST_UNARY_OPERATIONS(X) \
    X(abs) X(exp) X(log) X(negative) X(rsqrt) X(sigmoid) X(sort) X(sqrt) X(square) \
    X(tanh) X(transpose) X(zeros_like)

#define HOST_BINARY_OPERATIONS(X) \
    X(add) X(bitwise_and) X(divide) X(equal) X(greater) X(greater_equal) X(less) X(logaddexp) X(logical_and) \
    X(matmul) X(maximum) X(multiply) X(remainder) X(right_shift) X(subtract) X(take)

/// Reductions over the `count` axes in `axes`, or over all axes if `count < 0`.
#define HOST_REDUCTIONS(X) X(all) X(logsumexp) X(max) X(mean) X(sum)

/// Operations on an array with two ints. The ints are axes, except that the first int of `repeat` is a count.
#define HOST_INT2_OPERATIONS(X) X(flatten) X(repeat) X(swapaxes)

/// Operations on an array with a list of ints: axes or a shape.
#define HOST_LIST_OPERATIONS(X) X(broadcast_to) X(expand_dims) X(reshape) X(squeeze) X(transpose)

#define HOST_DECLARE(name) HostArray host_##name(HostArray a, HostStream s);
HOST_UNARY_OPERATIONS(HOST_DECLARE)
#undef HOST_DECLARE
#define HOST_DECLARE(name) HostArray host_##name(HostArray a, HostArray b, HostStream s);
HOST_BINARY_OPERATIONS(HOST_DECLARE)
#undef HOST_DECLARE
#define HOST_DECLARE(name) \
    HostArray host_##name(HostArray a, const int32_t *axes, ptrdiff_t count, bool keep_dims, HostStream s);
HOST_REDUCTIONS(HOST_DECLARE)
#undef HOST_DECLARE
#define HOST_DECLARE(name) HostArray host_##name(HostArray a, int32_t first, int32_t second, HostStream s);
HOST_INT2_OPERATIONS(HOST_DECLARE)
#undef HOST_DECLARE
#define HOST_DECLARE(name) HostArray host_##name##_list(HostArray a, const int32_t *list, size_t count, HostStream s);
HOST_LIST_OPERATIONS(HOST_DECLARE)
#undef HOST_DECLARE

HostArray host_addmm(HostArray c, HostArray a, HostArray b, float alpha, float beta, HostStream s);
HostArray host_argsort(HostArray a, int32_t axis, HostStream s);
HostArray host_cumsum(HostArray a, int32_t axis, bool reverse, bool inclusive, HostStream s);
HostArray host_array_equal(HostArray a, HostArray b, bool equal_nan, HostStream s);
HostArray host_argmax(HostArray a, HostOptionalInt axis, bool keep_dims, HostStream s);
HostArray host_astype(HostArray a, int32_t dtype, HostStream s);
HostArray host_view(HostArray a, int32_t dtype, HostStream s);
HostArray host_contiguous(HostArray a, bool allow_col_major, HostStream s);
HostArray host_where(HostArray condition, HostArray a, HostArray b, HostStream s);
HostArray host_softmax(HostArray a, const int32_t *axes, ptrdiff_t count, bool precise, HostStream s);
HostArray host_rms_norm(HostArray x, HostArray weight, float eps, HostStream s);
HostArray host_rope(
    HostArray x, int dimensions, bool traditional, bool has_base, float base, float scale, int offset,
    HostArray frequencies, HostStream s);
/// Applies RoPE with int32 `offsets`: one for each index of the first axis of `x`, or one for all.
HostArray host_rope_dynamic(
    HostArray x, int dimensions, bool traditional, bool has_base, float base, float scale, HostArray offsets,
    HostArray frequencies, HostStream s);
HostArray host_scaled_dot_product_attention(
    HostArray queries, HostArray keys, HostArray values, float scale, bool is_causal, HostArray mask, HostStream s);
HostArray host_concatenate(HostVector arrays, int32_t axis, HostStream s);
HostArray host_stack(HostVector arrays, int32_t axis, HostStream s);
HostVector host_split_parts(HostArray a, int32_t parts, int32_t axis, HostStream s);
HostVector host_depends(HostVector inputs, HostVector dependencies);
HostArray host_take_axis(HostArray a, HostArray indices, int32_t axis, HostStream s);
HostArray host_take_along_axis(HostArray a, HostArray indices, int32_t axis, HostStream s);
HostArray host_gather(
    HostArray a, HostVector indices, const int32_t *axes, size_t count, const int32_t *slice_sizes, HostStream s);
/// Returns `a` with `updates` [n, 1, …] added to the rows `indices` [n].
HostArray host_scatter_add(HostArray a, HostArray indices, HostArray updates, HostStream s);
/// `start`, `end` and `strides` have one entry for each axis of `a`.
HostArray host_slice(HostArray a, const int32_t *start, const int32_t *end, const int32_t *strides, HostStream s);
HostArray host_slice_update(
    HostArray a, HostArray update, const int32_t *start, const int32_t *end, const int32_t *strides, HostStream s);

HostVector host_quantize(
    HostArray w, HostOptionalInt group_size, HostOptionalInt bits, const char *mode, HostArray global_scale,
    HostStream s);
HostArray host_dequantize(
    HostArray w, HostArray scales, HostArray biases, HostOptionalInt group_size, HostOptionalInt bits,
    const char *mode, HostArray global_scale, HostOptionalInt dtype, HostStream s);
HostArray host_quantized_matmul(
    HostArray x, HostArray w, HostArray scales, HostArray biases, bool transpose, HostOptionalInt group_size,
    HostOptionalInt bits, const char *mode, HostStream s);

HostArray host_arange(double start, double stop, double step, int32_t dtype, HostStream s);
HostArray host_eye(int32_t n, int32_t m, int32_t k, int32_t dtype, HostStream s);
HostArray host_full(const int32_t *shape, size_t ndim, HostArray values, int32_t dtype, HostStream s);
HostArray host_zeros(const int32_t *shape, size_t ndim, int32_t dtype, HostStream s);
HostArray host_ones(const int32_t *shape, size_t ndim, int32_t dtype, HostStream s);

// MARK: Random numbers

HostArray host_random_key(uint64_t seed);
HostArray host_random_split(HostArray key, int32_t count, HostStream s);
HostVector host_random_split_pair(HostArray key, HostStream s);
HostArray host_random_uniform(
    HostArray low, HostArray high, const int32_t *shape, size_t ndim, int32_t dtype, HostArray key, HostStream s);
HostArray host_random_normal(
    const int32_t *shape, size_t ndim, int32_t dtype, float loc, float scale, HostArray key, HostStream s);
HostArray host_random_randint(
    HostArray low, HostArray high, const int32_t *shape, size_t ndim, int32_t dtype, HostArray key, HostStream s);
HostArray host_random_categorical(HostArray logits, int32_t axis, HostArray key, HostStream s);

// MARK: Evaluation, transformations, exported functions

bool host_eval(HostVector arrays);
bool host_async_eval(HostVector arrays);

bool host_vjp(HostClosure f, HostVector primals, HostVector cotangents, HostVector *values, HostVector *gradients);

/// Calls `f`, compiled. `id` identifies the compiled code, which `host_compile_erase` deletes.
HostVector host_compiled_call(HostClosure f, uintptr_t id, HostVector inputs);
void host_compile_erase(uintptr_t id);

HostFunction host_import_function(const char *path);
void host_function_free(HostFunction f);
/// Calls an imported function. `named` has one array for each of the `count` names.
HostVector host_function_call(
    HostFunction f, HostVector arguments, const char *const *names, size_t count, HostVector named);
/// Exports `f`. Its parameters are the arguments, followed by the named arrays in the order of `names`.
bool host_export_function(
    const char *path, HostClosure f, HostVector arguments, const char *const *names, size_t count, HostVector named,
    bool shapeless);

// MARK: Files

bool host_save_safetensors(
    const char *path, const char *const *names, size_t count, HostVector arrays, const char *const *keys,
    const char *const *values, size_t metadata_count);
bool host_load_safetensors(
    const char *path, HostStream s, void *context, void (*array)(void *context, const char *name, HostArray a),
    void (*metadata)(void *context, const char *key, const char *value));

// MARK: Memory, devices, streams

size_t host_active_memory(void);
size_t host_cache_memory(void);
size_t host_peak_memory(void);
void host_reset_peak_memory(void);
size_t host_memory_limit(void);
void host_set_memory_limit(size_t limit);
size_t host_set_cache_limit(size_t limit);  // returns the former limit
void host_clear_cache(void);

int32_t host_default_device(void);
const char *host_version(void);
void host_set_default_device(int32_t device);
bool host_new_stream(int32_t device, HostStream *stream);
void host_make_gpu_stream(void);
void host_synchronize(HostStream s);

// MARK: Metal's behaviour where a CPU is kinder: FailingCommandBuffers.cpp, Streams.cpp, TF32.h

typedef struct {
    bool tf32;
    bool gpu_by_default;
    size_t first_failing;  // the number of the first failing command buffer, from 1; 0: none
    size_t failing_count;
    size_t period;
    size_t delay;
    bool leaves_zeros;
    bool of_allocations;
    const char *message;
} HostMetalRules;

/// Applies the rules. Returns false if rules already apply.
bool host_metal_begin(HostMetalRules rules);
/// Ends the rules. Calls `fault` with each fault that would have ended a process on Metal, and its count. Returns the number of command
/// buffers or of allocations.
size_t host_metal_end(void *context, void (*fault)(void *context, const char *text, size_t count));

#ifdef __cplusplus
}
#endif

#endif
