/* copy, fill and accumulate, for any dtypes and leading strides. The tensors are walked as rows
 * that are dense in both, the longest there are; a thread owns VECTORS vectors of up to 16 bytes
 * and reads and writes each element once.
 *
 * Between f32, bf16 and f16 elements go through fp32; every other pair goes through double, element
 * by element, with one rounding at the end. Whole numbers are cut towards 0 and held within their
 * bounds, and NaN becomes 0.
 */
#include "element.cuh"
#include "op/accumulate.h"
#include "op/copy.h"
#include "op/fill.h"

enum { THREADS = 256, VECTORS = 2 };

/* `rows` rows of `cols` elements, dense in x and y; sizes and strides of the dimensions around
 * them, innermost first. */
struct walk {
    int64_t rows, cols;
    int64_t size[3], x_stride[3], y_stride[3];
};

static walk walk_of(const lg_tensor *x, const lg_tensor *y) {
    walk w = {1, 1, {1, 1, 1}, {0, 0, 0}, {0, 0, 0}};
    int outer = y->ndim;
    for (; outer > 0; outer--) {
        const int i = outer - 1;
        if (y->shape[i] > 1 && (x->stride[i] != w.cols || y->stride[i] != w.cols)) break;
        w.cols *= y->shape[i];
    }
    for (int i = outer - 1, at = 0; i >= 0; i--, at++) {
        w.rows *= y->shape[i];
        w.size[at] = y->shape[i];
        w.x_stride[at] = x->stride[i];
        w.y_stride[at] = y->stride[i];
    }
    return w;
}

/* Whether vectors of `n` elements that start at multiples of n in a row are aligned in memory. */
static bool is_aligned(const void *data, int64_t element_bytes, const int64_t size[3],
                       const int64_t stride[3], int n) {
    bool aligned = (uintptr_t)data % (uintptr_t)(n * element_bytes) == 0;
    for (int i = 0; i < 3; i++) aligned = aligned && (size[i] == 1 || stride[i] % n == 0);
    return aligned;
}

/* ---- where the elements are ---- */

/* a / b of numbers that are not negative: in 32 bits where they do, several times as fast. */
__device__ __forceinline__ int64_t divide(int64_t a, int64_t b) {
    return (uint64_t)(a | b) >> 32 ? a / b : (uint32_t)a / (uint32_t)b;
}

struct place {
    int64_t x, y, count; /* offsets; elements to the end of the row */
};

/* Vector i of a walk whose rows take `per_row` vectors of N elements. */
template <int N>
__device__ __forceinline__ place place_of(const walk &w, int64_t i, int64_t per_row) {
    int64_t r = w.rows > 1 ? divide(i, per_row) : 0;
    const int64_t col = (i - r * per_row) * N;
    place at = {col, col, w.cols - col};
#pragma unroll
    for (int d = 0; d < 3; d++) {
        if (r == 0) break;
        const int64_t next = d < 2 ? divide(r, w.size[d]) : 0, index = r - next * w.size[d];
        at.x += index * w.x_stride[d];
        at.y += index * w.y_stride[d];
        r = next;
    }
    return at;
}

/* ---- what is done to an element ---- */

struct Take {
    template <class T>
    __device__ __forceinline__ T operator()(T x, T) const {
        return x;
    }
};

struct Convert {
    template <class X, class Y>
    __device__ __forceinline__ Y operator()(X x, Y) const {
        return from_float<Y>(to_float(x));
    }
};

struct AddTo {
    template <class X, class Y>
    __device__ __forceinline__ Y operator()(X x, Y y) const {
        return from_float<Y>(to_float(y) + to_float(x));
    }
    __device__ __forceinline__ double operator()(double x, double y) const { return y + x; }
};

template <class U>
struct Constant {
    U bits;
    __device__ __forceinline__ U operator()(U, U) const { return bits; }
};

/* y = f(x, y). What f does not use is not read. */
template <class X, class Y, class F>
__global__ void __launch_bounds__(THREADS)
    update_rows(walk w, int64_t per_row, const X *x, Y *y, bool aligned, F f) {
    constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
    const int64_t first = (int64_t)blockIdx.x * (THREADS * VECTORS) + threadIdx.x;
    place at[VECTORS];
    vec<X, N> xs[VECTORS];
    vec<Y, N> ys[VECTORS];
#pragma unroll
    for (int u = 0; u < VECTORS; u++) {
        at[u] = {0, 0, 0};
        if (first + u * THREADS < w.rows * per_row)
            at[u] = place_of<N>(w, first + u * THREADS, per_row);
        xs[u] = load_part<N>(x + at[u].x, at[u].count, aligned, X());
        ys[u] = load_part<N>((const Y *)y + at[u].y, at[u].count, aligned, Y());
    }
#pragma unroll
    for (int u = 0; u < VECTORS; u++) {
#pragma unroll
        for (int j = 0; j < N; j++) ys[u][j] = f(xs[u][j], ys[u][j]);
        store_part<N>(y + at[u].y, ys[u], at[u].count, aligned);
    }
}

/* ---- any dtype, through double ---- */

__device__ __forceinline__ double load_any(const void *x, int dtype, int64_t i) {
    switch (dtype) {
    case LG_F32: return ((const float *)x)[i];
    case LG_F64: return ((const double *)x)[i];
    case LG_BF16: return to_float(((const bf16 *)x)[i]);
    case LG_F16: return to_float(((const f16 *)x)[i]);
    case LG_I32: return ((const int32_t *)x)[i];
    case LG_I64: return (double)((const int64_t *)x)[i];
    default: return ((const uint8_t *)x)[i];
    }
}

