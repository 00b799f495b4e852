/* Sums and indexed reads. Long sums add blocks of fixed size, each by fixed lanes in double, in
 * order: the bits do not depend on the number of threads. */
#include "cpu.h"

enum { BLOCK = 4096, LANES = 16, GRAIN = 16 * BLOCK };

/* ---- sum, sum_squares ---- */

/* The lanes' total, by halves. */
static double fold(double lane[LANES]) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

static double sum_block(const lg_tensor *x, int64_t i, int64_t n, bool squares) {
    double lane[LANES] = {0};
    const float *p = x->dtype == LG_F32 ? (const float *)x->data + i : NULL;
    int64_t j = 0;
    if (p && squares) {
        for (; j + LANES <= n; j += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += (double)p[j + l] * p[j + l];
    } else if (p) {
        for (; j + LANES <= n; j += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += p[j + l];
    }
    for (; j < n; j++) {
        const double value = load(x, i + j);
        lane[j % LANES] += squares ? value * value : value;
    }
    return fold(lane);
}

static lg_status sum_all(lg_context *ctx, const lg_tensor *x, bool squares, double *total) {
    const int64_t n = tensor_numel(x), blocks = (n + BLOCK - 1) / BLOCK;
    if (blocks <= 1) {
        *total = sum_block(x, 0, n, squares);
        return LG_OK;
    }
    const int threads = op_threads(ctx, n, GRAIN);
    void *scratch;
    LG_TRY(lg_scratch(ctx, blocks * (int64_t)sizeof(double), &scratch));
    double *partial = scratch;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t left = n - b * BLOCK;
        partial[b] = sum_block(x, b * BLOCK, left < BLOCK ? left : BLOCK, squares);
    }
    *total = 0;
    for (int64_t b = 0; b < blocks; b++) *total += partial[b];
    return LG_OK;
}

lg_status cpu_sum(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    double total;
    LG_TRY(sum_all(ctx, x, false, &total));
    store(y, 0, total);
    return LG_OK;
}

lg_status cpu_sum_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *dx) {
    return dx ? cpu_fill(ctx, load(dy, 0), dx) : LG_OK;
}

lg_status cpu_sum_squares(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    double total;
    LG_TRY(sum_all(ctx, x, true, &total));
    store(y, 0, total);
    return LG_OK;
}

/* ---- segment_sum ---- */

/* Segments lie within the row and do not run backwards; they need not cover it. */
static lg_status check_segments(lg_context *ctx, const char *op, const lg_tensor *cu_seqlens,
                                int64_t n) {
    const int32_t *cu = cu_seqlens->data;
    for (int64_t s = 0; s < cu_seqlens->shape[0]; s++) {
        const int64_t low = s > 0 ? cu[s - 1] : 0;
        if (cu[s] < low || cu[s] > n)
            return lg_fail(ctx, LG_EINVAL, "%s: cu_seqlens[%lld] is %d, wanted [%lld, %lld]", op,
                           (long long)s, cu[s], (long long)low, (long long)n);
    }
    return LG_OK;
}

lg_status cpu_segment_sum(lg_context *ctx, const lg_tensor *x, const lg_tensor *cu_seqlens,
                          lg_tensor *y) {
    const int32_t *cu = cu_seqlens->data;
    LG_TRY(check_segments(ctx, "segment_sum", cu_seqlens, x->shape[0]));
    for (int64_t s = 0; s < y->shape[0]; s++) {
        double sum = 0;
        for (int64_t i = cu[s]; i < cu[s + 1]; i++) sum += load(x, i);
        store(y, s, sum);
    }
    return LG_OK;
}

lg_status cpu_segment_sum_backward(lg_context *ctx, const lg_tensor *dy,
                                   const lg_tensor *cu_seqlens, lg_tensor *dx) {
    if (!dx) return LG_OK;
    const int32_t *cu = cu_seqlens->data;
    LG_TRY(check_segments(ctx, "segment_sum_backward", cu_seqlens, dx->shape[0]));
    LG_TRY(cpu_fill(ctx, 0, dx));
    for (int64_t s = 0; s < dy->shape[0]; s++)
        for (int64_t i = cu[s]; i < cu[s + 1]; i++) store(dx, i, load(dy, s));
    return LG_OK;
}

/* ---- gather ---- */

static lg_status check_index(lg_context *ctx, const char *op, const lg_tensor *index,
                             int64_t size) {
    const int32_t *at = index->data;
    for (int64_t n = 0; n < index->shape[0]; n++)
        if (at[n] < 0 || at[n] >= size)
            return lg_fail(ctx, LG_EINVAL, "%s: index[%lld] is %d, wanted [0, %lld)", op,
                           (long long)n, at[n], (long long)size);
    return LG_OK;
}

lg_status cpu_gather(lg_context *ctx, const lg_tensor *x, const lg_tensor *index, lg_tensor *y) {
    const int32_t *at = index->data;
    LG_TRY(check_index(ctx, "gather", index, x->shape[0]));
    for (int64_t n = 0; n < index->shape[0]; n++) store(y, n, load(x, at[n]));
    return LG_OK;
}

lg_status cpu_gather_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *index,
                              lg_tensor *dx) {
    if (!dx) return LG_OK;
    const int32_t *at = index->data;
    const int64_t size = dx->shape[0];
    LG_TRY(check_index(ctx, "gather_backward", index, size));
    void *scratch;
    LG_TRY(lg_scratch(ctx, size * (int64_t)sizeof(double), &scratch));
    double *sum = scratch;
    for (int64_t s = 0; s < size; s++) sum[s] = 0;
    for (int64_t n = 0; n < index->shape[0]; n++) sum[at[n]] += load(dy, n);
    for (int64_t s = 0; s < size; s++) store(dx, s, sum[s]);
    return LG_OK;
}
