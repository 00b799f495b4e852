/* Log-probabilities of chosen tokens under given logits, with the entropy of their rows.
 *
 * logprob_fwd: a block owns a row, reads it once and writes its K log-probabilities, its entropy and
 * its log-sum-exp.
 *
 * logprob_bwd_dlogits: with t = z - lse and p = e^t, a block owns a part of a row, reads it once and
 * writes dlogits = (sum_k dlogp[k] ([v = target[k]] - p) - dentropy p (t + entropy)) / temperature.
 * A row whose coefficients are all 0 is not read.
 */
#include "logits.cuh"
#include "op/logprob.h"

/* The targets of a row, and what arrives at them. */
struct row_targets {
    const int32_t *id;
    int64_t K, ignore;

    __device__ __forceinline__ bool any() const {
        bool some = K == 0;
        for (int64_t k = 0; k < K; k++) some |= id[k] != ignore;
        return some;
    }
};

template <class T, class Finish>
static __global__ void __launch_bounds__(LOGITS_THREADS)
    logprob_fwd(const __grid_constant__ logits_rows<T> logits, int64_t V, Finish finish,
                const int32_t *target, int64_t K, int64_t ignore, float *logp, float *entropy,
                float *lse, device_error *error) {
    __shared__ head_room room;
    const int64_t n = blockIdx.x;
    const row_targets targets = {target + n * K, K, ignore};
    const T *row = logits.row(n);
    logits_prefetch(row, V); /* while the targets arrive */
    const bool some = targets.any();
    float chosen = 0; /* this thread's first target's logit, on its way */
    if (threadIdx.x < K) {
        const int32_t t = targets.id[threadIdx.x];
        if (t != ignore && t >= 0 && t < V) chosen = to_float(row[t]);
    }
    head_stats s = head_stats::none();
    if (some)
        s = logits_reduce<true, false>(row, V, logits.vector, finish, &room, [](int64_t, float) {});
    const float log_sum = logf(s.sum);
    for (int64_t k = threadIdx.x; k < K; k += blockDim.x) {
        const int32_t t = targets.id[k];
        const bool bad = t != ignore && (t < 0 || t >= V);
        if (bad) note_error(error, ERROR_TARGET, n * K + k, t, V);
        if (k >= blockDim.x && !bad && t != ignore) chosen = to_float(row[t]);
        logp[n * K + k] = bad || t == ignore ? 0 : (finish(chosen) - s.max) - log_sum;
    }
    if (threadIdx.x > 0) return;
    entropy[n] = some ? log_sum - s.weighted / s.sum : 0;
    lse[n] = some ? s.max + log_sum : 0;
}

template <class T, class Finish>
static __global__ void __launch_bounds__(LOGITS_THREADS)
    logprob_bwd_dlogits(const __grid_constant__ logits_rows<T> logits,
                        const __grid_constant__ logits_rows<T> dlogits, int64_t V, unsigned parts,
                        Finish finish, const int32_t *target, int64_t K, int64_t ignore,
                        const float *dlogp, const float *dentropy, const float *entropy,
                        const float *lse) {
    const int64_t n = logits_row_of(parts), part = blockIdx.x % parts;
    const row_targets targets = {target + n * K, K, ignore};
    const float *dlogp_row = dlogp + n * K;
    const float dh = dentropy && targets.any() ? dentropy[n] : 0;
    const float l = lse[n], h = entropy[n];
    float sum = 0;
    bool active = dh != 0;
    for (int64_t k = 0; k < K; k++) {
        const float from_above = dlogp_row[k], d = targets.id[k] != ignore ? from_above : 0;
        sum += d;
        active |= d != 0;
    }
    T *to = dlogits.row(n);
    if (!active) {
        logits_clear_part(to, V, part, dlogits.vector);
        return;
    }
    const auto gradient = [&](int64_t v, float(&z)[piece<T>::N]) {
#pragma unroll
        for (int e = 0; e < piece<T>::N; e++) {
            const float t = fmaxf(z[e] - l, -200.0f);
            z[e] = 0.0f - head_exp(t) * fmaf(dh, t + h, sum); /* from 0: never -0 */
        }
        for (int64_t k = 0; k < K; k++) {
            const int64_t at = targets.id[k] - v;
            if (at < 0 || at >= piece<T>::N || targets.id[k] == ignore) continue;
#pragma unroll
            for (int e = 0; e < piece<T>::N; e++)
                if (e == at) z[e] += dlogp_row[k];
        }
#pragma unroll
        for (int e = 0; e < piece<T>::N; e++) z[e] *= finish.slope(z[e]);
    };
    logits_map_part(logits.row(n), to, V, part, logits.vector, dlogits.vector, finish, gradient);
}

/* Calls f(Finish()) with what makes z of the logits. */
template <class F>
static lg_status with_temperature(double temperature, F f) {
    if (temperature == 1) return f(head_plain());
    return f(logits_scaled{(float)(1 / temperature)});
}

extern "C" lg_status cuda_logprob(lg_context *ctx, const lg_tensor *logits, const lg_tensor *target,
                                  double temperature, int64_t ignore, lg_tensor *logp,
                                  lg_tensor *entropy, lg_tensor *lse) {
    LG_TRY(head_check_temperature(ctx, "logprob", temperature));
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits), K = tensor_cols(target);
    if (N == 0) return LG_OK;
    return dispatch_float(ctx, "logprob", logits->dtype, [&](auto type) {
        using T = decltype(type);
        return with_temperature(temperature, [&](auto finish) {
            logprob_fwd<T><<<(unsigned)N, logits_threads(V), 0, cuda_stream(ctx)>>>(
                logits_rows_of<T>(logits), V, finish, (const int32_t *)target->data, K, ignore,
                (float *)logp->data, (float *)entropy->data, (float *)lse->data,
                cuda_error_slot(ctx, "logprob"));
            return cuda_launched(ctx, "logprob");
        });
    });
}

extern "C" lg_status cuda_logprob_backward(lg_context *ctx, const lg_tensor *dlogp,
                                           const lg_tensor *dentropy, const lg_tensor *logits,
                                           const lg_tensor *target, const lg_tensor *entropy,
                                           const lg_tensor *lse, double temperature, int64_t ignore,
                                           lg_tensor *dlogits) {
    LG_TRY(head_check_temperature(ctx, "logprob_backward", temperature));
    const int64_t N = tensor_rows(logits), V = tensor_cols(logits), K = tensor_cols(target);
    if (!dlogits || N == 0 || V == 0) return LG_OK;
    return dispatch_float(ctx, "logprob_backward", logits->dtype, [&](auto type) {
        using T = decltype(type);
        const unsigned parts = logits_parts<T>(V);
        return with_temperature(temperature, [&](auto finish) {
            logprob_bwd_dlogits<T>
                <<<(unsigned)(N * parts), logits_threads(V), 0, cuda_stream(ctx)>>>(
                    logits_rows_of<T>(logits), logits_rows_of<T>(dlogits), V, parts, finish,
                    (const int32_t *)target->data, K, ignore, (const float *)dlogp->data,
                    (const float *)(dentropy ? dentropy->data : NULL), (const float *)entropy->data,
                    (const float *)lse->data);
            return cuda_launched(ctx, "logprob_backward");
        });
    });
}
