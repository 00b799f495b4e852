/* Sums and indexed reads. All sums run in double, in an order that follows from the sizes alone.
 *
 *   sum, sum_squares   block b owns a run of elements and writes partial[b]; one block adds those
 *   segment_sum        a block owns a segment; in the backward a thread owns an element
 *   gather             a thread owns an element; the backward is described where it stands
 */
#include "element.cuh"
#include "follow.cuh"
#include "piece.cuh"
#include "op/gather.h"
#include "op/segment_sum.h"
#include "op/sum.h"
#include "op/sum_squares.h"

enum { THREADS = 256, MAX_PARTIALS = 4096, TOTAL_THREADS = 1024 };

/* ---- sum, sum_squares ---- */

struct Itself {
    __device__ __forceinline__ double operator()(float x) const { return x; }
};
struct Square {
    __device__ __forceinline__ double operator()(float x) const { return (double)x * x; }
};

/* Vectors that a thread has in flight. */
enum { UNROLL = 4 };

template <class T, class F>
__global__ void __launch_bounds__(THREADS)
    sum_partial(const T *x, int64_t n, int64_t per_block, bool aligned, double *partial, F f) {
    constexpr int N = 16 / sizeof(T);
    constexpr int64_t Step = THREADS * N;
    follow();
    const int64_t begin = blockIdx.x * per_block,
                  end = begin + per_block < n ? begin + per_block : n;
    double sum[UNROLL] = {0};
    for (int64_t i = begin + threadIdx.x * N; i < end; i += UNROLL * Step) {
        piece<T> v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            v[u] = load_piece(x + i + u * Step, end - i - u * Step, aligned);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int j = 0; j < N; j++) sum[u] += f(v[u][j]);
    }
    const double total = block_all((sum[0] + sum[1]) + (sum[2] + sum[3]), Add(), 0.0);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__device__ __forceinline__ void store_sum(double *y, double x) { *y = x; }
template <class T>
__device__ __forceinline__ void store_sum(T *y, double x) {
    *y = from_double<T>(x);
}

/* The scalar at `x`, for every element. */
template <class T>
struct ScalarAt {
    const T *x;
    __device__ __forceinline__ float operator()() const { return to_float(*x); }
};

template <class Y>
__global__ void __launch_bounds__(TOTAL_THREADS) sum_total(const double *partial, int n, Y *y) {
    double sum = 0;
    follow();
#pragma unroll 4
    for (int i = threadIdx.x; i < n; i += TOTAL_THREADS) sum += partial[i];
    sum = block_all(sum, Add(), 0.0);
    if (threadIdx.x == 0) store_sum(y, sum);
}

template <class T, class Y, class F>
static lg_status sum_all(lg_context *ctx, const char *op, const lg_tensor *x, Y *y, F f) {
    constexpr int64_t Tile = THREADS * UNROLL * (16 / sizeof(T));
    const int64_t n = tensor_numel(x), tiles = (n + Tile - 1) / Tile;
    const int64_t per_block = (tiles + MAX_PARTIALS - 1) / MAX_PARTIALS * Tile;
    const unsigned blocks = n > 0 ? blocks_for(n, per_block) : 0;
    void *partial;
    LG_TRY(lg_scratch(ctx, MAX_PARTIALS * (int64_t)sizeof(double), &partial));
    if (blocks > 0) {
        sum_partial<<<blocks, THREADS, 0, cuda_stream(ctx)>>>(
            (const T *)x->data, n, per_block, can_vectorise<T>(x->data, 0), (double *)partial, f);
        LG_TRY(cuda_launched(ctx, op));
    }
    return launch_follower(ctx, op, 1, TOTAL_THREADS, sum_total<Y>, (const double *)partial,
                           (int)blocks, y);
}

/* ---- segment_sum ---- */

