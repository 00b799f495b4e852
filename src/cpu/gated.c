/* Gated activations y = act(gate) up: swiglu and geglu. Rows of gate and up may lie apart: the halves of
 * one matrix. */
#include "cpu.h"
#include "vec.h"

enum { BLOCK = 512 };

/* SILU: z sigmoid(z). GELU: z Phi(z). GELU_TANH: z sigmoid(2 u), u = sqrt(2 / pi) (z + 0.044715 z^3), for
 * (1 + tanh u) / 2 is sigmoid(2 u). */
typedef enum activation { SILU, GELU, GELU_TANH } activation;

/* 2 sqrt(2 / pi), its 0.044715, 1 / sqrt(2), 1 / sqrt(2 pi). */
#define TWO_U 1.5957691216057308
#define TWO_U_CUBE 0.07135481627260025
#define ROOT_HALF 0.7071067811865476
#define DENSITY 0.3989422804014327

typedef struct gating {
    activation act;
    double gate_multiplier, down_multiplier;
} gating;

/* 1 / (1 + e^-x); e is e^-|x|, which does not overflow. */
VEC_INLINE f32x16 sigmoid16(f32x16 x) {
    const f32x16 e = exp16_negative(-max16(x, -x));
    return select16(x < 0.0f, e, splat16(1.0f)) / (e + 1.0f);
}

/* What z is multiplied by: act(z) / z. */
VEC_INLINE f32x16 share16(activation act, f32x16 z) {
    if (act == SILU) return sigmoid16(z);
    if (act == GELU_TANH) return sigmoid16(z * ((z * z) * (float)TWO_U_CUBE + (float)TWO_U));
    f32x16 s;
    for (int i = 0; i < VEC_LANES; i++) s[i] = 0.5f + 0.5f * erff(z[i] * (float)ROOT_HALF);
    return s;
}

/* act'(z) / s for silu, act'(z) else, s being share16(z). */
VEC_INLINE f32x16 slope16(activation act, f32x16 z, f32x16 s) {
    if (act == SILU) return z * (1.0f - s) + 1.0f;
    if (act == GELU_TANH)
        return s + z * s * (1.0f - s) * ((z * z) * (float)(3 * TWO_U_CUBE) + (float)TWO_U);
    return s + z * exp16_negative(z * z * -0.5f) * (float)DENSITY;
}

VEC_INLINE void gated16(activation act, const float *gate, const float *up, int64_t i, int64_t m,
                        float gate_multiplier, float down_multiplier, float *y) {
    const f32x16 z = load16_part(gate + i, m, 0.0f) * gate_multiplier;
    store16_part(y + i, m, z * share16(act, z) * load16_part(up + i, m, 0.0f) * down_multiplier);
}

VEC_INLINE void gated_row(activation act, const gating *g, const float *gate, const float *up,
                          int64_t n, float *y) {
    const float a = (float)g->gate_multiplier, b = (float)g->down_multiplier;
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) gated16(act, gate, up, i, VEC_LANES, a, b, y);
    if (i < n) gated16(act, gate, up, i, n - i, a, b, y);
}

/* Elements [i, i + m), m <= 16; either result may be NULL. */
VEC_INLINE void gated16_backward(activation act, const float *dy, const float *gate,
                                 const float *up, int64_t i, int64_t m, float gate_multiplier,
                                 float down_multiplier, float *dgate, float *dup) {
    const f32x16 z = load16_part(gate + i, m, 0.0f) * gate_multiplier, s = share16(act, z),
                 d = load16_part(dy + i, m, 0.0f) * down_multiplier;
    if (dup) store16_part(dup + i, m, d * s * z);
    if (!dgate) return;
    const f32x16 u = load16_part(up + i, m, 0.0f), outer = act == SILU ? d * s * u : d * u;
    store16_part(dgate + i, m, outer * slope16(act, z, s) * gate_multiplier);
}

VEC_INLINE void gated_row_backward(activation act, const gating *g, const float *dy,
                                   const float *gate, const float *up, int64_t n, float *dgate,
                                   float *dup) {
    const float a = (float)g->gate_multiplier, b = (float)g->down_multiplier;
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        gated16_backward(act, dy, gate, up, i, VEC_LANES, a, b, dgate, dup);
    if (i < n) gated16_backward(act, dy, gate, up, i, n - i, a, b, dgate, dup);
}

static void any_row(const gating *g, const float *gate, const float *up, int64_t n, float *y) {
    switch (g->act) {
    case SILU: gated_row(SILU, g, gate, up, n, y); break;
    case GELU: gated_row(GELU, g, gate, up, n, y); break;
    case GELU_TANH: gated_row(GELU_TANH, g, gate, up, n, y); break;
    }
}

static void any_row_backward(const gating *g, const float *dy, const float *gate, const float *up,
                             int64_t n, float *dgate, float *dup) {
    switch (g->act) {
    case SILU: gated_row_backward(SILU, g, dy, gate, up, n, dgate, dup); break;
    case GELU: gated_row_backward(GELU, g, dy, gate, up, n, dgate, dup); break;
    case GELU_TANH: gated_row_backward(GELU_TANH, g, dy, gate, up, n, dgate, dup); break;
    }
}

