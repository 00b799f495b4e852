/* Normalisation of rows: RMS norm, RMS norm of a sum, layer norm; one set of kernels, cut to each at
 * compile time. With xc = x (layer norm: x - mean), rstd = 1 / sqrt(mean(xc^2) + eps) and f the factor of
 * a column: y = f xc rstd (+ b). With g = dy f and a = rstd^3 mean(g xc): dx = rstd g - a xc, less rstd
 * mean(g) in layer norm, plus ds for a sum; dw += sum over rows of dy xc rstd, db += sum of dy.
 *
 * A group of LANES threads owns a row at a time, K pieces of 16 bytes a thread, so that x (and dy)
 * is read once; thread l's piece k has columns (k LANES + l) W on. Forward: a group owns ROWS rows,
 * all loaded before the first is summed; rows longer than a group holds are read again for each sum.
 * Backward: GROUPS groups a block walk over the rows, the next rows on their way to shared memory
 * meanwhile; each thread keeps the sums of its columns, a block writes them to partial[block,C], and
 * norm_bwd_dw adds the blocks in order. How rows go to blocks depends on N and C alone, so the
 * bits do; whether 16 bytes are read at once or one by one changes none.
 */
#ifndef LIGER_NORM_CUH
#define LIGER_NORM_CUH

#include "piece.cuh"

/* What a kernel normalises: a sum of these. */
enum {
    NORM_RMS = 0,      /* f = w; in bf16 x rstd is rounded before the product, as Llama does */
    NORM_OFFSET = 1,   /* f = offset + w in fp32, rounded before the product or not */
    NORM_ADD = 2,      /* x + residual; the backward has a ds */
    NORM_CENTERED = 4, /* layer norm */
};

enum { FWD_THREADS = 256 /* or LANES, if more */ };

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

/* Two sums at one barrier; `room` is [2, 2, warps of the block]. */
template <int LANES>
__device__ __forceinline__ float2 group_sums(float x, float y, float *room, int turn) {
    if (LANES <= 32)
        return make_float2(warp_reduce<(LANES < 32 ? LANES : 32)>(x, Sum()),
                           warp_reduce<(LANES < 32 ? LANES : 32)>(y, Sum()));
    constexpr int WARPS = LANES / 32;
    const int group = threadIdx.x / LANES, warp = threadIdx.x / 32;
    float2 *sums = (float2 *)room + (turn & 1) * 32;
    x = warp_reduce(x, Sum()), y = warp_reduce(y, Sum());
    if (threadIdx.x % 32 == 0) sums[warp] = make_float2(x, y);
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(LANES < 32 ? 32 : LANES) : "memory");
    float2 sum = sums[group * WARPS];
#pragma unroll
    for (int i = 1; i < WARPS; i++) {
        const float2 other = sums[group * WARPS + i];
        sum.x += other.x, sum.y += other.y;
    }
    return sum;
}

/* ---- forward ---- */

/* Everything that the forward reads and writes. */
template <class T>
struct norm_forward {
    const T *x, *residual, *w, *b;
    strided_rows x_rows;
    float eps, offset;
    bool round;
    int64_t N, C;
    bool vector;
    T *s, *y;
    float *mean, *rstd;
};

/* w x rstd; without a weight it counts as 1. In bf16 x rstd is rounded before the product; the product
 * of two bf16 numbers is exact in fp32, and the pair's is rounded once. */
