/* Softmax over the last dimension: y = exp(x - max) / sum, dx = y (dy - sum of dy y).
 *
 * A block owns a row, K pieces of 16 bytes a thread, so that a row is read once; longer rows are read
 * twice. Forward: each thread keeps a running maximum and sum, the block merges them. Which sizes a
 * row takes depends on V and the dtype alone, so the bits do.
 */
#include "logits.cuh"
#include "op/softmax.h"

/* f(c, count) for this thread's pieces of a round that starts at c0. */
template <int THREADS, int K, class T, class F>
__device__ __forceinline__ void each_piece(int64_t c0, int64_t V, F f) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t c = c0 + (k * THREADS + threadIdx.x) * piece<T>::N;
        f(k, c, V - c);
    }
}

template <class T, int THREADS, int K>
static __global__ void __launch_bounds__(THREADS)
    softmax_fwd(const __grid_constant__ logits_rows<T> x, T *y, int64_t V, bool vector) {
    constexpr int W = piece<T>::N;
    constexpr int64_t HELD = (int64_t)THREADS * K * W;
    const T *row = x.row(blockIdx.x);
    T *to = y + blockIdx.x * V;
    piece<T> v[K];
    const auto load = [&](int64_t c0) {
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t c, int64_t count) {
            v[k] = load_piece(row + c, count, x.vector);
        });
    };
    float max = -FLT_MAX, sum = 0;
    for (int64_t c0 = 0; c0 < V; c0 += HELD) {
        load(c0);
        const float before = max;
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t, int64_t count) {
#pragma unroll
            for (int e = 0; e < W; e++)
                if (e < count) max = fmaxf(max, v[k][e]);
        });
        sum *= head_exp(before - max);
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t, int64_t count) {
            repack(v[k]);
#pragma unroll
            for (int e = 0; e < W; e++)
                if (e < count) sum += head_exp(v[k][e] - max);
        });
    }
    const float most = block_reduce(max, Max(), -FLT_MAX);
    const float scale = 1 / block_reduce(sum * head_exp(max - most), Sum(), 0.0f);
    for (int64_t c0 = 0; c0 < V; c0 += HELD) {
        if (V > HELD) load(c0);
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t c, int64_t count) {
            float p[W];
            repack(v[k]);
#pragma unroll
            for (int e = 0; e < W; e++) p[e] = head_exp(v[k][e] - most) * scale;
            store_piece(to + c, pack_piece<T>(p), count, vector);
        });
    }
}

template <class T, int THREADS, int K>
static __global__ void __launch_bounds__(THREADS)
    softmax_bwd(const T *dy, const T *y, const __grid_constant__ logits_rows<T> dx, int64_t V,
                bool vector) {
    constexpr int W = piece<T>::N;
    constexpr int64_t HELD = (int64_t)THREADS * K * W;
    const int64_t row = blockIdx.x * V;
    T *to = dx.row(blockIdx.x);
    piece<T> d[K], p[K];
    const auto load = [&](int64_t c0) {
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t c, int64_t count) {
            d[k] = load_piece(dy + row + c, count, vector);
            p[k] = load_piece(y + row + c, count, vector);
        });
    };
    float sum = 0;
    for (int64_t c0 = 0; c0 < V; c0 += HELD) {
        load(c0);
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t, int64_t) {
#pragma unroll
            for (int e = 0; e < W; e++) sum = fmaf(d[k][e], p[k][e], sum);
        });
    }
    sum = block_reduce(sum, Sum(), 0.0f);
    for (int64_t c0 = 0; c0 < V; c0 += HELD) {
        if (V > HELD) load(c0);
        each_piece<THREADS, K, T>(c0, V, [&](int k, int64_t c, int64_t count) {
            float out[W];
            repack(d[k]);
            repack(p[k]);
#pragma unroll
            for (int e = 0; e < W; e++) out[e] = p[k][e] * (d[k][e] - sum);
            store_piece(to + c, pack_piece<T>(out), count, dx.vector);
        });
    }
}

/* Calls f(threads, pieces of a thread): what holds a row of V in up to 128 bytes a thread. */
template <class T, class F>
static lg_status with_shape(int64_t V, F f) {
    const int64_t pieces = (V + piece<T>::N - 1) / piece<T>::N;
    if (pieces <= 256) return f(width_of<128>(), width_of<2>());
    if (pieces <= 1024) return f(width_of<256>(), width_of<4>());
    return f(width_of<512>(), width_of<8>());
}

/* y and dy are dense. */
template <class T>
static bool dense_vector(const lg_tensor *t) {
    return can_vectorise<T>(t->data, tensor_cols(t));
}

extern "C" lg_status cuda_softmax(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    const int64_t N = tensor_rows(x), V = tensor_cols(x);
    if (N == 0 || V == 0) return LG_OK;
    return dispatch_float(ctx, "softmax", x->dtype, [&](auto type) {
        using T = decltype(type);
        return with_shape<T>(V, [&](auto threads, auto pieces) {
            softmax_fwd<T, threads.value, pieces.value>
                <<<(unsigned)N, threads.value, 0, cuda_stream(ctx)>>>(
                    logits_rows_of<T>(x), (T *)y->data, V, dense_vector<T>(y));
            return cuda_launched(ctx, "softmax");
        });
    });
}

extern "C" lg_status cuda_softmax_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                                           lg_tensor *dx) {
    const int64_t N = tensor_rows(y), V = tensor_cols(y);
    if (!dx || N == 0 || V == 0) return LG_OK;
    return dispatch_float(ctx, "softmax_backward", y->dtype, [&](auto type) {
        using T = decltype(type);
        return with_shape<T>(V, [&](auto threads, auto pieces) {
            softmax_bwd<T, threads.value, pieces.value>
                <<<(unsigned)N, threads.value, 0, cuda_stream(ctx)>>>(
                    (const T *)dy->data, (const T *)y->data, logits_rows_of<T>(dx), V,
                    dense_vector<T>(y) && dense_vector<T>(dy));
            return cuda_launched(ctx, "softmax_backward");
        });
    });
}
