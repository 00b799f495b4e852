/* Token embedding: rows of a table by id, and the sum of their gradients.
 *
 * Forward: a thread copies ITEMS vectors of y; w's rows are read and y written once.
 *
 * Backward: dw[v] += sum of dy[n] over ids[n] = v. The rows are sorted by id first (count, scan,
 * place, rank: integers only), n ascending within an id. embedding_bwd_tile's block then owns
 * TILE rows of that order and some columns, and adds the ids that lie wholly in its tile to dw.
 * What crosses tiles goes to partial[tile, 2, C] (first: of an id that began before; second: of
 * one that goes on) and embedding_bwd_carry adds it up in order. dy is read once; rows of dw
 * that no id names are not touched. The grouping of the sums depends on ids alone.
 */
#include "follow.cuh"
#include "op/embedding.h"

enum {
    THREADS = 256,
    ITEMS = 2,
    TILE = 32, /* rows of the order that one block sums */
    AHEAD = 4, /* of them in flight; 8 take the registers of twice as many threads */
    TILE_THREADS = 128,
    SCAN_THREADS = 1024,
    SCAN_ITEMS = 4, /* counts a thread */
};

template <class T, int W>
static __global__ void __launch_bounds__(THREADS)
    embedding_fwd(const T *w, const int32_t *ids, T *y, int64_t V, int64_t total, unsigned cols,
                  device_error *error) {
    const int64_t start = (int64_t)blockIdx.x * (THREADS * ITEMS);
    vec<T, W> x[ITEMS];
    bool fine[ITEMS];
#pragma unroll
    for (int k = 0; k < ITEMS; k++) {
        const unsigned i = k * THREADS + threadIdx.x;
        int64_t n;
        unsigned c;
        fine[k] = start + i < total;
        if (!fine[k]) continue;
        split_index(start, i, cols, &n, &c);
        const int32_t id = ids[n];
        fine[k] = id >= 0 && id < V;
        if (fine[k])
            x[k] = *(const vec<T, W> *)(w + ((int64_t)id * cols + c) * W);
        else if (c == 0)
            note_error(error, ERROR_IDS, n, id, V);
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        if (fine[k]) *(vec<T, W> *)(y + (start + k * THREADS + threadIdx.x) * W) = x[k];
}

/* ---- sorting ---- */

/* arrival[n]: how many rows of the same id were counted before; in any order. -1 for a bad id, and for
 * the padding's. */
static __global__ void embedding_bwd_count(const int32_t *ids, int64_t N, int64_t V,
                                           int64_t padding, int32_t *count, int32_t *arrival,
                                           device_error *error) {
    follow();
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (n >= N) return;
    const int32_t id = ids[n];
    if (id < 0 || id >= V) {
        note_error(error, ERROR_IDS, n, id, V);
        arrival[n] = -1;
        return;
    }
    arrival[n] = id == padding ? -1 : atomicAdd(&count[id], 1);
}

__device__ __forceinline__ int warp_sum_int(int x) { return __reduce_add_sync(0xffffffffu, x); }

/* Sum over a block of SCAN_THREADS of x, and of x over the threads before this one. */
__device__ __forceinline__ int block_scan(int x, int *before) {
    __shared__ int warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int inclusive = x;
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, inclusive, step);
        if (lane >= step) inclusive += other;
    }
    if (lane == 31) warps[warp] = inclusive;
    __syncthreads();
    const int others = warps[lane];
    *before = inclusive - x + warp_sum_int(lane < warp ? others : 0);
    const int total = warp_sum_int(others);
    __syncthreads();
    return total;
}

/* total[b] = the number of rows with an id of block b's. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    embedding_bwd_scan_blocks(const int32_t *count, int64_t V, int32_t *total) {
    follow();
    const int64_t v0 = ((int64_t)blockIdx.x * SCAN_THREADS + threadIdx.x) * SCAN_ITEMS;
    int sum = 0, before;
    for (int i = 0; i < SCAN_ITEMS; i++) sum += v0 + i < V ? count[v0 + i] : 0;
    sum = block_scan(sum, &before);
    if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

/* first[v] = the number of rows with an id below v, v in [0, V]. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    embedding_bwd_scan(const int32_t *count, const int32_t *total, int64_t V, int32_t *first) {
    follow();
    const int64_t v0 = ((int64_t)blockIdx.x * SCAN_THREADS + threadIdx.x) * SCAN_ITEMS;
    int c[SCAN_ITEMS], sum = 0, base = 0, before, unused;
    for (int b = threadIdx.x; b < blockIdx.x; b += SCAN_THREADS) base += total[b];
    base = block_scan(base, &unused);
    for (int i = 0; i < SCAN_ITEMS; i++) sum += c[i] = v0 + i < V ? count[v0 + i] : 0;
    block_scan(sum, &before);
    int at = base + before;
    for (int i = 0; i < SCAN_ITEMS; i++) {
        if (v0 + i <= V) first[v0 + i] = at;
        at += c[i];
    }
}

static __global__ void embedding_bwd_place(const int32_t *ids, int64_t N, const int32_t *first,
                                           const int32_t *arrival, int32_t *placed) {
    follow();
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (n < N && arrival[n] >= 0) placed[first[ids[n]] + arrival[n]] = (int32_t)n;
}

/* Within an id by n: order[i], and the id of each as sorted[i]. */
static __global__ void embedding_bwd_rank(const int32_t *ids, int64_t V, const int32_t *first,
                                          const int32_t *placed, int32_t *order, int32_t *sorted) {
    follow();
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= first[V]) return;
    const int32_t n = placed[i], id = ids[n], begin = first[id], end = first[id + 1];
    int rank = 0;
    for (int32_t j = begin; j < end; j++) rank += placed[j] < n;
    order[begin + rank] = n;
    sorted[begin + rank] = id;
}

