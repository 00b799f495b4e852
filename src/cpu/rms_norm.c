/* RMS normalisation over the last dimension. Rows may be strided: the heads of a fused query,
 * key and value matrix. Statistics run in fp32 over 256 elements and in double beyond. */
#include "cpu.h"
#include "vec.h"

/* The sum of dw groups ROWS rows, whatever the threads. Roots and divisions of STEP rows go through
 * the processor together, and the next rows are fetched meanwhile (20480 strided rows of 16: 370
 * to 280 us). */
enum { ROWS = 64, STEP = 16 };

/* Elements [c, c + n), n <= 16, of y = x rstd w. */
VEC_INLINE void norm16(const float *x, const float *w, int64_t c, int64_t n, float rstd, float *y) {
    f32x16 v = load16_part(x + c, n, 0.0f) * rstd;
    if (w) v *= load16_part(w + c, n, 0.0f);
    store16_part(y + c, n, v);
}

static void norm_row(const float *x, const float *w, int64_t C, float rstd, bool round, float *y) {
    if (round) {
        for (int64_t c = 0; c < C; c++) y[c] = bf16_to_f32(f32_to_bf16(x[c] * rstd));
        for (int64_t c = 0; w && c < C; c++) y[c] *= w[c];
        return;
    }
    int64_t c = 0;
    for (; c + VEC_LANES <= C; c += VEC_LANES) norm16(x, w, c, VEC_LANES, rstd, y);
    if (c < C) norm16(x, w, c, C - c, rstd, y);
}

/* Elements [i, i + 16) of dy w below n. */
VEC_INLINE f32x16 weighted16(const float *dy, const float *w, int64_t i, int64_t n) {
    const f32x16 g = load16_at(dy, i, n, 0.0f);
    return w ? g * load16_at(w, i, n, 0.0f) : g;
}

/* The dot product of dy w and x, in dot_f32's order. */
VEC_INLINE double dot_weighted(const float *dy, const float *w, const float *x, int64_t C) {
    double sum = 0;
    for (int64_t c0 = 0; c0 < C; c0 += VEC_BLOCK) {
        const int64_t end = C - c0 < VEC_BLOCK ? C : c0 + VEC_BLOCK;
        f32x16 s[4] = {{0}};
        for (int64_t c = c0; c < end; c += 4 * VEC_LANES)
            for (int u = 0; u < 4; u++) {
                const int64_t at = c + u * VEC_LANES;
                if (at < end) s[u] += weighted16(dy, w, at, end) * load16_at(x, at, end, 0.0f);
            }
        sum += sum4(s);
    }
    return sum;
}

/* Elements [c, c + n), n <= 16, of dx = dy w rstd - x a and of dw += dy x rstd. */
VEC_INLINE void norm16_backward(const float *dy, const float *x, const float *w, int64_t c,
                                int64_t n, float rstd, float a, float *dx, float *dw) {
    const f32x16 d = load16_part(dy + c, n, 0.0f), v = load16_part(x + c, n, 0.0f);
    if (dw) store16_part(dw + c, n, d * (v * rstd) + load16_part(dw + c, n, 0.0f));
    if (!dx) return;
    const f32x16 g = w ? d * load16_part(w + c, n, 0.0f) : d;
    store16_part(dx + c, n, g * rstd - v * a);
}

/* dx = rstd (g - xhat mean(g xhat)), dw += dy xhat, with g = dy w; either result may be NULL.
 * `x` may be `dx`. */
static void norm_row_backward(const float *dy, const float *x, const float *w, int64_t C,
                              float rstd, float *dx, float *dw) {
    const double sum = dx ? dot_weighted(dy, w, x, C) : 0;
    const float a = (float)(sum * rstd * rstd * rstd / (double)C);
    int64_t c = 0;
    for (; c + VEC_LANES <= C; c += VEC_LANES)
        norm16_backward(dy, x, w, c, VEC_LANES, rstd, a, dx, dw);
    if (c < C) norm16_backward(dy, x, w, c, C - c, rstd, a, dx, dw);
}

static void rms_norm_f64(const lg_tensor *x, const lg_tensor *w, double eps, lg_tensor *y,
                         lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    for (int64_t n = 0; n < N; n++) {
        const double *x_row = (const double *)x->data + row_offset(x, n);
        double *y_row = (double *)y->data + n * C, sum = 0;
        for (int64_t c = 0; c < C; c++) sum += x_row[c] * x_row[c];
        const double r = 1 / sqrt(sum / (double)C + eps);
        for (int64_t c = 0; c < C; c++)
            y_row[c] = x_row[c] * r * (w ? ((const double *)w->data)[c] : 1);
        ((double *)rstd->data)[n] = r;
    }
}

