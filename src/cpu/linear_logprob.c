/* Log-probabilities of target tokens, and their gradient. Rows that take no part leave before
 * the products; those that do are worked on in chunks, so that no more than a chunk of logits is
 * held, unless the caller asks for them. */
#include "logits.h"

lg_status cpu_linear_logprob(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                             const lg_tensor *b, const lg_tensor *target, double temperature,
                             double softcap, int64_t ignore, int64_t kept, lg_tensor *logp,
                             lg_tensor *entropy, lg_tensor *lse, lg_tensor *predicted,
                             lg_tensor *z) {
    const lm_head head = {x, w, b, temperature, softcap};
    const int64_t N = x->shape[0], C = x->shape[1], V = w->shape[0];
    const lg_dtype dtype = logits_dtype(&head);
    int32_t *row;
    LG_TRY(check_temperature(ctx, "linear_logprob", temperature));
    LG_TRY(head_kept_rows(ctx, "linear_logprob", target, V, ignore, &row, &kept));
    const int64_t chunk = head_chunk_rows(&head);
    void *packed = NULL, *logits = NULL;
    if (kept > 0 && kept < N)
        LG_TRY(lg_scratch(ctx, chunk * C * lg_dtype_bytes(x->dtype), &packed));
    if (kept > 0 && !z) LG_TRY(lg_scratch(ctx, chunk * V * lg_dtype_bytes(dtype), &logits));

    memset(logp->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
    memset(lse->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
    if (entropy) memset(entropy->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
    for (int64_t n = 0; predicted && n < N; n++) ((int32_t *)predicted->data)[n] = -1;
    for (int64_t i0 = 0; i0 < kept; i0 += chunk) {
        const int64_t n = kept - i0 < chunk ? kept - i0 : chunk;
        void *rows = z ? logits_at(z->data, i0 * V, dtype) : logits;
        LG_TRY(head_logits(ctx, &head, head_gather(&head, row + i0, n, packed), n, rows));
        const int threads = op_threads(ctx, n * V, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < n; i++) {
            const int64_t r = row[i0 + i];
            const int32_t t = ((const int32_t *)target->data)[r];
            const logits_row z_row = {logits_at(rows, i * V, dtype), V, dtype};
            double h;
            const double l = row_logsumexp(z_row, entropy ? &h : NULL);
            store(logp, r, row_at(z_row, t) - l);
            store(lse, r, l);
            if (entropy) store(entropy, r, h);
            if (predicted) ((int32_t *)predicted->data)[r] = row_argmax(z_row);
        }
    }
    return LG_OK;
}

/* The gradient of the logits in place of row z. */
static void backward_row(const lm_head *head, const row_gradient *g, logits_row z, int32_t target,
                         void *dz) {
    const double d = target_logprob_backward(head, g, row_at(z, target), g->dlogp);
    row_logprob_backward(head, g, z, dz);
    if (z.dtype == LG_F64)
        ((double *)dz)[target] = d;
    else
        ((float *)dz)[target] = (float)d;
}

/* Moves row from[i] of z to row i, from[i] >= i ascending; threads own columns, so the order of
 * moves is kept. */
static void compact_rows(lg_context *ctx, lg_tensor *z, const int32_t *from, int64_t n) {
    const int64_t V = z->shape[1], width = lg_dtype_bytes(z->dtype), piece = 4096;
    if (n == 0 || from[n - 1] == n - 1) return;
    const int threads = op_threads(ctx, n * V, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t v = 0; v < V; v += piece) {
        const size_t bytes = (size_t)((V - v < piece ? V - v : piece) * width);
        for (int64_t i = 0; i < n; i++)
            if (from[i] != i)
                memcpy(logits_at(z->data, i * V + v, z->dtype),
                       logits_at(z->data, from[i] * V + v, z->dtype), bytes);
    }
}

lg_status cpu_linear_logprob_backward(lg_context *ctx, const lg_tensor *dlogp,
                                      const lg_tensor *dentropy, const lg_tensor *x,
                                      const lg_tensor *w, const lg_tensor *b,
                                      const lg_tensor *target, const lg_tensor *entropy,
                                      const lg_tensor *lse, double temperature, double softcap,
                                      int64_t ignore, lg_tensor *z, lg_tensor *dx, lg_tensor *dw,
                                      lg_tensor *db) {
    const lm_head head = {x, w, b, temperature, softcap};
    const int64_t N = x->shape[0], C = x->shape[1], V = w->shape[0];
    const lg_dtype dtype = logits_dtype(&head);
    int32_t *row;
    int64_t kept = -1, active = 0;
    LG_TRY(check_temperature(ctx, "linear_logprob_backward", temperature));
    if (dentropy && !entropy)
        return lg_fail(ctx, LG_EINVAL,
                       "linear_logprob_backward: entropy is NULL, wanted that of the forward");
    LG_TRY(head_kept_rows(ctx, "linear_logprob_backward", target, V, ignore, &row, &kept));

    /* row: the active rows of x; from: their rows in a packed z. */
    void *scratch;
    LG_TRY(lg_scratch(ctx, kept * 4, &scratch));
    int32_t *from = scratch;
    for (int64_t i = 0; i < kept; i++) {
        if (load(dlogp, row[i]) == 0 && (!dentropy || load(dentropy, row[i]) == 0)) continue;
        from[active] = (int32_t)i;
        row[active++] = row[i];
    }
    const int64_t chunk = head_chunk_rows(&head);
    void *packed = NULL, *logits = NULL;
    if (active > 0 && active < N)
        LG_TRY(lg_scratch(ctx, chunk * C * lg_dtype_bytes(x->dtype), &packed));
    if (active > 0 && !z) LG_TRY(lg_scratch(ctx, chunk * V * lg_dtype_bytes(dtype), &logits));

    if (dx && active < N) memset(dx->data, 0, (size_t)(N * C * lg_dtype_bytes(dx->dtype)));
    if (z) compact_rows(ctx, z, from, active);
    for (int64_t i0 = 0; i0 < active; i0 += chunk) {
        const int64_t n = active - i0 < chunk ? active - i0 : chunk;
        const void *x_rows = head_gather(&head, row + i0, n, packed);
        void *rows = z ? logits_at(z->data, i0 * V, dtype) : logits;
        if (!z) LG_TRY(head_logits(ctx, &head, x_rows, n, rows));
        const int threads = op_threads(ctx, n * V, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < n; i++) {
            const int64_t r = row[i0 + i];
            const row_gradient g = {
                .dlogp = load(dlogp, r),
                .dentropy = dentropy ? load(dentropy, r) : 0,
                .lse = load(lse, r),
                .entropy = dentropy ? load(entropy, r) : 0,
            };
            void *z_row = logits_at(rows, i * V, dtype);
            backward_row(&head, &g, (logits_row){z_row, V, dtype},
                         ((const int32_t *)target->data)[r], z_row);
        }
        LG_TRY(head_products(ctx, &head, rows, x_rows, row + i0, n, packed, dx, dw, db));
    }
    return LG_OK;
}
