/* Log-probabilities of target tokens, and their gradient.
 *
 * linear_logprob_fwd: a cluster owns an active row i of a chunk, reads its fp32 logits once and
 * writes logp, lse and entropy of row[i]; where logits are kept, it leaves z in place of the
 * products.
 *
 * linear_logprob_bwd_dlogits: with t = z - lse and p = e^t, a block owns 4,096 logits of an
 * active row, reads them once and writes dlogits = (dlogp [v = target] - p (dlogp + dentropy (t
 * + entropy))) dz / dlogits in x's dtype, and zeros in the row's padding, which the products may
 * read.
 */
#include "head.cuh"
#include "op/linear_logprob.h"

enum { BWD_ITEMS = 4 /* vectors of 4 logits a thread */ };

template <class Finish>
static __global__ void __launch_bounds__(HEAD_MOST_THREADS)
    linear_logprob_fwd(float *z, int64_t ld, int64_t V, bool vector, bool keep, Finish finish,
                       const int32_t *row, const int32_t *target, float *logp, float *lse,
                       float *entropy) {
    __shared__ head_room room;
    const int64_t i = blockIdx.x / head_num_slices();
    float *row_z = z + i * ld;
    const head_stats s = head_merge(
        head_reduce_thread(row_z, head_slice_of(V), vector, finish, keep ? row_z : NULL), &room);
    if (head_slice_index() == 0 && threadIdx.x == 0) {
        const int32_t n = row[i];
        /* Past the first-level cache: another block of the cluster may have written it. */
        const float at = __ldcg(row_z + target[n]), z_target = keep ? at : finish(at);
        const float log_sum = logf(s.sum);
        logp[n] = (z_target - s.max) - log_sum;
        lse[n] = s.max + log_sum;
        if (entropy) entropy[n] = log_sum - s.weighted / s.sum;
    }
    head_leave();
}

/* Row i of z is from[i], or i without `from`. */
template <class T, class Finish>
static __global__ void __launch_bounds__(HEAD_THREADS)
    linear_logprob_bwd_dlogits(const float *z, int64_t z_ld, bool vector, bool finished,
                               Finish finish, const int32_t *row, const int32_t *from,
                               const int32_t *target, const float *dlogp, const float *dentropy,
                               const float *lse, const float *entropy, int64_t V, T *dlogits,
                               int64_t ld) {
    const int64_t i = blockIdx.y, n = row[i];
    const int64_t v0 = ((int64_t)blockIdx.x * (HEAD_THREADS * BWD_ITEMS) + threadIdx.x) * 4;
    const float *row_z = z + (from ? from[i] : i) * z_ld;
    vec<float, 4> x[BWD_ITEMS];
    head_load_step(row_z, v0, HEAD_THREADS * 4, V, vector, x);
    const float d = dlogp[n], dh = dentropy ? dentropy[n] : 0, h = dentropy ? entropy[n] : 0,
                l = lse[n];
    const int32_t t_n = target[n];
#pragma unroll
    for (int u = 0; u < BWD_ITEMS; u++) {
        const int64_t v = v0 + u * HEAD_THREADS * 4;
        vec<T, 4> out;
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float ze = finished ? x[u][e] : finish(x[u][e]);
            const float t = fmaxf(ze - l, -200.0f);
            float dz = -head_exp(t) * fmaf(dh, t + h, d);
            if (v + e == t_n) dz += d;
            out[e] = from_float<T>(dz * finish.slope(ze));
        }
        head_cut(out, v, V);
        if (v < ld) head_store(dlogits + i * ld, v, ld, true, out);
    }
}

