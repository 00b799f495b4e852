/* Log-probabilities of target tokens, and their gradient.
 *
 * linear_logprob_fwd: a cluster owns an active row i of a chunk, reads its fp32 logits once and
 * writes logp, lse, entropy and the largest logit's place of row[i]; where logits are kept, it leaves z in place of the
 * products.
 *
 * Without kept logits the backward goes over rectangles of 4,096 rows by a few thousand logits: a
 * rectangle's logits are made again, its part of dw is complete but for the other rows', and dx
 * adds up over the rectangles of a row in fp32, in order. Their width depends on N and V alone.
 *
 * linear_logprob_bwd_dlogits: with t = z - lse and p = e^t, a block owns 4,096 logits of an
 * active row, reads them once and writes dlogits = (dlogp [v = target] - p (dlogp + dentropy (t
 * + entropy))) dz / dlogits in x's dtype, and zeros in the row's padding, which the products may
 * read.
 */
#include "head.cuh"
#include "op/linear_logprob.h"

enum {
    BWD_ITEMS = 4,        /* vectors of 4 logits a thread */
    FWD_ROWS_LARGE = 512, /* of logits at a time, for vocabularies beyond HEAD_LARGE */
    BWD_ROWS = 4096,      /* of a rectangle */
    BWD_LOGITS = 1 << 24,
    BWD_LEAST_COLUMNS = 4096,
};

/* Without Predicted the place of the maximum is not looked for. */
template <bool Predicted, class Finish>
static __global__ void __launch_bounds__(HEAD_MOST_THREADS)
    linear_logprob_fwd(float *z, int64_t ld, int64_t V, bool vector, bool keep, Finish finish,
                       const int32_t *row, const int32_t *target, float *logp, float *lse,
                       float *entropy, int32_t *predicted) {
    __shared__ head_room room;
    const int64_t i = blockIdx.x / head_num_slices();
    float *row_z = z + i * ld;
    const head_stats s = head_merge(
        head_reduce_thread(row_z, head_slice_of(V), vector, finish, keep ? row_z : NULL), &room);
    if (head_slice_index() == 0 && threadIdx.x == 0) {
        const int32_t n = row[i], t = n < 0 ? 0 : target[n];
        /* Past the first-level cache: another block of the cluster may have written it. */
        const float at = __ldcg(row_z + t), z_target = keep ? at : finish(at);
        const float log_sum = logf(s.sum);
        if (n >= 0) {
            logp[n] = (z_target - s.max) - log_sum;
            lse[n] = s.max + log_sum;
            if (entropy) entropy[n] = log_sum - s.weighted / s.sum;
            if (Predicted) predicted[n] = s.argmax;
        }
    }
    head_leave();
}

