/* RMS normalisation: y = w x rstd, rstd = 1 / sqrt(mean(x^2) + eps). With g = dy w and a = rstd^3
 * mean(g x): dx = rstd g - a x, dw += sum over rows of dy x rstd.
 *
 * A group of LANES threads owns a row at a time, K pieces of 16 bytes a thread, so that x (and dy)
 * is read once; thread l's piece k has columns (k LANES + l) W on. Forward: a group owns ROWS rows,
 * all loaded before the first is summed; rows longer than a group holds are read twice. Backward:
 * GROUPS groups a block walk over the rows, the next rows on their way to shared memory meanwhile;
 * each thread keeps the sums of its columns of dw, a block writes them to partial[block,C], and
 * rms_norm_bwd_dw adds the blocks in order. How rows go to blocks depends on N and C alone, so the
 * bits do; whether 16 bytes are read at once or one by one changes none.
 */
#include "piece.cuh"
#include "op/rms_norm.h"

enum {
    FWD_THREADS = 256, /* or LANES, if more */
    BWD_THREADS = 512,
    BWD_BLOCKS = 132, /* a block on each multiprocessor of an H200, fixed so that bits are */
    DW_COLUMNS = 32,
    DW_LANES = 32,
    WIDE_THREADS = 256,
    WIDE_ROWS = 128, /* rows of dw that a block of the wide form sums */
};

/* ---- a group of threads ---- */

/* Sum over LANES threads, each of which gets it. Groups of several warps meet at the barrier of
 * their own and use `room` [2, warps of the block] by turns: `turn` differs from call to call. */
template <int LANES>
__device__ __forceinline__ float group_sum(float x, float *room, int turn) {
    if (LANES <= 32) return warp_reduce<(LANES < 32 ? LANES : 32)>(x, Sum());
    constexpr int WARPS = LANES / 32;
    const int group = threadIdx.x / LANES, warp = threadIdx.x / 32;
    x = warp_reduce(x, Sum());
    room += (turn & 1) * 32;
    if (threadIdx.x % 32 == 0) room[warp] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(LANES < 32 ? 32 : LANES) : "memory");
    float sum = room[group * WARPS];
#pragma unroll
    for (int i = 1; i < WARPS; i++) sum += room[group * WARPS + i];
    return sum;
}

/* w x rstd; without a weight it counts as 1. In bf16 x rstd is rounded before the product, as Llama
 * does; the product of two bf16 numbers is exact in fp32, and the pair's is rounded once. */
template <class T>
__device__ __forceinline__ piece<T> normalised(const piece<T> &x, float rstd,
                                               const piece<T> &weight, bool weighted) {
    float y[x.N];
#pragma unroll
    for (int e = 0; e < x.N; e++) y[e] = weighted ? x[e] * rstd * weight[e] : x[e] * rstd;
    return pack_piece<T>(y);
}
__device__ __forceinline__ piece<bf16> normalised(const piece<bf16> &x, float rstd,
                                                  const piece<bf16> &weight, bool weighted) {
    piece<bf16> y;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 s = __floats2bfloat162_rn(x[2 * i] * rstd, x[2 * i + 1] * rstd);
        if (weighted) s = __hmul2(s, reinterpret_cast<const __nv_bfloat162 &>(weight.word[i]));
        y.word[i] = reinterpret_cast<const uint32_t &>(s);
    }
    return y;
}

/* ---- forward ---- */

