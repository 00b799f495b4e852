/* Gated activations: y = act(z) up down_multiplier, z = gate_multiplier gate; swiglu and geglu. With act(z)
 * = z s: dup = dy z s, dgate = dy up act'(z) gate_multiplier.
 *
 * A thread owns ITEMS vectors of W elements, a block THREADS * ITEMS vectors one after the other
 * through all rows. Each input is read once, each output written once; rows may lie apart.
 */
#include "common.cuh"
#include "op/geglu.h"
#include "op/swiglu.h"

enum { THREADS = 256, ITEMS = 2 };

__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x)); /* e^-x of infinity gives 0 */
}

/* What z is multiplied by to give act(z), and act'(z) from z and that. */
struct silu {
    static __device__ __forceinline__ float share(float z) { return sigmoid(z); }
    static __device__ __forceinline__ float slope(float z, float s) {
        return s * (1.0f + z * (1.0f - s));
    }
};
struct gelu {
    static __device__ __forceinline__ float share(float z) {
        return fmaf(0.5f, erff(z * 0.70710678f), 0.5f);
    }
    static __device__ __forceinline__ float slope(float z, float s) {
        return fmaf(z * 0.39894228f, __expf(-0.5f * z * z), s); /* 1 / sqrt(2 pi) */
    }
};
/* (1 + tanh u) / 2 = sigmoid(2 u), 2 u = 2 sqrt(2 / pi) (z + 0.044715 z^3). */
struct gelu_tanh {
    static __device__ __forceinline__ float share(float z) {
        return sigmoid(z * fmaf(0.071354816f, z * z, 1.5957691f));
    }
    static __device__ __forceinline__ float slope(float z, float s) {
        return fmaf(z * s * (1.0f - s), fmaf(3 * 0.071354816f, z * z, 1.5957691f), s);
    }
};

struct multipliers {
    float gate, down;
};

template <class Act, class T, int W>
static __global__ void __launch_bounds__(THREADS)
    gated_fwd(const T *gate, strided_rows gate_rows, const T *up, strided_rows up_rows, T *y,
              multipliers by, int64_t total, unsigned cols) {
    const int64_t start = (int64_t)blockIdx.x * (THREADS * ITEMS);
    vec<T, W> g[ITEMS], u[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const unsigned i = k * THREADS + threadIdx.x;
        int64_t r;
        unsigned c;
        if (start + i >= total) continue;
        split_index(start, i, cols, &r, &c);
        g[k] = *(const vec<T, W> *)(gate + gate_rows.offset(r) + (int64_t)c * W);
        u[k] = *(const vec<T, W> *)(up + up_rows.offset(r) + (int64_t)c * W);
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const int64_t i = start + k * THREADS + threadIdx.x;
        vec<T, W> out;
        if (i >= total) continue;
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float z = to_float(g[k][e]) * by.gate;
            out[e] = from_float<T>(z * Act::share(z) * to_float(u[k][e]) * by.down);
        }
        *(vec<T, W> *)(y + i * W) = out;
    }
}

/* Where the rows of the four strided tensors lie. */
struct gated_rows {
    strided_rows gate, up, dgate, dup;
};

template <class Act, class T, int W>
static __global__ void __launch_bounds__(THREADS)
    gated_bwd(const T *dy, const T *gate, const T *up, T *dgate, T *dup,
              const __grid_constant__ gated_rows rows, multipliers by, int64_t total,
              unsigned cols) {
    const int64_t start = (int64_t)blockIdx.x * (THREADS * ITEMS);
    vec<T, W> d[ITEMS], g[ITEMS], u[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const unsigned i = k * THREADS + threadIdx.x;
        int64_t r;
        unsigned c;
        if (start + i >= total) continue;
        split_index(start, i, cols, &r, &c);
        d[k] = *(const vec<T, W> *)(dy + (start + i) * W);
        g[k] = *(const vec<T, W> *)(gate + rows.gate.offset(r) + (int64_t)c * W);
        u[k] = *(const vec<T, W> *)(up + rows.up.offset(r) + (int64_t)c * W);
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const unsigned i = k * THREADS + threadIdx.x;
        int64_t r;
        unsigned c;
        vec<T, W> dg, du;
        if (start + i >= total) continue;
        split_index(start, i, cols, &r, &c);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float z = to_float(g[k][e]) * by.gate, s = Act::share(z),
                        dz = to_float(d[k][e]) * by.down;
            du[e] = from_float<T>(dz * s * z);
            dg[e] = from_float<T>(dz * to_float(u[k][e]) * Act::slope(z, s) * by.gate);
        }
        if (dgate) *(vec<T, W> *)(dgate + rows.dgate.offset(r) + (int64_t)c * W) = dg;
        if (dup) *(vec<T, W> *)(dup + rows.dup.offset(r) + (int64_t)c * W) = du;
    }
}