/* Row i of z is from[i], or i without `from`; its columns are those of [first, first + V). */
template <class T, class Finish>
static __global__ void __launch_bounds__(HEAD_THREADS)
    linear_logprob_bwd_dlogits(const float *z, int64_t z_ld, bool vector, bool finished,
                               Finish finish, const int32_t *row, const int32_t *from,
                               const int32_t *target, const float *dlogp, const float *dentropy,
                               const float *lse, const float *entropy, int64_t first, int64_t V,
                               T *dlogits, int64_t ld) {
    const int64_t i = blockIdx.y, n = row[i];
    const int64_t v0 = ((int64_t)blockIdx.x * (HEAD_THREADS * BWD_ITEMS) + threadIdx.x) * 4;
    const float *row_z = z + (from ? from[i] : i) * z_ld;
    vec<float, 4> x[BWD_ITEMS];
    head_load_step(row_z, v0, HEAD_THREADS * 4, V, vector, x);
    const float d = dlogp[n], dh = dentropy ? dentropy[n] : 0, h = dentropy ? entropy[n] : 0,
                l = lse[n];
    const int64_t t_n = target[n] - first;
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
                                         int64_t kept, lg_tensor *logp, lg_tensor *entropy,
                                         lg_tensor *lse, lg_tensor *predicted, lg_tensor *z) {
    const char *op = "linear_logprob";
    LG_TRY(head_check_temperature(ctx, op, temperature));
    LG_TRY(head_check_kept(ctx, op, kept, x->shape[0]));
    return dispatch_float(ctx, op, x->dtype, [&](auto) {
        lm_head head = head_of(ctx, op, x, w, b, temperature, softcap);
        int64_t active;
        if (head.N == 0) return LG_OK;
        if (head.V > HEAD_LARGE && head.chunk > FWD_ROWS_LARGE) head.chunk = FWD_ROWS_LARGE;
        LG_TRY(head_reserve(head, !z, false));
        LG_TRY(head_find_rows(head, target, ignore, NULL, NULL, kept));
        LG_TRY(head_bias(head));
        LG_TRY(head_clear(head, logp, 0));
        LG_TRY(head_clear(head, lse, 0));
        LG_TRY(head_clear(head, entropy, 0));
        LG_TRY(head_clear(head, predicted, 0xff));
        LG_TRY(head_wait_rows(head, kept, &active));
        const int64_t ld = z ? head.V : head.logits_ld;
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            float *rows = z ? (float *)z->data + i0 * ld : head.logits;
            LG_TRY(head_logits(head, x_rows, n, rows, ld));
            return head_with_finish(head, [&](auto finish) {
                using Finish = decltype(finish);
                return head_launch_rows(
                    ctx, op, head_launch_of(head.V), n, 0,
                    predicted ? linear_logprob_fwd<true, Finish>
                              : linear_logprob_fwd<false, Finish>,
                    rows, ld, head.V, can_vectorise<float>(rows, ld), z != NULL && finish.changes,
                    finish, (const int32_t *)(head.row + i0), (const int32_t *)target->data,
                    (float *)logp->data, (float *)lse->data,
                    (float *)(entropy ? entropy->data : NULL),
                    (int32_t *)(predicted ? predicted->data : NULL));
            });
        });
    });
}

/* What the backward has of a row beside its logits. */
struct logprob_gradient {
    const int32_t *target;
    const float *dlogp, *dentropy, *lse, *entropy;
};

/* dlogits of n rows from i0 on, columns [first, first + V), from `rows`. */
template <class T>
static lg_status logprob_dlogits(const lm_head &head, const logprob_gradient &g, const float *rows,
                                 int64_t z_ld, bool kept, int64_t i0, int64_t n, int64_t first,
                                 int64_t V) {
    return head_with_finish(head, [&](auto finish) {
        const dim3 grid(blocks_for(V, HEAD_THREADS * BWD_ITEMS * 4, INT32_MAX), (unsigned)n);
        linear_logprob_bwd_dlogits<T><<<grid, HEAD_THREADS, 0, cuda_stream(head.ctx)>>>(
            rows, z_ld, can_vectorise<float>(rows, z_ld), kept, finish, head.row + i0,
            kept ? head.from + i0 : NULL, g.target, g.dlogp, g.dentropy, g.lse, g.entropy, first, V,
            (T *)head.dlogits, head.dlogits_ld);
        return cuda_launched(head.ctx, head.op);
    });
}

template <class T>
static __global__ void __launch_bounds__(HEAD_THREADS)
    linear_logprob_bwd_dx(const float *sums, int64_t n, T *dx) {
    const int64_t i = ((int64_t)blockIdx.x * HEAD_THREADS + threadIdx.x) * 4;
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (i + e < n) dx[i + e] = from_float<T>(sums[i + e]);
}

/* The products of a rectangle, columns [first, first + V): dw and db of these, dx into the sums,
 * or, if there is only one rectangle in a row, into `dx` itself. */
