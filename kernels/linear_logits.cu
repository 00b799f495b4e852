/* Logits of a vocabulary head: the product with the bias in its epilogue, then the cap and the
 * temperature in place.
 *
 * linear_logits_finish: a thread owns 4 logits, read and written once.
 */
#include "head.cuh"
#include "op/linear_logits.h"

static __global__ void __launch_bounds__(HEAD_THREADS)
    linear_logits_finish(float *z, int64_t n, bool vector, head_capped finish) {
    const int64_t v = ((int64_t)blockIdx.x * HEAD_THREADS + threadIdx.x) * 4;
    if (v >= n) return;
    vec<float, 4> x = head_load(z, v, n, vector);
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = finish(x[e]);
    head_store(z, v, n, vector, x);
}

extern "C" lg_status cuda_linear_logits(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                        const lg_tensor *b, double temperature, double softcap,
                                        lg_tensor *z) {
    const char *op = "linear_logits";
    LG_TRY(head_check_temperature(ctx, op, temperature));
    return dispatch_float(ctx, op, x->dtype, [&](auto) {
        lm_head head = head_of(ctx, op, x, w, b, temperature, softcap);
        const int64_t n = tensor_numel(z);
        if (n == 0) return LG_OK;
        void *bias = NULL;
        if (b) LG_TRY(lg_scratch(ctx, head.V * 4, &bias));
        head.bias = (float *)bias;
        LG_TRY(head_bias(head));
        LG_TRY(head_logits(head, x->data, head.N, (float *)z->data, head.V));
        if (softcap == 0 && temperature == 1) return LG_OK;
        linear_logits_finish<<<blocks_for(n, HEAD_THREADS * 4, INT32_MAX), HEAD_THREADS, 0,
                               cuda_stream(ctx)>>>((float *)z->data, n,
                                                   can_vectorise<float>(z->data, 0),
                                                   head_capped{head.softcap, head.temperature});
        return cuda_launched(ctx, op);
    });
}
