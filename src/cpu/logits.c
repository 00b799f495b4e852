/* Rows of logits: loading, reductions, gradients. Loops over v run in fp32 vectors, or double for
 * f64; the numbers of a row and of its target are double. */
#include "logits.h"

#include "logsoftmax.h"

double row_logsumexp(logits_row z, double *entropy) {
    return z.dtype == LG_F64 ? row_logsumexp_f64(z.data, z.V, entropy)
                             : row_logsumexp_f32(z.data, z.V, entropy);
}

/* Whole blocks are passed over by their maximum. */
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

int32_t row_argmax(logits_row z) {
    if (z.dtype == LG_F32) return argmax_f32(z.data, z.V);
    const double *x = z.data;
    int32_t best = 0;
    for (int64_t v = 1; v < z.V; v++)
        if (x[v] > x[best]) best = (int32_t)v;
    return best;
}

/* ---- rows of a tensor ---- */

/* Whether rows are computed elsewhere, in fp32. */
static bool is_short(const lg_tensor *x) { return lg_dtype_bytes(x->dtype) == 2; }

static int64_t row_width(const lg_tensor *x) { return x->dtype == LG_F64 ? 8 : 4; }

lg_status rows_reserve(lg_context *ctx, const lg_tensor *x, int threads, int num, void **room) {
    return lg_scratch(ctx, threads * num * tensor_cols(x) * row_width(x), room);
}

void *rows_room(const lg_tensor *x, void *room, int num, int i) {
    return (char *)room + (thread_index() * num + i) * tensor_cols(x) * row_width(x);
}

logits_row row_load(const lm_head *head, int64_t n, void *buffer) {
    const lg_tensor *x = head->x;
    const int64_t V = tensor_cols(x), offset = row_offset(x, n);
    logits_row z = {logits_at(x->data, offset, x->dtype), V, logits_dtype(head)};
    const bool changes = head->softcap != 0 || head->temperature != 1;
    if (is_short(x))
        z.data = load_row(x, offset, V, buffer);
    else if (changes)
        z.data = memcpy(buffer, z.data, (size_t)(V * row_width(x)));
    if (changes) head_finish(head, buffer, V);
    return z;
}

void *row_begin(lg_tensor *y, int64_t n, void *buffer) {
    return is_short(y) ? buffer : logits_at(y->data, row_offset(y, n), y->dtype);
}

void row_store(lg_tensor *y, int64_t n, const void *row) {
    if (is_short(y)) store_row(y, row_offset(y, n), tensor_cols(y), row);
}

void row_clear(lg_tensor *y, int64_t n) {
    memset(logits_at(y->data, row_offset(y, n), y->dtype), 0,
           (size_t)(tensor_cols(y) * lg_dtype_bytes(y->dtype)));
}

lg_status check_targets(lg_context *ctx, const char *op, const lg_tensor *target, int64_t V,
                        int64_t ignore) {
    const int64_t n = tensor_numel(target);
    const int32_t *t = target->data;
    for (int64_t i = 0; i < n; i++)
        if (t[i] != ignore && (t[i] < 0 || t[i] >= V))
            return lg_fail(ctx, LG_EINVAL, "%s: target[%lld] is %d, wanted [0, %lld) or %lld", op,
                           (long long)i, t[i], (long long)V, (long long)ignore);
    return LG_OK;
}

lg_status check_temperature(lg_context *ctx, const char *op, double temperature) {
    if (temperature > 0) return LG_OK;
    return lg_fail(ctx, LG_EINVAL, "%s: temperature is %g, wanted above 0", op, temperature);
}

/* ---- log-probabilities ---- */

double target_logprob_backward(const lm_head *head, const row_gradient *g, double z, double dlogp) {
    const double t = z - g->lse < -800 ? -800 : z - g->lse;
    const double dz = dlogp - exp(t) * (g->dlogp + g->dentropy * (t + g->entropy));
    return dz * head_slope(head, z);
}