static lg_status logprob_products(const lm_head &head, const void *x, int64_t n, int64_t first,
                                  int64_t V, void *dx, lg_tensor *dw, lg_tensor *db) {
    const int64_t C = head.C, ld = head.dlogits_ld;
    const int32_t dtype = head.x->dtype;
    const char *w = (const char *)head.w->data + first * C * lg_dtype_bytes(dtype);
    if (dw)
        LG_TRY(cuda_gemm(head.ctx, head.op, V, C, n, {head.dlogits, ld, dtype, true},
                         {x, C, dtype, false}, (float *)dw->data + first * C, C, LG_F32, NULL,
                         true));
    if (dx)
        LG_TRY(cuda_gemm(head.ctx, head.op, n, C, V, {head.dlogits, ld, dtype, false},
                         {w, C, dtype, false}, head.sums ? head.sums : dx, C,
                         head.sums ? LG_F32 : dtype, NULL, first > 0));
    if (!db) return LG_OK;
    return linear_bias_gradient(head.ctx, head.op, head.dlogits, ld, dtype, n, V,
                                (float *)db->data + first);
}

/* The backward that makes the logits again, rectangle by rectangle. */
template <class T>
static lg_status logprob_recompute(lm_head &head, int64_t active, int64_t columns,
                                   const logprob_gradient &g, lg_tensor *dx, lg_tensor *dw,
                                   lg_tensor *db) {
    const int64_t C = head.C;
    return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x) {
        const bool together = active == head.N;
        T *rows_dx = !dx ? NULL : together ? (T *)dx->data + i0 * C : (T *)head.packed;
        for (int64_t first = 0; first < head.V; first += columns) {
            const int64_t V = head.V - first < columns ? head.V - first : columns;
            const char *w = (const char *)head.w->data + first * C * lg_dtype_bytes(head.x->dtype);
            lg_context_stats(head.ctx)->gemm_rows += first == 0 ? 2.0 * (double)n : 0;
            LG_TRY(cuda_gemm(head.ctx, head.op, n, V, C, {x, C, head.x->dtype, false},
                             {w, C, head.x->dtype, true}, head.logits, head.logits_ld, LG_F32,
                             head.bias ? head.bias + first : NULL, false));
            LG_TRY(
                logprob_dlogits<T>(head, g, head.logits, head.logits_ld, false, i0, n, first, V));
            LG_TRY(logprob_products(head, x, n, first, V, rows_dx, dw, db));
        }
        if (!dx) return LG_OK;
        if (head.sums) {
            linear_logprob_bwd_dx<T><<<blocks_for(n * C, HEAD_THREADS * 4, INT32_MAX), HEAD_THREADS,
                                       0, cuda_stream(head.ctx)>>>(head.sums, n * C, rows_dx);
            LG_TRY(cuda_launched(head.ctx, head.op));
        }
        return together ? LG_OK : head_move_rows<true>(head, dx->data, i0, n);
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
        const logprob_gradient g = {(const int32_t *)target->data, (const float *)dlogp->data,
                                    (const float *)(dentropy ? dentropy->data : NULL),
                                    (const float *)lse->data,
                                    (const float *)(entropy ? entropy->data : NULL)};
        const int64_t rows = head.N < BWD_ROWS ? head.N : BWD_ROWS, whole = head.dlogits_ld;
        int64_t columns = BWD_LOGITS / rows / 1024 * 1024;
        if (columns < BWD_LEAST_COLUMNS) columns = BWD_LEAST_COLUMNS;
        if (columns > whole) columns = whole;
        if (!z) head.chunk = rows, head.logits_ld = head.dlogits_ld = columns;
        LG_TRY(head_reserve(head, !z, true, !z && columns < whole));
        LG_TRY(head_find_rows(head, target, ignore, dlogp, dentropy, -1));
        LG_TRY(head_bias(head));
        /* Which dlogp are exactly 0 only the device knows. */
        LG_TRY(head_wait_rows(head, -1, &active));
        if (active < head.N) LG_TRY(head_clear(head, dx, 0));
        if (!z) return logprob_recompute<T>(head, active, columns, g, dx, dw, db);
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            LG_TRY(logprob_dlogits<T>(head, g, (const float *)z->data, head.V, true, i0, n, 0,
                                      head.V));
            return head_products(head, active, i0, n, x_rows, dx, dw, db);
        });
    });
}
