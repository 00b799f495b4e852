/* The backward of the norms of norm.cuh, whose header has the formulas and who owns what. */
#ifndef LIGER_NORM_BACKWARD_CUH
#define LIGER_NORM_BACKWARD_CUH

#include "norm.cuh"

enum {
    BWD_THREADS = 512,
    BWD_BLOCKS = 132, /* a block on each multiprocessor of an H200, fixed so that bits are */
    DW_COLUMNS = 32,
    DW_LANES = 32,
    WIDE_THREADS = 256,
    WIDE_ROWS = 128, /* rows of dw that a block of the wide form sums */
};

/* ---- rows that a group holds ---- */

__device__ __forceinline__ void copy_async(void *shared, const void *global) {
    const unsigned to = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Newer>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Newer) : "memory");
}

/* Everything that the backward reads and writes. */
template <class T>
struct norm_backward {
    const T *dy, *ds, *x, *w;
    const float *mean, *rstd;
    T *dx, *dx_too; /* dx_too: NULL, or gets what dx gets */
    strided_rows x_rows, dx_rows;
    float offset;
    int64_t N, C;
    bool vector;
    float *dw_partial, *db_partial; /* [blocks, C], or NULL */
};

/* The weights from column c on; 1 without. */
template <class T>
__device__ __forceinline__ piece<T> load_weight(const norm_backward<T> &a, int64_t c) {
    float one[piece<T>::N];
#pragma unroll
    for (float &e : one) e = 1;
    return a.w ? load_piece(a.w + c, a.C - c, a.vector) : pack_piece<T>(one);
}

template <int KIND, class T>
__device__ __forceinline__ float factor(const norm_backward<T> &a, float w) {
    return KIND & NORM_OFFSET ? a.offset + w : w;
}

