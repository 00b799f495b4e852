/* Softmax over the last dimension: y = exp(x - max) / sum, dx = y (dy - sum of dy y).
 *
 * A block owns a row, or on chips with clusters up to 8 blocks a slice each, K pieces of 16 bytes a
 * thread, so that a row is read once; longer rows are read twice. Forward: each thread keeps a
 * running maximum and sum, which the blocks merge. Which sizes a row takes depends on V and the
 * dtype alone, so the bits do.
 */
#include "logits.cuh"
#include "op/softmax.h"

/* The maximum, and the sum of exp(x - max). */
struct softmax_stats {
    float max, sum;
    static __device__ __forceinline__ softmax_stats none() { return {-FLT_MAX, 0}; }
};

__device__ __forceinline__ softmax_stats head_merge_warp(softmax_stats s) {
    const float max = warp_reduce(s.max, Max());
    return {max, warp_reduce(s.sum * head_exp(s.max - max), Sum())};
}

struct softmax_sum {
    float sum;
    static __device__ __forceinline__ softmax_sum none() { return {0}; }
};

__device__ __forceinline__ softmax_sum head_merge_warp(softmax_sum s) {
    return {warp_reduce(s.sum, Sum())};
}

/* f(k, c, count) for this thread's pieces of a round that starts at c0. */
template <int THREADS, int K, class T, class F>
__device__ __forceinline__ void each_piece(int64_t c0, int64_t end, F f) {
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t c = c0 + (k * THREADS + threadIdx.x) * piece<T>::N;
        f(k, c, end - c);
    }
}

template <class T, int THREADS, int K>
static __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    softmax_fwd(const __grid_constant__ logits_rows<T> x, T *y, int64_t V, bool vector) {
    constexpr int W = piece<T>::N;
    constexpr int64_t HELD = (int64_t)THREADS * K * W;
    __shared__ head_room_of<softmax_stats> room;
    const int64_t n = blockIdx.x / head_num_slices();
    const head_slice slice = head_slice_of(V, 8);
    const T *row = x.row(n);
    T *to = y + n * V;
    piece<T> v[K];
    const auto load = [&](int64_t c0) {
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t c, int64_t count) {
            v[k] = load_piece(row + c, count, x.vector);
        });
    };
    softmax_stats s = softmax_stats::none();
    for (int64_t c0 = slice.begin; c0 < slice.end; c0 += HELD) {
        load(c0);
        const float before = s.max;
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t, int64_t count) {
            if (count >= W) {
#pragma unroll
                for (int e = 0; e < W; e++) s.max = fmaxf(s.max, v[k][e]);
            } else {
#pragma unroll
                for (int e = 0; e < W; e++)
                    if (e < count) s.max = fmaxf(s.max, v[k][e]);
            }
        });
        s.sum *= head_exp(before - s.max);
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t, int64_t count) {
            repack(v[k]);
            if (count >= W) {
#pragma unroll
                for (int e = 0; e < W; e++) s.sum += head_exp(v[k][e] - s.max);
            } else {
#pragma unroll
                for (int e = 0; e < W; e++)
                    if (e < count) s.sum += head_exp(v[k][e] - s.max);
            }
        });
    }
    s = head_merge(s, &room);
    const float most = s.max, scale = 1 / s.sum;
    for (int64_t c0 = slice.begin; c0 < slice.end; c0 += HELD) {
        if (slice.end - slice.begin > HELD) load(c0);
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t c, int64_t count) {
            float p[W];
            repack(v[k]);
#pragma unroll
            for (int e = 0; e < W; e++) p[e] = head_exp(v[k][e] - most) * scale;
            store_piece(to + c, pack_piece<T>(p), count, vector);
        });
    }
    head_leave();
}

template <class T, int THREADS, int K>
static __global__ void __launch_bounds__(THREADS)
    softmax_bwd(const T *dy, const T *y, const __grid_constant__ logits_rows<T> dx, int64_t V,
                bool vector) {
    constexpr int W = piece<T>::N;
    constexpr int64_t HELD = (int64_t)THREADS * K * W;
    __shared__ head_room_of<softmax_sum> room;
    const int64_t n = blockIdx.x / head_num_slices(), row = n * V;
    const head_slice slice = head_slice_of(V, 8);
    T *to = dx.row(n);
    piece<T> d[K], p[K];
    const auto load = [&](int64_t c0) {
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t c, int64_t count) {
            d[k] = load_piece(dy + row + c, count, vector);
            p[k] = load_piece(y + row + c, count, vector);
        });
    };
    softmax_sum s = {0};
    for (int64_t c0 = slice.begin; c0 < slice.end; c0 += HELD) {
        load(c0);
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t, int64_t) {
#pragma unroll
            for (int e = 0; e < W; e++) s.sum = fmaf(d[k][e], p[k][e], s.sum);
        });
    }
    s = head_merge(s, &room);
    for (int64_t c0 = slice.begin; c0 < slice.end; c0 += HELD) {
        if (slice.end - slice.begin > HELD) load(c0);
        each_piece<THREADS, K, T>(c0, slice.end, [&](int k, int64_t c, int64_t count) {
            float out[W];
            repack(d[k]);
            repack(p[k]);
#pragma unroll
            for (int e = 0; e < W; e++) out[e] = p[k][e] * (d[k][e] - s.sum);
            store_piece(to + c, pack_piece<T>(out), count, dx.vector);
        });
    }
    head_leave();
}

/* Calls f(threads, pieces of a thread, blocks): what holds a row of V in up to 128 bytes a thread. */
template <class T, class F>
static lg_status with_shape(int64_t V, F f) {
    const int64_t pieces = (V + piece<T>::N - 1) / piece<T>::N;
    if (pieces <= 256) return f(width_of<128>(), width_of<2>(), 1);
    if (pieces <= 1024) return f(width_of<256>(), width_of<4>(), 1);
    int blocks = 1;
    while (head_has_clusters() && blocks < 8 && pieces > 512 * 8 * blocks) blocks *= 2;
    return f(width_of<512>(), width_of<8>(), blocks);
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
        return with_shape<T>(V, [&](auto threads, auto pieces, int blocks) {
            return head_launch_rows(ctx, "softmax", {blocks, threads.value}, N, 0,
                                    softmax_fwd<T, threads.value, pieces.value>,
                                    logits_rows_of<T>(x), (T *)y->data, V, dense_vector<T>(y));
        });
    });
}

extern "C" lg_status cuda_softmax_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                                           lg_tensor *dx) {
    const int64_t N = tensor_rows(y), V = tensor_cols(y);
    if (!dx || N == 0 || V == 0) return LG_OK;
    return dispatch_float(ctx, "softmax_backward", y->dtype, [&](auto type) {
        using T = decltype(type);
        return with_shape<T>(V, [&](auto threads, auto pieces, int blocks) {
            return head_launch_rows(ctx, "softmax_backward", {blocks, threads.value}, N, 0,
                                    softmax_bwd<T, threads.value, pieces.value>,
                                    (const T *)dy->data, (const T *)y->data, logits_rows_of<T>(dx),
                                    V, dense_vector<T>(y) && dense_vector<T>(dy));
        });
    });
}
