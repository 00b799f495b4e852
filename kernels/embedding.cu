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
#include "common.cuh"

enum {
    THREADS = 256,
    ITEMS = 2,
    TILE = 32, /* rows of the order that one block sums */
    AHEAD = 8, /* of them in flight */
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
            note_error(error, ERROR_ID, n, id, V);
    }
#pragma unroll
    for (int k = 0; k < ITEMS; k++)
        if (fine[k]) *(vec<T, W> *)(y + (start + k * THREADS + threadIdx.x) * W) = x[k];
}

/* ---- sorting ---- */

/* arrival[n]: how many rows of the same id were counted before; in any order. -1 for a bad id. */
static __global__ void embedding_bwd_count(const int32_t *ids, int64_t N, int64_t V, int32_t *count,
                                           int32_t *arrival, device_error *error) {
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (n >= N) return;
    const int32_t id = ids[n];
    if (id < 0 || id >= V) {
        note_error(error, ERROR_ID, n, id, V);
        arrival[n] = -1;
        return;
    }
    arrival[n] = atomicAdd(&count[id], 1);
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
    const int64_t v0 = ((int64_t)blockIdx.x * SCAN_THREADS + threadIdx.x) * SCAN_ITEMS;
    int sum = 0, before;
    for (int i = 0; i < SCAN_ITEMS; i++) sum += v0 + i < V ? count[v0 + i] : 0;
    sum = block_scan(sum, &before);
    if (threadIdx.x == 0) total[blockIdx.x] = sum;
}

/* first[v] = the number of rows with an id below v, v in [0, V]. */
static __global__ void __launch_bounds__(SCAN_THREADS)
    embedding_bwd_scan(const int32_t *count, const int32_t *total, int64_t V, int32_t *first) {
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
    const int64_t n = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (n < N && arrival[n] >= 0) placed[first[ids[n]] + arrival[n]] = (int32_t)n;
}

/* Within an id by n: order[i], and the id of each as sorted[i]. */
static __global__ void embedding_bwd_rank(const int32_t *ids, int64_t V, const int32_t *first,
                                          const int32_t *placed, int32_t *order, int32_t *sorted) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= first[V]) return;
    const int32_t n = placed[i], id = ids[n], begin = first[id], end = first[id + 1];
    int rank = 0;
    for (int32_t j = begin; j < end; j++) rank += placed[j] < n;
    order[begin + rank] = n;
    sorted[begin + rank] = id;
}

/* ---- sums ---- */

/* Adds W columns to fp32 memory. */
template <int W>
__device__ __forceinline__ void add_to(float *at, const float *sum) {
    constexpr int L = W < 4 ? W : 4;
#pragma unroll
    for (int e = 0; e < W; e += L) {
        vec<float, L> x = *(vec<float, L> *)(at + e);
#pragma unroll
        for (int l = 0; l < L; l++) x[l] += sum[e + l];
        *(vec<float, L> *)(at + e) = x;
    }
}

template <int W>
__device__ __forceinline__ void put(float *at, const float *sum) {
    constexpr int L = W < 4 ? W : 4;
#pragma unroll
    for (int e = 0; e < W; e += L) {
        vec<float, L> x;
#pragma unroll
        for (int l = 0; l < L; l++) x[l] = sum[e + l];
        *(vec<float, L> *)(at + e) = x;
    }
}

