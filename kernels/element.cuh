/* What the small operators share: conversions from double, vectors with a predicated tail,
 * reductions of any type, and the element-wise loops map1 to map3: y[i] = f(a[i], b[i], c[i]),
 * computed in fp32 and rounded once to y's dtype.
 *
 * In a loop a thread owns MAP_VECTORS vectors of 16 bytes, one block apart, all loaded before the
 * first is used: y may be one of the inputs. Tensors that do not start at a multiple of 16 bytes go
 * element by element through the same code.
 */
#ifndef LIGER_ELEMENT_CUH
#define LIGER_ELEMENT_CUH

#include "common.cuh"

/* ---- elements ---- */

/* Rounded once, to nearest even, on either side. */
template <class T>
__host__ __device__ __forceinline__ T from_double(double x);
template <>
__host__ __device__ __forceinline__ float from_double<float>(double x) {
    return (float)x;
}
template <>
__host__ __device__ __forceinline__ bf16 from_double<bf16>(double x) {
    return __double2bfloat16(x);
}
template <>
__host__ __device__ __forceinline__ f16 from_double<f16>(double x) {
    return __double2half(x);
}

/* `count` of the N elements at x: in one access if `aligned` and all are there, else one by one,
 * then `fill`. */
template <int N, class T>
__device__ __forceinline__ vec<T, N> load_part(const T *x, int64_t count, bool aligned, T fill) {
    vec<T, N> v;
    if (aligned && count >= N) return *(const vec<T, N> *)x;
#pragma unroll
    for (int j = 0; j < N; j++) v[j] = j < count ? x[j] : fill;
    return v;
}

template <int N, class T>
__device__ __forceinline__ void store_part(T *y, const vec<T, N> &v, int64_t count, bool aligned) {
    if (aligned && count >= N) {
        *(vec<T, N> *)y = v;
        return;
    }
#pragma unroll
    for (int j = 0; j < N; j++)
        if (j < count) y[j] = v[j];
}

/* ---- reductions in any type, as warp_reduce and block_reduce ---- */

struct Add {
    template <class V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a + b;
    }
};
struct Larger {
    template <class V>
    __device__ __forceinline__ V operator()(V a, V b) const {
        return a > b ? a : b;
    }
};

template <class V, class Op>
__device__ __forceinline__ V warp_all(V x, Op op) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* For blocks of whole warps. */
template <class V, class Op>
__device__ __forceinline__ V block_all(V x, Op op, V identity) {
    __shared__ V partial[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_all(x, op);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_all(lane < warps ? partial[lane] : identity, op);
}

/* ---- element-wise loops ---- */

enum { MAP_THREADS = 256, MAP_VECTORS = 2 };

struct map_inputs {
    const void *x[3];
};

template <class T, int K, class F>
__global__ void __launch_bounds__(MAP_THREADS)
    map_elements(map_inputs in, T *y, int64_t n, bool aligned, F f) {
    constexpr int N = 16 / sizeof(T);
    constexpr int64_t Step = MAP_THREADS * N;
    const int64_t first = blockIdx.x * (MAP_VECTORS * Step) + threadIdx.x * N;
    vec<T, N> x[MAP_VECTORS][K > 0 ? K : 1];
#pragma unroll
    for (int u = 0; u < MAP_VECTORS; u++)
#pragma unroll
        for (int k = 0; k < K; k++)
            x[u][k] = load_part<N>((const T *)in.x[k] + first + u * Step, n - first - u * Step,
                                   aligned, T());
#pragma unroll
    for (int u = 0; u < MAP_VECTORS; u++) {
        vec<T, N> out;
#pragma unroll
        for (int j = 0; j < N; j++) {
            if constexpr (K == 0) out[j] = from_float<T>(f());
            if constexpr (K == 1) out[j] = from_float<T>(f(to_float(x[u][0][j])));
            if constexpr (K == 2)
                out[j] = from_float<T>(f(to_float(x[u][0][j]), to_float(x[u][1][j])));
            if constexpr (K == 3)
                out[j] = from_float<T>(
                    f(to_float(x[u][0][j]), to_float(x[u][1][j]), to_float(x[u][2][j])));
        }
        store_part<N>(y + first + u * Step, out, n - first - u * Step, aligned);
    }
}

template <int K, class F>
lg_status map_launch(lg_context *ctx, const char *op, lg_tensor *y, map_inputs in, F f) {
    return dispatch_float(ctx, op, y->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = tensor_numel(y);
        if (n == 0) return LG_OK;
        bool aligned = can_vectorise<T>(y->data, 0);
        for (int k = 0; k < K; k++) aligned = aligned && can_vectorise<T>(in.x[k], 0);
        const unsigned blocks =
            blocks_for(n, MAP_THREADS * MAP_VECTORS * (16 / sizeof(T)), INT32_MAX);
        map_elements<T, K>
            <<<blocks, MAP_THREADS, 0, cuda_stream(ctx)>>>(in, (T *)y->data, n, aligned, f);
        return cuda_launched(ctx, op);
    });
}

template <class F>
lg_status map1(lg_context *ctx, const char *op, lg_tensor *y, const lg_tensor *a, F f) {
    return map_launch<1>(ctx, op, y, {{a->data}}, f);
}

template <class F>
lg_status map2(lg_context *ctx, const char *op, lg_tensor *y, const lg_tensor *a,
               const lg_tensor *b, F f) {
    return map_launch<2>(ctx, op, y, {{a->data, b->data}}, f);
}

template <class F>
lg_status map3(lg_context *ctx, const char *op, lg_tensor *y, const lg_tensor *a,
               const lg_tensor *b, const lg_tensor *c, F f) {
    return map_launch<3>(ctx, op, y, {{a->data, b->data, c->data}}, f);
}

#endif
