/* Cross entropy on a vocabulary head, chunk by chunk: logits, loss, and at once the gradient's
 * products.
 *
 * linear_cross_entropy_row: a cluster owns an active row i of a chunk. Its blocks copy their
 * slices of the fp32 logits to shared memory, reduce them there, and write dlogits = scale (p -
 * [v = target]) dz / dlogits in x's dtype: a logit is read once and its gradient written once.
 * Slices that shared memory does not hold are read twice.
 */
#include "head.cuh"
#include "op/linear_cross_entropy.h"

/* The slice to shared memory, each thread what it will read itself. */
__device__ __forceinline__ void keep_slice(const float *z, head_slice slice, float *kept) {
    for (int64_t v = slice.begin + threadIdx.x * 4; v < slice.end; v += blockDim.x * 4) {
        const unsigned to = (unsigned)__cvta_generic_to_shared(kept + (v - slice.begin));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(z + v) : "memory");
    }
    asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 0;" ::: "memory");
}

template <class T, class Finish>
static __global__ void __launch_bounds__(HEAD_MOST_THREADS)
    linear_cross_entropy_row(const float *z, int64_t ld, int64_t V, bool held, Finish finish,
                             float scale, const int32_t *row, const int32_t *target, float *loss,
                             float *entropy, int32_t *predicted, T *dlogits, int64_t dlogits_ld) {
    extern __shared__ float4 memory[];
    __shared__ head_room room;
    const int64_t i = blockIdx.x / head_num_slices();
    const head_slice slice = head_slice_of(V);
    const float *row_z = z + i * ld, *source = row_z;
    if (held) {
        keep_slice(row_z, slice, (float *)memory);
        source = (const float *)memory - slice.begin;
    }
    const head_stats s = head_merge(head_reduce_thread(source, slice, true, finish, NULL), &room);
    const int32_t n = row[i], t = target[n];
    if (head_slice_index() == 0 && threadIdx.x == 0) {
        const float log_sum = logf(s.sum);
        loss[n] = log_sum - (finish(row_z[t]) - s.max);
        if (entropy) entropy[n] = log_sum - s.weighted / s.sum;
        if (predicted) predicted[n] = s.argmax;
    }
    if (dlogits) {
        const float factor = scale / s.sum;
        T *to = dlogits + i * dlogits_ld;
#pragma unroll 4
        for (int64_t v = slice.begin + threadIdx.x * 4; v < slice.end; v += blockDim.x * 4) {
            const vec<float, 4> x = head_load(source, v, slice.end, true);
            vec<T, 4> out;
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float ze = finish(x[e]), p = head_exp(ze - s.max) * factor;
                out[e] = from_float<T>((v + e == t ? p - scale : p) * finish.slope(ze));
            }
            head_store(to, v, slice.end, true, out);
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

extern "C" lg_status
cuda_linear_cross_entropy(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                          const lg_tensor *b, const lg_tensor *target, double scale, double softcap,
                          int64_t ignore, lg_tensor *loss, lg_tensor *entropy, lg_tensor *predicted,
                          lg_tensor *grad_x, lg_tensor *grad_w, lg_tensor *grad_b) {
    const char *op = "linear_cross_entropy";
    return dispatch_float(ctx, op, x->dtype, [&](auto type) {
        using T = decltype(type);
        lm_head head = head_of(ctx, op, x, w, b, 1, softcap);
        const bool gradient = grad_x || grad_w || grad_b;
        int64_t active;
        if (head.N == 0) return LG_OK;
        LG_TRY(head_reserve(head, true, gradient));
        LG_TRY(head_find_rows(head, target, ignore, NULL, NULL));
        LG_TRY(head_bias(head));
        LG_TRY(head_clear(head, loss, 0));
        LG_TRY(head_clear(head, entropy, 0));
        LG_TRY(head_clear(head, predicted, 0xff));
        LG_TRY(cuda_wait_count(ctx, op, &active));
        if (active < head.N) LG_TRY(head_clear(head, grad_x, 0));
        const size_t bytes = gradient ? slice_bytes(head.V) : 0;
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            LG_TRY(head_logits(head, x_rows, n, head.logits, head.logits_ld));
            LG_TRY(head_with_finish(head, [&](auto finish) {
                const auto kernel = linear_cross_entropy_row<T, decltype(finish)>;
                LG_TRY(cuda_check(ctx, op,
                                  cudaFuncSetAttribute(kernel,
                                                       cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                       (int)bytes)));
                return head_launch_rows(
                    ctx, op, head.V, n, bytes, kernel, (const float *)head.logits, head.logits_ld,
                    head.V, bytes > 0, finish, (float)scale, (const int32_t *)(head.row + i0),
                    (const int32_t *)target->data, (float *)loss->data,
                    (float *)(entropy ? entropy->data : NULL),
                    (int32_t *)(predicted ? predicted->data : NULL), (T *)head.dlogits,
                    head.dlogits_ld);
            }));
            if (!gradient) return LG_OK;
            return head_products(head, active, i0, n, x_rows, grad_x, grad_w, grad_b);
        });
    });
}