/* ---- sums ---- */

/* Rows of dw that end within the tile are on their way while dy is summed: each id ends once, so
 * that no other thread changes them. */
template <class T, int W>
static __global__ void __launch_bounds__(TILE_THREADS)
    embedding_bwd_tile(const T *dy, const int32_t *order, const int32_t *sorted, const int32_t *num,
                       int64_t C, float *partial, float *dw) {
    __shared__ int32_t row_of[TILE], id_of[TILE + 2]; /* id_of[i + 1] is that of row i; -1: none */
    follow();
    const int64_t first = (int64_t)blockIdx.x * TILE;
    const int rows = *num, count = rows - first < TILE ? (int)(rows - first) : TILE;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (count <= 0) return;
    for (int i = threadIdx.x; i < TILE + 2; i += blockDim.x) {
        const int64_t at = first - 1 + i;
        id_of[i] = at >= 0 && at < rows ? sorted[at] : -1;
        if (i < count) row_of[i] = order[first + i];
    }
    __syncthreads();
    if (c >= C) return;
    float *crossing = partial + (int64_t)blockIdx.x * 2 * C + c;
    bool began = id_of[0] != id_of[1];
    float sum[W] = {};
    for (int i0 = 0; i0 < count; i0 += AHEAD) {
        vec<T, W> x[AHEAD];
        vec<float, W> old[AHEAD];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int i = i0 + k;
            if (i >= count) break;
            x[k] = *(const vec<T, W> *)(dy + (int64_t)row_of[i] * C + c);
            if (id_of[i + 2] != id_of[i + 1])
                old[k] = *(const vec<float, W> *)(dw + (int64_t)id_of[i + 1] * C + c);
        }
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            const int i = i0 + k;
            if (i >= count) break;
#pragma unroll
            for (int e = 0; e < W; e++) sum[e] += to_float(x[k][e]);
            const bool ends = id_of[i + 2] != id_of[i + 1];
            if (!ends && i + 1 < count) continue;
            vec<float, W> out;
#pragma unroll
            for (int e = 0; e < W; e++) out[e] = began && ends ? old[k][e] + sum[e] : sum[e];
            float *to = began && ends ? dw + (int64_t)id_of[i + 1] * C + c
                        : began       ? crossing + C
                                      : crossing;
            *(vec<float, W> *)to = out;
            began = true;
#pragma unroll
            for (int e = 0; e < W; e++) sum[e] = 0;
        }
    }
}

/* The id that begins in this block's tile and goes on after it. */
template <int W>
static __global__ void __launch_bounds__(TILE_THREADS)
    embedding_bwd_carry(const float *partial, const int32_t *sorted, const int32_t *num, int64_t C,
                        float *dw) {
    follow();
    const int64_t rows = *num, first = (int64_t)blockIdx.x * TILE, next = first + TILE;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (next >= rows || c >= C) return;
    const int32_t id = sorted[next];
    if (sorted[next - 1] != id || (first > 0 && sorted[first - 1] == id)) return;
    vec<float, W> *to = (vec<float, W> *)(dw + (int64_t)id * C + c), old = *to;
    vec<float, W> sum = *(const vec<float, W> *)(partial + (int64_t)blockIdx.x * 2 * C + C + c);
    for (int64_t tile = blockIdx.x + 1, at = next; at < rows && sorted[at] == id;
         tile++, at += TILE) {
        const vec<float, W> x = *(const vec<float, W> *)(partial + tile * 2 * C + c);
#pragma unroll
        for (int e = 0; e < W; e++) sum[e] += x[e];
    }
#pragma unroll
    for (int e = 0; e < W; e++) old[e] += sum[e];
    *to = old;
}

/* ---- launchers ---- */

static lg_status check_padding(lg_context *ctx, const char *op, int64_t padding, int64_t V) {
    if (padding >= -1 && padding < V) return LG_OK;
    return lg_fail(ctx, LG_EINVAL, "%s: padding_idx is %lld, wanted [-1, %lld)", op,
                   (long long)padding, (long long)V);
}

