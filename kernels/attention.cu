/* Attention over packed sequences, forward.
 *
 *   y[i,h] = sum_j p[j] v[j],  p = softmax_j(s[j]),  s[j] = scale q[i,h] . k[j],
 *   lse[i,h] = ln sum_j exp(s[j])
 *
 * with options over the keys of a window alone, s[j] = softcap tanh(scale q[i,h] . k[j] / softcap),
 * and with a sink's exponential in the sum.
 *
 * A block owns a tile of queries of one head of one sequence: it reads them once, goes over the
 * sequence's keys and values in tiles (up to the diagonal if causal, from the window on) with a running maximum and
 * sum, and writes its rows of y and lse. Rows do not depend on each other. 16-bit types run on
 * tensor cores with fp32 sums; fp32 runs in fused multiply-adds. */
#include "attention.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "op/attention.h"

template <class T>
struct forward_args {
    head_rows<const T> q, k, v;
    head_rows<T> y;
    float *lse;
    const int32_t *cu;
    int S, N, H, group, d;
    float
        scale; /* above 0; of the 16-bit kernels times log2(e); with a cap what its tanh is times */
    bool negate; /* the scores count negative */
    bool causal, aligned;
    const T *sinks; /* NULL: none */
    int window;     /* at most N: none */
    float cap;      /* 0: none; a product times it goes into the tanh, tanh_fast in 16 bits */
    device_error *error;
};

/* A block without a tile. The grid has one more than tiles can need, which looks the sequences over,
 * with one thread: with all of them the main loops spill more. */
template <class T>
__device__ __forceinline__ void spare_block(const forward_args<T> &a) {
    if (blockIdx.x + 1 == gridDim.x && blockIdx.y == 0 && threadIdx.x == 0)
        check_sequences(a.cu, a.S, a.N, a.error);
}

template <class T>
static dim3 forward_grid(const forward_args<T> &a, int rows) {
    return dim3((unsigned)num_sequence_tiles(a.N, a.S, rows) + 1, (unsigned)a.H);
}