/* Taken from 0, so that no gradient is -0. */
static void logprob_backward_f32(const lm_head *head, const row_gradient *g, const float *z,
                                 int64_t V, float *dz) {
    const float lse = (float)g->lse, dlogp = (float)g->dlogp, dh = (float)g->dentropy,
                entropy = (float)g->entropy;
    for (int64_t v = 0; v < V; v += VEC_LANES) {
        const f32x16 zv = load16_at(z, v, V, -INFINITY), t = max16(splat16(-200.0f), zv - lse);
        const f32x16 d =
            0.0f - exp16_negative(t) * (dlogp + dh * (t + entropy)) * head_slope16(head, zv);
        if (v + VEC_LANES <= V)
            store16(dz + v, d);
        else
            store16_part(dz + v, V - v, d);
    }
}

void row_logprob_backward(const lm_head *head, const row_gradient *g, logits_row z, void *dz) {
    if (z.dtype == LG_F32) {
        logprob_backward_f32(head, g, z.data, z.V, dz);
        return;
    }
    for (int64_t v = 0; v < z.V; v++)
        ((double *)dz)[v] = 0 + target_logprob_backward(head, g, row_at(z, v), 0);
}

/* ---- cross entropy ---- */

lg_status cross_entropy_terms_of(lg_context *ctx, const char *op, const lm_head *head,
                                 const lg_tensor *class_weight, int64_t V, double label_smoothing,
                                 cross_entropy_terms *terms) {
    if (!(label_smoothing >= 0 && label_smoothing <= 1))
        return lg_fail(ctx, LG_EINVAL, "%s: label_smoothing is %g, wanted [0, 1]", op,
                       label_smoothing);
    *terms = (cross_entropy_terms){head, class_weight, (double)V, label_smoothing};
    if (!class_weight) return LG_OK;
    terms->weight_sum = 0;
    for (int64_t v = 0; v < V; v++) terms->weight_sum += load(class_weight, v);
    return LG_OK;
}

/* A class of weight 0 takes no part, even with a logit of -inf. */
double row_cross_entropy(const cross_entropy_terms *terms, logits_row z, int32_t target,
                         double lse) {
    const double s = terms->label_smoothing, own = (1 - s) * class_weight_of(terms, target);
    double loss = own != 0 ? own * (lse - row_at(z, target)) : 0, smooth = 0;
    if (s == 0) return loss;
    for (int64_t v = 0; v < z.V; v++) {
        const double c = class_weight_of(terms, v);
        if (c != 0) smooth += c * (lse - row_at(z, v));
    }
    return loss + s / (double)z.V * smooth;
}

/* dz[v] = (factor p[v] - share c[v]) slope; c is NULL for 1. */
static void cross_entropy_backward_f32(const lm_head *head, const float *z, int64_t V, float lse,
                                       float factor, float share, const float *c, float *dz) {
    for (int64_t v = 0; v < V; v += VEC_LANES) {
        const f32x16 zv = load16_at(z, v, V, -INFINITY);
        const f32x16 cv = c ? load16_at(c, v, V, 0.0f) : splat16(1.0f);
        const f32x16 d = (exp16_negative(zv - lse) * factor - share * cv) * head_slope16(head, zv);
        if (v + VEC_LANES <= V)
            store16(dz + v, d);
        else
            store16_part(dz + v, V - v, d);
    }
}

void row_cross_entropy_backward(const cross_entropy_terms *terms, logits_row z, int32_t target,
                                double lse, double dloss, double dlse, void *dz) {
    const double s = terms->label_smoothing, c_target = class_weight_of(terms, target);
    const double own = (1 - s) * c_target, share = s / (double)z.V;
    const double all = own + share * terms->weight_sum;
    const double z_target = row_at(z, target), p_target = exp(z_target - lse);
    const lg_tensor *c = terms->class_weight;
    if (z.dtype == LG_F32)
        cross_entropy_backward_f32(terms->head, z.data, z.V, (float)lse,
                                   (float)(dloss * all + dlse), (float)(dloss * share),
                                   c ? c->data : NULL, dz);
    for (int64_t v = 0; z.dtype == LG_F64 && v < z.V; v++) {
        const double zv = row_at(z, v), p = exp(zv - lse);
        ((double *)dz)[v] = (dloss * (p * all - share * class_weight_of(terms, v)) + dlse * p) *
                            head_slope(terms->head, zv);
    }
    const double d = (dloss * (p_target * all - share * c_target - own) + dlse * p_target) *
                     head_slope(terms->head, z_target);
    if (z.dtype == LG_F64)
        ((double *)dz)[target] = d;
    else
        ((float *)dz)[target] = (float)d;
}