extern "C" lg_status cuda_embedding(lg_context *ctx, const lg_tensor *w, const lg_tensor *ids,
                                    int64_t padding_idx, lg_tensor *y) {
    LG_TRY(check_padding(ctx, "embedding", padding_idx, w->shape[0]));
    if (tensor_numel(y) == 0) return LG_OK;
    return dispatch_float(ctx, "embedding", w->dtype, [&](auto t) {
        using T = decltype(t);
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            const int64_t total = tensor_numel(y) / W;
            embedding_fwd<T, W>
                <<<blocks_for(total, THREADS * ITEMS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
                    (const T *)w->data, (const int32_t *)ids->data, (T *)y->data, w->shape[0],
                    total, (unsigned)(y->shape[1] / W), cuda_error_slot(ctx, "embedding"));
            return cuda_launched(ctx, "embedding");
        };
        if (rows_vectorise<T>(w) && rows_vectorise<T>(y)) return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}

/* The rows in the order of their ids: order[N] and sorted[N], of which *num count. */
static lg_status sort_ids(lg_context *ctx, const int32_t *ids, int64_t N, int64_t V,
                          int64_t padding, int32_t **order, int32_t **sorted, const int32_t **num) {
    const unsigned blocks = blocks_for(N, THREADS, INT32_MAX),
                   scan_blocks = blocks_for(V + 1, SCAN_THREADS * SCAN_ITEMS, INT32_MAX);
    const cudaStream_t stream = cuda_stream(ctx);
    void *scratch;
    LG_TRY(lg_scratch(ctx, (4 * N + 2 * V + 1 + scan_blocks) * 4, &scratch));
    *order = (int32_t *)scratch;
    *sorted = *order + N;
    int32_t *arrival = *sorted + N, *placed = arrival + N, *count = placed + N, *first = count + V,
            *total = first + V + 1;
    LG_TRY(cuda_check(ctx, "embedding_backward", cudaMemsetAsync(count, 0, V * 4, stream)));
    embedding_bwd_count<<<blocks, THREADS, 0, stream>>>(ids, N, V, padding, count, arrival,
                                                        cuda_error_slot(ctx, "embedding_backward"));
    const auto then = [&](auto kernel, unsigned grid, unsigned block, auto... args) {
        return launch_follower(ctx, "embedding_backward", grid, block, kernel, args...);
    };
    LG_TRY(then(embedding_bwd_scan_blocks, scan_blocks, SCAN_THREADS, count, V, total));
    LG_TRY(then(embedding_bwd_scan, scan_blocks, SCAN_THREADS, count, total, V, first));
    LG_TRY(then(embedding_bwd_place, blocks, THREADS, ids, N, first, arrival, placed));
    LG_TRY(then(embedding_bwd_rank, blocks, THREADS, ids, V, first, placed, *order, *sorted));
    *num = first + V;
    return LG_OK;
}

extern "C" lg_status cuda_embedding_backward(lg_context *ctx, const lg_tensor *dy,
                                             const lg_tensor *ids, int64_t padding_idx,
                                             lg_tensor *dw) {
    const int64_t N = dy->shape[0], C = dy->shape[1];
    if (!dw) return LG_OK;
    LG_TRY(check_padding(ctx, "embedding_backward", padding_idx, dw->shape[0]));
    if (N == 0 || C == 0) return LG_OK;
    return dispatch_float(ctx, "embedding_backward", dy->dtype, [&](auto t) {
        using T = decltype(t);
        int32_t *order, *sorted;
        const int32_t *num;
        void *partial;
        const int64_t tiles = (N + TILE - 1) / TILE;
        LG_TRY(lg_scratch(ctx, tiles * 2 * C * 4, &partial));
        LG_TRY(sort_ids(ctx, (const int32_t *)ids->data, N, dw->shape[0], padding_idx, &order,
                        &sorted, &num));
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            const int64_t threads = (C / W + 31) / 32 * 32;
            const unsigned block = threads < TILE_THREADS ? (unsigned)threads : TILE_THREADS;
            const dim3 grid((unsigned)tiles, blocks_for(C, (int64_t)block * W, 65535));
            LG_TRY(launch_follower(ctx, "embedding_backward", grid, block, embedding_bwd_tile<T, W>,
                                   (const T *)dy->data, order, sorted, num, C, (float *)partial,
                                   (float *)dw->data));
            return launch_follower(ctx, "embedding_backward", grid, block, embedding_bwd_carry<W>,
                                   (const float *)partial, sorted, num, C, (float *)dw->data);
        };
        /* 16 bytes of dw: of bf16, 8 of dy. */
        if (rows_vectorise<float>(dw) && (uintptr_t)dy->data % (4 * sizeof(T)) == 0)
            return launch(width_of<4>());
        return launch(width_of<1>());
    });
}
