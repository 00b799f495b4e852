/* Rotary position embedding of half-split or interleaved pairs, and tables for tokens with several
 * positions. The backward is the rotation by the opposite angle. */
#include "rope.h"

/* Turns pairs (x[2i], x[2i+1]), i < R, by sign times their angles; the rest is copied. */
#define DEFINE_ROTATE_PAIRS(real, name)                                                          \
    static void name(const real *restrict x, const real *restrict cos, const real *restrict sin, \
                     real sign, int64_t R, int64_t D, real *restrict y) {                        \
        for (int64_t i = 0; i < R; i++) {                                                        \
            const real a = x[2 * i], b = x[2 * i + 1], s = sign * sin[i];                        \
            y[2 * i] = a * cos[i] - b * s;                                                       \
            y[2 * i + 1] = b * cos[i] + a * s;                                                   \
        }                                                                                        \
        for (int64_t i = 2 * R; i < D; i++) y[i] = x[i];                                         \
    }
DEFINE_ROTATE_PAIRS(float, rotate_pairs_f32)
DEFINE_ROTATE_PAIRS(double, rotate_pairs_f64)

static void rotate_token(const lg_tensor *x, const lg_tensor *cos, const lg_tensor *sin, int64_t p,
                         int sign, bool interleaved, int64_t n, lg_tensor *y) {
    const int64_t H = x->shape[1], D = x->shape[2], R = cos->shape[1],
                  width = lg_dtype_bytes(x->dtype);
    for (int64_t h = 0; h < H; h++) {
        const int64_t x_offset = n * x->stride[0] + h * x->stride[1];
        const int64_t y_offset = n * y->stride[0] + h * y->stride[1];
        /* 20480 strided rows of 16: 356 to 278 us. */
        if (n + 2 < x->shape[0])
            __builtin_prefetch((const char *)x->data + (x_offset + 2 * x->stride[0]) * width);
        if (x->dtype == LG_F64) {
            (interleaved ? rotate_pairs_f64 : rotate_f64)(
                (const double *)x->data + x_offset, (const double *)cos->data + p * R,
                (const double *)sin->data + p * R, sign, R, D, (double *)y->data + y_offset);
            continue;
        }
        float from[HEAD_BUFFER], to[HEAD_BUFFER];
        const float *x_row = load_row(x, x_offset, D, from);
        float *y_row = begin_row(y, y_offset, to);
        (interleaved ? rotate_pairs_f32 : rotate_f32)(x_row, (const float *)cos->data + p * R,
                                                      (const float *)sin->data + p * R, (float)sign,
                                                      R, D, y_row);
        store_row(y, y_offset, D, y_row);
    }
}

lg_status cpu_rope_check(lg_context *ctx, const char *op, const lg_tensor *x, const lg_tensor *cos,
                         const lg_tensor *position) {
    const int64_t N = x->shape[0], D = x->shape[2], P = cos->shape[0], R = cos->shape[1];
    const int32_t *p = position->data;
    if (2 * R > D)
        return lg_fail(ctx, LG_EINVAL, "%s: cos has %lld pairs, wanted at most %lld", op,
                       (long long)R, (long long)(D / 2));
    if (D > HEAD_BUFFER)
        return lg_fail(ctx, LG_EUNSUPPORTED, "%s: head size is %lld, wanted at most %d", op,
                       (long long)D, HEAD_BUFFER);
    for (int64_t n = 0; n < N; n++)
        if (p[n] < 0 || p[n] >= P)
            return lg_fail(ctx, LG_EINVAL, "%s: position[%lld] is %d, wanted [0, %lld)", op,
                           (long long)n, p[n], (long long)P);
    return LG_OK;
}

static lg_status rotate(lg_context *ctx, const char *op, const lg_tensor *x, const lg_tensor *cos,
                        const lg_tensor *sin, const lg_tensor *position, int sign, bool interleaved,
                        lg_tensor *y) {
    const int64_t N = x->shape[0];
    const int32_t *p = position->data;
    LG_TRY(cpu_rope_check(ctx, op, x, cos, position));
    const int threads = op_threads(ctx, tensor_numel(x), ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) rotate_token(x, cos, sin, p[n], sign, interleaved, n, y);
    return LG_OK;
}

lg_status cpu_rope(lg_context *ctx, const lg_tensor *x, const lg_tensor *cos, const lg_tensor *sin,
                   const lg_tensor *position, bool interleaved, lg_tensor *y) {
    return rotate(ctx, "rope", x, cos, sin, position, 1, interleaved, y);
}

lg_status cpu_rope_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *cos,
                            const lg_tensor *sin, const lg_tensor *position, bool interleaved,
                            lg_tensor *dx) {
    if (!dx) return LG_OK;
    return rotate(ctx, "rope_backward", dy, cos, sin, position, -1, interleaved, dx);
}

lg_status cpu_rope_planes(lg_context *ctx, const lg_tensor *table, const lg_tensor *position,
                          const lg_tensor *plane, lg_tensor *y) {
    const int64_t P = table->shape[0], R = table->shape[1], M = position->shape[0],
                  N = position->shape[1], bytes = lg_dtype_bytes(table->dtype);
    const int32_t *p = position->data, *of = plane->data;
    for (int64_t i = 0; i < R; i++)
        if (of[i] < 0 || of[i] >= M)
            return lg_fail(ctx, LG_EINVAL, "rope_planes: plane[%lld] is %d, wanted [0, %lld)",
                           (long long)i, of[i], (long long)M);
    for (int64_t i = 0; i < M * N; i++)
        if (p[i] < 0 || p[i] >= P)
            return lg_fail(ctx, LG_EINVAL, "rope_planes: position[%lld] is %d, wanted [0, %lld)",
                           (long long)i, p[i], (long long)P);
    const int threads = op_threads(ctx, N * R, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++)
        for (int64_t i = 0; i < R; i++)
            memcpy((char *)y->data + (n * R + i) * bytes,
                   (const char *)table->data + (p[of[i] * N + n] * R + i) * bytes, (size_t)bytes);
    return LG_OK;
}
