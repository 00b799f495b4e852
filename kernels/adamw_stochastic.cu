/* AdamW on bf16 weights and moments, rounded stochastically. A thread owns 4 neighbouring elements:
 * it reads g in 16 bytes, reads and writes p, m and v once in 8 bytes each, and makes the two
 * Philox blocks that hold the elements' words.
 */
#include "adamw.cuh"
#include "philox.cuh"
#include "op/adamw.h"
#include "op/adamw_stochastic.h"

/* Up in magnitude with probability (what 16 bits lack) / 2^16. `random` is below 2^16. A NaN that
 * arithmetic gave stays one when it is cut. */
__device__ __forceinline__ bf16 round_with(float x, uint32_t random) {
    return __ushort_as_bfloat16(
        (uint16_t)((__float_as_uint(x) + (isfinite(x) ? random : 0)) >> 16));
}

static __global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_stochastic_step(const float *g, bf16 *p, bf16 *m, bf16 *v, int64_t n, adamw_rates r,
                          uint64_t seed, uint64_t stream, bool aligned) {
    constexpr int N = ADAMW_ELEMENTS;
    const int64_t i = ((int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * N;
    if (i >= n) return;
    const vec<float, N> gs = load_part<N>(g + i, n - i, aligned, 0.0f);
    vec<bf16, N> ps = load_part<N>(p + i, n - i, aligned, bf16());
    vec<bf16, N> ms = load_part<N>(m + i, n - i, aligned, bf16());
    vec<bf16, N> vs = load_part<N>(v + i, n - i, aligned, bf16());
    const uint4 a = random_words(seed, stream, (uint64_t)i / 2),
                b = random_words(seed, stream, (uint64_t)i / 2 + 1);
    const uint32_t word[2 * N] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int j = 0; j < N; j++) {
        float mj = to_float(ms[j]), vj = to_float(vs[j]);
        const float pj = adamw_element(gs[j], to_float(ps[j]), &mj, &vj, r);
        ps[j] = round_with(pj, word[2 * j] & 0xffff);
        ms[j] = round_with(mj, word[2 * j] >> 16);
        vs[j] = round_with(vj, word[2 * j + 1] & 0xffff);
    }
    store_part<N>(p + i, ps, n - i, aligned);
    store_part<N>(m + i, ms, n - i, aligned);
    store_part<N>(v + i, vs, n - i, aligned);
}

extern "C" lg_status cuda_adamw_stochastic(lg_context *ctx, const lg_tensor *g, double grad_scale,
                                           double lr, double beta1, double beta2, double eps,
                                           double weight_decay, int64_t step, int64_t seed,
                                           int64_t stream, lg_tensor *p, lg_tensor *m,
                                           lg_tensor *v) {
    adamw_rates r;
    LG_TRY(adamw_rates_of(ctx, "adamw_stochastic", grad_scale, lr, beta1, beta2, eps, weight_decay,
                          step, &r));
    if (p->dtype != LG_BF16)
        return cuda_adamw(ctx, g, grad_scale, lr, beta1, beta2, eps, weight_decay, step, p, m, v,
                          NULL);
    const int64_t n = tensor_numel(p);
    if (n == 0) return LG_OK;
    const bool aligned = can_vectorise<float>(g->data, 0) && can_vectorise<bf16>(p->data, 0) &&
                         can_vectorise<bf16>(m->data, 0) && can_vectorise<bf16>(v->data, 0);
    adamw_stochastic_step<<<blocks_for(n, ADAMW_THREADS * ADAMW_ELEMENTS, INT32_MAX), ADAMW_THREADS,
                            0, cuda_stream(ctx)>>>((const float *)g->data, (bf16 *)p->data,
                                                   (bf16 *)m->data, (bf16 *)v->data, n, r,
                                                   (uint64_t)seed, (uint64_t)stream, aligned);
    return cuda_launched(ctx, "adamw_stochastic");
}
