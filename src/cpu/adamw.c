/* AdamW, in double: square root and division keep up with memory. */
#include "cpu.h"

enum { GRAIN = 16384 };

typedef struct rates {
    double grad_scale, keep, beta1, beta2, rate, vhat, eps;
} rates;

/* One element; `keep` is what decay leaves, `rate` and `vhat` hold the bias corrections. */
__attribute__((always_inline)) static inline double step_of(double g, double p, double *m,
                                                            double *v, const rates *r) {
    g *= r->grad_scale;
    *m = r->beta1 * *m + (1 - r->beta1) * g;
    *v = r->beta2 * *v + (1 - r->beta2) * g * g;
    return r->keep * p - r->rate * *m / (sqrt(*v * r->vhat) + r->eps);
}

static void adamw_f32(const float *g, float *p, float *m, float *v, int64_t n, rates r,
                      int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) {
        double mi = m[i], vi = v[i];
        p[i] = (float)step_of(g[i], p[i], &mi, &vi, &r);
        m[i] = (float)mi;
        v[i] = (float)vi;
    }
}

lg_status cpu_adamw(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr, double beta1,
                    double beta2, double eps, double weight_decay, int64_t step, lg_tensor *p,
                    lg_tensor *m, lg_tensor *v) {
    if (step < 1)
        return lg_fail(ctx, LG_EINVAL, "adamw: step is %lld, wanted at least 1", (long long)step);
    if (!(beta1 >= 0 && beta1 < 1))
        return lg_fail(ctx, LG_EINVAL, "adamw: beta1 is %g, wanted [0, 1)", beta1);
    if (!(beta2 >= 0 && beta2 < 1))
        return lg_fail(ctx, LG_EINVAL, "adamw: beta2 is %g, wanted [0, 1)", beta2);
    const rates r = {.grad_scale = grad_scale,
                     .keep = 1 - lr * weight_decay,
                     .beta1 = beta1,
                     .beta2 = beta2,
                     .rate = lr / (1 - pow(beta1, (double)step)),
                     .vhat = 1 / (1 - pow(beta2, (double)step)),
                     .eps = eps};
    const int64_t n = tensor_numel(p);
    if (p->dtype == LG_F32) {
        adamw_f32(g->data, p->data, m->data, v->data, n, r, op_threads(ctx, n, GRAIN));
        return LG_OK;
    }
    for (int64_t i = 0; i < n; i++) {
        double mi = load(m, i), vi = load(v, i);
        store(p, i, step_of(load(g, i), load(p, i), &mi, &vi, &r));
        store(m, i, mi);
        store(v, i, vi);
    }
    return LG_OK;
}
