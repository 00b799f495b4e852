/* AdamW on fp32 state. A thread owns 4 neighbouring elements: it reads g, p, m and v and writes p,
 * m and v once, in 16 bytes each (8 for p in bf16 and f16). With g' = grad_scale g:
 *   m = beta1 m + (1 - beta1) g',  v = beta2 v + (1 - beta2) g'^2,
 *   p = (1 - lr weight_decay) p - rate m / (sqrt(v vhat) + eps),
 * where rate = lr / (1 - beta1^step) and vhat = 1 / (1 - beta2^step).
 */
#include "element.cuh"

enum { THREADS = 256, PER_THREAD = 4 };

/* A factor near 1 in two floats: 1 - 1e-7 is not among them, and the part that is lost would drift
 * over many steps. */
struct factor {
    float high, low;
};

static factor split(double x) {
    const float high = (float)x;
    return {high, (float)(x - high)};
}

__device__ __forceinline__ float multiply_add(factor a, float x, float b) {
    return fmaf(a.high, x, fmaf(a.low, x, b));
}

struct adamw_rates {
    factor keep, beta1, beta2;
    float grad_scale, gain1, gain2, rate, vhat, eps; /* gain = 1 - beta */
};

template <class T>
__global__ void __launch_bounds__(THREADS)
    adamw_step(const float *g, T *p, float *m, float *v, int64_t n, adamw_rates r, bool aligned) {
    constexpr int N = PER_THREAD;
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= n) return;
    const vec<float, N> gs = load_part<N>(g + i, n - i, aligned, 0.0f);
    vec<float, N> ms = load_part<N>(m + i, n - i, aligned, 0.0f);
    vec<float, N> vs = load_part<N>(v + i, n - i, aligned, 0.0f);
    vec<T, N> ps = load_part<N>(p + i, n - i, aligned, T());
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float gradient = r.grad_scale * gs[j];
        ms[j] = multiply_add(r.beta1, ms[j], r.gain1 * gradient);
        vs[j] = multiply_add(r.beta2, vs[j], r.gain2 * gradient * gradient);
        const float move = r.rate * ms[j] / (sqrtf(vs[j] * r.vhat) + r.eps);
        ps[j] = from_float<T>(multiply_add(r.keep, to_float(ps[j]), -move));
    }
    store_part<N>(p + i, ps, n - i, aligned);
    store_part<N>(m + i, ms, n - i, aligned);
    store_part<N>(v + i, vs, n - i, aligned);
}

extern "C" lg_status cuda_adamw(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr,
                                double beta1, double beta2, double eps, double weight_decay,
                                int64_t step, lg_tensor *p, lg_tensor *m, lg_tensor *v) {
    if (step < 1)
        return lg_fail(ctx, LG_EINVAL, "adamw: step is %lld, wanted at least 1", (long long)step);
    if (!(beta1 >= 0 && beta1 < 1))
        return lg_fail(ctx, LG_EINVAL, "adamw: beta1 is %g, wanted [0, 1)", beta1);
    if (!(beta2 >= 0 && beta2 < 1))
        return lg_fail(ctx, LG_EINVAL, "adamw: beta2 is %g, wanted [0, 1)", beta2);
    return dispatch_float(ctx, "adamw", p->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = tensor_numel(p);
        if (n == 0) return LG_OK;
        const adamw_rates r = {split(1 - lr * weight_decay),
                               split(beta1),
                               split(beta2),
                               (float)grad_scale,
                               (float)(1 - beta1),
                               (float)(1 - beta2),
                               (float)(lr / (1 - pow(beta1, (double)step))),
                               (float)(1 / (1 - pow(beta2, (double)step))),
                               (float)eps};
        const bool aligned = can_vectorise<T>(p->data, 0) && can_vectorise<float>(g->data, 0) &&
                             can_vectorise<float>(m->data, 0) && can_vectorise<float>(v->data, 0);
        adamw_step<<<blocks_for(n, THREADS * PER_THREAD, INT32_MAX), THREADS, 0,
                     cuda_stream(ctx)>>>((const float *)g->data, (T *)p->data, (float *)m->data,
                                         (float *)v->data, n, r, aligned);
        return cuda_launched(ctx, "adamw");
    });
}
