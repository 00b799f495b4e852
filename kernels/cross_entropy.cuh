/* What the cross entropies share: class weights and label smoothing. */
#ifndef LIGER_CROSS_ENTROPY_CUH
#define LIGER_CROSS_ENTROPY_CUH

#include "common.cuh"

struct cross_entropy_terms {
    const float *weight, *sum; /* [V] and the sum of it; NULL: 1 each */
    float own, share;          /* 1 - label_smoothing, label_smoothing / V */

    __device__ __forceinline__ float of(int64_t v) const { return weight ? weight[v] : 1; }
    /* Of the target's own term. */
    __device__ __forceinline__ float own_of(int64_t target) const { return own * of(target); }
    /* Of all terms together: what lse counts by. */
    __device__ __forceinline__ float all_of(float own_of_target, int64_t V) const {
        return share > 0 ? own_of_target + share * total(V) : own_of_target;
    }
    __device__ __forceinline__ float total(int64_t V) const { return weight ? *sum : (float)V; }
};

/* One block. */
template <int THREADS>
static __global__ void __launch_bounds__(THREADS)
    class_weight_sum(const float *weight, int64_t V, float *sum) {
    float s = 0;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) s += weight[v];
    s = block_reduce(s, Sum(), 0.0f);
    if (threadIdx.x == 0) *sum = s;
}

static inline lg_status check_label_smoothing(lg_context *ctx, const char *op, double smoothing) {
    if (smoothing >= 0 && smoothing <= 1) return LG_OK;
    return lg_fail(ctx, LG_EINVAL, "%s: label_smoothing is %g, wanted [0, 1]", op, smoothing);
}

/* `room` holds one number for the kernels after this call. */
template <int THREADS = 1024>
static lg_status cross_entropy_terms_of(lg_context *ctx, const char *op,
                                        const lg_tensor *class_weight, int64_t V, double smoothing,
                                        float *room, cross_entropy_terms *terms) {
    *terms = {(const float *)(class_weight ? class_weight->data : NULL), room,
              (float)(1 - smoothing), (float)(smoothing / (double)V)};
    if (!class_weight || smoothing == 0) return LG_OK;
    class_weight_sum<THREADS><<<1, THREADS, 0, cuda_stream(ctx)>>>(terms->weight, V, room);
    return cuda_launched(ctx, op);
}

#endif
