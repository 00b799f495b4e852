/* The step of AdamW that its variants share. With g' = grad_scale g:
 *   m = beta1 m + (1 - beta1) g',  v = beta2 v + (1 - beta2) g'^2,
 *   p = (1 - lr weight_decay) p - rate m / (sqrt(v vhat) + eps),
 * where rate = lr / (1 - beta1^step) and vhat = 1 / (1 - beta2^step).
 */
#ifndef LIGER_ADAMW_CUH
#define LIGER_ADAMW_CUH

#include "element.cuh"

enum { ADAMW_THREADS = 256, ADAMW_ELEMENTS = 4 /* a thread */ };

/* A factor near 1 in two floats: 1 - 1e-7 is not among them, and the part that is lost would drift
 * over many steps. */
struct factor {
    float high, low;
};

static inline factor split_factor(double x) {
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

/* The new p; m and v are updated. */
__device__ __forceinline__ float adamw_element(float g, float p, float *m, float *v,
                                               const adamw_rates &r) {
    const float gradient = r.grad_scale * g;
    *m = multiply_add(r.beta1, *m, r.gain1 * gradient);
    *v = multiply_add(r.beta2, *v, r.gain2 * gradient * gradient);
    const float move = r.rate * *m / (sqrtf(*v * r.vhat) + r.eps);
    return multiply_add(r.keep, p, -move);
}

/* Checks the attributes of `op` and gives the rates of a step. */
static inline lg_status adamw_rates_of(lg_context *ctx, const char *op, double grad_scale,
                                       double lr, double beta1, double beta2, double eps,
                                       double weight_decay, int64_t step, adamw_rates *r) {
    if (step < 1)
        return lg_fail(ctx, LG_EINVAL, "%s: step is %lld, wanted at least 1", op, (long long)step);
    if (!(beta1 >= 0 && beta1 < 1))
        return lg_fail(ctx, LG_EINVAL, "%s: beta1 is %g, wanted [0, 1)", op, beta1);
    if (!(beta2 >= 0 && beta2 < 1))
        return lg_fail(ctx, LG_EINVAL, "%s: beta2 is %g, wanted [0, 1)", op, beta2);
    *r = {split_factor(1 - lr * weight_decay),
          split_factor(beta1),
          split_factor(beta2),
          (float)grad_scale,
          (float)(1 - beta1),
          (float)(1 - beta2),
          (float)(lr / (1 - pow(beta1, (double)step))),
          (float)(1 / (1 - pow(beta2, (double)step))),
          (float)eps};
    return LG_OK;
}

#endif