template <class T, int LANES, int K, int ROWS>
static __global__ void __launch_bounds__(LANES > FWD_THREADS ? LANES : FWD_THREADS)
    rms_norm_fwd(const T *x, const __grid_constant__ strided_rows x_rows, const T *w, float eps,
                 int64_t N, int64_t C, bool vector, T *y, float *rstd) {
    constexpr int W = 16 / sizeof(T);
    constexpr int64_t HELD = (int64_t)LANES * K * W;
    __shared__ float room[64];
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES * ROWS;
    const int lane = threadIdx.x % LANES;
    const T *x_row[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) x_row[i] = first + i < N ? x + x_rows.offset(first + i) : NULL;

    piece<T> v[ROWS][K], weight[K];
    const auto column = [&](int k) { return (k * LANES + lane) * W; };
    const auto load_weights = [&](int64_t c0) {
#pragma unroll
        for (int k = 0; k < K; k++)
            if (w) weight[k] = load_piece(w + c0 + column(k), C - c0 - column(k), vector);
    };
    const auto load_rows = [&](int64_t c0) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int k = 0; k < K; k++)
                v[i][k] = load_piece(x_row[i] + c0 + column(k), x_row[i] ? C - c0 - column(k) : 0,
                                     vector);
    };

    load_weights(0);
    float sum[ROWS] = {};
    for (int64_t c0 = 0; c0 < C; c0 += HELD) {
        load_rows(c0);
#pragma unroll
        for (int k = 0; k < K; k++)
#pragma unroll
            for (int e = 0; e < W; e++)
#pragma unroll
                for (int i = 0; i < ROWS; i++) sum[i] = fmaf(v[i][k][e], v[i][k][e], sum[i]);
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        sum[i] = group_sum<LANES>(sum[i], room, i);
        sum[i] = 1.0f / sqrtf(sum[i] / (float)C + eps);
        if (lane == 0 && x_row[i]) rstd[first + i] = sum[i];
    }
    for (int64_t c0 = 0; c0 < C; c0 += HELD) {
        if (C > HELD) {
            load_weights(c0);
            load_rows(c0);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int k = 0; k < K; k++) {
                repack(v[i][k]);
                if (x_row[i])
                    store_piece(y + (first + i) * C + c0 + column(k),
                                normalised(v[i][k], sum[i], weight[k], w != NULL),
                                C - c0 - column(k), vector);
            }
    }
}

/* ---- backward, rows that a group holds ---- */

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
    const T *dy, *x, *w;
    const float *rstd;
    T *dx;
    float *partial; /* [blocks, C], or NULL */
    strided_rows x_rows, dx_rows;
    int64_t N, C;
    bool vector;
};

/* The weights from column c on; 1 without. */
template <class T>
__device__ __forceinline__ piece<T> load_weight(const norm_backward<T> &a, int64_t c) {
    float one[piece<T>::N];
#pragma unroll
    for (float &e : one) e = 1;
    return a.w ? load_piece(a.w + c, a.C - c, a.vector) : pack_piece<T>(one);
}

