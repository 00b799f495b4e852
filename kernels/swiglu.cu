/* SwiGLU: y = gate sigmoid(gate) up. With s = sigmoid(gate): dup = dy gate s,
 * dgate = dy up s (1 + gate (1 - s)).
 *
 * A thread owns ITEMS vectors of W elements, a block THREADS * ITEMS vectors one after the other
 * through all rows. Each input is read once, each output written once; rows may lie apart.
 */
#include "common.cuh"
#include "op/swiglu.h"

enum { THREADS = 256, ITEMS = 2 };

__device__ __forceinline__ float sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + __expf(-x)); /* e^-x of infinity gives 0 */
}

template <class T, int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_fwd(const T *gate, strided_rows gate_rows, const T *up, strided_rows up_rows, T *y,
               int64_t total, unsigned cols) {
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
            const float x = to_float(g[k][e]);
            out[e] = from_float<T>(x * sigmoid(x) * to_float(u[k][e]));
        }
        *(vec<T, W> *)(y + i * W) = out;
    }
}

/* Where the rows of the four strided tensors lie. */
struct swiglu_rows {
    strided_rows gate, up, dgate, dup;
};

template <class T, int W>
static __global__ void __launch_bounds__(THREADS)
    swiglu_bwd(const T *dy, const T *gate, const T *up, T *dgate, T *dup,
               const __grid_constant__ swiglu_rows rows, int64_t total, unsigned cols) {
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
            const float x = to_float(g[k][e]), s = sigmoid(x), ds = to_float(d[k][e]) * s;
            du[e] = from_float<T>(ds * x);
            dg[e] = from_float<T>(ds * to_float(u[k][e]) * (1.0f + x * (1.0f - s)));
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

extern "C" lg_status cuda_swiglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up,
                                 lg_tensor *y) {
    if (tensor_numel(y) == 0) return LG_OK;
    return dispatch_float(ctx, "swiglu", y->dtype, [&](auto t) {
        using T = decltype(t);
        const strided_rows g = rows_of(gate), u = rows_of(up);
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            return with_items<W>(y, g.dense && u.dense,
                                 [&](int64_t total, unsigned cols, unsigned blocks) {
                                     swiglu_fwd<T, W><<<blocks, THREADS, 0, cuda_stream(ctx)>>>(
                                         (const T *)gate->data, g, (const T *)up->data, u,
                                         (T *)y->data, total, cols);
                                     return cuda_launched(ctx, "swiglu");
                                 });
        };
        if (rows_vectorise<T>(gate) && rows_vectorise<T>(up) && rows_vectorise<T>(y))
            return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}

extern "C" lg_status cuda_swiglu_backward(lg_context *ctx, const lg_tensor *dy,
                                          const lg_tensor *gate, const lg_tensor *up,
                                          lg_tensor *dgate, lg_tensor *dup) {
    if (tensor_numel(dy) == 0 || (!dgate && !dup)) return LG_OK;
    return dispatch_float(ctx, "swiglu_backward", dy->dtype, [&](auto t) {
        using T = decltype(t);
        const swiglu_rows rows = {rows_of(gate), rows_of(up), rows_of(dgate ? dgate : gate),
                                  rows_of(dup ? dup : up)};
        const bool dense = rows.gate.dense && rows.up.dense && rows.dgate.dense && rows.dup.dense;
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            return with_items<W>(dy, dense, [&](int64_t total, unsigned cols, unsigned blocks) {
                swiglu_bwd<T, W><<<blocks, THREADS, 0, cuda_stream(ctx)>>>(
                    (const T *)dy->data, (const T *)gate->data, (const T *)up->data,
                    (T *)(dgate ? dgate->data : NULL), (T *)(dup ? dup->data : NULL), rows, total,
                    cols);
                return cuda_launched(ctx, "swiglu_backward");
            });
        };
        if (rows_vectorise<T>(dy) && rows_vectorise<T>(gate) && rows_vectorise<T>(up) &&
            rows_vectorise<T>(dgate) && rows_vectorise<T>(dup))
            return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}