/* Each thread fetches and reads its own vectors only, so that the ring needs no barrier. */
template <class T, int KIND, int LANES, int K, int STAGES>
static __global__ void __launch_bounds__(BWD_THREADS, K <= 2 ? 2 : 1)
    norm_bwd(const __grid_constant__ norm_backward<T> a) {
    constexpr int W = 16 / sizeof(T), GROUPS = BWD_THREADS / LANES;
    constexpr bool CENTERED = KIND & NORM_CENTERED, ADD = KIND & NORM_ADD;
    constexpr int INPUTS = ADD ? 3 : 2;
    extern __shared__ char memory[];
    __shared__ alignas(8) float room[128];
    piece<T>(*ring)[INPUTS][K][BWD_THREADS] = (piece<T>(*)[INPUTS][K][BWD_THREADS])memory;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int64_t step = (int64_t)gridDim.x * GROUPS, C = a.C;
    const int64_t first = (int64_t)blockIdx.x * GROUPS + group;
    /* As many for all groups of the block: those of a warp sum together to the end. */
    const int turns = (int)((a.N - (int64_t)blockIdx.x * GROUPS + step - 1) / step);

    const auto fetch = [&](int64_t n, int stage) {
        if (n < a.N) {
            const T *row[] = {a.x + a.x_rows.offset(n), a.dy + n * C, ADD ? a.ds + n * C : NULL};
#pragma unroll
            for (int k = 0; k < K; k++) {
                const int64_t c = (k * LANES + lane) * W;
                if (a.vector && c >= C) break;
#pragma unroll
                for (int input = 0; input < INPUTS; input++) {
                    piece<T> *to = &ring[stage][input][k][threadIdx.x];
                    if (a.vector)
                        copy_async(to, row[input] + c);
                    else
                        *to = load_piece(row[input] + c, C - c, false);
                }
            }
        }
        commit_copies();
    };

    piece<T>(*weights)[LANES] = (piece<T>(*)[LANES])(ring + STAGES);
    for (int i = threadIdx.x; i < K * LANES; i += BWD_THREADS)
        weights[i / LANES][i % LANES] = load_weight(a, i * W);
    __syncthreads();
    const float share = 1 / (float)C;
    float dw[K][W] = {}, db[CENTERED ? K : 1][W] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(first + s * step, s);

    int64_t n = first;
    for (int t = 0; t < turns; t++, n += step) {
        const int stage = t % STAGES;
        const bool mine = n < a.N;
        fetch(n + (STAGES - 1) * step, (t + STAGES - 1) % STAGES);
        const float r = mine ? a.rstd[n] : 0, m = CENTERED && mine ? a.mean[n] : 0;
        wait_copies<STAGES - 1>();
        float sum = 0, sum_g = 0;
        if (mine) {
#pragma unroll
            for (int k = 0; k < K; k++) {
                if ((k * LANES + lane) * W >= C) break;
                const piece<T> x = ring[stage][0][k][threadIdx.x],
                               d = ring[stage][1][k][threadIdx.x], w = weights[k][lane];
#pragma unroll
                for (int e = 0; e < W; e++) {
                    const float g = d[e] * factor<KIND>(a, w[e]);
                    sum = fmaf(g, CENTERED ? x[e] - m : x[e], sum);
                    if (CENTERED) sum_g += g;
                }
            }
        }
        float2 sums = {0, 0};
        if (CENTERED)
            sums = group_sums<LANES>(sum, sum_g, room, t);
        else
            sums.x = group_sum<LANES>(sum, room, t);
        const float slope = sums.x * r * r * r * share, shift = sums.y * r * share;
        if (!mine) continue;
        T *dx_row = a.dx ? a.dx + a.dx_rows.offset(n) : NULL;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t c = (k * LANES + lane) * W;
            if (c >= C) break;
            const piece<T> x = ring[stage][0][k][threadIdx.x], d = ring[stage][1][k][threadIdx.x],
                           s = ring[stage][INPUTS - 1][k][threadIdx.x], w = weights[k][lane];
            float out[W];
#pragma unroll
            for (int e = 0; e < W; e++) {
                const float xc = CENTERED ? x[e] - m : x[e];
                dw[k][e] = fmaf(d[e], xc * r, dw[k][e]);
                if (CENTERED) db[CENTERED ? k : 0][e] += d[e];
                out[e] = fmaf(d[e] * factor<KIND>(a, w[e]), r, -(xc * slope));
                if (CENTERED) out[e] -= shift;
                if (ADD) out[e] += s[e];
            }
            const piece<T> packed = pack_piece<T>(out);
            if (dx_row) store_piece(dx_row + c, packed, C - c, a.vector);
            if (ADD && a.dx_too) store_piece(a.dx_too + n * C + c, packed, C - c, a.vector);
        }
    }

    /* The sums of the block's groups; column c of group g lies at g LANES K W + c. */
    wait_copies<0>();
    float *sums = (float *)memory;
    const auto add_groups = [&](const float(*of)[W], float *partial) {
        if (!partial) return;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int e = 0; e < W; e++) sums[((group * K + k) * LANES + lane) * W + e] = of[k][e];
        __syncthreads();
        for (int64_t c = threadIdx.x; c < C; c += BWD_THREADS) {
            float total = 0;
            for (int g = 0; g < GROUPS; g++) total += sums[g * (LANES * K * W) + c];
            partial[blockIdx.x * C + c] = total;
        }
    };
    add_groups(dw, a.dw_partial);
    if constexpr (CENTERED) add_groups(db, a.db_partial);
}

/* dw[c] += sum over blocks of partial[block,c]: DW_LANES threads a column, block i to thread i %
 * DW_LANES, then the threads in order. blockIdx.y is 1 for db, where there is one. */
static __global__ void __launch_bounds__(DW_COLUMNS *DW_LANES)
    norm_bwd_dw(const float *partial, float *dw, const float *db_partial, float *db, int blocks,
                int64_t C) {
    __shared__ float sums[DW_LANES][DW_COLUMNS + 1];
    const int64_t c = (int64_t)blockIdx.x * DW_COLUMNS + threadIdx.x;
    float sum = 0;
    if (blockIdx.y == 1) partial = db_partial, dw = db;
    if (c < C)
        for (int b = threadIdx.y; b < blocks; b += DW_LANES) sum += partial[b * C + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= C) return;
    sum = 0;
#pragma unroll
    for (int y = 0; y < DW_LANES; y++) sum += sums[y][threadIdx.x];
    dw[c] += sum;
}