/* Each thread fetches and reads its own vectors only, so that the ring needs no barrier. */
template <class T, int LANES, int K, int STAGES>
static __global__ void __launch_bounds__(BWD_THREADS, K <= 2 ? 2 : 1)
    rms_norm_bwd(const __grid_constant__ norm_backward<T> a) {
    constexpr int W = 16 / sizeof(T), GROUPS = BWD_THREADS / LANES;
    extern __shared__ char memory[];
    __shared__ float room[64];
    piece<T>(*ring)[2][K][BWD_THREADS] = (piece<T>(*)[2][K][BWD_THREADS])memory;
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int64_t step = (int64_t)gridDim.x * GROUPS, C = a.C;
    const int64_t first = (int64_t)blockIdx.x * GROUPS + group;
    /* As many for all groups of the block: those of a warp sum together to the end. */
    const int turns = (int)((a.N - (int64_t)blockIdx.x * GROUPS + step - 1) / step);

    const auto fetch = [&](int64_t n, int stage) {
        if (n < a.N) {
            const T *x_row = a.x + a.x_rows.offset(n), *dy_row = a.dy + n * C;
#pragma unroll
            for (int k = 0; k < K; k++) {
                const int64_t c = (k * LANES + lane) * W;
                if (a.vector) {
                    if (c >= C) break;
                    copy_async(&ring[stage][0][k][threadIdx.x], x_row + c);
                    copy_async(&ring[stage][1][k][threadIdx.x], dy_row + c);
                } else {
                    ring[stage][0][k][threadIdx.x] = load_piece(x_row + c, C - c, false);
                    ring[stage][1][k][threadIdx.x] = load_piece(dy_row + c, C - c, false);
                }
            }
        }
        commit_copies();
    };

    piece<T>(*weights)[LANES] = (piece<T>(*)[LANES])(ring + STAGES);
    for (int i = threadIdx.x; i < K * LANES; i += BWD_THREADS)
        weights[i / LANES][i % LANES] = load_weight(a, i * W);
    __syncthreads();
    float dw[K][W] = {};
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) fetch(first + s * step, s);

    int64_t n = first;
    for (int t = 0; t < turns; t++, n += step) {
        const int stage = t % STAGES;
        const bool mine = n < a.N;
        fetch(n + (STAGES - 1) * step, (t + STAGES - 1) % STAGES);
        const float r = mine ? a.rstd[n] : 0;
        wait_copies<STAGES - 1>();
        float sum = 0;
        if (mine) {
#pragma unroll
            for (int k = 0; k < K; k++) {
                if ((k * LANES + lane) * W >= C) break;
                const piece<T> x = ring[stage][0][k][threadIdx.x],
                               d = ring[stage][1][k][threadIdx.x], w = weights[k][lane];
#pragma unroll
                for (int e = 0; e < W; e++) sum = fmaf(d[e] * w[e], x[e], sum);
            }
        }
        const float slope = group_sum<LANES>(sum, room, t) * r * r * r / (float)C;
        if (!mine) continue;
        T *dx_row = a.dx ? a.dx + a.dx_rows.offset(n) : NULL;
#pragma unroll
        for (int k = 0; k < K; k++) {
            const int64_t c = (k * LANES + lane) * W;
            if (c >= C) break;
            const piece<T> x = ring[stage][0][k][threadIdx.x], d = ring[stage][1][k][threadIdx.x],
                           w = weights[k][lane];
            float out[W];
#pragma unroll
            for (int e = 0; e < W; e++) {
                dw[k][e] = fmaf(d[e], x[e] * r, dw[k][e]);
                out[e] = fmaf(d[e] * w[e], r, -(x[e] * slope));
            }
            if (dx_row) store_piece(dx_row + c, pack_piece<T>(out), C - c, a.vector);
        }
    }
    if (!a.partial) return;

    /* Column c of group g lies at g LANES K W + c. */
    wait_copies<0>();
    __syncthreads();
    float *sums = (float *)memory;
#pragma unroll
    for (int k = 0; k < K; k++)
#pragma unroll
        for (int e = 0; e < W; e++) sums[((group * K + k) * LANES + lane) * W + e] = dw[k][e];
    __syncthreads();
    for (int64_t c = threadIdx.x; c < C; c += BWD_THREADS) {
        float total = 0;
        for (int g = 0; g < GROUPS; g++) total += sums[g * (LANES * K * W) + c];
        a.partial[blockIdx.x * C + c] = total;
    }
}

/* dw[c] += sum over blocks of partial[block,c]: DW_LANES threads a column, block i to thread i %
 * DW_LANES, then the threads in order. */
