/* Rotary position embedding: pair i < R, (a, b) = (x[i], x[i+R]), or interleaved (x[2i], x[2i+1]),
 * becomes (a cos - b sin, b cos + a sin); dimensions from 2R on are copied. The backward is the
 * rotation by the opposite angle.
 *
 * A thread owns W pairs (interleaved: W dimensions; or W copied dimensions) of HEADS heads of a
 * token, so that a token's cosines and sines are read once for them, while x is on its way. x is
 * read once, y written once; tokens and heads may lie apart.
 */
#include "piece.cuh"
#include "op/rope.h"
#include "op/rope_planes.h"

enum { THREADS = 256, HEADS = 4 };

/* Sizes and strides, in elements. */
struct rope_shape {
    int64_t N, P;
    int H, D, R;
    unsigned items; /* threads a token */
    int64_t x_token, x_head, y_token, y_head;
};

template <class T, int W>
static __global__ void __launch_bounds__(THREADS)
    rope_rotate(const T *x, const float *cos, const float *sin, float sign, const int32_t *position,
                T *y, const __grid_constant__ rope_shape s, device_error *error) {
    const unsigned pairs = s.R / W, parts = pairs + (s.D - 2 * s.R) / W;
    int64_t n;
    unsigned item;
    split_index((int64_t)blockIdx.x * THREADS, threadIdx.x, s.items, &n, &item);
    if (n >= s.N) return;
    const unsigned part = item % parts, h0 = item / parts * HEADS;
    const int32_t p = position[n];
    const bool turns = part < pairs;
    const int i = turns ? part * W : 2 * s.R + (part - pairs) * W;
    const T *from = x + n * s.x_token + i;
    T *to = y + n * s.y_token + i;

    constexpr bool whole = W == piece<T>::N;
    piece<T> a[HEADS], b[HEADS];
#pragma unroll
    for (int k = 0; k < HEADS; k++) {
        if (h0 + k >= s.H) break;
        a[k] = load_piece(from + (h0 + k) * s.x_head, W, whole);
        if (turns) b[k] = load_piece(from + (h0 + k) * s.x_head + s.R, W, whole);
    }
    if (p < 0 || p >= s.P) {
        if (item == 0) note_error(error, ERROR_POSITION, n, p, s.P);
        return;
    }
    if (turns) {
        float c[W], t[W];
        constexpr int L = W < 4 ? W : 4;
#pragma unroll
        for (int e = 0; e < W; e += L) {
            const vec<float, L> vc = *(const vec<float, L> *)(cos + (int64_t)p * s.R + i + e);
            const vec<float, L> vs = *(const vec<float, L> *)(sin + (int64_t)p * s.R + i + e);
#pragma unroll
            for (int l = 0; l < L; l++) c[e + l] = vc[l], t[e + l] = sign * vs[l];
        }
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            float u[piece<T>::N] = {}, v[piece<T>::N] = {};
#pragma unroll
            for (int e = 0; e < W; e++) {
                /* Written out, so that every width rounds alike. */
                u[e] = fmaf(a[k][e], c[e], -(b[k][e] * t[e]));
                v[e] = fmaf(b[k][e], c[e], a[k][e] * t[e]);
            }
            a[k] = pack_piece<T>(u);
            b[k] = pack_piece<T>(v);
        }
    }
#pragma unroll
    for (int k = 0; k < HEADS; k++) {
        if (h0 + k >= s.H) break;
        store_piece(to + (h0 + k) * s.y_head, a[k], W, whole);
        if (turns) store_piece(to + (h0 + k) * s.y_head + s.R, b[k], W, whole);
    }
}

/* W dimensions a thread: W / 2 pairs side by side, or, where W is 1, a pair of single elements. */
template <class T, int W>
static __global__ void __launch_bounds__(THREADS)
    rope_rotate_pairs(const T *x, const float *cos, const float *sin, float sign,
                      const int32_t *position, T *y, const __grid_constant__ rope_shape s,
                      device_error *error) {
    constexpr bool whole = W == piece<T>::N;
    constexpr int PAIRS = whole ? W / 2 : 1, SPAN = 2 * PAIRS;
    const unsigned turning = s.R / PAIRS, parts = turning + (s.D - 2 * s.R) / W;
    int64_t n;
    unsigned item;
    split_index((int64_t)blockIdx.x * THREADS, threadIdx.x, s.items, &n, &item);
    if (n >= s.N) return;
    const unsigned part = item % parts, h0 = item / parts * HEADS;
    const int32_t p = position[n];
    const bool turns = part < turning;
    const int i = turns ? part * SPAN : 2 * s.R + (part - turning) * W, held = turns ? SPAN : W;
    const T *from = x + n * s.x_token + i;
    T *to = y + n * s.y_token + i;

    piece<T> a[HEADS];
#pragma unroll
    for (int k = 0; k < HEADS; k++)
        if (h0 + k < s.H) a[k] = load_piece(from + (h0 + k) * s.x_head, held, whole);
    if (p < 0 || p >= s.P) {
        if (item == 0) note_error(error, ERROR_POSITION, n, p, s.P);
        return;
    }
    if (turns) {
        const int64_t at = (int64_t)p * s.R + i / 2;
        const vec<float, PAIRS> c = *(const vec<float, PAIRS> *)(cos + at),
                                t = *(const vec<float, PAIRS> *)(sin + at);
#pragma unroll
        for (int k = 0; k < HEADS; k++) {
            float u[piece<T>::N] = {};
#pragma unroll
            for (int e = 0; e < PAIRS; e++) {
                const float re = a[k][2 * e], im = a[k][2 * e + 1];
                u[2 * e] = fmaf(re, c[e], -(im * (sign * t[e])));
                u[2 * e + 1] = fmaf(im, c[e], re * (sign * t[e]));
            }
            a[k] = pack_piece<T>(u);
        }
    }
#pragma unroll
    for (int k = 0; k < HEADS; k++)
        if (h0 + k < s.H) store_piece(to + (h0 + k) * s.y_head, a[k], held, whole);
}

