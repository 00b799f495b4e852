/* AdamW on fp32 moments. A thread owns 4 neighbouring elements: it reads g, p, m and v and writes
 * p, m and v once, in 16 bytes each (8 for p in 16 bits). Beside `low` p is half of an fp32 weight.
 */
#include "adamw.cuh"
#include "op/adamw.h"

/* ---- where weights are ---- */

template <class T>
struct plain_weights {
    T *p;
    bool aligned;
    __device__ __forceinline__ vec<float, ADAMW_ELEMENTS> load(int64_t i, int64_t count) const {
        const vec<T, ADAMW_ELEMENTS> x = load_part<ADAMW_ELEMENTS>(p + i, count, aligned, T());
        vec<float, ADAMW_ELEMENTS> w;
#pragma unroll
        for (int j = 0; j < ADAMW_ELEMENTS; j++) w[j] = to_float(x[j]);
        return w;
    }
    __device__ __forceinline__ void store(int64_t i, int64_t count,
                                          const vec<float, ADAMW_ELEMENTS> &w) const {
        vec<T, ADAMW_ELEMENTS> x;
#pragma unroll
        for (int j = 0; j < ADAMW_ELEMENTS; j++) x[j] = from_float<T>(w[j]);
        store_part<ADAMW_ELEMENTS>(p + i, x, count, aligned);
    }
};

/* fp32 bits = (p << 16) + low, low signed. */
struct split_weights {
    uint16_t *p, *low;
    bool aligned;
    __device__ __forceinline__ vec<float, ADAMW_ELEMENTS> load(int64_t i, int64_t count) const {
        const vec<uint16_t, ADAMW_ELEMENTS> a = load_part<ADAMW_ELEMENTS>(p + i, count, aligned,
                                                                          (uint16_t)0),
                                            b = load_part<ADAMW_ELEMENTS>(low + i, count, aligned,
                                                                          (uint16_t)0);
        vec<float, ADAMW_ELEMENTS> w;
#pragma unroll
        for (int j = 0; j < ADAMW_ELEMENTS; j++)
            w[j] = __uint_as_float(((uint32_t)a[j] << 16) + (uint32_t)(int16_t)b[j]);
        return w;
    }
    __device__ __forceinline__ void store(int64_t i, int64_t count,
                                          const vec<float, ADAMW_ELEMENTS> &w) const {
        vec<uint16_t, ADAMW_ELEMENTS> a, b;
#pragma unroll
        for (int j = 0; j < ADAMW_ELEMENTS; j++) {
            /* A NaN whose bits round up would become a number. */
            const uint32_t bits = w[j] != w[j] ? 0x7fc00000u : __float_as_uint(w[j]);
            a[j] = (uint16_t)((bits + 0x8000u) >> 16);
            b[j] = (uint16_t)bits;
        }
        store_part<ADAMW_ELEMENTS>(p + i, a, count, aligned);
        store_part<ADAMW_ELEMENTS>(low + i, b, count, aligned);
    }
};

/* ---- the step ---- */

template <class Weights>
static __global__ void __launch_bounds__(ADAMW_THREADS)
    adamw_step(const float *g, Weights weights, float *m, float *v, int64_t n, adamw_rates r,
               bool aligned) {
    constexpr int N = ADAMW_ELEMENTS;
    const int64_t i = ((int64_t)blockIdx.x * ADAMW_THREADS + threadIdx.x) * N;
    if (i >= n) return;
    const vec<float, N> gs = load_part<N>(g + i, n - i, aligned, 0.0f);
    vec<float, N> ms = load_part<N>(m + i, n - i, aligned, 0.0f);
    vec<float, N> vs = load_part<N>(v + i, n - i, aligned, 0.0f);
    vec<float, N> ps = weights.load(i, n - i);
#pragma unroll
    for (int j = 0; j < N; j++) ps[j] = adamw_element(gs[j], ps[j], &ms[j], &vs[j], r);
    weights.store(i, n - i, ps);
    store_part<N>(m + i, ms, n - i, aligned);
    store_part<N>(v + i, vs, n - i, aligned);
}

/* ---- launchers ---- */

extern "C" lg_status cuda_adamw(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr,
                                double beta1, double beta2, double eps, double weight_decay,
                                int64_t step, lg_tensor *p, lg_tensor *m, lg_tensor *v,
                                lg_tensor *low) {
    adamw_rates r;
    LG_TRY(adamw_rates_of(ctx, "adamw", grad_scale, lr, beta1, beta2, eps, weight_decay, step, &r));
    if (low && p->dtype != LG_BF16)
        return lg_fail(ctx, LG_EINVAL, "adamw: p is %s, wanted bf16 beside low",
                       lg_dtype_name(p->dtype));
    const int64_t n = tensor_numel(p);
    if (n == 0) return LG_OK;
    const bool aligned = can_vectorise<float>(g->data, 0) && can_vectorise<float>(m->data, 0) &&
                         can_vectorise<float>(v->data, 0);
    const auto launch = [&](auto weights) {
        const unsigned blocks = blocks_for(n, ADAMW_THREADS * ADAMW_ELEMENTS, INT32_MAX);
        adamw_step<<<blocks, ADAMW_THREADS, 0, cuda_stream(ctx)>>>(
            (const float *)g->data, weights, (float *)m->data, (float *)v->data, n, r, aligned);
        return cuda_launched(ctx, "adamw");
    };
    if (low)
        return launch(
            split_weights{(uint16_t *)p->data, (uint16_t *)low->data,
                          can_vectorise<bf16>(p->data, 0) && can_vectorise<bf16>(low->data, 0)});
    return dispatch_float(ctx, "adamw", p->dtype, [&](auto t) {
        using T = decltype(t);
        return launch(plain_weights<T>{(T *)p->data, can_vectorise<T>(p->data, 0)});
    });
}