/* A fragment's products become scores, -inf where row `first` + r does not see key j0 + column. */
template <bool Options, class T, int Tiles>
__device__ __forceinline__ void finish_scores(const forward_args<T> &a, float (&s)[Tiles][4],
                                              int first, int j0, int keys, int lane) {
    if (a.negate)
#pragma unroll
        for (int n = 0; n < Tiles; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = -s[n][e];
    if (Options && a.cap != 0)
#pragma unroll
        for (int n = 0; n < Tiles; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = tanh_fast(__fmul_rn(s[n][e], a.cap));
    if (j0 + 8 * Tiles > keys || (a.causal && j0 + 8 * Tiles - 1 > first) ||
        (Options && first + 15 - j0 >= a.window)) {
#pragma unroll
        for (int n = 0; n < Tiles; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int j = j0 + 8 * n + lane % 4 * 2 + e % 2, i = first + lane / 4 + e / 2 * 8;
                if (j >= keys || (a.causal && j > i) || (Options && i - j >= a.window))
                    s[n][e] = -INFINITY;
            }
    }
}

/* A warp's 16 rows from `row` of the tile on leave through those rows of the queries' tile. */
template <class T, int D, int Queries, bool Options>
__device__ __forceinline__ void
finish_rows(const forward_args<T> &a, const sequence_tile &tile, int h, const float (&y)[D / 8][4],
            const float (&top)[2], const float (&sum)[2], uint32_t q, int row, int lane) {
    float factor[2];
    int first = tile.row + row;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float total = quad_reduce(sum[half], Sum());
        int i = first + lane / 4 + 8 * half;
        float lse;
        if constexpr (Options) {
            factor[half] = with_sink(top[half], a.scale, &total, a.sinks, h, &lse);
        } else {
            factor[half] = 1 / total;
            lse = (top[half] * a.scale + log2f(total)) * LN2;
        }
        if (lane % 4 == 0 && i < tile.length) a.lse[(int64_t)(tile.first + i) * a.H + h] = lse;
    }
    store_rows<T, D / 8, Queries>(y, factor, q, row, a.d, a.aligned, lane, [&](int r) {
        return first + r < tile.length ? a.y.row(tile.first + first + r, h) : NULL;
    });
}

/* ---- mma.sync ---- */

/* The tiles of a head size: a warp owns 32 rows, so that a fragment of keys serves two products;
 * 16 at D = 256, where 32 rows of sums do not fit in registers. */
template <int D>
struct forward_tiles {
    static constexpr int Fragments = D > 128 ? 1 : 2, Warps = D > 128 ? 8 : 4, Threads = 32 * Warps;
    static constexpr int Queries = 128, Keys = 64, Panels = (D + 63) / 64,
                         BlocksPerSm = D > 128 ? 1 : 2;
    static constexpr int64_t bytes = (int64_t)Panels * 128 * (Queries + 4 * Keys);
};

template <class T, int D, bool Options>
__global__ void __launch_bounds__(forward_tiles<D>::Threads, forward_tiles<D>::BlocksPerSm)
    attention_forward(forward_args<T> a) {
    using Tiles = forward_tiles<D>;
    constexpr int M = Tiles::Fragments, Keys = Tiles::Keys, Queries = Tiles::Queries,
                  Threads = Tiles::Threads;
    constexpr int KeyBytes = Tiles::Panels * 128 * Keys;
    extern __shared__ __align__(1024) char memory[];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 * M, h = blockIdx.y, g = h / a.group;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, Queries, blockIdx.x, false, &tile)) return spare_block(a);
    uint32_t q = shared_address(memory), k = q + Tiles::Panels * 128 * Queries,
             v = k + 2 * KeyBytes;
    int keys = a.causal ? min(tile.length, tile.row + Queries) : tile.length;
    int begin = first_tile<Options, Keys>(tile.row, a.window);

    auto load_keys = [&](int j0, int stage) {
        load_tile<D, Keys, Threads>(k + stage * KeyBytes, threadIdx.x, a.k.row(tile.first + j0, g),
                                    a.k.token, keys - j0, a.d, a.aligned);
        load_tile<D, Keys, Threads>(v + stage * KeyBytes, threadIdx.x, a.v.row(tile.first + j0, g),
                                    a.v.token, keys - j0, a.d, a.aligned);
    };
    load_tile<D, Queries, Threads>(q, threadIdx.x, a.q.row(tile.first + tile.row, h), a.q.token,
                                   tile.length - tile.row, a.d, a.aligned);
    load_keys(begin, 0);
    copy_commit();

    float y[M][D / 8][4] = {}, top[M][2], sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++) top[m][0] = top[m][1] = no_score<Options>();
    for (int j0 = begin, stage = 0; j0 < keys; j0 += Keys, stage ^= 1) {
        copy_wait<0>();
        __syncthreads();
        if (j0 + Keys < keys) load_keys(j0 + Keys, stage ^ 1);
        copy_commit();
        uint32_t k_tile = k + stage * KeyBytes, v_tile = v + stage * KeyBytes;

        float s[M][Keys / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t x[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) load_a<Queries>(x[m], q, row + 16 * m, c, lane);
#pragma unroll
            for (int n = 0; n < Keys / 16; n++) {
                uint32_t b[4];
                load_b<Keys>(b, k_tile, 16 * n, c, lane);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    product(s[m][2 * n], x[m], b[0], b[1], T());
                    product(s[m][2 * n + 1], x[m], b[2], b[3], T());
                }
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
            finish_scores<Options>(a, s[m], tile.row + row + 16 * m, j0, keys, lane);
            float alpha[2];
            softmax_step(s[m], a.scale, top[m], sum[m], alpha);
#pragma unroll
            for (int n = 0; n < D / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) y[m][n][e] *= alpha[e / 2];
        }
#pragma unroll
        for (int c = 0; c < Keys / 16; c++) {
            uint32_t x[M][4];
#pragma unroll
            for (int m = 0; m < M; m++) accumulators_as_a<T>(x[m], s[m][2 * c], s[m][2 * c + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                uint32_t b[4];
                load_b_rows<Keys>(b, v_tile, 16 * c, n, lane);
#pragma unroll
                for (int m = 0; m < M; m++) {
                    product(y[m][2 * n], x[m], b[0], b[1], T());
                    product(y[m][2 * n + 1], x[m], b[2], b[3], T());
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++)
        finish_rows<T, D, Queries, Options>(a, tile, h, y[m], top[m], sum[m], q, row + 16 * m,
                                            lane);
}

/* ---- wgmma: 16 rows a warp ---- */

/* The scores of the next keys and the product with these values are in flight while the next
 * softmax runs. Registers leave room for two times four warps at D = 128, three times at 64. */
template <int D>
struct hopper_tiles {
    static constexpr int Queries = D > 64 ? 128 : 192, Keys = 128, Threads = 2 * Queries,
                         Panels = D / 64;
    static constexpr int QueryBytes = Panels * 128 * Queries, KeyBytes = Panels * 128 * Keys;
    static constexpr int64_t bytes = 1024 + QueryBytes + 4 * KeyBytes;
};

template <class T, int D, bool Options>
__global__ void __launch_bounds__(hopper_tiles<D>::Threads, 1)
    attention_forward_hopper(forward_args<T> a) {
    using Tiles = hopper_tiles<D>;
    constexpr int Keys = Tiles::Keys, Queries = Tiles::Queries, Threads = Tiles::Threads;
    extern __shared__ __align__(1024) char memory[];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, group_row = threadIdx.x / 128 * 64;
    int h = blockIdx.y, g = h / a.group;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, Queries, blockIdx.x, false, &tile)) return spare_block(a);
    uint32_t q = (shared_address(memory) + 1023) / 1024 * 1024, k = q + Tiles::QueryBytes,
             v = k + 2 * Tiles::KeyBytes;
    int keys = a.causal ? min(tile.length, tile.row + Queries) : tile.length,
        first = tile.row + row, begin = first_tile<Options, Keys>(tile.row, a.window);

    auto load_keys = [&](int j0) {
        if (j0 >= keys) return;
        load_tile<D, Keys, Threads>(k + j0 / Keys % 2 * Tiles::KeyBytes, threadIdx.x,
                                    a.k.row(tile.first + j0, g), a.k.token, keys - j0, a.d,
                                    a.aligned);
    };
    auto load_values = [&](int j0) {
        if (j0 >= keys) return;
        load_tile<D, Keys, Threads>(v + j0 / Keys % 2 * Tiles::KeyBytes, threadIdx.x,
                                    a.v.row(tile.first + j0, g), a.v.token, keys - j0, a.d,
                                    a.aligned);
    };
    float y[D / 8][4] = {}, s[Keys / 8][4], sum[2] = {}, alpha[2],
                top[2] = {no_score<Options>(), no_score<Options>()};
    uint32_t p[Keys / 16][4];
    auto softmax = [&](int j0) {
        finish_scores<Options>(a, s, first, j0, keys, lane);
        softmax_step(s, a.scale, top, sum, alpha);
    };
    auto pack_scores = [&] {
#pragma unroll
        for (int c = 0; c < Keys / 16; c++) accumulators_as_a<T>(p[c], s[2 * c], s[2 * c + 1]);
    };
    load_tile<D, Queries, Threads>(q, threadIdx.x, a.q.row(tile.first + tile.row, h), a.q.token,
                                   tile.length - tile.row, a.d, a.aligned);
    int j0 = begin, stage = begin / Keys % 2;
    load_keys(begin);
    copy_commit();
    load_values(begin);
    load_keys(begin + Keys);
    copy_commit();
    copy_wait<1>();
    fence_async();
    __syncthreads();
    wgmma_fence();
    wgmma_scores<T, D, Queries, Keys>(s, q, group_row, k + stage * Tiles::KeyBytes);
    wgmma_wait<0>();
    wgmma_settled(s);
    softmax(begin);
    pack_scores();
    for (; j0 + Keys < keys; j0 += Keys, stage ^= 1) {
        copy_wait<0>();
        fence_async();
        __syncthreads();
        wgmma_fence();
        wgmma_scores<T, D, Queries, Keys>(s, q, group_row, k + (stage ^ 1) * Tiles::KeyBytes);
        wgmma_values<T, D, Keys>(y, p, v + stage * Tiles::KeyBytes);
        load_values(j0 + Keys);
        load_keys(j0 + 2 * Keys);
        copy_commit();
        wgmma_wait<1>();
        wgmma_settled(s);
        softmax(j0 + Keys);
        wgmma_wait<0>();
        wgmma_settled(y);
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) y[n][e] *= alpha[e / 2];
        pack_scores();
    }
    copy_wait<0>();
    fence_async();
    __syncthreads();
    wgmma_fence();
    wgmma_values<T, D, Keys>(y, p, v + stage * Tiles::KeyBytes);
    wgmma_wait<0>();
    wgmma_settled(y);
    __syncthreads();
    finish_rows<T, D, Queries, Options>(a, tile, h, y, top, sum, q, row, lane);
}