/* y[n,i] = table[position[plane[i],n],i], an element a thread. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    rope_planes_gather(const T *table, const int32_t *position, const int32_t *plane, int64_t N,
                       int64_t P, int64_t M, unsigned R, T *y, device_error *error) {
    int64_t n;
    unsigned i;
    split_index((int64_t)blockIdx.x * THREADS, threadIdx.x, R, &n, &i);
    if (n >= N) return;
    const int32_t m = plane[i];
    if (m < 0 || m >= M) {
        if (n == 0) note_error(error, ERROR_PLANE, i, m, M);
        return;
    }
    const int32_t p = position[m * N + n];
    if (p < 0 || p >= P) {
        note_error(error, ERROR_POSITION, m * N + n, p, P);
        return;
    }
    y[n * R + i] = table[(int64_t)p * R + i];
}

static lg_status rotate(lg_context *ctx, const char *op, const lg_tensor *x, const lg_tensor *cos,
                        const lg_tensor *sin, const lg_tensor *position, float sign,
                        bool interleaved, lg_tensor *y) {
    rope_shape s = {
        x->shape[0], cos->shape[0], (int)x->shape[1], (int)x->shape[2], (int)cos->shape[1],
        0,           x->stride[0],  x->stride[1],     y->stride[0],     y->stride[1],
    };
    if (2 * s.R > s.D)
        return lg_fail(ctx, LG_EINVAL, "%s: cos has %d pairs, wanted at most %d", op, s.R, s.D / 2);
    if (tensor_numel(x) == 0) return LG_OK;
    return dispatch_float(ctx, op, x->dtype, [&](auto t) {
        using T = decltype(t);
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            const int dims = interleaved && W > 1 ? s.D : s.D - s.R;
            const auto kernel = interleaved ? rope_rotate_pairs<T, W> : rope_rotate<T, W>;
            s.items = (unsigned)((s.H + HEADS - 1) / HEADS * (dims / W));
            kernel<<<blocks_for(s.N * s.items, THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
                (const T *)x->data, (const float *)cos->data, (const float *)sin->data, sign,
                (const int32_t *)position->data, (T *)y->data, s, cuda_error_slot(ctx, op));
            return cuda_launched(ctx, op);
        };
        constexpr int W = 16 / sizeof(T);
        if (s.R % W == 0 && s.D % W == 0 && rows_vectorise<T>(x) && rows_vectorise<T>(y) &&
            can_vectorise<float>(cos->data, s.R) && can_vectorise<float>(sin->data, s.R))
            return launch(width_of<W>());
        return launch(width_of<1>());
    });
}

extern "C" lg_status cuda_rope(lg_context *ctx, const lg_tensor *x, const lg_tensor *cos,
                               const lg_tensor *sin, const lg_tensor *position, bool interleaved,
                               lg_tensor *y) {
    return rotate(ctx, "rope", x, cos, sin, position, 1, interleaved, y);
}

extern "C" lg_status cuda_rope_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *cos,
                                        const lg_tensor *sin, const lg_tensor *position,
                                        bool interleaved, lg_tensor *dx) {
    if (!dx) return LG_OK;
    return rotate(ctx, "rope_backward", dy, cos, sin, position, -1, interleaved, dx);
}

extern "C" lg_status cuda_rope_planes(lg_context *ctx, const lg_tensor *table,
                                      const lg_tensor *position, const lg_tensor *plane,
                                      lg_tensor *y) {
    const int64_t N = y->shape[0], R = y->shape[1];
    if (N == 0 || R == 0) return LG_OK;
    return dispatch_float(ctx, "rope_planes", y->dtype, [&](auto t) {
        using T = decltype(t);
        rope_planes_gather<T>
            <<<blocks_for(N * R, THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
                (const T *)table->data, (const int32_t *)position->data,
                (const int32_t *)plane->data, N, table->shape[0], position->shape[0], (unsigned)R,
                (T *)y->data, cuda_error_slot(ctx, "rope_planes"));
        return cuda_launched(ctx, "rope_planes");
    });
}
