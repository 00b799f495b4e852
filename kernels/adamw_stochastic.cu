/* AdamW on bf16 weights and moments, rounded stochastically. A thread owns 8 neighbouring elements:
 * it reads g, reads and writes p, m and v once, in 16 bytes each, and makes the four Philox blocks
 * that hold the elements' words.
 */
#include "adamw.cuh"
#include "philox.cuh"
#include "op/adamw.h"
#include "op/adamw_stochastic.h"

enum { STOCHASTIC_ELEMENTS = 8 /* a thread */ };

/* Up in magnitude with probability (what 16 bits lack) / 2^16. `random` is below 2^16. A NaN that
 * arithmetic gave stays one when it is cut. */
__device__ __forceinline__ bf16 round_with(float x, uint32_t random) {
    return __ushort_as_bfloat16(
        (uint16_t)((__float_as_uint(x) + (isfinite(x) ? random : 0)) >> 16));
}

static __global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_stochastic_step(const float *g, bf16 *p, bf16 *m, bf16 *v, int64_t n, adamw_rates r,
                          uint64_t seed, uint64_t stream, bool aligned) {
    constexpr int N = STOCHASTIC_ELEMENTS;
    const int64_t i = ((int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * N;
    if (i >= n) return;
    vec<float, 4> gs[N / 4];
#pragma unroll
    for (int j = 0; j < N; j += 4) gs[j / 4] = load_part<4>(g + i + j, n - i - j, aligned, 0.0f);
    vec<bf16, N> ps = load_part<N>(p + i, n - i, aligned, bf16());
    vec<bf16, N> ms = load_part<N>(m + i, n - i, aligned, bf16());
    vec<bf16, N> vs = load_part<N>(v + i, n - i, aligned, bf16());
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        const uint4 words = random_words(seed, stream, (uint64_t)(i + j) / 2);
        const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int l = 0; l < 2; l++) {
            const int k = j + l;
            float mk = to_float(ms[k]), vk = to_float(vs[k]);
            const float pk = adamw_element(gs[k / 4][k % 4], to_float(ps[k]), &mk, &vk, r);
            ps[k] = round_with(pk, word[2 * l] & 0xffff);
            ms[k] = round_with(mk, word[2 * l] >> 16);
            vs[k] = round_with(vk, word[2 * l + 1] & 0xffff);
        }
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
    adamw_stochastic_step<<<blocks_for(n, ADAMW_THREADS * STOCHASTIC_ELEMENTS, INT32_MAX),
                            ADAMW_THREADS, 0, cuda_stream(ctx)>>>(
        (const float *)g->data, (bf16 *)p->data, (bf16 *)m->data, (bf16 *)v->data, n, r,
        (uint64_t)seed, (uint64_t)stream, aligned);
    return cuda_launched(ctx, "adamw_stochastic");
}
