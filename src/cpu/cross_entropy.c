/* Cross entropy of given logits. */
#include "logits.h"

lg_status cpu_cross_entropy(lg_context *ctx, const lg_tensor *logits, const lg_tensor *target,
                            const lg_tensor *class_weight, double label_smoothing, double softcap,
                            int64_t ignore, lg_tensor *loss, lg_tensor *lse, lg_tensor *weight,
                            lg_tensor *predicted) {
    const lm_head head = {.x = logits, .temperature = 1, .softcap = softcap};
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits);
    const int threads = op_threads(ctx, N * V, ROW_GRAIN);
    cross_entropy_terms terms;
    void *room;
    LG_TRY(cross_entropy_terms_of(ctx, "cross_entropy", &head, class_weight, V, label_smoothing,
                                  &terms));
    LG_TRY(check_targets(ctx, "cross_entropy", target, V, ignore));
    LG_TRY(rows_reserve(ctx, logits, threads, 1, &room));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int32_t t = ((const int32_t *)target->data)[n];
        const bool kept = t != ignore;
        double l = 0, row_loss = 0;
        int32_t best = -1;
        if (kept) {
            const logits_row z = row_load(&head, n, rows_room(logits, room, 1, 0));
            l = row_logsumexp(z, NULL);
            row_loss = row_cross_entropy(&terms, z, t, l);
            best = row_argmax(z);
        }
        store(loss, n, row_loss);
        store(lse, n, l);
        store(weight, n, kept ? class_weight_of(&terms, t) : 0);
        ((int32_t *)predicted->data)[n] = best;
    }
    return LG_OK;
}

lg_status cpu_cross_entropy_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *dlse,
                                     const lg_tensor *logits, const lg_tensor *target,
                                     const lg_tensor *class_weight, const lg_tensor *lse,
                                     double label_smoothing, double softcap, int64_t ignore,
                                     lg_tensor *dlogits) {
    const lm_head head = {.x = logits, .temperature = 1, .softcap = softcap};
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits);
    const int threads = op_threads(ctx, N * V, ROW_GRAIN);
    cross_entropy_terms terms;
    void *room;
    LG_TRY(cross_entropy_terms_of(ctx, "cross_entropy_backward", &head, class_weight, V,
                                  label_smoothing, &terms));
    LG_TRY(check_targets(ctx, "cross_entropy_backward", target, V, ignore));
    if (!dlogits) return LG_OK;
    LG_TRY(rows_reserve(ctx, logits, threads, 2, &room));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int32_t t = ((const int32_t *)target->data)[n];
        const double d = load(dloss, n), d_lse = dlse ? load(dlse, n) : 0;
        if (t == ignore || (d == 0 && d_lse == 0)) {
            row_clear(dlogits, n);
            continue;
        }
        const logits_row z = row_load(&head, n, rows_room(logits, room, 2, 0));
        void *dz = row_begin(dlogits, n, rows_room(logits, room, 2, 1));
        row_cross_entropy_backward(&terms, z, t, load(lse, n), d, d_lse, dz);
        row_store(dlogits, n, dz);
    }
    return LG_OK;
}
