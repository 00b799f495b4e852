/* Rows of an RMS norm, for the ops that have one: y = x rstd w, its gradient, and weights in fp32. */
#ifndef LIGER_NORM_H
#define LIGER_NORM_H

#include "cpu.h"
#include "vec.h"

/* The sum of dw groups ROWS rows, whatever the threads. */
enum { NORM_ROWS = 64 };

/* Elements [c, c + n), n <= 16, of y = x rstd w. */
VEC_INLINE void norm16(const float *x, const float *w, int64_t c, int64_t n, float rstd, float *y) {
    f32x16 v = load16_part(x + c, n, 0.0f) * rstd;
    if (w) v *= load16_part(w + c, n, 0.0f);
    store16_part(y + c, n, v);
}

static inline void norm_row(const float *x, const float *w, int64_t C, float rstd, bool round,
                            float *y) {
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

/* Elements [c, c + n), n <= 16, of dx = dy w rstd - x a, plus ds if there is one, and of dw += dy x rstd. */
VEC_INLINE void norm16_backward(const float *dy, const float *ds, const float *x, const float *w,
                                int64_t c, int64_t n, float rstd, float a, float *dx, float *dw) {
    const f32x16 d = load16_part(dy + c, n, 0.0f), v = load16_part(x + c, n, 0.0f);
    if (dw) store16_part(dw + c, n, d * (v * rstd) + load16_part(dw + c, n, 0.0f));
    if (!dx) return;
    const f32x16 g = w ? d * load16_part(w + c, n, 0.0f) : d;
    f32x16 out = g * rstd - v * a;
    if (ds) out += load16_part(ds + c, n, 0.0f);
    store16_part(dx + c, n, out);
}

/* dx = rstd (g - xhat mean(g xhat)) + ds, dw += dy xhat, with g = dy w; ds and either result may be
 * NULL. `x` may be `dx`. */
static inline void norm_row_backward(const float *dy, const float *ds, const float *x,
                                     const float *w, int64_t C, float rstd, float *dx, float *dw) {
    const double sum = dx ? dot_weighted(dy, w, x, C) : 0;
    const float a = (float)(sum * rstd * rstd * rstd / (double)C);
    int64_t c = 0;
    for (; c + VEC_LANES <= C; c += VEC_LANES)
        norm16_backward(dy, ds, x, w, c, VEC_LANES, rstd, a, dx, dw);
    if (c < C) norm16_backward(dy, ds, x, w, c, C - c, rstd, a, dx, dw);
}

/* offset + w in fp32, or NULL without w. */
static inline lg_status weight_row(lg_context *ctx, const lg_tensor *w, double offset,
                                   const float **row) {
    void *buffer = NULL;
    *row = NULL;
    if (!w) return LG_OK;
    const int64_t C = w->shape[0];
    LG_TRY(lg_scratch(ctx, C * 4, &buffer));
    const float *weight = *row = load_row(w, 0, C, buffer);
    if (offset == 0) return LG_OK;
    for (int64_t c = 0; c < C; c++) ((float *)buffer)[c] = weight[c] + (float)offset;
    *row = buffer;
    return LG_OK;
}

/* dw += the sums of the blocks [num_blocks,C], in order. */
static inline void add_blocks(lg_tensor *dw, const float *partial, int64_t num_blocks) {
    const int64_t C = tensor_cols(dw);
    float *dw_row = dw->data;
    for (int64_t b = 0; b < num_blocks; b++)
        for (int64_t c = 0; c < C; c++) dw_row[c] += partial[b * C + c];
}

#endif