template <class T, int W>
static __global__ void __launch_bounds__(TILE_THREADS)
    embedding_bwd_tile(const T *dy, const int32_t *order, const int32_t *sorted, const int32_t *num,
                       int64_t C, float *partial, float *dw) {
    const int64_t first = (int64_t)blockIdx.x * TILE;
    const int rows = *num, last = first + TILE < rows ? (int)first + TILE : rows;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (first >= rows || c >= C) return;
    float *crossing = partial + (int64_t)blockIdx.x * 2 * C + c;
    bool began = first == 0 || sorted[first - 1] != sorted[first];
    float sum[W] = {};
    for (int i0 = (int)first; i0 < last; i0 += AHEAD) {
        vec<T, W> x[AHEAD];
        int id[AHEAD + 1];
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            id[k] = i0 + k < rows ? sorted[i0 + k] : -1;
            if (i0 + k < last) x[k] = *(const vec<T, W> *)(dy + (int64_t)order[i0 + k] * C + c);
        }
        id[AHEAD] = i0 + AHEAD < rows ? sorted[i0 + AHEAD] : -1;
#pragma unroll
        for (int k = 0; k < AHEAD; k++) {
            if (i0 + k >= last) break;
#pragma unroll
            for (int e = 0; e < W; e++) sum[e] += to_float(x[k][e]);
            const bool ends = id[k + 1] != id[k];
            if (!ends && i0 + k + 1 < last) continue;
            if (began && ends)
                add_to<W>(dw + (int64_t)id[k] * C + c, sum);
            else
                put<W>(began ? crossing + C : crossing, sum);
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
    const int64_t rows = *num, first = (int64_t)blockIdx.x * TILE, next = first + TILE;
    const int64_t c = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * W;
    if (next >= rows || c >= C) return;
    const int32_t id = sorted[next];
    if (sorted[next - 1] != id || (first > 0 && sorted[first - 1] == id)) return;
    constexpr int L = W < 4 ? W : 4;
    float sum[W];
    for (int64_t tile = blockIdx.x, at = next;; tile++, at += TILE) {
        const float *from = partial + tile * 2 * C + c;
        if (tile == blockIdx.x) from += C;
#pragma unroll
        for (int e = 0; e < W; e += L) {
            const vec<float, L> x = *(const vec<float, L> *)(from + e);
#pragma unroll
            for (int l = 0; l < L; l++) sum[e + l] = tile == blockIdx.x ? x[l] : sum[e + l] + x[l];
        }
        if (at >= rows || sorted[at] != id) break;
    }
    add_to<W>(dw + (int64_t)id * C + c, sum);
}

/* ---- launchers ---- */

extern "C" lg_status cuda_embedding(lg_context *ctx, const lg_tensor *w, const lg_tensor *ids,
                                    lg_tensor *y) {
    if (tensor_numel(y) == 0) return LG_OK;
    return dispatch_float(ctx, "embedding", w->dtype, [&](auto t) {
        using T = decltype(t);
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            const int64_t total = tensor_numel(y) / W;
            embedding_fwd<T, W>
                <<<blocks_for(total, THREADS * ITEMS, INT32_MAX), THREADS, 0, cuda_stream(ctx)>>>(
                    (const T *)w->data, (const int32_t *)ids->data, (T *)y->data, w->shape[0],
                    total, (unsigned)(y->shape[1] / W), cuda_error_slot(ctx));
            return cuda_launched(ctx, "embedding");
        };
        if (rows_vectorise<T>(w) && rows_vectorise<T>(y)) return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}

/* The rows in the order of their ids: order[N] and sorted[N], of which *num count. */
static lg_status sort_ids(lg_context *ctx, const int32_t *ids, int64_t N, int64_t V,
                          int32_t **order, int32_t **sorted, const int32_t **num) {
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
    embedding_bwd_count<<<blocks, THREADS, 0, stream>>>(ids, N, V, count, arrival,
                                                        cuda_error_slot(ctx));
    embedding_bwd_scan_blocks<<<scan_blocks, SCAN_THREADS, 0, stream>>>(count, V, total);
    embedding_bwd_scan<<<scan_blocks, SCAN_THREADS, 0, stream>>>(count, total, V, first);
    embedding_bwd_place<<<blocks, THREADS, 0, stream>>>(ids, N, first, arrival, placed);
    embedding_bwd_rank<<<blocks, THREADS, 0, stream>>>(ids, V, first, placed, *order, *sorted);
    *num = first + V;
    return cuda_launched(ctx, "embedding_backward");
}

extern "C" lg_status cuda_embedding_backward(lg_context *ctx, const lg_tensor *dy,
                                             const lg_tensor *ids, lg_tensor *dw) {
    const int64_t N = dy->shape[0], C = dy->shape[1];
    if (!dw || N == 0 || C == 0) return LG_OK;
    return dispatch_float(ctx, "embedding_backward", dy->dtype, [&](auto t) {
        using T = decltype(t);
        int32_t *order, *sorted;
        const int32_t *num;
        void *partial;
        const int64_t tiles = (N + TILE - 1) / TILE;
        LG_TRY(lg_scratch(ctx, tiles * 2 * C * 4, &partial));
        LG_TRY(sort_ids(ctx, (const int32_t *)ids->data, N, dw->shape[0], &order, &sorted, &num));
        const auto launch = [&](auto width) {
            constexpr int W = decltype(width)::value;
            const int64_t threads = (C / W + 31) / 32 * 32;
            const unsigned block = threads < TILE_THREADS ? (unsigned)threads : TILE_THREADS;
            const dim3 grid((unsigned)tiles, blocks_for(C, (int64_t)block * W, 65535));
            embedding_bwd_tile<T, W><<<grid, block, 0, cuda_stream(ctx)>>>(
                (const T *)dy->data, order, sorted, num, C, (float *)partial, (float *)dw->data);
            embedding_bwd_carry<W><<<grid, block, 0, cuda_stream(ctx)>>>(
                (const float *)partial, sorted, num, C, (float *)dw->data);
            return cuda_launched(ctx, "embedding_backward");
        };
        if (rows_vectorise<T>(dy) && rows_vectorise<float>(dw))
            return launch(width_of<16 / sizeof(T)>());
        return launch(width_of<1>());
    });
}