/* ---- fp32 ---- */

template <int D, bool Options>
__global__ void __launch_bounds__(F32_THREADS) attention_forward_f32(forward_args<float> a) {
    extern __shared__ __align__(1024) char memory[];
    constexpr int Rows = 64;
    int h = blockIdx.y, g = h / a.group;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, Rows, blockIdx.x, false, &tile)) return spare_block(a);
    auto token = [&](int r) { return (int64_t)tile.first + tile.row + r; };
    score_rule rule = {a.causal ? min(tile.length, tile.row + Rows) : tile.length,
                       a.causal ? tile.row : -1,
                       a.window,
                       a.scale,
                       a.cap,
                       a.sinks != NULL};
    attend_f32<D, Rows / 16, Options>(
        (float *)memory, rule, a.d,
        [&](int r) { return tile.row + r < tile.length ? a.q.row(token(r), h) : NULL; },
        [&](int j) { return a.k.row(tile.first + j, g); },
        [&](int j) { return a.v.row(tile.first + j, g); }, [&](int) { return a.sinks[h]; },
        [&](int r) { return tile.row + r < tile.length ? a.y.row(token(r), h) : NULL; },
        [&](int r, float lse) { a.lse[token(r) * a.H + h] = lse; });
}

/* ---- launchers ---- */

