/* The rotation of one head, for the ops that have one. */
#ifndef LIGER_ROPE_H
#define LIGER_ROPE_H

#include "cpu.h"

enum { HEAD_BUFFER = 1024 };

/* Turns pairs (x[i], x[i+R]), i < R, by sign times their angles; the rest is copied. */
#define DEFINE_ROTATE(real, name)                                                      \
    static inline void name(const real *restrict x, const real *restrict cos,          \
                            const real *restrict sin, real sign, int64_t R, int64_t D, \
                            real *restrict y) {                                        \
        for (int64_t i = 0; i < R; i++) {                                              \
            const real a = x[i], b = x[i + R], s = sign * sin[i];                      \
            y[i] = a * cos[i] - b * s;                                                 \
            y[i + R] = b * cos[i] + a * s;                                             \
        }                                                                              \
        for (int64_t i = 2 * R; i < D; i++) y[i] = x[i];                               \
    }
DEFINE_ROTATE(float, rotate_f32)
DEFINE_ROTATE(double, rotate_f64)

/* Refuses tables that are too wide, heads that are too long and positions that are not there. */
lg_status cpu_rope_check(lg_context *ctx, const char *op, const lg_tensor *x, const lg_tensor *cos,
                         const lg_tensor *position);

#endif
