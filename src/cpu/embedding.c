/* Token embedding: rows of a table by id, and the sum of their gradients. */
#include "cpu.h"

static lg_status check_ids(lg_context *ctx, const char *op, const lg_tensor *ids,
                           int64_t padding_idx, int64_t V) {
    const int32_t *id = ids->data;
    if (padding_idx < -1 || padding_idx >= V)
        return lg_fail(ctx, LG_EINVAL, "%s: padding_idx is %lld, wanted [-1, %lld)", op,
                       (long long)padding_idx, (long long)V);
    for (int64_t n = 0; n < ids->shape[0]; n++)
        if (id[n] < 0 || id[n] >= V)
            return lg_fail(ctx, LG_EINVAL, "%s: ids[%lld] is %d, wanted [0, %lld)", op,
                           (long long)n, id[n], (long long)V);
    return LG_OK;
}

lg_status cpu_embedding(lg_context *ctx, const lg_tensor *w, const lg_tensor *ids,
                        int64_t padding_idx, lg_tensor *y) {
    const int64_t N = y->shape[0], C = y->shape[1];
    const size_t row_bytes = (size_t)(C * lg_dtype_bytes(w->dtype));
    const int32_t *id = ids->data;
    LG_TRY(check_ids(ctx, "embedding", ids, padding_idx, w->shape[0]));
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++)
        memcpy((char *)y->data + (size_t)n * row_bytes,
               (const char *)w->data + (size_t)id[n] * row_bytes, row_bytes);
    return LG_OK;
}

/* dw[id[n], c0..c1) += dy[n, c0..c1) for n ascending; threads own columns, so that no two add to
 * one element. */
static void add_columns(const lg_tensor *dy, const int32_t *id, int64_t padding_idx, lg_tensor *dw,
                        int64_t c0, int64_t c1) {
    const int64_t N = dy->shape[0], C = dy->shape[1];
    for (int64_t n = 0; n < N; n++) {
        if (id[n] == padding_idx) continue;
        if (dy->dtype == LG_F64) {
            const double *row = (const double *)dy->data + n * C;
            double *sum = (double *)dw->data + id[n] * C;
            for (int64_t c = c0; c < c1; c++) sum[c] += row[c];
        } else if (dy->dtype == LG_F32) {
            const float *row = (const float *)dy->data + n * C;
            float *sum = (float *)dw->data + id[n] * C;
            for (int64_t c = c0; c < c1; c++) sum[c] += row[c];
        } else {
            const uint16_t *row = (const uint16_t *)dy->data + n * C;
            float *sum = (float *)dw->data + id[n] * C;
            for (int64_t c = c0; c < c1; c++) sum[c] += bf16_to_f32(row[c]);
        }
    }
}

lg_status cpu_embedding_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *ids,
                                 int64_t padding_idx, lg_tensor *dw) {
    if (!dw) return LG_OK;
    LG_TRY(check_ids(ctx, "embedding_backward", ids, padding_idx, dw->shape[0]));
    const int64_t N = dy->shape[0], C = dy->shape[1];
    if (C == 0) return LG_OK;
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
    /* Whole cache lines of 16 floats a thread. */
    const int64_t width = (C + 16 * threads - 1) / (16 * threads) * 16;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t c = 0; c < C; c += width)
        add_columns(dy, ids->data, padding_idx, dw, c, c + width < C ? c + width : C);
    return LG_OK;
}
