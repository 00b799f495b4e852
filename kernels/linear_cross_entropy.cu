/* Cross entropy on a vocabulary head, chunk by chunk: logits, loss, and at once the gradient's
 * products.
 *
 * linear_cross_entropy_row: a cluster owns an active row i of a chunk. Its blocks copy their
 * slices of the fp32 logits to shared memory, reduce them there, and write dlogits = (p (d all +
 * d_lse) - d (own [v = target] + share c[v])) dz / dlogits in x's dtype, with the names of
 * cross_entropy.cu: a logit is read once and its gradient written once, with zeros in the row's
 * padding, which the products may read. Slices that shared memory does not hold are read twice, or
 * three times with label smoothing.
 */
#include "cross_entropy.cuh"
#include "head.cuh"
#include "op/linear_cross_entropy.h"

/* The slice to shared memory, each thread what it will read itself; no further than its end. */
__device__ __forceinline__ void keep_slice(const float *z, head_slice slice, float *kept) {
    for (int64_t v = slice.begin + threadIdx.x * 4; v < slice.end; v += blockDim.x * 4) {
        const unsigned to = (unsigned)__cvta_generic_to_shared(kept + (v - slice.begin));
        const int bytes = slice.end - v < 4 ? (int)(slice.end - v) * 4 : 16;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(z + v),
                     "r"(bytes)
                     : "memory");
    }
    asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 0;" ::: "memory");
}

/* What the loss is made of: the gradient is that of scale * loss + z_scale * square. */
struct loss_options {
    cross_entropy_terms terms;
    float scale, z_scale;
    bool token_scaling;
};

/* The outputs, one a row of x; all but the loss may be NULL. */
struct loss_outputs {
    float *loss, *square, *entropy;
    int32_t *predicted;
};

/* sum_v c[v] (lse - z[v]) over a row, for all threads. */
template <class Finish>
__device__ __forceinline__ float smooth_sum(const float *z, head_slice slice, Finish finish,
                                            cross_entropy_terms terms, float lse, head_room *room) {
    head_stats sum = {0, 0, 0, 0}; /* of equal maxima: merging adds */
    for (int64_t v = slice.begin + threadIdx.x * 4; v < slice.end; v += blockDim.x * 4) {
        const vec<float, 4> x = head_load(z, v, slice.end, true);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const float c = v + e < slice.end ? terms.of(v + e) : 0;
            if (c != 0) sum.sum = fmaf(c, lse - finish(x[e]), sum.sum);
        }
    }
    head_leave();
    return head_merge(sum, room).sum;
}

template <class T, bool Smooth, class Finish>
static __global__ void __launch_bounds__(HEAD_MOST_THREADS)
    linear_cross_entropy_row(const float *z, int64_t ld, int64_t V, bool held, Finish finish,
                             loss_options o, const int32_t *row, const int32_t *target,
                             loss_outputs out, T *dlogits, int64_t dlogits_ld) {
    extern __shared__ float4 memory[];
    __shared__ head_room room, smooth_room;
    const int64_t i = blockIdx.x / head_num_slices();
    const head_slice slice = head_slice_of(V);
    const float *row_z = z + i * ld, *source = row_z;
    if (held) {
        keep_slice(row_z, slice, (float *)memory);
        source = (const float *)memory - slice.begin;
    }
    const head_stats s = head_merge(head_reduce_thread(source, slice, true, finish, NULL), &room);
    const int32_t n = row[i], t = n < 0 ? 0 : target[n];
    const float log_sum = logf(s.sum), lse = s.max + log_sum, own = o.terms.own_of(t);
    const float smooth = Smooth ? smooth_sum(source, slice, finish, o.terms, lse, &smooth_room) : 0;
    const bool first = head_slice_index() == 0 && threadIdx.x == 0;
    float nll = 0, weight = 1;
    if (first || o.token_scaling) nll = log_sum - (finish(row_z[t]) - s.max);
    if (o.token_scaling) weight = head_exp(-nll);
    if (n < 0) weight = 0; /* no row: no gradient */
    if (first && n >= 0) {
        float loss = own != 0 ? own * nll : 0;
        if (Smooth) loss += o.terms.share * smooth;
        /* A target of probability 0 has a loss of inf, and a weight of 0. */
        out.loss[n] = weight != 0 ? weight * loss : 0;
        if (out.square) out.square[n] = weight * lse * lse;
        if (out.entropy) out.entropy[n] = log_sum - s.weighted / s.sum;
        if (out.predicted) out.predicted[n] = s.argmax;
    }
    if (dlogits) {
        const float d = weight * o.scale, d_lse = weight * o.z_scale * 2 * lse;
        const float factor = fmaf(d, o.terms.all_of(own, V), d_lse) / s.sum;
        /* The row's last slice writes its padding too. */
        const int64_t end = slice.begin < V && slice.end == V ? dlogits_ld : slice.end;
        T *to = dlogits + i * dlogits_ld;
#pragma unroll 4
        for (int64_t v = slice.begin + threadIdx.x * 4; v < end; v += blockDim.x * 4) {
            const vec<float, 4> x = head_load(source, v, slice.end, true);
            vec<T, 4> dz;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float ze = finish(x[e]);
                float g = head_exp(ze - s.max) * factor;
                if (v + e == t) g -= d * own;
                if (Smooth && v + e < V) g -= d * o.terms.share * o.terms.of(v + e);
                dz[e] = from_float<T>(g * finish.slope(ze));
            }
            head_cut(dz, v, V);
            head_store(to, v, end, true, dz);
        }
    }
    head_leave();
}

