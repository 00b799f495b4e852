/* Layer normalisation over the last dimension, in double: the variance about the mean. */
#include "cpu.h"

/* The sums of dw and db group ROWS rows, whatever the threads. */
enum { ROWS = 64 };

/* A row as doubles. */
static void get_row(const lg_tensor *t, int64_t offset, int64_t C, double *row) {
    for (int64_t c = 0; c < C; c++) row[c] = load(t, offset + c);
}

lg_status cpu_layer_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                         const lg_tensor *b, double eps, lg_tensor *y, lg_tensor *mean,
                         lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    void *scratch;
    LG_TRY(lg_scratch(ctx, threads * C * 8, &scratch));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        double *row = (double *)scratch + thread_index() * C, sum = 0, squares = 0;
        get_row(x, row_offset(x, n), C, row);
        for (int64_t c = 0; c < C; c++) sum += row[c];
        const double m = C > 0 ? sum / (double)C : 0;
        for (int64_t c = 0; c < C; c++) squares += (row[c] - m) * (row[c] - m);
        const double r = 1 / sqrt((C > 0 ? squares / (double)C : 0) + eps);
        for (int64_t c = 0; c < C; c++)
            store(y, n * C + c, (row[c] - m) * r * (w ? load(w, c) : 1) + (b ? load(b, c) : 0));
        store(mean, n, m);
        store(rstd, n, r);
    }
    return LG_OK;
}

/* One row of the backward. `row` has room for xhat and g; dw and db are sums to add to. */
static void backward_row(const lg_tensor *dy, const lg_tensor *x, const lg_tensor *w, double mean,
                         double rstd, int64_t n, double *row, lg_tensor *dx, double *dw,
                         double *db) {
    const int64_t C = tensor_cols(x);
    double *xhat = row, *g = row + C, sum = 0, sum_x = 0;
    get_row(x, row_offset(x, n), C, xhat);
    get_row(dy, n * C, C, g);
    for (int64_t c = 0; c < C; c++) {
        xhat[c] = (xhat[c] - mean) * rstd;
        if (dw) dw[c] += g[c] * xhat[c];
        if (db) db[c] += g[c];
        if (w) g[c] *= load(w, c);
        sum += g[c];
        sum_x += g[c] * xhat[c];
    }
    if (!dx) return;
    const int64_t to = row_offset(dx, n);
    for (int64_t c = 0; c < C; c++)
        store(dx, to + c, rstd * (g[c] - (sum + xhat[c] * sum_x) / (double)C));
}

/* d += the sums of the blocks, block b's at b * stride, in order. */
static void add_blocks(lg_tensor *d, const double *partial, int64_t blocks, int64_t stride) {
    for (int64_t c = 0; c < tensor_cols(d); c++) {
        double sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += partial[b * stride + c];
        store(d, c, load(d, c) + sum);
    }
}

lg_status cpu_layer_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                  const lg_tensor *w, const lg_tensor *mean, const lg_tensor *rstd,
                                  lg_tensor *dx, lg_tensor *dw, lg_tensor *db) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x), blocks = (N + ROWS - 1) / ROWS;
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    void *scratch, *partial;
    LG_TRY(lg_scratch(ctx, threads * 2 * C * 8, &scratch));
    LG_TRY(lg_scratch(ctx, blocks * 2 * C * 8, &partial));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        double *sums = (double *)partial + b * 2 * C;
        memset(sums, 0, (size_t)(2 * C) * 8);
        for (int64_t n = b * ROWS; n < N && n < (b + 1) * ROWS; n++)
            backward_row(dy, x, w, load(mean, n), load(rstd, n), n,
                         (double *)scratch + thread_index() * 2 * C, dx, dw ? sums : NULL,
                         db ? sums + C : NULL);
    }
    if (dw) add_blocks(dw, partial, blocks, 2 * C);
    if (db) add_blocks(db, (double *)partial + C, blocks, 2 * C);
    return LG_OK;
}
