/* Random tensors from cuRAND's Philox stream: element i depends on the seed, the stream and i
 * alone. A thread owns the four words of one Philox block, counter = (i / 4, stream), key = seed,
 * and the four elements made of them.
 */
#include <curand_philox4x32_x.h>

#include "element.cuh"

enum { THREADS = 256 };

__device__ __forceinline__ uint4 random_words(uint64_t seed, uint64_t stream, uint64_t block) {
    const uint4 counter = make_uint4((uint32_t)block, (uint32_t)(block >> 32), (uint32_t)stream,
                                     (uint32_t)(stream >> 32));
    return curand_Philox4x32_10(counter, make_uint2((uint32_t)seed, (uint32_t)(seed >> 32)));
}

/* A word as a double in (0, 1), exactly. */
__device__ __forceinline__ double uniform(uint32_t word) { return word * 0x1p-32 + 0x1p-33; }

template <class T>
__global__ void __launch_bounds__(THREADS)
    random_uniform_fill(T *y, int64_t n, uint64_t seed, uint64_t stream, bool aligned) {
    const int64_t block = (int64_t)blockIdx.x * THREADS + threadIdx.x, i = 4 * block;
    if (i >= n) return;
    const uint4 w = random_words(seed, stream, (uint64_t)block);
    const vec<T, 4> v = {from_double<T>(uniform(w.x)), from_double<T>(uniform(w.y)),
                         from_double<T>(uniform(w.z)), from_double<T>(uniform(w.w))};
    store_part<4>(y + i, v, n - i, aligned);
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
            <<<blocks_for(n, 4 * THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
                (T *)y->data, n, (uint64_t)seed, (uint64_t)stream, can_vectorise<T>(y->data, 0));
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