__host__ __device__ __forceinline__ int64_t to_integer(double value, int64_t low, int64_t high) {
    if (value != value) return 0;
    if (value <= (double)low) return low;
    return value >= (double)high ? high : (int64_t)value;
}

__host__ __device__ __forceinline__ void store_any(void *y, int dtype, int64_t i, double value) {
    switch (dtype) {
    case LG_F32: ((float *)y)[i] = (float)value; break;
    case LG_F64: ((double *)y)[i] = value; break;
    case LG_BF16: ((bf16 *)y)[i] = from_double<bf16>(value); break;
    case LG_F16: ((f16 *)y)[i] = from_double<f16>(value); break;
    case LG_I32: ((int32_t *)y)[i] = (int32_t)to_integer(value, INT32_MIN, INT32_MAX); break;
    case LG_I64: ((int64_t *)y)[i] = to_integer(value, INT64_MIN, INT64_MAX); break;
    default: ((uint8_t *)y)[i] = (uint8_t)to_integer(value, 0, UINT8_MAX); break;
    }
}

struct TakeAny {
    __device__ __forceinline__ double operator()(double x, double) const { return x; }
};

template <class F>
__global__ void __launch_bounds__(THREADS)
    update_any(walk w, const void *x, int x_dtype, void *y, int y_dtype, F f) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= w.rows * w.cols) return;
    const place at = place_of<1>(w, i, w.cols);
    store_any(y, y_dtype, at.y, f(load_any(x, x_dtype, at.x), load_any(y, y_dtype, at.y)));
}

/* ---- launchers ---- */

template <class X, class Y, class F>
static lg_status update(lg_context *ctx, const char *op, const lg_tensor *x, lg_tensor *y, F f) {
    constexpr int N = 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
    if (tensor_numel(y) == 0) return LG_OK;
    const walk w = walk_of(x, y);
    const int64_t per_row = (w.cols + N - 1) / N;
    const bool aligned = is_aligned(x->data, sizeof(X), w.size, w.x_stride, N) &&
                         is_aligned(y->data, sizeof(Y), w.size, w.y_stride, N);
    update_rows<<<blocks_for(w.rows * per_row, THREADS * VECTORS, INT32_MAX), THREADS, 0,
                  cuda_stream(ctx)>>>(w, per_row, (const X *)x->data, (Y *)y->data, aligned, f);
    return cuda_launched(ctx, op);
}

template <class F>
static lg_status update_through_double(lg_context *ctx, const char *op, const lg_tensor *x,
                                       lg_tensor *y, F f) {
    const int64_t n = tensor_numel(y);
    if (n == 0) return LG_OK;
    update_any<<<blocks_for(n, THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
        walk_of(x, y), x->data, x->dtype, y->data, y->dtype, f);
    return cuda_launched(ctx, op);
}

static bool is_short_float(int32_t dtype) {
    return dtype == LG_F32 || dtype == LG_BF16 || dtype == LG_F16;
}

extern "C" lg_status cuda_copy(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    if (x->dtype == y->dtype) {
        switch (lg_dtype_bytes(y->dtype)) {
        case 1: return update<uint8_t, uint8_t>(ctx, "copy", x, y, Take());
        case 2: return update<uint16_t, uint16_t>(ctx, "copy", x, y, Take());
        case 4: return update<uint32_t, uint32_t>(ctx, "copy", x, y, Take());
        default: return update<uint64_t, uint64_t>(ctx, "copy", x, y, Take());
        }
    }
    if (!is_short_float(x->dtype) || !is_short_float(y->dtype))
        return update_through_double(ctx, "copy", x, y, TakeAny());
    return dispatch_float(ctx, "copy", x->dtype, [&](auto from) {
        return dispatch_float(ctx, "copy", y->dtype, [&](auto to) {
            return update<decltype(from), decltype(to)>(ctx, "copy", x, y, Convert());
        });
    });
}

extern "C" lg_status cuda_fill(lg_context *ctx, double value, lg_tensor *y) {
    uint64_t element = 0;
    store_any(&element, y->dtype, 0, value);
    switch (lg_dtype_bytes(y->dtype)) {
    case 1: return update<uint8_t, uint8_t>(ctx, "fill", y, y, Constant<uint8_t>{(uint8_t)element});
    case 2:
        return update<uint16_t, uint16_t>(ctx, "fill", y, y, Constant<uint16_t>{(uint16_t)element});
    case 4:
        return update<uint32_t, uint32_t>(ctx, "fill", y, y, Constant<uint32_t>{(uint32_t)element});
    default: return update<uint64_t, uint64_t>(ctx, "fill", y, y, Constant<uint64_t>{element});
    }
}

/* In fp32 where that rounds as double would: sums into f32, and of two in bf16 or two in f16. */
extern "C" lg_status cuda_accumulate(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    if (!is_short_float(x->dtype) || (y->dtype != LG_F32 && y->dtype != x->dtype))
        return update_through_double(ctx, "accumulate", x, y, AddTo());
    return dispatch_float(ctx, "accumulate", x->dtype, [&](auto t) {
        using T = decltype(t);
        if (y->dtype == LG_F32) return update<T, float>(ctx, "accumulate", x, y, AddTo());
        return update<T, T>(ctx, "accumulate", x, y, AddTo());
    });
}
