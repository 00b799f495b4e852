/* RMS norm of each head, then half-split rotary embedding: rows are heads of tokens, whose strides are
 * those of a fused query, key and value matrix. */
#include "norm.h"
#include "rope.h"

/* Sizes, and how tokens turn. */
typedef struct heads {
    const lg_tensor *cos, *sin;
    const int32_t *position;
    int64_t H, D, R;
} heads;

static heads heads_of(const lg_tensor *x, const lg_tensor *cos, const lg_tensor *sin,
                      const lg_tensor *position) {
    return (heads){cos, sin, position->data, x->shape[1], x->shape[2], cos->shape[1]};
}

/* y = a head x of token n turned forwards or, with sign -1, backwards. */
static void turn_f32(const heads *h, int64_t n, int sign, const float *x, float *y) {
    const int64_t row = h->position[n] * h->R;
    rotate_f32(x, (const float *)h->cos->data + row, (const float *)h->sin->data + row, (float)sign,
               h->R, h->D, y);
}

static void turn_f64(const heads *h, int64_t n, int sign, const double *x, double *y) {
    const int64_t row = h->position[n] * h->R;
    rotate_f64(x, (const double *)h->cos->data + row, (const double *)h->sin->data + row, sign,
               h->R, h->D, y);
}

static void forward_f64(const heads *h, const lg_tensor *x, const lg_tensor *w, double eps,
                        double offset, lg_tensor *y, lg_tensor *rstd) {
    const double *weight = w->data;
    double scaled[HEAD_BUFFER];
    row_walk at = row_walk_from(x, 0), to = row_walk_from(y, 0);
    for (int64_t r = 0; r < tensor_rows(x); r++, row_walk_next(&at), row_walk_next(&to)) {
        const double *x_row = (const double *)x->data + at.offset;
        double sum = 0;
        for (int64_t c = 0; c < h->D; c++) sum += x_row[c] * x_row[c];
        const double root = ((double *)rstd->data)[r] = 1 / sqrt(sum / (double)h->D + eps);
        for (int64_t c = 0; c < h->D; c++) scaled[c] = x_row[c] * root * (offset + weight[c]);
        turn_f64(h, at.index[0], 1, scaled, (double *)y->data + to.offset);
    }
}

static void backward_f64(const heads *h, const lg_tensor *dy, const lg_tensor *x,
                         const lg_tensor *w, const lg_tensor *rstd, double offset, lg_tensor *dx,
                         lg_tensor *dw) {
    const double *weight = w->data;
    double turned[HEAD_BUFFER];
    for (int64_t r = 0; r < tensor_rows(x); r++) {
        const double *x_row = (const double *)x->data + row_offset(x, r),
                     root = ((const double *)rstd->data)[r];
        double sum = 0;
        turn_f64(h, r / h->H, -1, (const double *)dy->data + row_offset(dy, r), turned);
        for (int64_t c = 0; c < h->D; c++)
            sum += turned[c] * (offset + weight[c]) * x_row[c] * root;
        for (int64_t c = 0; c < h->D; c++) {
            const double g = turned[c] * (offset + weight[c]), xhat = x_row[c] * root;
            if (dx)
                ((double *)dx->data)[row_offset(dx, r) + c] =
                    root * (g - xhat * sum / (double)h->D);
            if (dw) ((double *)dw->data)[c] += turned[c] * xhat;
        }
    }
}

/* The heads of token n. */
static void forward_token(const heads *h, int64_t n, const lg_tensor *x, const float *weight,
                          double eps, lg_tensor *y, float *rstd) {
    for (int64_t i = 0; i < h->H; i++) {
        const int64_t at = n * x->stride[0] + i * x->stride[1],
                      to = n * y->stride[0] + i * y->stride[1];
        float buffer[HEAD_BUFFER], scaled[HEAD_BUFFER], turned[HEAD_BUFFER];
        const float *x_row = load_row(x, at, h->D, buffer);
        float *y_row = begin_row(y, to, turned);
        const float root = (float)(1 / sqrt(dot_f32(x_row, x_row, h->D) / (double)h->D + eps));
        rstd[n * h->H + i] = root;
        norm_row(x_row, weight, h->D, root, false, scaled);
        turn_f32(h, n, 1, scaled, y_row);
        store_row(y, to, h->D, y_row);
    }
}

