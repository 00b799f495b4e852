/* AdamW on bf16 weights and moments, rounded stochastically: blocks of elements pass through
 * fp32. */
#include "../philox.h"
#include "adamw.h"

/* Up in magnitude with probability (what 16 bits lack) / 2^16. `random` is below 2^16. A NaN that
 * arithmetic gave stays one when it is cut. */
static inline uint16_t round_with(float x, uint32_t random) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const int finite = (bits & 0x7f800000u) != 0x7f800000u;
    return (uint16_t)((bits + (finite ? random : 0)) >> 16);
}

lg_status cpu_adamw_stochastic(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr,
                               double beta1, double beta2, double eps, double weight_decay,
                               int64_t step, int64_t seed, int64_t stream, lg_tensor *p,
                               lg_tensor *m, lg_tensor *v) {
    adamw_rates r;
    LG_TRY(adamw_rates_of(ctx, "adamw_stochastic", grad_scale, lr, beta1, beta2, eps, weight_decay,
                          step, &r));
    if (p->dtype != LG_BF16)
        return cpu_adamw(ctx, g, grad_scale, lr, beta1, beta2, eps, weight_decay, step, p, m, v,
                         NULL);
    const int64_t n = tensor_numel(p);
    const float *gradient = g->data;
    uint16_t *ps = p->data, *ms = m->data, *vs = v->data;
    const int threads = op_threads(ctx, n, ADAMW_GRAIN);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i0 = 0; i0 < n; i0 += ADAMW_BLOCK) {
        const int64_t count = n - i0 < ADAMW_BLOCK ? n - i0 : ADAMW_BLOCK;
        float pf[ADAMW_BLOCK], mf[ADAMW_BLOCK], vf[ADAMW_BLOCK];
        uint32_t words[2 * ADAMW_BLOCK];
        for (int64_t i = 0; i < count; i++) {
            pf[i] = bf16_to_f32(ps[i0 + i]);
            mf[i] = bf16_to_f32(ms[i0 + i]);
            vf[i] = bf16_to_f32(vs[i0 + i]);
        }
        adamw_steps(gradient + i0, pf, mf, vf, count, &r);
        lg_philox((uint64_t)seed, (uint64_t)stream, 2 * (uint64_t)i0, 2 * count, words);
        for (int64_t i = 0; i < count; i++) {
            ps[i0 + i] = round_with(pf[i], words[2 * i] & 0xffff);
            ms[i0 + i] = round_with(mf[i], words[2 * i] >> 16);
            vs[i0 + i] = round_with(vf[i], words[2 * i + 1] & 0xffff);
        }
    }
    return LG_OK;
}
