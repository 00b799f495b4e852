/* SwiGLU: y = gate sigmoid(gate) up. With s = sigmoid(gate): d(gate s) / dgate = s (1 + gate (1
 * - s)). */
#include "cpu.h"
#include "vec.h"

enum { BLOCK = 512 };

/* 1 / (1 + e^-x); e is e^-|x|, which does not overflow. */
VEC_INLINE f32x16 sigmoid16(f32x16 x) {
    const f32x16 e = exp16_negative(-max16(x, -x));
    return select16(x < 0.0f, e, splat16(1.0f)) / (e + 1.0f);
}

static void swiglu_row(const float *gate, const float *up, int64_t n, float *y) {
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        const f32x16 g = load16(gate + i);
        store16(y + i, g * sigmoid16(g) * load16(up + i));
    }
    if (i == n) return;
    const f32x16 g = load16_part(gate + i, n - i, 0.0f);
    store16_part(y + i, n - i, g * sigmoid16(g) * load16_part(up + i, n - i, 0.0f));
}

/* Elements [i, i + m), m <= 16; either result may be NULL. */
VEC_INLINE void swiglu_backward16(const float *dy, const float *gate, const float *up, int64_t i,
                                  int64_t m, float *dgate, float *dup) {
    const f32x16 g = load16_part(gate + i, m, 0.0f), s = sigmoid16(g),
                 d = load16_part(dy + i, m, 0.0f) * s;
    if (dup) store16_part(dup + i, m, d * g);
    if (dgate)
        store16_part(dgate + i, m, d * load16_part(up + i, m, 0.0f) * (g * (1.0f - s) + 1.0f));
}

static void swiglu_row_backward(const float *dy, const float *gate, const float *up, int64_t n,
                                float *dgate, float *dup) {
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES)
        swiglu_backward16(dy, gate, up, i, VEC_LANES, dgate, dup);
    if (i < n) swiglu_backward16(dy, gate, up, i, n - i, dgate, dup);
}

lg_status cpu_swiglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up, lg_tensor *y) {
    const int64_t N = tensor_rows(y), C = tensor_cols(y);
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int64_t gate_row = row_offset(gate, n), up_row = row_offset(up, n);
        if (y->dtype == LG_F64) {
            const double *g = (const double *)gate->data + gate_row,
                         *u = (const double *)up->data + up_row;
            for (int64_t c = 0; c < C; c++)
                ((double *)y->data)[n * C + c] = g[c] / (1 + exp(-g[c])) * u[c];
            continue;
        }
        for (int64_t c = 0; c < C; c += BLOCK) {
            const int64_t m = C - c < BLOCK ? C - c : BLOCK;
            float buffer[3][BLOCK];
            float *y_row = begin_row(y, n * C + c, buffer[2]);
            swiglu_row(load_row(gate, gate_row + c, m, buffer[0]),
                       load_row(up, up_row + c, m, buffer[1]), m, y_row);
            store_row(y, n * C + c, m, y_row);
        }
    }
    return LG_OK;
}

static void swiglu_backward_f64(const lg_tensor *dy, const lg_tensor *gate, const lg_tensor *up,
                                lg_tensor *dgate, lg_tensor *dup, int64_t n) {
    const int64_t C = tensor_cols(dy), gate_row = row_offset(gate, n), up_row = row_offset(up, n);
    for (int64_t c = 0; c < C; c++) {
        const double d = ((const double *)dy->data)[n * C + c],
                     g = ((const double *)gate->data)[gate_row + c];
        const double u = ((const double *)up->data)[up_row + c], s = 1 / (1 + exp(-g));
        if (dgate)
            ((double *)dgate->data)[row_offset(dgate, n) + c] = d * u * s * (1 + g * (1 - s));
        if (dup) ((double *)dup->data)[row_offset(dup, n) + c] = d * g * s;
    }
}

lg_status cpu_swiglu_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *gate,
                              const lg_tensor *up, lg_tensor *dgate, lg_tensor *dup) {
    const int64_t N = tensor_rows(dy), C = tensor_cols(dy);
    const int threads = op_threads(ctx, N * C, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        if (dy->dtype == LG_F64) {
            swiglu_backward_f64(dy, gate, up, dgate, dup, n);
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
            swiglu_row_backward(load_row(dy, n * C + c, m, buffer[0]),
                                load_row(gate, gate_row + c, m, buffer[1]),
                                load_row(up, up_row + c, m, buffer[2]), m, dg, du);
            if (dg) store_row(dgate, dgate_row + c, m, dg);
            if (du) store_row(dup, dup_row + c, m, du);
        }
    }
    return LG_OK;
}
