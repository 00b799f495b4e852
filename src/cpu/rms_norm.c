/* RMS normalisation over the last dimension, also of a sum. Rows may be strided: the heads of a fused
 * query, key and value matrix. Statistics run in fp32 over 1024 elements and in double beyond. */
#include "norm.h"

/* Roots and divisions of STEP rows go through the processor together, and the next rows are fetched
 * meanwhile (20480 strided rows of 16: 370 to 280 us). */
enum { STEP = 16 };

static double factor_f64(const lg_tensor *w, double offset, int64_t c) {
    return w ? offset + ((const double *)w->data)[c] : 1;
}

static void normalise_f64(const lg_tensor *x, const lg_tensor *w, double eps, double offset,
                          lg_tensor *y, lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    for (int64_t n = 0; n < N; n++) {
        const double *x_row = (const double *)x->data + row_offset(x, n);
        double *y_row = (double *)y->data + n * C, sum = 0;
        for (int64_t c = 0; c < C; c++) sum += x_row[c] * x_row[c];
        const double r = 1 / sqrt(sum / (double)C + eps);
        for (int64_t c = 0; c < C; c++) y_row[c] = x_row[c] * r * factor_f64(w, offset, c);
        ((double *)rstd->data)[n] = r;
    }
}

static void backward_f64(const lg_tensor *dy, const lg_tensor *ds, const lg_tensor *x,
                         const lg_tensor *w, const lg_tensor *rstd, double offset, lg_tensor *dx,
                         lg_tensor *dw) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    for (int64_t n = 0; n < N; n++) {
        const double *x_row = (const double *)x->data + row_offset(x, n),
                     *dy_row = (const double *)dy->data + n * C;
        const double r = ((const double *)rstd->data)[n];
        double sum = 0;
        for (int64_t c = 0; c < C; c++) sum += dy_row[c] * factor_f64(w, offset, c) * x_row[c] * r;
        for (int64_t c = 0; c < C; c++) {
            const double g = dy_row[c] * factor_f64(w, offset, c), xhat = x_row[c] * r;
            if (dx)
                ((double *)dx->data)[row_offset(dx, n) + c] =
                    r * (g - xhat * sum / (double)C) +
                    (ds ? ((const double *)ds->data)[n * C + c] : 0);
            if (dw) ((double *)dw->data)[c] += dy_row[c] * xhat;
        }
    }
}

/* y and rstd of the rows [b STEP, end). */
static void normalise_rows(const lg_tensor *x, const float *weight, double eps, bool round,
                           int64_t b, int64_t end, float *buffer, lg_tensor *y, lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x), width = lg_dtype_bytes(x->dtype);
    float *r = (float *)rstd->data + b * STEP;
    double sum[STEP];
    row_walk walk = row_walk_from(x, b * STEP);
    const row_walk first = walk;
    for (int64_t n = b * STEP; n < end; n++, row_walk_next(&walk)) {
        const float *x_row = load_row(x, walk.offset, C, buffer);
        sum[n - b * STEP] = dot_f32(x_row, x_row, C);
    }
    for (int64_t i = 0; i < end - b * STEP; i++) r[i] = (float)(1 / sqrt(sum[i] / (double)C + eps));
    row_walk ahead = walk;
    walk = first;
    for (int64_t n = b * STEP; n < end; n++, row_walk_next(&walk), row_walk_next(&ahead)) {
        if (end < N) __builtin_prefetch((const char *)x->data + ahead.offset * width);
        const float *x_row = load_row(x, walk.offset, C, buffer);
        float *y_row = begin_row(y, n * C, buffer + C);
        norm_row(x_row, weight, C, r[n - b * STEP], round && x->dtype == LG_BF16, y_row);
        store_row(y, n * C, C, y_row);
    }
}

/* Elements [from, to) of s = x + residual, all dense. */
static void add_range(const lg_tensor *x, const lg_tensor *residual, lg_tensor *s, int64_t from,
                      int64_t to) {
    if (s->dtype == LG_F64) {
        const double *a = x->data, *b = residual->data;
        for (int64_t i = from; i < to; i++) ((double *)s->data)[i] = a[i] + b[i];
    } else if (s->dtype == LG_F32) {
        const float *a = x->data, *b = residual->data;
        for (int64_t i = from; i < to; i++) ((float *)s->data)[i] = a[i] + b[i];
    } else {
        const uint16_t *a = x->data, *b = residual->data;
        for (int64_t i = from; i < to; i++)
            ((uint16_t *)s->data)[i] = f32_to_bf16(bf16_to_f32(a[i]) + bf16_to_f32(b[i]));
    }
}