/* ---- longer rows: x and dy are read twice ---- */

/* slope[n] = rstd^3 mean(g xc), and in layer norm slope[N + n] = rstd mean(g); a block a row. */
template <class T, int KIND>
static __global__ void __launch_bounds__(WIDE_THREADS)
    norm_bwd_wide_slope(const __grid_constant__ norm_backward<T> a, float *slope) {
    constexpr int W = 16 / sizeof(T);
    constexpr bool CENTERED = KIND & NORM_CENTERED;
    const int64_t n = blockIdx.x;
    const T *x_row = a.x + a.x_rows.offset(n), *dy_row = a.dy + n * a.C;
    const float r = a.rstd[n], m = CENTERED ? a.mean[n] : 0;
    float sum = 0, sum_g = 0;
    for (int64_t c = (int64_t)threadIdx.x * W; c < a.C; c += WIDE_THREADS * W) {
        const piece<T> x = load_piece(x_row + c, a.C - c, a.vector),
                       d = load_piece(dy_row + c, a.C - c, a.vector), w = load_weight(a, c);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float g = d[e] * factor<KIND>(a, w[e]);
            sum = fmaf(g, CENTERED ? x[e] - m : x[e], sum);
            if (CENTERED) sum_g += g;
        }
    }
    sum = block_reduce(sum, Sum(), 0);
    if (CENTERED) sum_g = block_reduce(sum_g, Sum(), 0);
    if (threadIdx.x > 0) return;
    slope[n] = sum * r * r * r / (float)a.C;
    if (CENTERED) slope[a.N + n] = sum_g * r / (float)a.C;
}

/* A block owns WIDE_ROWS rows of WIDE_THREADS * W columns. */
template <class T, int KIND>
static __global__ void __launch_bounds__(WIDE_THREADS)
    norm_bwd_wide(const __grid_constant__ norm_backward<T> a, const float *slope) {
    constexpr int W = 16 / sizeof(T);
    constexpr bool CENTERED = KIND & NORM_CENTERED, ADD = KIND & NORM_ADD;
    const int64_t c = ((int64_t)blockIdx.y * WIDE_THREADS + threadIdx.x) * W;
    const int64_t first = (int64_t)blockIdx.x * WIDE_ROWS;
    if (c >= a.C) return;
    const piece<T> w = load_weight(a, c);
    float dw[W] = {}, db[W] = {};
    for (int64_t n = first; n < a.N && n < first + WIDE_ROWS; n++) {
        const piece<T> x = load_piece(a.x + a.x_rows.offset(n) + c, a.C - c, a.vector),
                       d = load_piece(a.dy + n * a.C + c, a.C - c, a.vector);
        const float r = a.rstd[n], s = slope[n], m = CENTERED ? a.mean[n] : 0,
                    shift = CENTERED ? slope[a.N + n] : 0;
        piece<T> add = {};
        if (ADD) add = load_piece(a.ds + n * a.C + c, a.C - c, a.vector);
        float out[W];
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float xc = CENTERED ? x[e] - m : x[e];
            dw[e] = fmaf(d[e], xc * r, dw[e]);
            if (CENTERED) db[e] += d[e];
            out[e] = fmaf(d[e] * factor<KIND>(a, w[e]), r, -(xc * s));
            if (CENTERED) out[e] -= shift;
            if (ADD) out[e] += add[e];
        }
        const piece<T> packed = pack_piece<T>(out);
        if (a.dx) store_piece(a.dx + a.dx_rows.offset(n) + c, packed, a.C - c, a.vector);
        if (ADD && a.dx_too) store_piece(a.dx_too + n * a.C + c, packed, a.C - c, a.vector);
    }
#pragma unroll
    for (int e = 0; e < W; e++) {
        if (c + e >= a.C) break;
        if (a.dw_partial) a.dw_partial[blockIdx.x * a.C + c + e] = dw[e];
        if (CENTERED && a.db_partial) a.db_partial[blockIdx.x * a.C + c + e] = db[e];
    }
}