static __global__ void __launch_bounds__(DW_COLUMNS *DW_LANES)
    rms_norm_bwd_dw(const float *partial, int blocks, int64_t C, float *dw) {
    __shared__ float sums[DW_LANES][DW_COLUMNS + 1];
    const int64_t c = (int64_t)blockIdx.x * DW_COLUMNS + threadIdx.x;
    float sum = 0;
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

/* ---- backward, longer rows: x and dy are read twice ---- */

/* slope[n] = rstd^3 mean(g x); a block a row. */
template <class T>
static __global__ void __launch_bounds__(WIDE_THREADS)
    rms_norm_bwd_wide_slope(const __grid_constant__ norm_backward<T> a, float *slope) {
    constexpr int W = 16 / sizeof(T);
    const int64_t n = blockIdx.x;
    const T *x_row = a.x + a.x_rows.offset(n), *dy_row = a.dy + n * a.C;
    float sum = 0;
    for (int64_t c = (int64_t)threadIdx.x * W; c < a.C; c += WIDE_THREADS * W) {
        const piece<T> x = load_piece(x_row + c, a.C - c, a.vector),
                       d = load_piece(dy_row + c, a.C - c, a.vector), w = load_weight(a, c);
#pragma unroll
        for (int e = 0; e < W; e++) sum = fmaf(d[e] * w[e], x[e], sum);
    }
    sum = block_reduce(sum, Sum(), 0);
    const float r = a.rstd[n];
    if (threadIdx.x == 0) slope[n] = sum * r * r * r / (float)a.C;
}

/* A block owns WIDE_ROWS rows of WIDE_THREADS * W columns. */
template <class T>
static __global__ void __launch_bounds__(WIDE_THREADS)
    rms_norm_bwd_wide(const __grid_constant__ norm_backward<T> a, const float *slope) {
    constexpr int W = 16 / sizeof(T);
    const int64_t c = ((int64_t)blockIdx.y * WIDE_THREADS + threadIdx.x) * W;
    const int64_t first = (int64_t)blockIdx.x * WIDE_ROWS;
    if (c >= a.C) return;
    const piece<T> w = load_weight(a, c);
    float dw[W] = {};
    for (int64_t n = first; n < a.N && n < first + WIDE_ROWS; n++) {
        const piece<T> x = load_piece(a.x + a.x_rows.offset(n) + c, a.C - c, a.vector),
                       d = load_piece(a.dy + n * a.C + c, a.C - c, a.vector);
        const float r = a.rstd[n], s = slope[n];
        float out[W];
#pragma unroll
        for (int e = 0; e < W; e++) {
            dw[e] = fmaf(d[e], x[e] * r, dw[e]);
            out[e] = fmaf(d[e] * w[e], r, -(x[e] * s));
        }
        if (a.dx)
            store_piece(a.dx + a.dx_rows.offset(n) + c, pack_piece<T>(out), a.C - c, a.vector);
    }
    if (!a.partial) return;
#pragma unroll
    for (int e = 0; e < W; e++)
        if (c + e < a.C) a.partial[blockIdx.x * a.C + c + e] = dw[e];
}

/* ---- launchers ---- */

/* Calls f(lanes, vectors a thread) for rows of so many vectors: a warp or less where four vectors a
 * thread hold the row, else the fewest threads that do. */
template <class F>
static lg_status with_group(int64_t vectors, F f) {
    if (vectors <= 8) return f(width_of<8>(), width_of<1>());
    if (vectors <= 16) return f(width_of<16>(), width_of<1>());
    if (vectors <= 32) return f(width_of<32>(), width_of<1>());
    if (vectors <= 64) return f(width_of<32>(), width_of<2>());
    if (vectors <= 128) return f(width_of<32>(), width_of<4>());
    if (vectors <= 256) return f(width_of<64>(), width_of<4>());
    if (vectors <= 512) return f(width_of<128>(), width_of<4>());
    if (vectors <= 1024) return f(width_of<256>(), width_of<4>());
    return f(width_of<512>(), width_of<4>());
}

extern "C" lg_status cuda_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                   double eps, lg_tensor *y, lg_tensor *rstd) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    if (N == 0) return LG_OK;
    return dispatch_float(ctx, "rms_norm", x->dtype, [&](auto t) {
        using T = decltype(t);
        constexpr int W = 16 / sizeof(T);
        const bool vector = rows_vectorise<T>(x) && rows_vectorise<T>(w) && rows_vectorise<T>(y);
        return with_group((C + W - 1) / W, [&](auto lanes, auto held) {
            constexpr int LANES = decltype(lanes)::value, K = decltype(held)::value;
            constexpr int threads = LANES > FWD_THREADS ? LANES : FWD_THREADS, ROWS = 4 / K;
            rms_norm_fwd<T, LANES, K, ROWS><<<blocks_for(N, threads / LANES * ROWS, INT32_MAX),
                                              threads, 0, cuda_stream(ctx)>>>(
                (const T *)x->data, rows_of(x), (const T *)(w ? w->data : NULL), (float)eps, N, C,
                vector, (T *)y->data, (float *)rstd->data);
            return cuda_launched(ctx, "rms_norm");
        });
    });
}