/* Of x, or with a residual of s = x + residual. */
static lg_status normalise(lg_context *ctx, const lg_tensor *x, const lg_tensor *residual,
                           const lg_tensor *w, double eps, double offset, bool round, lg_tensor *s,
                           lg_tensor *y, lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    const lg_tensor *of = residual ? s : x;
    if (x->dtype == LG_F64) {
        if (residual) add_range(x, residual, s, 0, N * C);
        normalise_f64(of, w, eps, offset, y, rstd);
        return LG_OK;
    }
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    const int64_t blocks = (N + STEP - 1) / STEP;
    const float *weight;
    void *scratch;
    LG_TRY(weight_row(ctx, w, offset, &weight));
    LG_TRY(lg_scratch(ctx, threads * 2 * C * 4, &scratch));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t end = N < (b + 1) * STEP ? N : (b + 1) * STEP;
        if (residual) add_range(x, residual, s, b * STEP * C, end * C);
        normalise_rows(of, weight, eps, round, b, end, (float *)scratch + thread_index() * 2 * C, y,
                       rstd);
    }
    return LG_OK;
}

/* ds may be NULL. */
static lg_status backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *ds,
                          const lg_tensor *x, const lg_tensor *w, const lg_tensor *rstd,
                          double offset, lg_tensor *dx, lg_tensor *dw) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    if (x->dtype == LG_F64) {
        backward_f64(dy, ds, x, w, rstd, offset, dx, dw);
        return LG_OK;
    }
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    const int64_t blocks = (N + NORM_ROWS - 1) / NORM_ROWS;
    const float *weight;
    void *scratch, *partial = NULL;
    LG_TRY(weight_row(ctx, w, offset, &weight));
    LG_TRY(lg_scratch(ctx, threads * 4 * C * 4, &scratch));
    if (dw) LG_TRY(lg_scratch(ctx, blocks * C * 4, &partial));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        float *buffer = (float *)scratch + thread_index() * 4 * C;
        float *dw_row = dw ? (float *)partial + b * C : NULL;
        row_walk x_walk = row_walk_from(x, b * NORM_ROWS),
                 dx_walk = row_walk_from(dx ? dx : x, b * NORM_ROWS);
        if (dw) memset(dw_row, 0, (size_t)C * 4);
        for (int64_t n = b * NORM_ROWS; n < N && n < (b + 1) * NORM_ROWS; n++) {
            const float *x_row = load_row(x, x_walk.offset, C, buffer);
            const float *dy_row = load_row(dy, n * C, C, buffer + C);
            const float *ds_row = ds ? load_row(ds, n * C, C, buffer + 2 * C) : NULL;
            float *dx_row = dx ? begin_row(dx, dx_walk.offset, buffer + 3 * C) : NULL;
            norm_row_backward(dy_row, ds_row, x_row, weight, C, ((const float *)rstd->data)[n],
                              dx_row, dw_row);
            if (dx) store_row(dx, dx_walk.offset, C, dx_row);
            row_walk_next(&x_walk);
            row_walk_next(&dx_walk);
        }
    }
    if (dw) add_blocks(dw, partial, blocks);
    return LG_OK;
}

lg_status cpu_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, double eps,
                       double offset, bool round, lg_tensor *y, lg_tensor *rstd) {
    return normalise(ctx, x, NULL, w, eps, offset, round, NULL, y, rstd);
}

lg_status cpu_rms_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                const lg_tensor *w, const lg_tensor *rstd, double offset,
                                lg_tensor *dx, lg_tensor *dw) {
    return backward(ctx, dy, NULL, x, w, rstd, offset, dx, dw);
}

lg_status cpu_add_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *residual,
                           const lg_tensor *w, double eps, double offset, bool round, lg_tensor *s,
                           lg_tensor *y, lg_tensor *rstd) {
    return normalise(ctx, x, residual, w, eps, offset, round, s, y, rstd);
}

lg_status cpu_add_rms_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *ds,
                                    const lg_tensor *s, const lg_tensor *w, const lg_tensor *rstd,
                                    double offset, lg_tensor *dx, lg_tensor *dresidual,
                                    lg_tensor *dw) {
    lg_tensor *written = dx ? dx : dresidual;
    LG_TRY(backward(ctx, dy, ds, s, w, rstd, offset, written, dw));
    if (dx && dresidual)
        memcpy(dresidual->data, dx->data, (size_t)(tensor_numel(dx) * lg_dtype_bytes(dx->dtype)));
    return LG_OK;
}