static void rms_norm_backward_f64(const lg_tensor *dy, const lg_tensor *x, const lg_tensor *w,
                                  const lg_tensor *rstd, lg_tensor *dx, lg_tensor *dw) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    for (int64_t n = 0; n < N; n++) {
        const double *x_row = (const double *)x->data + row_offset(x, n),
                     *dy_row = (const double *)dy->data + n * C;
        const double r = ((const double *)rstd->data)[n];
        double sum = 0;
        for (int64_t c = 0; c < C; c++)
            sum += dy_row[c] * (w ? ((const double *)w->data)[c] : 1) * x_row[c] * r;
        for (int64_t c = 0; c < C; c++) {
            const double g = dy_row[c] * (w ? ((const double *)w->data)[c] : 1),
                         xhat = x_row[c] * r;
            if (dx) ((double *)dx->data)[row_offset(dx, n) + c] = r * (g - xhat * sum / (double)C);
            if (dw) ((double *)dw->data)[c] += dy_row[c] * xhat;
        }
    }
}

/* A row of fp32 weights, or NULL for none. */
static lg_status weight_row(lg_context *ctx, const lg_tensor *w, const float **row) {
    void *buffer = NULL;
    *row = NULL;
    if (!w) return LG_OK;
    LG_TRY(lg_scratch(ctx, w->shape[0] * 4, &buffer));
    *row = load_row(w, 0, w->shape[0], buffer);
    return LG_OK;
}

lg_status cpu_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, double eps,
                       lg_tensor *y, lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x), width = lg_dtype_bytes(x->dtype);
    if (x->dtype == LG_F64) {
        rms_norm_f64(x, w, eps, y, rstd);
        return LG_OK;
    }
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    const int64_t blocks = (N + STEP - 1) / STEP;
    const float *weight;
    void *scratch;
    LG_TRY(weight_row(ctx, w, &weight));
    LG_TRY(lg_scratch(ctx, threads * 2 * C * 4, &scratch));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        float *buffer = (float *)scratch + thread_index() * 2 * C;
        const int64_t end = N < (b + 1) * STEP ? N : (b + 1) * STEP;
        float *r = (float *)rstd->data + b * STEP;
        double sum[STEP];
        row_walk walk = row_walk_from(x, b * STEP);
        const row_walk first = walk;
        for (int64_t n = b * STEP; n < end; n++, row_walk_next(&walk)) {
            const float *x_row = load_row(x, walk.offset, C, buffer);
            sum[n - b * STEP] = dot_f32(x_row, x_row, C);
        }
        for (int64_t i = 0; i < end - b * STEP; i++)
            r[i] = (float)(1 / sqrt(sum[i] / (double)C + eps));
        row_walk ahead = walk;
        walk = first;
        for (int64_t n = b * STEP; n < end; n++, row_walk_next(&walk), row_walk_next(&ahead)) {
            if (end < N) __builtin_prefetch((const char *)x->data + ahead.offset * width);
            const float *x_row = load_row(x, walk.offset, C, buffer);
            float *y_row = begin_row(y, n * C, buffer + C);
            norm_row(x_row, weight, C, r[n - b * STEP], x->dtype == LG_BF16, y_row);
            store_row(y, n * C, C, y_row);
        }
    }
    return LG_OK;
}

lg_status cpu_rms_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                const lg_tensor *w, const lg_tensor *rstd, lg_tensor *dx,
                                lg_tensor *dw) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    if (x->dtype == LG_F64) {
        rms_norm_backward_f64(dy, x, w, rstd, dx, dw);
        return LG_OK;
    }
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    const int64_t blocks = (N + ROWS - 1) / ROWS;
    const float *weight;
    void *scratch, *partial = NULL;
    LG_TRY(weight_row(ctx, w, &weight));
    LG_TRY(lg_scratch(ctx, threads * 3 * C * 4, &scratch));
    if (dw) LG_TRY(lg_scratch(ctx, blocks * C * 4, &partial));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        float *buffer = (float *)scratch + thread_index() * 3 * C;
        float *dw_row = dw ? (float *)partial + b * C : NULL;
        row_walk x_walk = row_walk_from(x, b * ROWS),
                 dx_walk = row_walk_from(dx ? dx : x, b * ROWS);
        if (dw) memset(dw_row, 0, (size_t)C * 4);
        for (int64_t n = b * ROWS; n < N && n < (b + 1) * ROWS; n++) {
            const float *x_row = load_row(x, x_walk.offset, C, buffer);
            const float *dy_row = load_row(dy, n * C, C, buffer + C);
            float *dx_row = dx ? begin_row(dx, dx_walk.offset, buffer + 2 * C) : NULL;
            norm_row_backward(dy_row, x_row, weight, C, ((const float *)rstd->data)[n], dx_row,
                              dw_row);
            if (dx) store_row(dx, dx_walk.offset, C, dx_row);
            row_walk_next(&x_walk);
            row_walk_next(&dx_walk);
        }
    }
    if (!dw) return LG_OK;
    float *dw_row = dw->data;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t c = 0; c < C; c++) dw_row[c] += ((const float *)partial)[b * C + c];
    return LG_OK;
}
