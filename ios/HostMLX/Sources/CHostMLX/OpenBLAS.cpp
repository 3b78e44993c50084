// The BLAS functions that MLX calls. The linker finds these definitions before those of the BLAS in MLX's wheel.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "Pool.h"
#include "TF32.h"

namespace host {

std::atomic<bool> rounds_to_tf32 = false;

bool has_tf32() {
    if (!rounds_to_tf32) {
        return false;
    }
    const char *enabled = std::getenv("MLX_ENABLE_TF32");
    return !enabled || std::atoi(enabled) != 0;
}

}  // namespace host

#ifdef HOST_OPENBLAS

static float tf32(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (std::isfinite(x)) {
        bits = (bits + 0xfff + (bits >> 13 & 1)) & ~uint32_t(0x1fff);
    }
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

extern "C" {

void scipy_openblas_set_num_threads(int count);
void scipy_cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
    int ldb, float beta, float *c, int ldc);
void scipy_cblas_dgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda, const double *b,
    int ldb, double beta, double *c, int ldc);
void scipy_cblas_cgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b,
    int ldb, const void *beta, void *c, int ldc);

/// Computes a product in parallel, in parts along the longer side of c. A part is so long that it takes far more time than waking its thread.
static void product(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
    int ldb, float beta, float *c, int ldc) {
    constexpr int row_major = 101, transposed = 112;
    constexpr int64_t worth = int64_t(1) << 17, shortest = 32, most = 8;
    const bool by_rows = m > n;
    const int size = by_rows ? m : n;
    const auto parts = int(std::bit_floor(uint64_t(std::min({int64_t(m) * n * k / worth, size / shortest, most}))));
    if (order != row_major || parts < 2) {
        return scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    }
    const int step = ((size + parts - 1) / parts + 7) / 8 * 8;
    host::parallel((size + step - 1) / step, true, [=](int part) {
        const ptrdiff_t start = ptrdiff_t(part) * step;
        const int count = std::min<ptrdiff_t>(step, size - start);
        if (by_rows) {
            const float *rows = a + (trans_a == transposed ? start : start * lda);
            scipy_cblas_sgemm(
                order, trans_a, trans_b, count, n, k, alpha, rows, lda, b, ldb, beta, c + start * ldc, ldc);
        } else {
            const float *columns = b + (trans_b == transposed ? start * ldb : start);
            scipy_cblas_sgemm(order, trans_a, trans_b, m, count, k, alpha, a, lda, columns, ldb, beta, c + start, ldc);
        }
    });
}

/// Returns a contiguous copy of a matrix, rounded to TF32, and sets `stride` to `columns`.
static std::vector<float> rounded(const float *x, int rows, int columns, int &stride) {
    std::vector<float> y(size_t(rows) * columns);
    for (int row = 0; row < rows; row++) {
        for (int column = 0; column < columns; column++) {
            y[size_t(row) * columns + column] = tf32(x[ptrdiff_t(row) * stride + column]);
        }
    }
    stride = columns;
    return y;
}

void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
    int ldb, float beta, float *c, int ldc) {
    constexpr int row_major = 101, transposed = 112;
    // On Metal, a product with a vector uses another kernel without TF32 (metal/matmul.cpp).
    if (order != row_major || m < 2 || n < 2 || !host::has_tf32()) {
        return product(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    }
    const auto x = trans_a == transposed ? rounded(a, k, m, lda) : rounded(a, m, k, lda);
    const auto y = trans_b == transposed ? rounded(b, n, k, ldb) : rounded(b, k, n, ldb);
    product(order, trans_a, trans_b, m, n, k, alpha, x.data(), lda, y.data(), ldb, beta, c, ldc);
}

void cblas_dgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a, int lda, const double *b,
    int ldb, double beta, double *c, int ldc) {
    scipy_cblas_dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b,
    int ldb, const void *beta, void *c, int ldc) {
    scipy_cblas_cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // extern "C"

// OpenBLAS's threads would spin while they wait. The threads of Pool.h sleep.
__attribute__((constructor)) static void set_up_threads() { scipy_openblas_set_num_threads(1); }

#endif