/* The heads [from, end), counted through all tokens. */
static void backward_rows(const heads *h, const lg_tensor *dy, const lg_tensor *x,
                          const float *weight, const float *rstd, int64_t from, int64_t end,
                          lg_tensor *dx, float *dw) {
    row_walk x_walk = row_walk_from(x, from), dy_walk = row_walk_from(dy, from),
             dx_walk = row_walk_from(dx ? dx : x, from);
    for (int64_t r = from; r < end; r++) {
        float x_buffer[HEAD_BUFFER], dy_buffer[HEAD_BUFFER], dx_buffer[HEAD_BUFFER],
            turned[HEAD_BUFFER];
        const float *x_row = load_row(x, x_walk.offset, h->D, x_buffer);
        float *dx_row = dx ? begin_row(dx, dx_walk.offset, dx_buffer) : NULL;
        turn_f32(h, x_walk.index[0], -1, load_row(dy, dy_walk.offset, h->D, dy_buffer), turned);
        norm_row_backward(turned, NULL, x_row, weight, h->D, rstd[r], dx_row, dw);
        if (dx) store_row(dx, dx_walk.offset, h->D, dx_row);
        row_walk_next(&x_walk);
        row_walk_next(&dy_walk);
        row_walk_next(&dx_walk);
    }
}

lg_status cpu_qk_norm_rope(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                           const lg_tensor *cos, const lg_tensor *sin, const lg_tensor *position,
                           double eps, double offset, lg_tensor *y, lg_tensor *rstd) {
    const heads h = heads_of(x, cos, sin, position);
    LG_TRY(cpu_rope_check(ctx, "qk_norm_rope", x, cos, position));
    if (x->dtype == LG_F64) {
        forward_f64(&h, x, w, eps, offset, y, rstd);
        return LG_OK;
    }
    const int threads = op_threads(ctx, tensor_numel(x), ROW_GRAIN);
    const float *weight;
    LG_TRY(weight_row(ctx, w, offset, &weight));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < x->shape[0]; n++) forward_token(&h, n, x, weight, eps, y, rstd->data);
    return LG_OK;
}

lg_status cpu_qk_norm_rope_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                    const lg_tensor *w, const lg_tensor *cos, const lg_tensor *sin,
                                    const lg_tensor *position, const lg_tensor *rstd, double offset,
                                    lg_tensor *dx, lg_tensor *dw) {
    const heads h = heads_of(x, cos, sin, position);
    LG_TRY(cpu_rope_check(ctx, "qk_norm_rope_backward", x, cos, position));
    if (x->dtype == LG_F64) {
        backward_f64(&h, dy, x, w, rstd, offset, dx, dw);
        return LG_OK;
    }
    const int64_t rows = tensor_rows(x), blocks = (rows + NORM_ROWS - 1) / NORM_ROWS;
    const int threads = op_threads(ctx, tensor_numel(x), ROW_GRAIN);
    const float *weight;
    void *partial = NULL;
    LG_TRY(weight_row(ctx, w, offset, &weight));
    if (dw) LG_TRY(lg_scratch(ctx, blocks * h.D * 4, &partial));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t b = 0; b < blocks; b++) {
        float *dw_row = dw ? (float *)partial + b * h.D : NULL;
        if (dw) memset(dw_row, 0, (size_t)h.D * 4);
        const int64_t end = rows < (b + 1) * NORM_ROWS ? rows : (b + 1) * NORM_ROWS;
        backward_rows(&h, dy, x, weight, rstd->data, b * NORM_ROWS, end, dx, dw_row);
    }
    if (dw) add_blocks(dw, partial, blocks);
    return LG_OK;
}