/* Shared memory for a slice, or 0 when a block cannot have as much. */
static size_t slice_bytes(int64_t V) {
    int device = 0, most = 0;
    const int slices = head_launch_of(V).slices;
    const int64_t bytes = (V + 4 * slices - 1) / (4 * slices) * 16;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    return bytes <= most - (int)sizeof(head_room) - 1024 ? (size_t)bytes : 0;
}

template <class T, bool Smooth>
static lg_status launch_rows(const lm_head &head, int64_t n, bool gradient, const loss_options &o,
                             const int32_t *row, const int32_t *target, const loss_outputs &out) {
    const size_t bytes = gradient ? slice_bytes(head.V) : 0;
    return head_with_finish(head, [&](auto finish) {
        const auto kernel = linear_cross_entropy_row<T, Smooth, decltype(finish)>;
        LG_TRY(cuda_check(
            head.ctx, head.op,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes)));
        return head_launch_rows(head.ctx, head.op, head_launch_of(head.V), n, bytes, kernel,
                                (const float *)head.logits, head.logits_ld, head.V, bytes > 0,
                                finish, o, row, target, out, (T *)head.dlogits, head.dlogits_ld);
    });
}

extern "C" lg_status cuda_linear_cross_entropy(
    lg_context *ctx, const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
    const lg_tensor *target, const lg_tensor *class_weight, double scale, double z_scale,
    double label_smoothing, bool token_scaling, double softcap, int64_t ignore, int64_t kept,
    lg_tensor *loss, lg_tensor *square, lg_tensor *entropy, lg_tensor *predicted, lg_tensor *grad_x,
    lg_tensor *grad_w, lg_tensor *grad_b) {
    const char *op = "linear_cross_entropy";
    LG_TRY(check_label_smoothing(ctx, op, label_smoothing));
    LG_TRY(head_check_kept(ctx, op, kept, x->shape[0]));
    return dispatch_float(ctx, op, x->dtype, [&](auto type) {
        using T = decltype(type);
        lm_head head = head_of(ctx, op, x, w, b, 1, softcap);
        const bool gradient = grad_x || grad_w || grad_b;
        loss_options o = {{}, (float)scale, (float)z_scale, token_scaling};
        const loss_outputs out = {(float *)loss->data, (float *)(square ? square->data : NULL),
                                  (float *)(entropy ? entropy->data : NULL),
                                  (int32_t *)(predicted ? predicted->data : NULL)};
        int64_t active;
        if (head.N == 0) return LG_OK;
        LG_TRY(head_reserve(head, true, gradient));
        LG_TRY(head_find_rows(head, target, ignore, NULL, NULL, kept));
        LG_TRY(head_bias(head));
        LG_TRY(cross_entropy_terms_of(ctx, op, class_weight, head.V, label_smoothing, head.number,
                                      &o.terms));
        LG_TRY(head_clear(head, loss, 0));
        LG_TRY(head_clear(head, square, 0));
        LG_TRY(head_clear(head, entropy, 0));
        LG_TRY(head_clear(head, predicted, 0xff));
        LG_TRY(head_wait_rows(head, kept, &active));
        if (active < head.N) LG_TRY(head_clear(head, grad_x, 0));
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            LG_TRY(head_logits(head, x_rows, n, head.logits, head.logits_ld));
            const int32_t *row = head.row + i0, *targets = (const int32_t *)target->data;
            LG_TRY((label_smoothing > 0
                        ? launch_rows<T, true>(head, n, gradient, o, row, targets, out)
                        : launch_rows<T, false>(head, n, gradient, o, row, targets, out)));
            if (!gradient) return LG_OK;
            return head_products(head, active, i0, n, x_rows, grad_x, grad_w, grad_b);
        });
    });
}