/* ---- launches ---- */

/* Adds the blocks' sums of columns to dw and db, of which either may be NULL. */
static inline lg_status launch_norm_sums(lg_context *ctx, const char *op, const float *dw_partial,
                                         lg_tensor *dw, const float *db_partial, lg_tensor *db,
                                         int blocks, int64_t C) {
    if (!dw && !db) return LG_OK;
    if (!dw) dw = db, dw_partial = db_partial, db = NULL;
    const dim3 grid(blocks_for(C, DW_COLUMNS, INT32_MAX), db ? 2 : 1);
    norm_bwd_dw<<<grid, dim3(DW_COLUMNS, DW_LANES), 0, cuda_stream(ctx)>>>(
        dw_partial, (float *)dw->data, db_partial, (float *)(db ? db->data : NULL), blocks, C);
    return cuda_launched(ctx, op);
}

/* The walk over the rows; sums of columns to *blocks rows of a.dw_partial and a.db_partial. */
template <int KIND, class T>
static lg_status walk_rows(lg_context *ctx, const char *op, norm_backward<T> &a, bool dw, bool db,
                           int *blocks) {
    constexpr int W = 16 / sizeof(T);
    const int64_t vectors = (a.C + W - 1) / W;
    const cudaStream_t stream = cuda_stream(ctx);
    const auto allocate = [&](int count) {
        void *dw_partial = NULL, *db_partial = NULL;
        *blocks = count;
        if (dw) LG_TRY(lg_scratch(ctx, count * a.C * 4, &dw_partial));
        if (db) LG_TRY(lg_scratch(ctx, count * a.C * 4, &db_partial));
        a.dw_partial = (float *)dw_partial, a.db_partial = (float *)db_partial;
        return LG_OK;
    };
    if (vectors > 2048) {
        void *slope;
        LG_TRY(allocate((int)((a.N + WIDE_ROWS - 1) / WIDE_ROWS)));
        LG_TRY(lg_scratch(ctx, 2 * a.N * 4, &slope));
        norm_bwd_wide_slope<T, KIND><<<(unsigned)a.N, WIDE_THREADS, 0, stream>>>(a, (float *)slope);
        const dim3 grid((unsigned)*blocks, blocks_for(vectors, WIDE_THREADS, 65535));
        norm_bwd_wide<T, KIND><<<grid, WIDE_THREADS, 0, stream>>>(a, (const float *)slope);
        return cuda_launched(ctx, op);
    }
    return with_group(vectors, [&](auto lanes, auto held) {
        constexpr int LANES = decltype(lanes)::value, K = decltype(held)::value;
        /* As many stages as fit; a sum has three inputs. */
        constexpr int INPUTS = KIND & NORM_ADD ? 3 : 2, GROUPS = BWD_THREADS / LANES;
        constexpr int STAGES = K == 1 ? 4 : KIND & NORM_ADD ? 2 : 3;
        /* Short rows: two blocks a multiprocessor, for their partial sums are small. */
        LG_TRY(allocate((int)blocks_for(a.N, GROUPS, K <= 2 ? 2 * BWD_BLOCKS : BWD_BLOCKS)));
        const auto kernel = norm_bwd<T, KIND, LANES, K, STAGES>;
        constexpr int bytes = (STAGES * INPUTS * BWD_THREADS + LANES) * K * 16;
        LG_TRY(cuda_check(
            ctx, op,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)));
        kernel<<<*blocks, BWD_THREADS, bytes, stream>>>(a);
        return cuda_launched(ctx, op);
    });
}

/* dx, and the sums dw and db, of which any may be NULL. */
template <int KIND, class T>
static lg_status launch_norm_backward(lg_context *ctx, const char *op, norm_backward<T> a,
                                      lg_tensor *dw, lg_tensor *db) {
    int blocks = 0;
    LG_TRY((walk_rows<KIND>(ctx, op, a, dw != NULL, db != NULL, &blocks)));
    return launch_norm_sums(ctx, op, a.dw_partial, dw, a.db_partial, db, blocks, a.C);
}

#endif
