/* Log-probabilities of chosen tokens under given logits, with the entropy of their rows. */
#include "logits.h"

static bool takes_part(const int32_t *target, int64_t K, int64_t ignore) {
    bool some = K == 0;
    for (int64_t k = 0; k < K; k++) some |= target[k] != ignore;
    return some;
}

lg_status cpu_logprob(lg_context *ctx, const lg_tensor *logits, const lg_tensor *target,
                      double temperature, int64_t ignore, lg_tensor *logp, lg_tensor *entropy,
                      lg_tensor *lse) {
    const lm_head head = {.x = logits, .temperature = temperature};
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits), K = tensor_cols(target);
    const int threads = op_threads(ctx, N * V, ROW_GRAIN);
    void *room;
    LG_TRY(check_temperature(ctx, "logprob", temperature));
    LG_TRY(check_targets(ctx, "logprob", target, V, ignore));
    LG_TRY(rows_reserve(ctx, logits, threads, 1, &room));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int32_t *t = (const int32_t *)target->data + n * K;
        const bool some = takes_part(t, K, ignore);
        logits_row z = {0};
        double h = 0, l = 0;
        if (some) {
            z = row_load(&head, n, rows_room(logits, room, 1, 0));
            l = row_logsumexp(z, &h);
        }
        for (int64_t k = 0; k < K; k++)
            store(logp, n * K + k, t[k] != ignore ? row_at(z, t[k]) - l : 0);
        store(entropy, n, h);
        store(lse, n, l);
    }
    return LG_OK;
}

/* The gradient of z at target k: of the targets that are equal, all take part in each. */
static double backward_at(const lm_head *head, const row_gradient *g, const int32_t *t,
                          const lg_tensor *dlogp, int64_t first, int64_t K, int64_t k, double z) {
    double own = 0;
    for (int64_t i = 0; i < K; i++)
        if (t[i] == t[k]) own += load(dlogp, first + i);
    return target_logprob_backward(head, g, z, own);
}

lg_status cpu_logprob_backward(lg_context *ctx, const lg_tensor *dlogp, const lg_tensor *dentropy,
                               const lg_tensor *logits, const lg_tensor *target,
                               const lg_tensor *entropy, const lg_tensor *lse, double temperature,
                               int64_t ignore, lg_tensor *dlogits) {
    const lm_head head = {.x = logits, .temperature = temperature};
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits), K = tensor_cols(target);
    const int threads = op_threads(ctx, N * V, ROW_GRAIN);
    void *room;
    LG_TRY(check_temperature(ctx, "logprob_backward", temperature));
    LG_TRY(check_targets(ctx, "logprob_backward", target, V, ignore));
    if (!dlogits) return LG_OK;
    LG_TRY(rows_reserve(ctx, logits, threads, 2, &room));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int32_t *t = (const int32_t *)target->data + n * K;
        row_gradient g = {0, 0, load(lse, n), load(entropy, n)};
        if (dentropy && takes_part(t, K, ignore)) g.dentropy = load(dentropy, n);
        bool active = g.dentropy != 0;
        for (int64_t k = 0; k < K; k++) {
            const double d = t[k] != ignore ? load(dlogp, n * K + k) : 0;
            g.dlogp += d;
            active |= d != 0;
        }
        if (!active) {
            row_clear(dlogits, n);
            continue;
        }
        const logits_row z = row_load(&head, n, rows_room(logits, room, 2, 0));
        void *dz = row_begin(dlogits, n, rows_room(logits, room, 2, 1));
        row_logprob_backward(&head, &g, z, dz);
        for (int64_t k = 0; k < K; k++) {
            if (t[k] == ignore) continue;
            const double d = backward_at(&head, &g, t, dlogp, n * K, K, k, row_at(z, t[k]));
            if (z.dtype == LG_F64)
                ((double *)dz)[t[k]] = d;
            else
                ((float *)dz)[t[k]] = (float)d;
        }
        row_store(dlogits, n, dz);
    }
    return LG_OK;
}
