/* Cross entropy of given logits.
 *
 * cross_entropy_fwd: a block owns a row, reads it once and writes its loss, log-sum-exp, class weight
 * and largest logit. With label smoothing sum_v c[v] z[v] runs along.
 *
 * cross_entropy_bwd_dlogits: a block owns a part of a row, reads it once and writes dlogits = (p
 * (dloss all + dlse) - dloss (own [v = target] + share c[v])) dz / dlogits, own = (1 - s) c[target],
 * share = s / V and all = own + share sum of c. A row whose coefficients are 0 is not read.
 */
#include "cross_entropy.cuh"
#include "logits.cuh"
#include "op/cross_entropy.h"

template <class T, bool Smooth, class Finish>
static __global__ void __launch_bounds__(LOGITS_THREADS)
    cross_entropy_fwd(const __grid_constant__ logits_rows<T> logits, int64_t V, Finish finish,
                      cross_entropy_terms terms, const int32_t *target, int64_t ignore, float *loss,
                      float *lse, float *weight, int32_t *predicted, device_error *error) {
    __shared__ head_room room;
    const int64_t n = blockIdx.x;
    const int32_t t = target[n];
    const bool bad = t < 0 || t >= V;
    if (bad || t == ignore) {
        if (threadIdx.x > 0) return;
        if (t != ignore) note_error(error, ERROR_TARGET, n, t, V);
        loss[n] = lse[n] = weight[n] = 0;
        predicted[n] = -1;
        return;
    }
    const T *row = logits.row(n);
    float sum_cz = 0;
    const head_stats s =
        logits_reduce<false, true>(row, V, logits.vector, finish, &room, [&](int64_t v, float z) {
            if (!Smooth) return;
            const float c = terms.of(v);
            if (c != 0) sum_cz = fmaf(c, z, sum_cz); /* without weight even -inf takes no part */
        });
    if (Smooth) sum_cz = block_reduce(sum_cz, Sum(), 0.0f);
    if (threadIdx.x > 0) return;
    const float log_sum = logf(s.sum), l = s.max + log_sum, own = terms.own_of(t);
    float x = own != 0 ? own * (log_sum - (finish(to_float(row[t])) - s.max)) : 0;
    if (Smooth) x += terms.share * (terms.total(V) * l - sum_cz);
    loss[n] = x;
    lse[n] = l;
    weight[n] = terms.of(t);
    predicted[n] = s.argmax;
}

template <class T, bool Smooth, class Finish>
static __global__ void __launch_bounds__(LOGITS_THREADS)
    cross_entropy_bwd_dlogits(const __grid_constant__ logits_rows<T> logits,
                              const __grid_constant__ logits_rows<T> dlogits, int64_t V,
                              unsigned parts, Finish finish, cross_entropy_terms terms,
                              const int32_t *target, int64_t ignore, const float *dloss,
                              const float *dlse, const float *lse) {
    const int64_t n = logits_row_of(parts), part = blockIdx.x % parts;
    const int32_t t = target[n];
    const float d = dloss[n], d_lse = dlse ? dlse[n] : 0;
    T *to = dlogits.row(n);
    if (t == ignore || t < 0 || t >= V || (d == 0 && d_lse == 0)) {
        logits_clear_part(to, V, part, dlogits.vector);
        return;
    }
    const float l = lse[n], own = terms.own_of(t), factor = fmaf(d, terms.all_of(own, V), d_lse),
                own_d = d * own, share_d = d * terms.share;
    const auto gradient = [&](int64_t v, float(&z)[piece<T>::N]) {
#pragma unroll
        for (int e = 0; e < piece<T>::N; e++) {
            float dz = head_exp(z[e] - l) * factor;
            if (Smooth && v + e < V) dz -= share_d * terms.of(v + e);
            if (v + e == t) dz -= own_d;
            z[e] = dz * finish.slope(z[e]);
        }
    };
    logits_map_part(logits.row(n), to, V, part, logits.vector, dlogits.vector, finish, gradient);
}

/* Calls f(Finish(), whether there is smoothing). */
template <class F>
static lg_status with_variant(double softcap, double smoothing, F f) {
    const auto capped = head_capped{(float)softcap, 1};
    if (smoothing > 0)
        return softcap != 0 ? f(capped, width_of<1>()) : f(head_plain(), width_of<1>());
    return softcap != 0 ? f(capped, width_of<0>()) : f(head_plain(), width_of<0>());
}

static lg_status terms_of(lg_context *ctx, const char *op, const lg_tensor *class_weight, int64_t V,
                          double smoothing, cross_entropy_terms *terms) {
    void *room = NULL;
    if (class_weight && smoothing > 0) LG_TRY(lg_scratch(ctx, sizeof(float), &room));
    return cross_entropy_terms_of(ctx, op, class_weight, V, smoothing, (float *)room, terms);
}

extern "C" lg_status cuda_cross_entropy(lg_context *ctx, const lg_tensor *logits,
                                        const lg_tensor *target, const lg_tensor *class_weight,
                                        double label_smoothing, double softcap, int64_t ignore,
                                        lg_tensor *loss, lg_tensor *lse, lg_tensor *weight,
                                        lg_tensor *predicted) {
    const char *op = "cross_entropy";
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits);
    cross_entropy_terms terms;
    LG_TRY(check_label_smoothing(ctx, op, label_smoothing));
    if (N == 0) return LG_OK;
    LG_TRY(terms_of(ctx, op, class_weight, V, label_smoothing, &terms));
    return dispatch_float(ctx, op, logits->dtype, [&](auto type) {
        using T = decltype(type);
        return with_variant(softcap, label_smoothing, [&](auto finish, auto smooth) {
            cross_entropy_fwd<T, smooth.value != 0>
                <<<(unsigned)N, logits_threads(V), 0, cuda_stream(ctx)>>>(
                    logits_rows_of<T>(logits), V, finish, terms, (const int32_t *)target->data,
                    ignore, (float *)loss->data, (float *)lse->data, (float *)weight->data,
                    (int32_t *)predicted->data, cuda_error_slot(ctx, "cross_entropy"));
            return cuda_launched(ctx, op);
        });
    });
}

extern "C" lg_status cuda_cross_entropy_backward(
    lg_context *ctx, const lg_tensor *dloss, const lg_tensor *dlse, const lg_tensor *logits,
    const lg_tensor *target, const lg_tensor *class_weight, const lg_tensor *lse,
    double label_smoothing, double softcap, int64_t ignore, lg_tensor *dlogits) {
    const char *op = "cross_entropy_backward";
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits);
    cross_entropy_terms terms;
    LG_TRY(check_label_smoothing(ctx, op, label_smoothing));
    if (!dlogits || N == 0 || V == 0) return LG_OK;
    LG_TRY(terms_of(ctx, op, class_weight, V, label_smoothing, &terms));
    return dispatch_float(ctx, op, logits->dtype, [&](auto type) {
        using T = decltype(type);
        const unsigned parts = logits_parts<T>(V);
        return with_variant(softcap, label_smoothing, [&](auto finish, auto smooth) {
            cross_entropy_bwd_dlogits<T, smooth.value != 0>
                <<<(unsigned)(N * parts), logits_threads(V), 0, cuda_stream(ctx)>>>(
                    logits_rows_of<T>(logits), logits_rows_of<T>(dlogits), V, parts, finish, terms,
                    (const int32_t *)target->data, ignore, (const float *)dloss->data,
                    (const float *)(dlse ? dlse->data : NULL), (const float *)lse->data);
            return cuda_launched(ctx, op);
        });
    });
}