template <class T, int D, bool Options>
static lg_status launch_forward(lg_context *ctx, const forward_args<T> &a) {
    using Tiles = forward_tiles<D>;
    return launch(ctx, "attention", attention_forward<T, D, Options>,
                  forward_grid(a, Tiles::Queries), Tiles::Threads, Tiles::bytes, a);
}

template <class T, int D, bool Options>
static lg_status launch_forward_hopper(lg_context *ctx, const forward_args<T> &a) {
    using Tiles = hopper_tiles<D>;
    return launch(ctx, "attention", attention_forward_hopper<T, D, Options>,
                  forward_grid(a, Tiles::Queries), Tiles::Threads, Tiles::bytes, a);
}

template <int D, bool Options>
static lg_status launch_forward_f32(lg_context *ctx, const forward_args<float> &a) {
    return launch(ctx, "attention", attention_forward_f32<D, Options>, forward_grid(a, 64),
                  F32_THREADS, attend_f32_bytes<D, 4>(), a);
}

/* A head size runs in the next larger one that there is. */
template <bool Options>
static lg_status forward_of_size(lg_context *ctx, forward_args<float> a, double softcap) {
    natural_scores(&a.scale, &a.cap, softcap);
    if (a.d <= 64) return launch_forward_f32<64, Options>(ctx, a);
    if (a.d <= 128) return launch_forward_f32<128, Options>(ctx, a);
    return launch_forward_f32<256, Options>(ctx, a);
}

template <bool Options, class T>
static lg_status forward_of_size(lg_context *ctx, forward_args<T> a, double softcap) {
    base2_scores(&a.scale, &a.negate, &a.cap, softcap);
    if (has_wgmma() && a.d <= 128)
        return a.d <= 64 ? launch_forward_hopper<T, 64, Options>(ctx, a)
                         : launch_forward_hopper<T, 128, Options>(ctx, a);
    if (a.d <= 32) return launch_forward<T, 32, Options>(ctx, a);
    if (a.d <= 64) return launch_forward<T, 64, Options>(ctx, a);
    if (a.d <= 96) return launch_forward<T, 96, Options>(ctx, a);
    if (a.d <= 128) return launch_forward<T, 128, Options>(ctx, a);
    return launch_forward<T, 256, Options>(ctx, a);
}

extern "C" lg_status cuda_attention(lg_context *ctx, const lg_tensor *q, const lg_tensor *k,
                                    const lg_tensor *v, const lg_tensor *cu_seqlens,
                                    const lg_tensor *sinks, double scale, bool causal,
                                    int64_t window, double softcap, lg_tensor *y, lg_tensor *lse) {
    int64_t N = q->shape[0], H = q->shape[1], D = q->shape[2], G = k->shape[1],
            S = cu_seqlens->shape[0] - 1;
    LG_TRY(check_attention(ctx, "attention", H, G, D, causal, window, softcap));
    if (N == 0 || S == 0 || H == 0) return LG_OK;
    return dispatch_float(ctx, "attention", q->dtype, [&](auto t) {
        using T = decltype(t);
        forward_args<T> a = {heads_of<const T>(q),
                             heads_of<const T>(k),
                             heads_of<const T>(v),
                             heads_of<T>(y),
                             (float *)lse->data,
                             (const int32_t *)cu_seqlens->data,
                             (int)S,
                             (int)N,
                             (int)H,
                             (int)(H / G),
                             (int)D,
                             (float)scale,
                             false,
                             causal,
                             heads_aligned(q) && heads_aligned(k) && heads_aligned(v) &&
                                 heads_aligned(y),
                             sinks ? (const T *)sinks->data : NULL,
                             window_within(window, N),
                             0,
                             cuda_error_slot(ctx, "attention")};
        return with_options(sinks || a.window < N || softcap != 0, [&](auto options) {
            return forward_of_size<decltype(options)::value != 0>(ctx, a, softcap);
        });
    });
}