/* A bound of a segment, held within [low, n]: what is not is noted and never read through. */
__device__ __forceinline__ int64_t segment_bound(const int32_t *cu, int64_t s, int64_t low,
                                                 int64_t n, device_error *error) {
    const int64_t at = cu[s];
    if (at >= low && at <= n) return at;
    note_error(error, ERROR_SEQUENCE, s, at, n + 1, low);
    return at < low ? low : n;
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    segment_sum_fwd(const T *x, const int32_t *cu, T *y, int64_t n, device_error *error) {
    const int64_t s = blockIdx.x;
    const int64_t begin = segment_bound(cu, s, 0, n, error),
                  end = segment_bound(cu, s + 1, begin, n, error);
    double sum[UNROLL] = {0};
    for (int64_t i = begin + threadIdx.x; i < end; i += UNROLL * THREADS)
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (i + u * THREADS < end) sum[u] += to_float(x[i + u * THREADS]);
    const double total = block_all((sum[0] + sum[1]) + (sum[2] + sum[3]), Add(), 0.0);
    if (threadIdx.x == 0) y[s] = from_double<T>(total);
}

/* Element i lies in segment s where cu[s] <= i < cu[s+1], if there is one: s is found by halving.
 * The first block looks the bounds over. */
template <class T>
__global__ void __launch_bounds__(THREADS)
    segment_sum_bwd(const T *dy, const int32_t *cu, T *dx, int64_t num, int64_t n,
                    device_error *error) {
    if (blockIdx.x == 0)
        for (int64_t s = threadIdx.x; s <= num; s += THREADS)
            segment_bound(cu, s, s > 0 ? cu[s - 1] : 0, n, error);
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    int64_t low = 0, high = num + 1; /* the first bound beyond i is in [low, high] */
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (cu[middle] > i)
            high = middle;
        else
            low = middle + 1;
    }
    dx[i] = low > 0 && low <= num ? dy[low - 1] : from_float<T>(0.0f);
}

/* ---- gather ---- */

template <class T>
__global__ void __launch_bounds__(THREADS)
    gather_fwd(const T *x, const int32_t *index, T *y, int64_t size, int64_t n,
               device_error *error) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    const int32_t at = index[i];
    const bool inside = at >= 0 && at < size;
    if (!inside) note_error(error, ERROR_INDEX, i, at, size);
    y[i] = inside ? x[at] : from_float<T>(0.0f);
}

/* The backward's warp (s-range, chunk) goes through one chunk of the n in order, 32 at a time, and
 * adds what falls into its RANGE elements of dx to sums of its own: lanes with the same index form
 * a group, whose first lane adds for all, in order. partial[chunk][s]; a second kernel adds the
 * chunks in order. */
enum { RANGE = 1024, MAX_CHUNKS = 64, MAX_PARTIAL_SUMS = 1 << 20, AHEAD = 4 };

template <class T>
__global__ void __launch_bounds__(32)
    gather_bwd_partial(const T *dy, const int32_t *index, double *partial, int64_t size, int64_t n,
                       int64_t per_chunk, device_error *error) {
    __shared__ double sum[RANGE];
    const int lane = threadIdx.x;
    const int64_t first = (int64_t)blockIdx.x * RANGE, begin = blockIdx.y * per_chunk;
    const int64_t end = begin + per_chunk < n ? begin + per_chunk : n;
    for (int s = lane; s < RANGE; s += 32) sum[s] = 0;
    __syncwarp();
    for (int64_t i0 = begin; i0 < end; i0 += 32 * AHEAD) {
        int32_t at[AHEAD];
        T value[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            const int64_t i = i0 + 32 * u + lane;
            at[u] = i < end ? index[i] : 0;
            value[u] = i < end ? dy[i] : from_float<T>(0.0f);
            if (at[u] < 0 || at[u] >= size) note_error(error, ERROR_INDEX, i, at[u], size);
            /* From here on an offset in the range; negative for what is not in it. */
            at[u] = i < end && at[u] < size && at[u] >= first && at[u] < first + RANGE
                        ? (int32_t)(at[u] - first)
                        : -1;
        }
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (!__any_sync(0xffffffffu, at[u] >= 0)) continue;
            unsigned left = __match_any_sync(0xffffffffu, at[u]);
            const bool adds = at[u] >= 0 && __ffs(left) - 1 == lane;
            if (!adds) left = 0;
            double total = adds ? sum[at[u]] : 0;
            while (__any_sync(0xffffffffu, left != 0)) {
                const float v =
                    __shfl_sync(0xffffffffu, to_float(value[u]), left ? __ffs(left) - 1 : lane);
                if (left) total += v;
                left &= left - 1;
            }
            if (adds) sum[at[u]] = total;
            __syncwarp();
        }
    }
    for (int s = lane; s < RANGE && first + s < size; s += 32)
        partial[blockIdx.y * size + first + s] = sum[s];
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    gather_bwd_total(const double *partial, T *dx, int64_t size, int chunks) {
    const int64_t s = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (s >= size) return;
    double sum = 0;
    for (int c = 0; c < chunks; c++) sum += partial[c * size + s];
    dx[s] = from_double<T>(sum);
}

/* ---- launchers ---- */