/* Calls f(vectors of all, vectors a row) for W elements a vector. Dense tensors are one long row.
 */
template <int W, class F>
static lg_status with_items(const lg_tensor *y, bool dense, F f) {
    const int64_t total = tensor_numel(y) / W;
    const int64_t cols = dense && total < INT32_MAX ? total : tensor_cols(y) / W;
    return f(total, (unsigned)cols, blocks_for(total, THREADS * ITEMS, INT32_MAX));
}

template <class Act>
static lg_status forward(lg_context *ctx, const char *op, const lg_tensor *gate,
                         const lg_tensor *up, multipliers by, lg_tensor *y) {
    if (tensor_numel(y) == 0) return LG_OK;
    return dispatch_float(ctx, op, y->dtype, [&](auto t) {
        using T = decltype(t);
        const strided_rows g = rows_of(gate), u = rows_of(up);
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            return with_items<W>(y, g.dense && u.dense,
                                 [&](int64_t total, unsigned cols, unsigned blocks) {
                                     gated_fwd<Act, T, W><<<blocks, THREADS, 0, cuda_stream(ctx)>>>(
                                         (const T *)gate->data, g, (const T *)up->data, u,
                                         (T *)y->data, by, total, cols);
                                     return cuda_launched(ctx, op);
                                 });
        };
        if (rows_vectorise<T>(gate) && rows_vectorise<T>(up) && rows_vectorise<T>(y))
            return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}

template <class Act>
static lg_status backward(lg_context *ctx, const char *op, const lg_tensor *dy,
                          const lg_tensor *gate, const lg_tensor *up, multipliers by,
                          lg_tensor *dgate, lg_tensor *dup) {
    if (tensor_numel(dy) == 0 || (!dgate && !dup)) return LG_OK;
    return dispatch_float(ctx, op, dy->dtype, [&](auto t) {
        using T = decltype(t);
        const gated_rows rows = {rows_of(gate), rows_of(up), rows_of(dgate ? dgate : gate),
                                 rows_of(dup ? dup : up)};
        const bool dense = rows.gate.dense && rows.up.dense && rows.dgate.dense && rows.dup.dense;
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            return with_items<W>(dy, dense, [&](int64_t total, unsigned cols, unsigned blocks) {
                gated_bwd<Act, T, W><<<blocks, THREADS, 0, cuda_stream(ctx)>>>(
                    (const T *)dy->data, (const T *)gate->data, (const T *)up->data,
                    (T *)(dgate ? dgate->data : NULL), (T *)(dup ? dup->data : NULL), rows, by,
                    total, cols);
                return cuda_launched(ctx, op);
            });
        };
        if (rows_vectorise<T>(dy) && rows_vectorise<T>(gate) && rows_vectorise<T>(up) &&
            rows_vectorise<T>(dgate) && rows_vectorise<T>(dup))
            return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}

extern "C" lg_status cuda_swiglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up,
                                 double gate_multiplier, double down_multiplier, lg_tensor *y) {
    return forward<silu>(ctx, "swiglu", gate, up, {(float)gate_multiplier, (float)down_multiplier},
                         y);
}

extern "C" lg_status cuda_swiglu_backward(lg_context *ctx, const lg_tensor *dy,
                                          const lg_tensor *gate, const lg_tensor *up,
                                          double gate_multiplier, double down_multiplier,
                                          lg_tensor *dgate, lg_tensor *dup) {
    return backward<silu>(ctx, "swiglu_backward", dy, gate, up,
                          {(float)gate_multiplier, (float)down_multiplier}, dgate, dup);
}

extern "C" lg_status cuda_geglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up,
                                bool approximate, lg_tensor *y) {
    if (approximate) return forward<gelu_tanh>(ctx, "geglu", gate, up, {1, 1}, y);
    return forward<gelu>(ctx, "geglu", gate, up, {1, 1}, y);
}

extern "C" lg_status cuda_geglu_backward(lg_context *ctx, const lg_tensor *dy,
                                         const lg_tensor *gate, const lg_tensor *up,
                                         bool approximate, lg_tensor *dgate, lg_tensor *dup) {
    if (approximate)
        return backward<gelu_tanh>(ctx, "geglu_backward", dy, gate, up, {1, 1}, dgate, dup);
    return backward<gelu>(ctx, "geglu_backward", dy, gate, up, {1, 1}, dgate, dup);
}