/* The walk over the rows, and with `dw` its sums of dw in a.partial, *blocks of them. */
template <class T>
static lg_status backward(lg_context *ctx, norm_backward<T> &a, bool dw, int *blocks) {
    constexpr int W = 16 / sizeof(T);
    const int64_t vectors = (a.C + W - 1) / W;
    const cudaStream_t stream = cuda_stream(ctx);
    void *partial = NULL, *slope;
    if (vectors > 2048) {
        *blocks = (int)((a.N + WIDE_ROWS - 1) / WIDE_ROWS);
        LG_TRY(lg_scratch(ctx, a.N * 4, &slope));
        if (dw) LG_TRY(lg_scratch(ctx, *blocks * a.C * 4, &partial));
        a.partial = (float *)partial;
        rms_norm_bwd_wide_slope<T><<<(unsigned)a.N, WIDE_THREADS, 0, stream>>>(a, (float *)slope);
        const dim3 grid((unsigned)*blocks, blocks_for(vectors, WIDE_THREADS, 65535));
        rms_norm_bwd_wide<T><<<grid, WIDE_THREADS, 0, stream>>>(a, (const float *)slope);
        return cuda_launched(ctx, "rms_norm_backward");
    }
    return with_group(vectors, [&](auto lanes, auto held) {
        constexpr int LANES = decltype(lanes)::value, K = decltype(held)::value;
        constexpr int STAGES = K == 1 ? 4 : 3, GROUPS = BWD_THREADS / LANES;
        /* Short rows: two blocks a multiprocessor, for their partial sums are small. */
        *blocks = (int)blocks_for(a.N, GROUPS, K <= 2 ? 2 * BWD_BLOCKS : BWD_BLOCKS);
        if (dw) LG_TRY(lg_scratch(ctx, *blocks * a.C * 4, &partial));
        a.partial = (float *)partial;
        const auto kernel = rms_norm_bwd<T, LANES, K, STAGES>;
        constexpr int bytes = (STAGES * 2 * BWD_THREADS + LANES) * K * 16;
        LG_TRY(cuda_check(
            ctx, "rms_norm_backward",
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)));
        kernel<<<*blocks, BWD_THREADS, bytes, stream>>>(a);
        return cuda_launched(ctx, "rms_norm_backward");
    });
}

extern "C" lg_status cuda_rms_norm_backward(lg_context *ctx, const lg_tensor *dy,
                                            const lg_tensor *x, const lg_tensor *w,
                                            const lg_tensor *rstd, lg_tensor *dx, lg_tensor *dw) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x);
    if (N == 0 || (!dx && !dw)) return LG_OK;
    return dispatch_float(ctx, "rms_norm_backward", x->dtype, [&](auto t) {
        using T = decltype(t);
        norm_backward<T> a = {
            (const T *)dy->data,
            (const T *)x->data,
            (const T *)(w ? w->data : NULL),
            (const float *)rstd->data,
            (T *)(dx ? dx->data : NULL),
            NULL,
            rows_of(x),
            rows_of(dx ? dx : x),
            N,
            C,
            rows_vectorise<T>(dy) && rows_vectorise<T>(x) && rows_vectorise<T>(w) &&
                rows_vectorise<T>(dx),
        };
        int blocks = 0;
        LG_TRY(backward<T>(ctx, a, dw != NULL, &blocks));
        if (!dw) return LG_OK;
        rms_norm_bwd_dw<<<blocks_for(C, DW_COLUMNS, INT32_MAX), dim3(DW_COLUMNS, DW_LANES), 0,
                          cuda_stream(ctx)>>>(a.partial, blocks, C, (float *)dw->data);
        return cuda_launched(ctx, "rms_norm_backward");
    });
}