extern "C" lg_status cuda_sum(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return dispatch_float(ctx, "sum", x->dtype, [&](auto t) {
        using T = decltype(t);
        return sum_all<T>(ctx, "sum", x, (T *)y->data, Itself());
    });
}

extern "C" lg_status cuda_sum_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *dx) {
    if (!dx) return LG_OK;
    return dispatch_float(ctx, "sum_backward", dy->dtype, [&](auto t) {
        return map_launch<0>(ctx, "sum_backward", dx, {},
                             ScalarAt<decltype(t)>{(const decltype(t) *)dy->data});
    });
}

extern "C" lg_status cuda_sum_squares(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return dispatch_float(ctx, "sum_squares", x->dtype, [&](auto t) {
        return sum_all<decltype(t)>(ctx, "sum_squares", x, (double *)y->data, Square());
    });
}

extern "C" lg_status cuda_segment_sum(lg_context *ctx, const lg_tensor *x,
                                      const lg_tensor *cu_seqlens, lg_tensor *y) {
    return dispatch_float(ctx, "segment_sum", x->dtype, [&](auto t) {
        using T = decltype(t);
        if (y->shape[0] == 0) return LG_OK;
        segment_sum_fwd<<<(unsigned)y->shape[0], THREADS, 0, cuda_stream(ctx)>>>(
            (const T *)x->data, (const int32_t *)cu_seqlens->data, (T *)y->data, x->shape[0],
            cuda_error_slot(ctx, "segment_sum"));
        return cuda_launched(ctx, "segment_sum");
    });
}

extern "C" lg_status cuda_segment_sum_backward(lg_context *ctx, const lg_tensor *dy,
                                               const lg_tensor *cu_seqlens, lg_tensor *dx) {
    if (!dx) return LG_OK;
    return dispatch_float(ctx, "segment_sum_backward", dx->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = dx->shape[0];
        if (n == 0) return LG_OK;
        segment_sum_bwd<<<blocks_for(n, THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
            (const T *)dy->data, (const int32_t *)cu_seqlens->data, (T *)dx->data, dy->shape[0], n,
            cuda_error_slot(ctx, "segment_sum_backward"));
        return cuda_launched(ctx, "segment_sum_backward");
    });
}

extern "C" lg_status cuda_gather(lg_context *ctx, const lg_tensor *x, const lg_tensor *index,
                                 lg_tensor *y) {
    return dispatch_float(ctx, "gather", x->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = index->shape[0];
        if (n == 0) return LG_OK;
        gather_fwd<<<blocks_for(n, THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
            (const T *)x->data, (const int32_t *)index->data, (T *)y->data, x->shape[0], n,
            cuda_error_slot(ctx, "gather"));
        return cuda_launched(ctx, "gather");
    });
}

/* Few sums: more chunks, for a short chain; many sums: fewer, for small scratch. */
extern "C" lg_status cuda_gather_backward(lg_context *ctx, const lg_tensor *dy,
                                          const lg_tensor *index, lg_tensor *dx) {
    if (!dx) return LG_OK;
    return dispatch_float(ctx, "gather_backward", dx->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t size = dx->shape[0], n = index->shape[0];
        if (size == 0 && n == 0) return LG_OK;
        const int64_t fit = MAX_PARTIAL_SUMS / (size > 0 ? size : 1), most = fit < 1 ? 1
                                                                             : fit < MAX_CHUNKS
                                                                                 ? fit
                                                                                 : MAX_CHUNKS;
        const int64_t per_chunk =
            ((n + most - 1) / most + 32 * AHEAD - 1) / (32 * AHEAD) * (32 * AHEAD);
        const unsigned chunks = n > 0 ? blocks_for(n, per_chunk) : 1;
        void *partial;
        LG_TRY(lg_scratch(ctx, chunks * size * (int64_t)sizeof(double), &partial));
        gather_bwd_partial<<<dim3(blocks_for(size, RANGE, INT32_MAX), chunks), 32, 0,
                             cuda_stream(ctx)>>>((const T *)dy->data, (const int32_t *)index->data,
                                                 (double *)partial, size, n, per_chunk,
                                                 cuda_error_slot(ctx, "gather_backward"));
        LG_TRY(cuda_launched(ctx, "gather_backward"));
        if (size == 0) return LG_OK;
        gather_bwd_total<<<blocks_for(size, THREADS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
            (const double *)partial, (T *)dx->data, size, (int)chunks);
        return cuda_launched(ctx, "gather_backward");
    });
}
