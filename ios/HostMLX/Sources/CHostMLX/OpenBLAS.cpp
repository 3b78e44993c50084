// libmlx resolves these three names in the executable first, and only then in the BLAS of its own wheel.

#ifdef HOST_OPENBLAS

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

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

void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b,
    int ldb, float beta, float *c, int ldc) {
    scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
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

// OpenBLAS's threads spin while they wait: where another program takes one core, all stand still. So half of the cores,
// unless the user has said how many.
__attribute__((constructor)) static void set_up_threads() {
    if (std::getenv("OPENBLAS_NUM_THREADS")) return;
    scipy_openblas_set_num_threads(std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)) / 2));
}

#endif
