/* Cross entropy on a vocabulary head, chunk by chunk: logits, loss, and at once the gradient's
 * products, so that no logits are kept. */
#include "linear_logits.h"
#include "logsoftmax.h"

/* The smallest index of the largest element; whole blocks are passed over by their maximum. */
static int32_t argmax_f32(const float *z, int64_t V) {
    const float max = max_f32(z, V);
    for (int64_t v0 = 0; v0 < V; v0 += VEC_BLOCK) {
        const int64_t n = V - v0 < VEC_BLOCK ? V - v0 : VEC_BLOCK;
        if (max_f32(z + v0, n) != max) continue;
        for (int64_t v = v0; v < v0 + n; v++)
            if (z[v] == max) return (int32_t)v;
    }
    return 0;
}

/* Of a row; predicted is the smallest index of the largest logit. */
typedef struct row_result {
    double loss, entropy;
    int32_t predicted;
} row_result;

/* The gradient of scale * loss with respect to the logits takes the place of z, if wanted. */
static row_result row_f32(const lm_head *head, float *z, int64_t V, int32_t target, double scale,
                          bool gradient, bool predicted) {
    const double z_target = z[target];
    row_result result = {.predicted = predicted ? argmax_f32(z, V) : 0};
    const double lse = row_logsumexp_f32(z, V, &result.entropy);
    result.loss = lse - z_target;
    if (!gradient) return result;
    for (int64_t v = 0; v < V; v += VEC_LANES) {
        const f32x16 zv = load16_at(z, v, V, -INFINITY);
        const f32x16 dz = exp16_negative(zv - (float)lse) * (float)scale * head_slope16(head, zv);
        if (v + VEC_LANES <= V)
            store16(z + v, dz);
        else
            store16_part(z + v, V - v, dz);
    }
    z[target] = (float)(scale * (exp(z_target - lse) - 1) * head_slope(head, z_target));
    return result;
}

static row_result row_f64(const lm_head *head, double *z, int64_t V, int32_t target, double scale,
                          bool gradient) {
    row_result result = {.predicted = 0};
    const double lse = row_logsumexp_f64(z, V, &result.entropy);
    result.loss = lse - z[target];
    for (int64_t v = 1; v < V; v++)
        if (z[v] > z[result.predicted]) result.predicted = (int32_t)v;
    for (int64_t v = 0; gradient && v < V; v++)
        z[v] = scale * (exp(z[v] - lse) - (v == target)) * head_slope(head, z[v]);
    return result;
}

lg_status cpu_linear_cross_entropy(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                   const lg_tensor *b, const lg_tensor *target, double scale,
                                   double softcap, int64_t ignore, lg_tensor *loss,
                                   lg_tensor *entropy, lg_tensor *predicted, lg_tensor *grad_x,
                                   lg_tensor *grad_w, lg_tensor *grad_b) {
    const lm_head head = {x, w, b, 1.0, softcap};
    const int64_t N = x->shape[0], C = x->shape[1], V = w->shape[0];
    const lg_dtype dtype = logits_dtype(&head);
    const bool gradient = grad_x || grad_w || grad_b;
    const int32_t *targets = target->data;
    int32_t *row;
    int64_t kept;
    void *packed = NULL, *logits = NULL;
    LG_TRY(head_kept_rows(ctx, "linear_cross_entropy", target, V, ignore, &row, &kept));
    const int64_t chunk = head_chunk_rows(&head);
    if (kept > 0 && kept < N)
        LG_TRY(lg_scratch(ctx, chunk * C * lg_dtype_bytes(x->dtype), &packed));
    if (kept > 0) LG_TRY(lg_scratch(ctx, chunk * V * lg_dtype_bytes(dtype), &logits));

    memset(loss->data, 0, (size_t)(N * lg_dtype_bytes(dtype)));
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
            const int32_t t = targets[r];
            const row_result result =
                dtype == LG_F64 ? row_f64(&head, (double *)logits + i * V, V, t, scale, gradient)
                                : row_f32(&head, (float *)logits + i * V, V, t, scale, gradient,
                                          predicted != NULL);
            store(loss, r, result.loss);
            if (entropy) store(entropy, r, result.entropy);
            if (predicted) ((int32_t *)predicted->data)[r] = result.predicted;
        }
        if (gradient)
            LG_TRY(head_products(ctx, &head, logits, x_rows, row + i0, n, packed, grad_x, grad_w,
                                 grad_b));
    }
    return LG_OK;
}
