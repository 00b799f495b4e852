/* Logits of a vocabulary head, and the pieces that linear_logprob and linear_cross_entropy build
 * on. */
#include "linear_logits.h"

#include "gemm.h"
#include "linear.h"

enum { CHUNK_ROWS = 2048, CHUNK_BYTES = 64 << 20 };

static void finish_row_f32(const lm_head *head, float *z, int64_t V) {
    const float cap = (float)head->softcap, temperature = (float)head->temperature;
    if (cap != 0)
        for (int64_t v = 0; v < V; v++) z[v] = cap * tanh_f32(z[v] / cap);
    if (temperature != 1)
        for (int64_t v = 0; v < V; v++) z[v] /= temperature;
}

static void finish_row_f64(const lm_head *head, double *z, int64_t V) {
    for (int64_t v = 0; v < V; v++) {
        if (head->softcap != 0) z[v] = head->softcap * tanh(z[v] / head->softcap);
        z[v] /= head->temperature;
    }
}

void head_finish(const lm_head *head, void *z, int64_t V) {
    if (head->x->dtype == LG_F64)
        finish_row_f64(head, z, V);
    else
        finish_row_f32(head, z, V);
}

int64_t head_chunk_rows(const lm_head *head) {
    const int64_t row_bytes = head->w->shape[0] * lg_dtype_bytes(logits_dtype(head));
    int64_t rows = row_bytes ? CHUNK_BYTES / row_bytes : CHUNK_ROWS;
    if (rows > CHUNK_ROWS) rows = CHUNK_ROWS;
    if (rows > head->x->shape[0]) rows = head->x->shape[0];
    return rows > 1 ? rows : 1;
}

const void *head_gather(const lm_head *head, const int32_t *row, int64_t n, void *packed) {
    const int64_t bytes = head->x->shape[1] * lg_dtype_bytes(head->x->dtype);
    if (row[n - 1] - row[0] == n - 1) return (const char *)head->x->data + row[0] * bytes;
    for (int64_t i = 0; i < n; i++)
        memcpy((char *)packed + i * bytes, (const char *)head->x->data + row[i] * bytes,
               (size_t)bytes);
    return packed;
}

lg_status head_logits(lg_context *ctx, const lm_head *head, const void *x, int64_t n, void *z) {
    const lg_tensor *w = head->w, *b = head->b;
    const int64_t V = w->shape[0], C = w->shape[1];
    const lg_dtype dtype = logits_dtype(head);
    const int64_t row_bytes = V * lg_dtype_bytes(dtype);
    if (b) {
        void *bias = b->data;
        if (b->dtype == LG_BF16) {
            LG_TRY(lg_scratch(ctx, row_bytes, &bias));
            load_row(b, 0, V, bias);
        }
        fill_rows(ctx, bias, z, n, row_bytes);
    }
    const gemm_args args = {
        .m = n,
        .n = V,
        .k = C,
        .a = {x, C, head->x->dtype, false},
        .b = {w->data, C, w->dtype, true},
        .c = z,
        .ldc = V,
        .c_dtype = dtype,
        .accumulate = b != NULL,
    };
    LG_TRY(gemm(ctx, &args));
    lg_context_stats(ctx)->gemm_rows += (double)n;
    if (head->softcap == 0 && head->temperature == 1) return LG_OK;
    const int threads = op_threads(ctx, n * V, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < n; i++) head_finish(head, logits_at(z, i * V, dtype), V);
    return LG_OK;
}

lg_status head_products(lg_context *ctx, const lm_head *head, const void *dlogits, const void *x,
                        const int32_t *row, int64_t n, void *packed, lg_tensor *dx, lg_tensor *dw,
                        lg_tensor *db) {
    const lg_tensor *w = head->w;
    const int64_t V = w->shape[0], C = w->shape[1], bytes = C * lg_dtype_bytes(head->x->dtype);
    const lg_dtype dtype = logits_dtype(head);
    lg_context_stats(ctx)->gemm_rows += (double)n;
    if (dw) {
        const gemm_args args = {
            .m = V,
            .n = C,
            .k = n,
            .a = {dlogits, V, dtype, true},
            .b = {x, C, head->x->dtype, false},
            .c = dw->data,
            .ldc = C,
            .c_dtype = dw->dtype,
            .accumulate = true,
        };
        LG_TRY(gemm(ctx, &args));
    }
    if (dx) {
        const bool dense = row[n - 1] - row[0] == n - 1;
        void *y = dense ? (char *)dx->data + row[0] * bytes : packed;
        const gemm_args args = {
            .m = n,
            .n = C,
            .k = V,
            .a = {dlogits, V, dtype, false},
            .b = {w->data, C, w->dtype, false},
            .c = y,
            .ldc = C,
            .c_dtype = dx->dtype,
        };
        LG_TRY(gemm(ctx, &args));
        for (int64_t i = 0; !dense && i < n; i++)
            memcpy((char *)dx->data + row[i] * bytes, (const char *)packed + i * bytes,
                   (size_t)bytes);
    }
    if (db) {
        const lg_tensor rows = {.data = (void *)dlogits, .dtype = dtype};
        linear_bias_gradient(ctx, &rows, n, db);
    }
    return LG_OK;
}

lg_status head_kept_rows(lg_context *ctx, const char *op, const lg_tensor *target, int64_t V,
                         int64_t ignore, int32_t **row, int64_t *kept) {
    const int64_t N = target->shape[0];
    const int32_t *t = target->data;
    int64_t num = 0;
    void *scratch;
    LG_TRY(lg_scratch(ctx, N * 4, &scratch));
    *row = scratch;
    for (int64_t n = 0; n < N; n++) {
        if (t[n] == ignore) continue;
        if (t[n] < 0 || t[n] >= V)
            return lg_fail(ctx, LG_EINVAL, "%s: target[%lld] is %d, wanted [0, %lld) or %lld", op,
                           (long long)n, t[n], (long long)V, (long long)ignore);
        (*row)[num++] = (int32_t)n;
    }
    if (*kept != -1 && *kept != num)
        return lg_fail(ctx, LG_EINVAL,
                       "%s: kept is %lld, wanted %lld, the targets that are not ignored", op,
                       (long long)*kept, (long long)num);
    *kept = num;
    return LG_OK;
}

lg_status cpu_linear_logits(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                            const lg_tensor *b, double temperature, double softcap, lg_tensor *z) {
    const lm_head head = {x, w, b, temperature, softcap};
    if (!(temperature > 0))
        return lg_fail(ctx, LG_EINVAL, "linear_logits: temperature is %g, wanted above 0",
                       temperature);
    if (x->shape[0] == 0) return LG_OK;
    return head_logits(ctx, &head, x->data, x->shape[0], z->data);
}
