/* Random tensors from cuRAND's Philox stream: element i has word i, which depends on the seed, the
 * stream and i alone.
 * Uniform: a thread owns two vectors of 16 bytes. Normal: a thread owns the four elements of one
 * Philox block.
 */
#include "element.cuh"
#include "philox.cuh"
#include "op/random_normal.h"
#include "op/random_uniform.h"

enum { THREADS = 256, UNIFORM_VECTORS = 2 };

/* A word as a double in (0, 1), exactly. */
__device__ __forceinline__ double uniform(uint32_t word) { return word * 0x1p-32 + 0x1p-33; }

/* uniform(word) rounded once. Double precision would take longer than memory does: word + 1/2 is
 * cut to 24 bits instead, and where a bit was lost, from 2^23 on, the last one says so (rounding to
 * odd), which makes the rounding to 16 bits that follows the right one. */
template <class T>
__device__ __forceinline__ T uniform_as(uint32_t word) {
    const float cut = __fmaf_rz(__uint2float_rz(word), 0x1p-32f, 0x1p-33f);
    return from_float<T>(__uint_as_float(__float_as_uint(cut) | (word >= 1u << 23)));
}
/* 23 bits and what is below them: one rounding of their sum. */
template <>
__device__ __forceinline__ float uniform_as<float>(uint32_t word) {
    const float low = fmaf((float)(word & 511), 0x1p-32f, 0x1p-33f);
    return fmaf((float)(word >> 9), 0x1p-23f, low);
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    random_uniform_fill(T *y, int64_t n, uint64_t seed, uint64_t stream, bool aligned) {
    constexpr int N = 16 / sizeof(T);
    const int64_t first = (int64_t)blockIdx.x * (UNIFORM_VECTORS * THREADS) + threadIdx.x;
#pragma unroll
    for (int u = 0; u < UNIFORM_VECTORS; u++) {
        const int64_t i = (first + u * THREADS) * N;
        if (i >= n) return;
        vec<T, N> v;
#pragma unroll
        for (int j = 0; j < N; j += 4) {
            const uint4 w = random_words(seed, stream, (uint64_t)(i + j) / 4);
            v[j] = uniform_as<T>(w.x);
            v[j + 1] = uniform_as<T>(w.y);
            v[j + 2] = uniform_as<T>(w.z);
            v[j + 3] = uniform_as<T>(w.w);
        }
        store_part<N>(y + i, v, n - i, aligned);
    }
}

/* The cosine comes first (Box and Muller 1958, equation 1); the last element of an odd number has
 * no partner. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    random_normal_fill(T *y, int64_t n, uint64_t seed, uint64_t stream, double mean, double std,
                       bool aligned) {
    const int64_t block = (int64_t)blockIdx.x * THREADS + threadIdx.x, i = 4 * block;
    if (i >= n) return;
    const uint4 w = random_words(seed, stream, (uint64_t)block);
    const uint32_t word[4] = {w.x, w.y, w.z, w.w};
    vec<T, 4> v;
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const double radius = std * sqrt(-2 * log(uniform(word[j])));
        double sine, cosine;
        sincos(2 * M_PI * uniform(word[j + 1]), &sine, &cosine);
        v[j] = from_double<T>(mean + radius * cosine);
        v[j + 1] = from_double<T>(mean + radius * sine);
    }
    store_part<4>(y + i, v, n - i, aligned);
}

extern "C" lg_status cuda_random_uniform(lg_context *ctx, int64_t seed, int64_t stream,
                                         lg_tensor *y) {
    return dispatch_float(ctx, "random_uniform", y->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = tensor_numel(y);
        if (n == 0) return LG_OK;
        random_uniform_fill<T>
            <<<blocks_for(n, UNIFORM_VECTORS * THREADS * (16 / sizeof(T)), INT32_MAX), THREADS, 0,
               cuda_stream(ctx)>>>((T *)y->data, n, (uint64_t)seed, (uint64_t)stream,
                                   can_vectorise<T>(y->data, 0));
        return cuda_launched(ctx, "random_uniform");
    });
}

extern "C" lg_status cuda_random_normal(lg_context *ctx, int64_t seed, int64_t stream, double mean,
                                        double std, lg_tensor *y) {
    return dispatch_float(ctx, "random_normal", y->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = tensor_numel(y);
        if (n == 0) return LG_OK;
        random_normal_fill<T>
            <<<blocks_for(n, 4 * THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
                (T *)y->data, n, (uint64_t)seed, (uint64_t)stream, mean, std,
                can_vectorise<T>(y->data, 0));
        return cuda_launched(ctx, "random_normal");
    });
}
