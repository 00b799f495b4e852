/* The linear layer: three matrix products and the column sums of the bias gradient. */
#include "linear.h"

#include "gemm.h"

enum { COLUMNS = 64, ROWS = 64 };

lg_status cpu_linear(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
                     lg_tensor *y) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x), O = w->shape[0];
    if (b) fill_rows(ctx, b->data, y->data, N, O * lg_dtype_bytes(y->dtype));
    lg_context_stats(ctx)->gemm_rows += (double)N;
    const gemm_args args = {
        .m = N,
        .n = O,
        .k = C,
        .a = {x->data, C, x->dtype, false},
        .b = {w->data, C, w->dtype, true},
        .c = y->data,
        .ldc = O,
        .c_dtype = y->dtype,
        .accumulate = b != NULL,
    };
    return gemm(ctx, &args);
}

/* COLUMNS columns from c0 on: fp32 over ROWS rows, those sums in double. */
static void sum_columns(const lg_tensor *dy, int64_t N, lg_tensor *db, int64_t c0) {
    const int64_t O = db->shape[0], n = O - c0 < COLUMNS ? O - c0 : COLUMNS;
    double total[COLUMNS] = {0};
    for (int64_t r0 = 0; r0 < N; r0 += ROWS) {
        float buffer[COLUMNS], sum[COLUMNS] = {0};
        for (int64_t r = r0; r < N && r < r0 + ROWS; r++) {
            if (dy->dtype == LG_F64) {
                const double *row = (const double *)dy->data + r * O + c0;
                for (int64_t c = 0; c < n; c++) total[c] += row[c];
            } else {
                const float *row = load_row(dy, r * O + c0, n, buffer);
                for (int64_t c = 0; c < n; c++) sum[c] += row[c];
            }
        }
        for (int64_t c = 0; c < n; c++) total[c] += sum[c];
    }
    for (int64_t c = 0; c < n; c++) store(db, c0 + c, load(db, c0 + c) + total[c]);
}

void linear_bias_gradient(lg_context *ctx, const lg_tensor *dy, int64_t N, lg_tensor *db) {
    const int64_t O = db->shape[0];
    const int threads = op_threads(ctx, N * O, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t c = 0; c < O; c += COLUMNS) sum_columns(dy, N, db, c);
}

lg_status cpu_linear_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                              const lg_tensor *w, lg_tensor *dx, lg_tensor *dw, lg_tensor *db) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x), O = w->shape[0];
    if (dx || dw) lg_context_stats(ctx)->gemm_rows += (double)N;
    if (dx) {
        const gemm_args args = {
            .m = N,
            .n = C,
            .k = O,
            .a = {dy->data, O, dy->dtype, false},
            .b = {w->data, C, w->dtype, false},
            .c = dx->data,
            .ldc = C,
            .c_dtype = dx->dtype,
        };
        LG_TRY(gemm(ctx, &args));
    }
    if (dw) {
        const gemm_args args = {
            .m = O,
            .n = C,
            .k = N,
            .a = {dy->data, O, dy->dtype, true},
            .b = {x->data, C, x->dtype, false},
            .c = dw->data,
            .ldc = C,
            .c_dtype = dw->dtype,
            .accumulate = true,
        };
        LG_TRY(gemm(ctx, &args));
    }
    if (db) linear_bias_gradient(ctx, dy, N, db);
    return LG_OK;
}