template <class T>
__device__ __forceinline__ piece<T> llama_scaled(const piece<T> &x, float rstd,
                                                 const piece<T> &weight, bool weighted) {
    float y[x.N];
#pragma unroll
    for (int e = 0; e < x.N; e++) y[e] = weighted ? x[e] * rstd * weight[e] : x[e] * rstd;
    return pack_piece<T>(y);
}
__device__ __forceinline__ piece<bf16> llama_scaled(const piece<bf16> &x, float rstd,
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

template <int KIND, class T>
__device__ __forceinline__ piece<T> normalised(const norm_forward<T> &a, const piece<T> &x,
                                               float mean, float rstd, const piece<T> &weight,
                                               const piece<T> &bias) {
    if constexpr (KIND & NORM_CENTERED) {
        float y[x.N];
#pragma unroll
        for (int e = 0; e < x.N; e++) {
            y[e] = fmaf((x[e] - mean) * rstd, weight[e], bias[e]);
        }
        return pack_piece<T>(y);
    } else if constexpr (KIND & NORM_OFFSET) {
        float y[x.N];
#pragma unroll
        for (int e = 0; e < x.N; e++) {
            y[e] = x[e] * rstd;
            if (a.round) y[e] = to_float(from_float<T>(y[e]));
            if (a.w) y[e] *= a.offset + weight[e];
        }
        return pack_piece<T>(y);
    } else {
        return llama_scaled(x, rstd, weight, a.w != NULL);
    }
}

template <class T>
__device__ __forceinline__ piece<T> sum_of(const piece<T> &x, const piece<T> &y) {
    float s[x.N];
#pragma unroll
    for (int e = 0; e < x.N; e++) s[e] = x[e] + y[e];
    return pack_piece<T>(s);
}

/* Index: what columns are counted in; 32 bits where a group holds a row. */
template <class Index, class T, int KIND, int LANES, int K, int ROWS>
static __global__ void __launch_bounds__(LANES > FWD_THREADS ? LANES : FWD_THREADS)
    norm_fwd(const __grid_constant__ norm_forward<T> a) {
    constexpr int W = 16 / sizeof(T);
    constexpr Index HELD = LANES * K * W;
    constexpr bool CENTERED = KIND & NORM_CENTERED, HOLDS = sizeof(Index) == 4;
    __shared__ float room[64];
    const int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES * ROWS;
    const Index C = (Index)a.C, end = HOLDS ? HELD : C;
    const int lane = threadIdx.x % LANES;
    const T *x_row[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        x_row[i] = first + i < a.N ? a.x + a.x_rows.offset(first + i) : NULL;

    piece<T> v[ROWS][K], weight[K], bias[CENTERED ? K : 1] = {};
    const auto column = [&](int k) { return (k * LANES + lane) * W; };
    const auto load_weights = [&](Index c0) {
#pragma unroll
        for (int k = 0; k < K; k++) {
            const Index c = c0 + column(k);
            if (a.w) weight[k] = load_piece(a.w + c, C - c, a.vector);
            if (!CENTERED) continue;
            if (a.b) bias[CENTERED ? k : 0] = load_piece(a.b + c, C - c, a.vector);
            if (!a.w) {
                float one[W];
#pragma unroll
                for (float &e : one) e = 1;
                weight[k] = pack_piece<T>(one);
            }
        }
    };
    const auto load_rows = [&](const T *const *row, Index c0, piece<T>(*to)[K]) {
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int k = 0; k < K; k++)
                to[i][k] =
                    load_piece(row[i] + c0 + column(k), row[i] ? C - c0 - column(k) : 0, a.vector);
    };
    /* s = x + residual takes the place of x, in memory too: a second reading is of s. */
    const auto load_sums = [&](Index c0) {
        const T *other[ROWS];
        piece<T> r[ROWS][K];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            other[i] = first + i < a.N ? a.residual + (first + i) * C : NULL;
        load_rows(x_row, c0, v);
        load_rows(other, c0, r);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int k = 0; k < K; k++) {
                v[i][k] = sum_of(v[i][k], r[i][k]);
                if (other[i])
                    store_piece(a.s + (first + i) * C + c0 + column(k), v[i][k], C - c0 - column(k),
                                a.vector);
            }
    };

    if (!CENTERED) load_weights(0); /* layer norm has two sums to wait for: later */
    float mean[ROWS] = {}, sum[ROWS] = {};
    if constexpr (CENTERED) {
        for (Index c0 = 0; c0 < end; c0 += HELD) {
            load_rows(x_row, c0, v);
#pragma unroll
            for (int i = 0; i < ROWS; i++)
#pragma unroll
                for (int k = 0; k < K; k++)
#pragma unroll
                    for (int e = 0; e < W; e++) mean[i] += v[i][k][e];
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            mean[i] = group_sum<LANES>(mean[i], room, i) / (float)C;
            if (lane == 0 && x_row[i]) a.mean[first + i] = mean[i];
        }
    }
    for (Index c0 = 0; c0 < end; c0 += HELD) {
        if constexpr (KIND & NORM_ADD)
            load_sums(c0);
        else if (!CENTERED || !HOLDS)
            load_rows(x_row, c0, v);
#pragma unroll
        for (int k = 0; k < K; k++) {
            const Index left = C - c0 - column(k);
            const auto add = [&](bool whole) {
#pragma unroll
                for (int i = 0; i < ROWS; i++)
#pragma unroll
                    for (int e = 0; e < W; e++) {
                        const float x = CENTERED ? v[i][k][e] - mean[i] : v[i][k][e];
                        if (whole || e < left) sum[i] = fmaf(x, x, sum[i]);
                    }
            };
            if (CENTERED && left < W) /* zeros past the row's end are not the mean */
                add(false);
            else
                add(true);
        }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        sum[i] = group_sum<LANES>(sum[i], room, (CENTERED ? ROWS : 0) + i);
        sum[i] = 1.0f / sqrtf(sum[i] / (float)C + a.eps);
        if (lane == 0 && x_row[i]) a.rstd[first + i] = sum[i];
        if (KIND & NORM_ADD) x_row[i] = x_row[i] ? a.s + (first + i) * C : NULL;
    }
    for (Index c0 = 0; c0 < end; c0 += HELD) {
        if (CENTERED) asm volatile("" ::: "memory"); /* not before: registers are for more rows */
        if (CENTERED || !HOLDS) load_weights(c0);
        if (!HOLDS) load_rows(x_row, c0, v);
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int k = 0; k < K; k++) {
                repack(v[i][k]);
                if (x_row[i])
                    store_piece(a.y + (first + i) * C + c0 + column(k),
                                normalised<KIND>(a, v[i][k], mean[i], sum[i], weight[k],
                                                 bias[CENTERED ? k : 0]),
                                C - c0 - column(k), a.vector);
            }
    }
}

/* ---- launches ---- */

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

template <int KIND, class T>
static lg_status launch_norm(lg_context *ctx, const char *op, const norm_forward<T> &a) {
    constexpr int W = 16 / sizeof(T);
    return with_group((a.C + W - 1) / W, [&](auto lanes, auto held) {
        constexpr int LANES = decltype(lanes)::value, K = decltype(held)::value;
        constexpr int threads = LANES > FWD_THREADS ? LANES : FWD_THREADS, ROWS = 4 / K;
        const unsigned blocks = blocks_for(a.N, threads / LANES * ROWS, INT32_MAX);
        if (a.C <= LANES * K * W)
            norm_fwd<int, T, KIND, LANES, K, ROWS><<<blocks, threads, 0, cuda_stream(ctx)>>>(a);
        else if constexpr (LANES == 512)
            norm_fwd<int64_t, T, KIND, LANES, K, ROWS><<<blocks, threads, 0, cuda_stream(ctx)>>>(a);
        return cuda_launched(ctx, op);
    });
}

#endif
