/* Cross entropy on a vocabulary head, chunk by chunk: logits, loss, and at once the gradient's
 * products, so that no logits are kept. */
#include "logits.h"

/* Of all rows; the gradients are those of scale * sum of loss + z_scale * sum of square. */
typedef struct loss_options {
    cross_entropy_terms terms;
    double scale, z_scale;
    bool token_scaling, gradient, predicted;
} loss_options;

/* Of a row. */
typedef struct row_result {
    double loss, square, entropy;
    int32_t predicted;
} row_result;

/* The gradient takes the place of z, if wanted. */
static row_result row_loss(const loss_options *o, logits_row z, int32_t target, void *dz) {
    row_result result = {.predicted = o->predicted ? row_argmax(z) : 0};
    const double lse = row_logsumexp(z, &result.entropy);
    const double factor = o->token_scaling ? exp(row_at(z, target) - lse) : 1;
    /* A target of probability 0 has a loss of inf, and a factor of 0. */
    result.loss = factor != 0 ? factor * row_cross_entropy(&o->terms, z, target, lse) : 0;
    result.square = factor * lse * lse;
    if (o->gradient)
        row_cross_entropy_backward(&o->terms, z, target, lse, factor * o->scale,
                                   factor * o->z_scale * 2 * lse, dz);
    return result;
}

lg_status cpu_linear_cross_entropy(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                   const lg_tensor *b, const lg_tensor *target,
                                   const lg_tensor *class_weight, double scale, double z_scale,
                                   double label_smoothing, bool token_scaling, double softcap,
                                   int64_t ignore, int64_t kept, lg_tensor *loss, lg_tensor *square,
                                   lg_tensor *entropy, lg_tensor *predicted, lg_tensor *grad_x,
                                   lg_tensor *grad_w, lg_tensor *grad_b) {
    const lm_head head = {x, w, b, 1.0, softcap};
    const int64_t N = x->shape[0], C = x->shape[1], V = w->shape[0];
    const lg_dtype dtype = logits_dtype(&head);
    loss_options o = {.scale = scale, .z_scale = z_scale, .token_scaling = token_scaling};
    const int32_t *targets = target->data;
    int32_t *row;
    void *packed = NULL, *logits = NULL;
    o.gradient = grad_x || grad_w || grad_b;
    o.predicted = predicted != NULL;
    LG_TRY(cross_entropy_terms_of(ctx, "linear_cross_entropy", &head, class_weight, V,
                                  label_smoothing, &o.terms));
    LG_TRY(head_kept_rows(ctx, "linear_cross_entropy", target, V, ignore, &row, &kept));
    const int64_t chunk = head_chunk_rows(&head);
    if (kept > 0 && kept < N)
        LG_TRY(lg_scratch(ctx, chunk * C * lg_dtype_bytes(x->dtype), &packed));
    if (kept > 0) LG_TRY(lg_scratch(ctx, chunk * V * lg_dtype_bytes(dtype), &logits));

    memset(loss->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
    if (square) memset(square->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
    if (entropy) memset(entropy->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
    for (int64_t n = 0; predicted && n < N; n++) ((int32_t *)predicted->data)[n] = -1;
    if (grad_x && kept < N)
        memset(grad_x->data, 0, (size_t)(N * C * lg_dtype_bytes(grad_x->dtype)));
    for (int64_t i0 = 0; i0 < kept; i0 += chunk) {
        const int64_t n = kept - i0 < chunk ? kept - i0 : chunk;
        const void *x_rows = head_gather(&head, row + i0, n, packed);
        LG_TRY(head_logits(ctx, &head, x_rows, n, logits));
        const int threads = op_threads(ctx, n * V, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
        for (int64_t i = 0; i < n; i++) {
            const int64_t r = row[i0 + i];
            void *z = logits_at(logits, i * V, dtype);
            const row_result result = row_loss(&o, (logits_row){z, V, dtype}, targets[r], z);
            store(loss, r, result.loss);
            if (square) store(square, r, result.square);
            if (entropy) store(entropy, r, result.entropy);
            if (predicted) ((int32_t *)predicted->data)[r] = result.predicted;
        }
        if (o.gradient)
            LG_TRY(head_products(ctx, &head, logits, x_rows, row + i0, n, packed, grad_x, grad_w,
                                 grad_b));
    }
    return LG_OK;
}