/* act(z) and act'(z). */
static double act_f64(activation act, double z, double *slope) {
    const double cube = TWO_U_CUBE * z * z;
    double s, ds; /* act(z) / z and its derivative */
    if (act == GELU) {
        s = 0.5 * (1 + erf(z * ROOT_HALF));
        ds = DENSITY * exp(-0.5 * z * z);
    } else {
        s = 1 / (1 + exp(act == SILU ? -z : -z * (TWO_U + cube)));
        ds = s * (1 - s) * (act == SILU ? 1 : TWO_U + 3 * cube);
    }
    *slope = s + z * ds;
    return z * s;
}

static lg_status gated(lg_context *ctx, gating g, const lg_tensor *gate, const lg_tensor *up,
                       lg_tensor *y) {
    const int64_t N = tensor_rows(y), C = tensor_cols(y);
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int64_t gate_row = row_offset(gate, n), up_row = row_offset(up, n);
        if (y->dtype == LG_F64) {
            const double *z = (const double *)gate->data + gate_row,
                         *u = (const double *)up->data + up_row;
            double unused;
            for (int64_t c = 0; c < C; c++)
                ((double *)y->data)[n * C + c] =
                    act_f64(g.act, g.gate_multiplier * z[c], &unused) * u[c] * g.down_multiplier;
            continue;
        }
        for (int64_t c = 0; c < C; c += BLOCK) {
            const int64_t m = C - c < BLOCK ? C - c : BLOCK;
            float buffer[3][BLOCK];
            float *y_row = begin_row(y, n * C + c, buffer[2]);
            any_row(&g, load_row(gate, gate_row + c, m, buffer[0]),
                    load_row(up, up_row + c, m, buffer[1]), m, y_row);
            store_row(y, n * C + c, m, y_row);
        }
    }
    return LG_OK;
}

static void backward_f64(const gating *g, const lg_tensor *dy, const lg_tensor *gate,
                         const lg_tensor *up, lg_tensor *dgate, lg_tensor *dup, int64_t n) {
    const int64_t C = tensor_cols(dy), gate_row = row_offset(gate, n), up_row = row_offset(up, n);
    for (int64_t c = 0; c < C; c++) {
        const double d = ((const double *)dy->data)[n * C + c] * g->down_multiplier,
                     u = ((const double *)up->data)[up_row + c];
        double slope;
        const double value = act_f64(
            g->act, ((const double *)gate->data)[gate_row + c] * g->gate_multiplier, &slope);
        if (dgate)
            ((double *)dgate->data)[row_offset(dgate, n) + c] = d * u * slope * g->gate_multiplier;
        if (dup) ((double *)dup->data)[row_offset(dup, n) + c] = d * value;
    }
}

static lg_status gated_backward(lg_context *ctx, gating g, const lg_tensor *dy,
                                const lg_tensor *gate, const lg_tensor *up, lg_tensor *dgate,
                                lg_tensor *dup) {
    const int64_t N = tensor_rows(dy), C = tensor_cols(dy);
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        if (dy->dtype == LG_F64) {
            backward_f64(&g, dy, gate, up, dgate, dup, n);
            continue;
        }
        const int64_t gate_row = row_offset(gate, n), up_row = row_offset(up, n);
        const int64_t dgate_row = dgate ? row_offset(dgate, n) : 0,
                      dup_row = dup ? row_offset(dup, n) : 0;
        for (int64_t c = 0; c < C; c += BLOCK) {
            const int64_t m = C - c < BLOCK ? C - c : BLOCK;
            float buffer[5][BLOCK];
            float *dg = dgate ? begin_row(dgate, dgate_row + c, buffer[3]) : NULL;
            float *du = dup ? begin_row(dup, dup_row + c, buffer[4]) : NULL;
            any_row_backward(&g, load_row(dy, n * C + c, m, buffer[0]),
                             load_row(gate, gate_row + c, m, buffer[1]),
                             load_row(up, up_row + c, m, buffer[2]), m, dg, du);
            if (dg) store_row(dgate, dgate_row + c, m, dg);
            if (du) store_row(dup, dup_row + c, m, du);
        }
    }
    return LG_OK;
}

lg_status cpu_swiglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up,
                     double gate_multiplier, double down_multiplier, lg_tensor *y) {
    return gated(ctx, (gating){SILU, gate_multiplier, down_multiplier}, gate, up, y);
}

lg_status cpu_swiglu_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *gate,
                              const lg_tensor *up, double gate_multiplier, double down_multiplier,
                              lg_tensor *dgate, lg_tensor *dup) {
    return gated_backward(ctx, (gating){SILU, gate_multiplier, down_multiplier}, dy, gate, up,
                          dgate, dup);
}

static gating gelu(bool approximate) { return (gating){approximate ? GELU_TANH : GELU, 1, 1}; }

lg_status cpu_geglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up, bool approximate,
                    lg_tensor *y) {
    return gated(ctx, gelu(approximate), gate, up, y);
}

lg_status cpu_geglu_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *gate,
                             const lg_tensor *up, bool approximate, lg_tensor *dgate,
                             lg_tensor *dup) {
    return gated_backward(ctx, gelu(approximate), dy, gate, up, dgate, dup);
}