extern "C" lg_status cuda_linear_logprob(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                         const lg_tensor *b, const lg_tensor *target,
                                         double temperature, double softcap, int64_t ignore,
                                         lg_tensor *logp, lg_tensor *entropy, lg_tensor *lse,
                                         lg_tensor *z) {
    const char *op = "linear_logprob";
    LG_TRY(head_check_temperature(ctx, op, temperature));
    return dispatch_float(ctx, op, x->dtype, [&](auto) {
        lm_head head = head_of(ctx, op, x, w, b, temperature, softcap);
        int64_t active;
        if (head.N == 0) return LG_OK;
        LG_TRY(head_reserve(head, !z, false));
        LG_TRY(head_find_rows(head, target, ignore, NULL, NULL));
        LG_TRY(head_bias(head));
        LG_TRY(head_clear(head, logp, 0));
        LG_TRY(head_clear(head, lse, 0));
        LG_TRY(head_clear(head, entropy, 0));
        LG_TRY(cuda_wait_count(ctx, op, &active));
        const int64_t ld = z ? head.V : head.logits_ld;
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            float *rows = z ? (float *)z->data + i0 * ld : head.logits;
            LG_TRY(head_logits(head, x_rows, n, rows, ld));
            return head_with_finish(head, [&](auto finish) {
                return head_launch_rows(
                    ctx, op, head.V, n, 0, linear_logprob_fwd<decltype(finish)>, rows, ld, head.V,
                    can_vectorise<float>(rows, ld), z != NULL && finish.changes, finish,
                    (const int32_t *)(head.row + i0), (const int32_t *)target->data,
                    (float *)logp->data, (float *)lse->data,
                    (float *)(entropy ? entropy->data : NULL));
            });
        });
    });
}

extern "C" lg_status cuda_linear_logprob_backward(lg_context *ctx, const lg_tensor *dlogp,
                                                  const lg_tensor *dentropy, const lg_tensor *x,
                                                  const lg_tensor *w, const lg_tensor *b,
                                                  const lg_tensor *target, const lg_tensor *entropy,
                                                  const lg_tensor *lse, double temperature,
                                                  double softcap, int64_t ignore, lg_tensor *z,
                                                  lg_tensor *dx, lg_tensor *dw, lg_tensor *db) {
    const char *op = "linear_logprob_backward";
    LG_TRY(head_check_temperature(ctx, op, temperature));
    if (dentropy && !entropy)
        return lg_fail(ctx, LG_EINVAL, "%s: entropy is NULL, wanted that of the forward", op);
    return dispatch_float(ctx, op, x->dtype, [&](auto t) {
        using T = decltype(t);
        lm_head head = head_of(ctx, op, x, w, b, temperature, softcap);
        int64_t active;
        if (head.N == 0) return LG_OK;
        LG_TRY(head_reserve(head, !z, true));
        LG_TRY(head_find_rows(head, target, ignore, dlogp, dentropy));
        LG_TRY(head_bias(head));
        LG_TRY(cuda_wait_count(ctx, op, &active));
        if (active < head.N) LG_TRY(head_clear(head, dx, 0));
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            const float *rows = z ? (const float *)z->data : head.logits;
            const int64_t z_ld = z ? head.V : head.logits_ld;
            if (!z) LG_TRY(head_logits(head, x_rows, n, head.logits, z_ld));
            LG_TRY(head_with_finish(head, [&](auto finish) {
                const dim3 grid(blocks_for(head.V, HEAD_THREADS * BWD_ITEMS * 4, INT32_MAX),
                                (unsigned)n);
                linear_logprob_bwd_dlogits<T><<<grid, HEAD_THREADS, 0, cuda_stream(ctx)>>>(
                    rows, z_ld, can_vectorise<float>(rows, z_ld), z != NULL, finish, head.row + i0,
                    z ? head.from + i0 : NULL, (const int32_t *)target->data,
                    (const float *)dlogp->data, (const float *)(dentropy ? dentropy->data : NULL),
                    (const float *)lse->data, (const float *)(entropy ? entropy->data : NULL),
                    head.V, (T *)head.dlogits, head.dlogits_ld);
                return cuda_launched(ctx, op);
            }));
            return head_products(head, active, i0, n, x_rows, dx, dw, db);
        });
    });
}
