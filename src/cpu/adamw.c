/* AdamW, in double: square root and division keep up with memory. */
#include "adamw.h"

lg_status adamw_rates_of(lg_context *ctx, const char *op, double grad_scale, double lr,
                         double beta1, double beta2, double eps, double weight_decay, int64_t step,
                         adamw_rates *r) {
    if (step < 1)
        return lg_fail(ctx, LG_EINVAL, "%s: step is %lld, wanted at least 1", op, (long long)step);
    if (!(beta1 >= 0 && beta1 < 1))
        return lg_fail(ctx, LG_EINVAL, "%s: beta1 is %g, wanted [0, 1)", op, beta1);
    if (!(beta2 >= 0 && beta2 < 1))
        return lg_fail(ctx, LG_EINVAL, "%s: beta2 is %g, wanted [0, 1)", op, beta2);
    *r = (adamw_rates){.grad_scale = grad_scale,
                       .keep = 1 - lr * weight_decay,
                       .beta1 = beta1,
                       .beta2 = beta2,
                       .rate = lr / (1 - pow(beta1, (double)step)),
                       .vhat = 1 / (1 - pow(beta2, (double)step)),
                       .eps = eps};
    return LG_OK;
}

__attribute__((always_inline)) static inline double step_of(double g, double p, double *m,
                                                            double *v, const adamw_rates *r) {
    g *= r->grad_scale;
    *m = r->beta1 * *m + (1 - r->beta1) * g;
    *v = r->beta2 * *v + (1 - r->beta2) * g * g;
    return r->keep * p - r->rate * *m / (sqrt(*v * r->vhat) + r->eps);
}

void adamw_steps(const float *g, float *p, float *m, float *v, int64_t n,
                 const adamw_rates *rates) {
    const adamw_rates r = *rates;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        double mi = m[i], vi = v[i];
        p[i] = (float)step_of(g[i], p[i], &mi, &vi, &r);
        m[i] = (float)mi;
        v[i] = (float)vi;
    }
}

static inline float join(uint16_t p, uint16_t low) {
    const uint32_t bits = ((uint32_t)p << 16) + (uint32_t)(int16_t)low;
    float w;
    memcpy(&w, &bits, 4);
    return w;
}

static inline void split(float w, uint16_t *p, uint16_t *low) {
    uint32_t bits;
    memcpy(&bits, &w, 4);
    if (w != w) bits = 0x7fc00000u; /* a NaN whose bits round up would become a number */
    *p = (uint16_t)((bits + 0x8000u) >> 16);
    *low = (uint16_t)bits;
}

static void adamw_f32(const float *g, float *p, float *m, float *v, int64_t n, const adamw_rates *r,
                      int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i += ADAMW_GRAIN)
        adamw_steps(g + i, p + i, m + i, v + i, n - i < ADAMW_GRAIN ? n - i : ADAMW_GRAIN, r);
}

static void adamw_low(const float *g, uint16_t *p, uint16_t *low, float *m, float *v, int64_t n,
                      const adamw_rates *r, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i0 = 0; i0 < n; i0 += ADAMW_BLOCK) {
        const int64_t count = n - i0 < ADAMW_BLOCK ? n - i0 : ADAMW_BLOCK;
        float w[ADAMW_BLOCK];
        for (int64_t i = 0; i < count; i++) w[i] = join(p[i0 + i], low[i0 + i]);
        adamw_steps(g + i0, w, m + i0, v + i0, count, r);
        for (int64_t i = 0; i < count; i++) split(w[i], &p[i0 + i], &low[i0 + i]);
    }
}

lg_status cpu_adamw(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr, double beta1,
                    double beta2, double eps, double weight_decay, int64_t step, lg_tensor *p,
                    lg_tensor *m, lg_tensor *v, lg_tensor *low) {
    adamw_rates r;
    LG_TRY(adamw_rates_of(ctx, "adamw", grad_scale, lr, beta1, beta2, eps, weight_decay, step, &r));
    if (low && p->dtype != LG_BF16)
        return lg_fail(ctx, LG_EINVAL, "adamw: p is %s, wanted bf16 beside low",
                       lg_dtype_name(p->dtype));
    const int64_t n = tensor_numel(p);
    const int threads = op_threads(ctx, n, ADAMW_GRAIN);
    if (p->dtype == LG_F32) {
        adamw_f32(g->data, p->data, m->data, v->data, n, &r, threads);
        return LG_OK;
    }
    if (low) {
        adamw_low(g->data, p->data, low->data, m->data, v->data, n, &r, threads);
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
