/* Rows of given logits, of any dtype and row stride, for logprob and cross_entropy.
 *
 * Forward: a block owns a row and reads it once, LOGITS_STEP pieces of 16 bytes a thread at a time;
 * statistics and their merge are head_row.cuh's. Backward: a block owns a part of a row, reads it once
 * and writes as much. The order of sums depends on V and the dtype alone: rows that do not start at
 * a multiple of 16 bytes are read element by element through the same code.
 */
#ifndef LIGER_LOGITS_CUH
#define LIGER_LOGITS_CUH

#include "head_row.cuh"
#include "piece.cuh"

enum { LOGITS_THREADS = 256, LOGITS_STEP = 4 };

/* z = logits / temperature, by its reciprocal. */
struct logits_scaled {
    float factor;
    __device__ __forceinline__ float operator()(float x) const { return x * factor; }
    __device__ __forceinline__ float slope(float) const { return factor; }
};

/* The rows of a tensor. */
template <class T>
struct logits_rows {
    T *data;
    strided_rows rows;
    bool vector; /* all start at a multiple of 16 bytes */

    __device__ __forceinline__ T *row(int64_t n) const { return data + rows.offset(n); }
};

template <class T>
static logits_rows<T> logits_rows_of(const lg_tensor *t) {
    bool vector = (uintptr_t)t->data % 16 == 0;
    for (int i = 0; i + 1 < t->ndim; i++)
        vector = vector && (t->shape[i] <= 1 || t->stride[i] * (int64_t)sizeof(T) % 16 == 0);
    return {(T *)t->data, rows_of(t), vector};
}

/* Threads of a block: short rows have few pieces. */
static inline int logits_threads(int64_t V) {
    return V <= 40000 ? LOGITS_THREADS / 2 : LOGITS_THREADS;
}

/* ---- forward ---- */

/* Pieces at v, v + stride, ... of a row; all at once where the row goes on past them. */
template <class T>
__device__ __forceinline__ void logits_load_step(const T *x, int64_t v, int64_t stride, int64_t V,
                                                 bool vector, piece<T> (&p)[LOGITS_STEP]) {
    constexpr int W = piece<T>::N;
    if (vector && v + (LOGITS_STEP - 1) * stride + W <= V) {
#pragma unroll
        for (int u = 0; u < LOGITS_STEP; u++) p[u] = load_piece(x + v + u * stride, W, true);
    } else {
#pragma unroll
        for (int u = 0; u < LOGITS_STEP; u++)
            p[u] = load_piece(x + v + u * stride, V - v - u * stride, vector);
    }
}

/* Asks for the pieces of the first step. */
template <class T>
__device__ __forceinline__ void logits_prefetch(const T *x, int64_t V) {
    const int64_t stride = (int64_t)blockDim.x * piece<T>::N;
#pragma unroll
    for (int u = 0; u < LOGITS_STEP; u++) {
        const int64_t v = threadIdx.x * piece<T>::N + u * stride;
        if (v < V) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + v));
    }
}

/* Adds a step to the statistics; `each(v, z)` sees its logits too. */
template <bool Entropy, bool Argmax, bool Whole, class T, class Finish, class Each>
__device__ __forceinline__ void logits_reduce_step(head_stats &s, const T *x, int64_t v,
                                                   int64_t stride, int64_t V, bool vector,
                                                   Finish finish, Each each) {
    constexpr int W = piece<T>::N, ITEMS = LOGITS_STEP * W;
    piece<T> p[LOGITS_STEP];
    float z[ITEMS], max = -FLT_MAX;
    int left[LOGITS_STEP]; /* elements of each piece that the row has */
    logits_load_step(x, v, stride, V, vector, p);
#pragma unroll
    for (int u = 0; u < LOGITS_STEP; u++) {
        const int64_t rest = V - v - u * stride;
        left[u] = rest < W ? (int)rest : W;
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        /* What lies past the row's end stays -inf: a cap would give it a share. */
        const bool inside = Whole || i % W < left[i / W];
        z[i] = inside ? finish(p[i / W][i % W]) : -INFINITY;
        max = fmaxf(max, z[i]);
        if (inside) each(v + (i / W) * stride + i % W, z[i]);
    }
    if (max > s.max) {
        s.rise(max);
        if (Argmax)
#pragma unroll
            for (int i = ITEMS - 1; i >= 0; i--)
                if (z[i] == max) s.argmax = (int)(v + (i / W) * stride + i % W);
    }
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const float t = z[i] - s.max, e = head_exp(t);
        s.sum += e;
        if (Entropy) s.weighted = fmaf(e, fmaxf(t, -200.0f), s.weighted); /* keeps 0 * -inf out */
    }
}

/* The statistics of the block's row, for all its threads. */
template <bool Entropy, bool Argmax, class T, class Finish, class Each>
__device__ __forceinline__ head_stats logits_reduce(const T *x, int64_t V, bool vector,
                                                    Finish finish, head_room *room, Each each) {
    constexpr int W = piece<T>::N;
    const int64_t stride = (int64_t)blockDim.x * W;
    head_stats s = head_stats::none();
    int64_t v = threadIdx.x * W;
    for (; v + (LOGITS_STEP - 1) * stride + W <= V; v += LOGITS_STEP * stride)
        logits_reduce_step<Entropy, Argmax, true>(s, x, v, stride, V, vector, finish, each);
    if (v < V) logits_reduce_step<Entropy, Argmax, false>(s, x, v, stride, V, vector, finish, each);
    return head_merge(s, room);
}

/* ---- backward ---- */

/* Blocks that a row of V is divided among. */
template <class T>
static unsigned logits_parts(int64_t V) {
    return blocks_for(V, (int64_t)logits_threads(V) * LOGITS_STEP * piece<T>::N, INT32_MAX);
}

/* The block's row; the last comes first, which the forward may have left in the cache. */
__device__ __forceinline__ int64_t logits_row_of(unsigned parts) {
    return (gridDim.x - 1 - blockIdx.x) / parts;
}

/* Writes a part of a row: `f(v, z)` turns logits v on into their gradient. */
template <class T, class Finish, class F>
__device__ __forceinline__ void logits_map_part(const T *x, T *dx, int64_t V, int64_t part,
                                                bool vector, bool vector_out, Finish finish, F f) {
    constexpr int W = piece<T>::N;
    const int64_t stride = (int64_t)blockDim.x * W;
    const int64_t first = part * LOGITS_STEP * stride + threadIdx.x * W;
    piece<T> p[LOGITS_STEP];
    logits_load_step(x, first, stride, V, vector, p);
#pragma unroll
    for (int u = 0; u < LOGITS_STEP; u++) {
        const int64_t v = first + u * stride;
        float z[W];
#pragma unroll
        for (int e = 0; e < W; e++) z[e] = finish(p[u][e]);
        f(v, z);
        store_piece(dx + v, pack_piece<T>(z), V - v, vector_out);
    }
}

template <class T>
__device__ __forceinline__ void logits_clear_part(T *dx, int64_t V, int64_t part, bool vector) {
    constexpr int W = piece<T>::N;
    const int64_t stride = (int64_t)blockDim.x * W;
#pragma unroll
    for (int u = 0; u < LOGITS_STEP; u++) {
        const int64_t v = (part * LOGITS_STEP + u) * stride + threadIdx.x * W;
        store_piece(dx + v, piece<T>{}, V - v, vector);
    }
}

#endif
