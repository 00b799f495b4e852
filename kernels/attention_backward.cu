/* Attention over packed sequences, backward. With s the scaled score, p = exp(s - lse) and delta =
 * dy . y:
 *
 *   ds = p (dy . v - delta),  dq = scale sum_j ds k,  dk = scale sum_i ds q,  dv = sum_i p dy
 *
 * with options over the keys of a window alone, ds times 1 - (s / softcap)^2, and
 * dsinks -= sum_i exp(sinks - lse) delta.
 *
 * Three launches and one for sinks, no atomics: delta; dk and dv, where a block owns a tile of keys of one key/value
 * head and goes over the query heads of its group, h ascending, and over their tiles of queries;
 * dq, where a block owns a tile of queries of one head and goes over the tiles of keys. Scores are
 * computed again in both. 16-bit types run on tensor cores with fp32 sums; fp32 runs in fused
 * multiply-adds. */
#include "attention.cuh"
#include "element.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "op/attention.h"

template <class T>
struct backward_args {
    head_rows<const T> dy, q, k, v, y;
    head_rows<T> dq, dk, dv;
    const float *lse;
    float *delta; /* [N, H] */
    const int32_t *cu;
    int S, N, H, group, d;
    float scale;
    bool causal, aligned;
    const T *sinks; /* NULL: none */
    float *dsinks;
    int window; /* at most N: none */
    float cap,
        large; /* as in the forward: scores are large tanh(cap x), or large x where cap is 0 */
};

/* The end of the queries that see any of a tile's keys. */
template <bool Options, int Rows, class T>
__device__ __forceinline__ int queries_end(const backward_args<T> &a, const sequence_tile &tile) {
    return Options ? min(tile.length, tile.row + Rows - 1 + a.window) : tile.length;
}

/* A warp owns a row of one head. */
template <class T>
__global__ void __launch_bounds__(256) attention_backward_delta(backward_args<T> a) {
    int64_t at = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (at >= (int64_t)a.N * a.H) return;
    const T *dy = a.dy.row(at / a.H, at % a.H), *y = a.y.row(at / a.H, at % a.H);
    float sum = 0;
    for (int d = threadIdx.x % 32; d < a.d; d += 32)
        sum = fmaf(to_float(dy[d]), to_float(y[d]), sum);
    sum = warp_reduce(sum, Sum());
    if (threadIdx.x % 32 == 0) a.delta[at] = sum;
}

/* A block owns a head. */
template <class T>
__global__ void __launch_bounds__(1024) attention_backward_sinks(backward_args<T> a) {
    int h = blockIdx.x;
    float sink = to_float(a.sinks[h]);
    double sum = 0;
#pragma unroll 4
    for (int64_t n = threadIdx.x; n < a.N; n += 1024) {
        int64_t at = n * a.H + h;
        sum += (double)expf(sink - a.lse[at]) * a.delta[at];
    }
    sum = block_all(sum, Add(), 0.0);
    if (threadIdx.x == 0) a.dsinks[h] -= (float)sum;
}

/* ---- tensor cores ---- */

/* A warp owns 16 rows: keys in dk/dv, queries in dq. Above D = 128 the sums of a row do not fit in
 * registers: a block of dk/dv makes one slice of 128 columns, and tiles are not doubled. */
template <int D>
struct backward_tiles {
    static constexpr int Threads = 256, Rows = 128, Columns = 64, Panels = (D + 63) / 64;
    static constexpr int Stages = D > 128 ? 1 : 2, Slice = D > 128 ? 128 : D,
                         Slices = (D + Slice - 1) / Slice;
    static constexpr int RowBytes = Panels * 128 * Rows, ColumnBytes = Panels * 128 * Columns;
    static constexpr int64_t bytes =
        1024 + 2 * RowBytes + Stages * (2 * ColumnBytes + 2 * Columns * 4);
};

/* The two products of the backward by mma.sync, done on return. */
struct warp_products {
    /* c = a tile's 16 rows of this warp times the rows of `columns`, over all D. */
    template <class T, int D, int Rows, int Columns>
    static __device__ __forceinline__ void scores(float (&c)[Columns / 8][4], uint32_t rows,
                                                  uint32_t columns) {
        int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
#pragma unroll
        for (int n = 0; n < Columns / 8; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll
        for (int k = 0; k < D / 16; k++) {
            uint32_t a[4];
            load_a<Rows>(a, rows, row, k, lane);
#pragma unroll
            for (int n = 0; n < Columns / 16; n++) {
                uint32_t b[4];
                load_b<Columns>(b, columns, 16 * n, k, lane);
                product(c[2 * n], a, b[0], b[1], T());
                product(c[2 * n + 1], a, b[2], b[3], T());
            }
        }
    }
    /* sum += p times the tile `columns`, its columns from `slice` on. */
    template <class T, int Slice, int Columns>
    static __device__ __forceinline__ void add(float (&sum)[Slice / 8][4],
                                               const uint32_t (&p)[Columns / 16][4],
                                               uint32_t columns, int slice) {
#pragma unroll
        for (int k = 0; k < Columns / 16; k++)
#pragma unroll
            for (int n = 0; n < Slice / 16; n++) {
                uint32_t b[4];
                load_b_rows<Columns>(b, columns, 16 * k, slice / 16 + n, threadIdx.x % 32);
                product(sum[2 * n], p[k], b[0], b[1], T());
                product(sum[2 * n + 1], p[k], b[2], b[3], T());
            }
    }
    static __device__ __forceinline__ void ready() { __syncthreads(); }
    static __device__ __forceinline__ void begin() {}
    template <int Pending, int Tiles>
    static __device__ __forceinline__ void wait(float (&)[Tiles][4]) {}
};

/* The same by wgmma: in flight until waited for, in the order of their calls. */
struct warpgroup_products {
    template <class T, int D, int Rows, int Columns>
    static __device__ __forceinline__ void scores(float (&c)[Columns / 8][4], uint32_t rows,
                                                  uint32_t columns) {
        wgmma_scores<T, D, Rows, Columns>(c, rows, threadIdx.x / 128 * 64, columns);
    }
    template <class T, int Slice, int Columns>
    static __device__ __forceinline__ void
    add(float (&sum)[Slice / 8][4], const uint32_t (&p)[Columns / 16][4], uint32_t columns, int) {
        wgmma_values<T, Slice, Columns>(sum, p, columns);
    }
    /* Makes the block's copies visible to the products. */
    static __device__ __forceinline__ void ready() {
        fence_async();
        __syncthreads();
    }
    static __device__ __forceinline__ void begin() { wgmma_fence(); }
    template <int Pending, int Tiles>
    static __device__ __forceinline__ void wait(float (&sum)[Tiles][4]) {
        wgmma_wait<Pending>();
        wgmma_settled(sum);
    }
};

template <class T, int Columns>
__device__ __forceinline__ void pack_rows(uint32_t (&a)[Columns / 16][4],
                                          const float (&c)[Columns / 8][4]) {
#pragma unroll
    for (int k = 0; k < Columns / 16; k++) accumulators_as_a<T>(a[k], c[2 * k], c[2 * k + 1]);
}

/* A tile of products becomes probabilities, given what is subtracted from their scores; `slope` is
 * what passes the cap of a gradient. Not seen: 0. */
template <class T, class Shift, class Seen>
__device__ __forceinline__ void probabilities(const backward_args<T> &a, float (&p)[4],
                                              float (&slope)[4], Shift shift, Seen seen) {
    float scale = a.large * LOG2E;
#pragma unroll
    for (int e = 0; e < 4; e++) slope[e] = 1;
    if (a.cap != 0)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            p[e] = tanh_fast(__fmul_rn(p[e], a.cap));
            slope[e] = fmaf(-p[e], p[e], 1.0f);
        }
#pragma unroll
    for (int e = 0; e < 4; e++) p[e] = seen(e) ? exp2_fast(fmaf(p[e], scale, -shift(e))) : 0.0f;
}

template <class Products, class T, int D, bool Options>
__global__ void __launch_bounds__(256, 1) attention_backward_dkdv(backward_args<T> a) {
    using Tiles = backward_tiles<D>;
    constexpr int Rows = Tiles::Rows, Columns = Tiles::Columns, Slice = Tiles::Slice,
                  Stages = Tiles::Stages;
    extern __shared__ __align__(1024) char memory[];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, g = blockIdx.y,
        slice = blockIdx.z * Slice;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, Rows, blockIdx.x, true, &tile)) return;
    uint32_t k = (shared_address(memory) + 1023) / 1024 * 1024, v = k + Tiles::RowBytes,
             columns = v + Tiles::RowBytes;
    float *statistics =
        (float *)(memory + (columns + Stages * 2 * Tiles::ColumnBytes - shared_address(memory)));

    /* Tiles of queries of the group's heads, one after the other. */
    int first = a.causal ? tile.row / Columns : 0, end = queries_end<Options, Rows>(a, tile),
        per_head = (end + Columns - 1) / Columns - first;
    int num_tiles = per_head * a.group;
    auto load_queries = [&](int number, int stage) {
        int h = g * a.group + number / per_head, i0 = (first + number % per_head) * Columns;
        uint32_t q = columns + stage * 2 * Tiles::ColumnBytes;
        load_tile<D, Columns, 256>(q, threadIdx.x, a.q.row(tile.first + i0, h), a.q.token,
                                   tile.length - i0, a.d, a.aligned);
        load_tile<D, Columns, 256>(q + Tiles::ColumnBytes, threadIdx.x,
                                   a.dy.row(tile.first + i0, h), a.dy.token, tile.length - i0, a.d,
                                   a.aligned);
        if (threadIdx.x < Columns) {
            int i = i0 + threadIdx.x;
            int64_t at = (int64_t)(tile.first + i) * a.H + h;
            /* p = 0 beyond the sequence */
            statistics[stage * 2 * Columns + threadIdx.x] =
                i < tile.length ? a.lse[at] * LOG2E : INFINITY;
            statistics[stage * 2 * Columns + Columns + threadIdx.x] =
                i < tile.length ? a.delta[at] : 0.0f;
        }
    };
    load_tile<D, Rows, 256>(k, threadIdx.x, a.k.row(tile.first + tile.row, g), a.k.token,
                            tile.length - tile.row, a.d, a.aligned);
    load_tile<D, Rows, 256>(v, threadIdx.x, a.v.row(tile.first + tile.row, g), a.v.token,
                            tile.length - tile.row, a.d, a.aligned);
    load_queries(0, 0);
    copy_commit();

    float dk[Slice / 8][4] = {}, dv[Slice / 8][4] = {}, scale_log2 = a.scale * LOG2E;
    for (int number = 0; number < num_tiles; number++) {
        int stage = Stages > 1 ? number & 1 : 0;
        if (Stages == 1 && number > 0) {
            __syncthreads();
            load_queries(number, 0);
            copy_commit();
        }
        copy_wait<0>();
        Products::ready();
        uint32_t q = columns + stage * 2 * Tiles::ColumnBytes, dy = q + Tiles::ColumnBytes;
        const float *lse = statistics + stage * 2 * Columns, *delta = lse + Columns;
        int i0 = (first + number % per_head) * Columns;

        float p[Columns / 8][4], ds[Columns / 8][4];
        uint32_t packed_p[Columns / 16][4], packed_ds[Columns / 16][4];
        Products::begin();
        Products::template scores<T, D, Rows, Columns>(p, k, q);
        Products::template scores<T, D, Rows, Columns>(ds, v, dy);
        if (Stages > 1) {
            if (number + 1 < num_tiles) load_queries(number + 1, stage ^ 1);
            copy_commit();
        }
        Products::template wait<1>(p);
        if constexpr (Options) {
            float slope[2][4];
#pragma unroll
            for (int n = 0; n < Columns / 8; n++) {
                float2 shift = *(const float2 *)(lse + 8 * n + lane % 4 * 2);
                probabilities(
                    a, p[n], slope[n % 2], [&](int e) { return e % 2 ? shift.y : shift.x; },
                    [&](int e) {
                        int i = i0 + 8 * n + lane % 4 * 2 + e % 2,
                            j = tile.row + row + lane / 4 + e / 2 * 8;
                        return !(a.causal && j > i) && i - j < a.window;
                    });
                if (n % 2 == 0) continue;
                accumulators_as_a<T>(packed_p[n / 2], p[n - 1], p[n]);
#pragma unroll
                for (int e = 0; e < 4; e++) p[n - 1][e] *= slope[0][e], p[n][e] *= slope[1][e];
            }
        } else {
#pragma unroll
            for (int n = 0; n < Columns / 8; n++) {
                float2 shift = *(const float2 *)(lse + 8 * n + lane % 4 * 2);
#pragma unroll
                for (int e = 0; e < 4; e++)
                    p[n][e] = exp2_fast(fmaf(p[n][e], scale_log2, e % 2 ? -shift.y : -shift.x));
            }
            if (a.causal && i0 < tile.row + row + 15) {
#pragma unroll
                for (int n = 0; n < Columns / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int i = i0 + 8 * n + lane % 4 * 2 + e % 2,
                            j = tile.row + row + lane / 4 + e / 2 * 8;
                        if (j > i) p[n][e] = 0;
                    }
            }
            pack_rows<T, Columns>(packed_p, p);
        }
        Products::begin();
        Products::template add<T, Slice, Columns>(dv, packed_p, dy, slice);
        Products::template wait<1>(ds);
#pragma unroll
        for (int n = 0; n < Columns / 8; n++) {
            float2 shift = *(const float2 *)(delta + 8 * n + lane % 4 * 2);
#pragma unroll
            for (int e = 0; e < 4; e++)
                ds[n][e] = p[n][e] * (ds[n][e] - (e % 2 ? shift.y : shift.x));
        }
        pack_rows<T, Columns>(packed_ds, ds);
        Products::begin();
        Products::template add<T, Slice, Columns>(dk, packed_ds, q, slice);
        Products::template wait<0>(dk);
        Products::template wait<0>(dv);
    }
    /* The results leave through the rows of k and v that only this warp reads; a slice's columns
     * come first there. */
    __syncthreads();
    float by_scale[2] = {a.scale, a.scale}, by_one[2] = {1, 1};
    auto store = [&](const float(&sum)[Slice / 8][4], const float(&factor)[2], uint32_t through,
                     const head_rows<T> &to) {
        if (!to.data) return;
        store_rows<T, Slice / 8, Rows>(
            sum, factor, through, row, a.d - slice, a.aligned, lane, [&](int r) {
                int j = tile.row + row + r;
                return j < tile.length ? to.row(tile.first + j, g) + slice : NULL;
            });
    };
    store(dk, by_scale, k, a.dk);
    store(dv, by_one, v, a.dv);
}

template <class Products, class T, int D, bool Options>
__global__ void __launch_bounds__(256, D > 64 ? 1 : 2) attention_backward_dq(backward_args<T> a) {
    using Tiles = backward_tiles<D>;
    constexpr int Rows = Tiles::Rows, Columns = Tiles::Columns, Stages = Tiles::Stages;
    extern __shared__ __align__(1024) char memory[];
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, h = blockIdx.y, g = h / a.group;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, Rows, blockIdx.x, false, &tile)) return;
    uint32_t q = (shared_address(memory) + 1023) / 1024 * 1024, dy = q + Tiles::RowBytes,
             columns = dy + Tiles::RowBytes;
    int keys = a.causal ? min(tile.length, tile.row + Rows) : tile.length,
        begin = first_tile<Options, Columns>(tile.row, a.window);
    auto load_keys = [&](int j0, int stage) {
        uint32_t k = columns + stage * 2 * Tiles::ColumnBytes;
        load_tile<D, Columns, 256>(k, threadIdx.x, a.k.row(tile.first + j0, g), a.k.token,
                                   keys - j0, a.d, a.aligned);
        load_tile<D, Columns, 256>(k + Tiles::ColumnBytes, threadIdx.x, a.v.row(tile.first + j0, g),
                                   a.v.token, keys - j0, a.d, a.aligned);
    };
    load_tile<D, Rows, 256>(q, threadIdx.x, a.q.row(tile.first + tile.row, h), a.q.token,
                            tile.length - tile.row, a.d, a.aligned);
    load_tile<D, Rows, 256>(dy, threadIdx.x, a.dy.row(tile.first + tile.row, h), a.dy.token,
                            tile.length - tile.row, a.d, a.aligned);
    load_keys(begin, Stages > 1 ? begin / Columns & 1 : 0);
    copy_commit();
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int i = tile.row + row + lane / 4 + 8 * half;
        int64_t at = (int64_t)(tile.first + i) * a.H + h;
        lse[half] = i < tile.length ? a.lse[at] * LOG2E : INFINITY;
        delta[half] = i < tile.length ? a.delta[at] : 0.0f;
    }

    float dq[D / 8][4] = {}, scale_log2 = a.scale * LOG2E;
    for (int j0 = begin; j0 < keys; j0 += Columns) {
        int stage = Stages > 1 ? j0 / Columns & 1 : 0;
        if (Stages == 1 && j0 > begin) {
            __syncthreads();
            load_keys(j0, 0);
            copy_commit();
        }
        copy_wait<0>();
        Products::ready();
        uint32_t k = columns + stage * 2 * Tiles::ColumnBytes, v = k + Tiles::ColumnBytes;
        float p[Columns / 8][4], ds[Columns / 8][4];
        uint32_t packed[Columns / 16][4];
        Products::begin();
        Products::template scores<T, D, Rows, Columns>(p, q, k);
        Products::template scores<T, D, Rows, Columns>(ds, dy, v);
        if (Stages > 1) {
            if (j0 + Columns < keys) load_keys(j0 + Columns, stage ^ 1);
            copy_commit();
        }
        Products::template wait<1>(p);
        if constexpr (Options) {
#pragma unroll
            for (int n = 0; n < Columns / 8; n++) {
                float slope[4];
                probabilities(
                    a, p[n], slope, [&](int e) { return lse[e / 2]; },
                    [&](int e) {
                        int j = j0 + 8 * n + lane % 4 * 2 + e % 2,
                            i = tile.row + row + lane / 4 + e / 2 * 8;
                        return j < keys && !(a.causal && j > i) && i - j < a.window;
                    });
#pragma unroll
                for (int e = 0; e < 4; e++) p[n][e] *= slope[e];
            }
        } else {
#pragma unroll
            for (int n = 0; n < Columns / 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    p[n][e] = exp2_fast(fmaf(p[n][e], scale_log2, -lse[e / 2]));
            if (j0 + Columns > keys || (a.causal && j0 + Columns - 1 > tile.row + row)) {
#pragma unroll
                for (int n = 0; n < Columns / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        int j = j0 + 8 * n + lane % 4 * 2 + e % 2,
                            i = tile.row + row + lane / 4 + e / 2 * 8;
                        if (j >= keys || (a.causal && j > i)) p[n][e] = 0;
                    }
            }
        }
        Products::template wait<0>(ds);
#pragma unroll
        for (int n = 0; n < Columns / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) ds[n][e] = p[n][e] * (ds[n][e] - delta[e / 2]);
        pack_rows<T, Columns>(packed, ds);
        Products::begin();
        Products::template add<T, D, Columns>(dq, packed, k, 0);
        Products::template wait<0>(dq);
    }
    __syncthreads();
    float by_scale[2] = {a.scale, a.scale};
    store_rows<T, D / 8, Rows>(dq, by_scale, q, row, a.d, a.aligned, lane, [&](int r) {
        int i = tile.row + row + r;
        return i < tile.length ? a.dq.row(tile.first + i, h) : NULL;
    });
}

/* ---- fp32: tiles of 32 queries and 32 keys, a thread owns 2 by 2 of their scores ---- */

constexpr int TILE_F32 = 32, PITCH_F32 = 33;

template <int D>
constexpr int64_t backward_f32_bytes() {
    return (int64_t)(4 * TILE_F32 * (D + 4) + 2 * TILE_F32 * PITCH_F32 + 2 * TILE_F32) * 4;
}

/* Shared memory of both kernels: tiles of the four inputs, p and ds with the block's own rows
 * first, statistics. */
template <int D>
struct backward_f32_memory {
    float *q, *dy, *k, *v, *p, *ds, *lse, *delta;
    __device__ explicit backward_f32_memory(void *memory) {
        q = (float *)memory;
        dy = q + TILE_F32 * (D + 4);
        k = dy + TILE_F32 * (D + 4);
        v = k + TILE_F32 * (D + 4);
        p = v + TILE_F32 * (D + 4);
        ds = p + TILE_F32 * PITCH_F32;
        lse = ds + TILE_F32 * PITCH_F32;
        delta = lse + TILE_F32;
    }
};

template <int D>
__device__ __forceinline__ void load_queries_f32(const backward_f32_memory<D> &m,
                                                 const backward_args<float> &a,
                                                 const sequence_tile &tile, int i0, int h) {
    load_rows_f32<D>(m.q, TILE_F32, a.d, [&](int i) {
        return i0 + i < tile.length ? a.q.row(tile.first + i0 + i, h) : NULL;
    });
    load_rows_f32<D>(m.dy, TILE_F32, a.d, [&](int i) {
        return i0 + i < tile.length ? a.dy.row(tile.first + i0 + i, h) : NULL;
    });
    if (threadIdx.x < TILE_F32) {
        int i = i0 + threadIdx.x;
        int64_t at = (int64_t)(tile.first + i) * a.H + h;
        m.lse[threadIdx.x] = i < tile.length ? a.lse[at] : INFINITY;
        m.delta[threadIdx.x] = i < tile.length ? a.delta[at] : 0.0f;
    }
}

template <int D>
__device__ __forceinline__ void load_keys_f32(const backward_f32_memory<D> &m,
                                              const backward_args<float> &a,
                                              const sequence_tile &tile, int j0, int g) {
    load_rows_f32<D>(m.k, TILE_F32, a.d, [&](int j) {
        return j0 + j < tile.length ? a.k.row(tile.first + j0 + j, g) : NULL;
    });
    load_rows_f32<D>(m.v, TILE_F32, a.d, [&](int j) {
        return j0 + j < tile.length ? a.v.row(tile.first + j0 + j, g) : NULL;
    });
}

/* The probability of key j for query i, whose statistics are `lse`, and what passes the cap of a
 * gradient. */
template <bool Options>
__device__ __forceinline__ float probability_f32(const backward_args<float> &a, float score,
                                                 float lse, int i, int j, int T, float *slope) {
    *slope = 1;
    if (j >= T || (a.causal && j > i) || (Options && i - j >= a.window)) return 0;
    if (Options && a.cap != 0) {
        float t = tanhf(__fmul_rn(score, a.cap));
        *slope = fmaf(-t, t, 1.0f);
        return expf(t * a.large - lse);
    }
    return expf(score * a.scale - lse);
}

template <int D, bool Options>
__global__ void __launch_bounds__(F32_THREADS) attention_backward_dkdv_f32(backward_args<float> a) {
    extern __shared__ __align__(1024) char memory[];
    backward_f32_memory<D> m(memory);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16, g = blockIdx.y;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, TILE_F32, blockIdx.x, true, &tile)) return;
    load_keys_f32<D>(m, a, tile, tile.row, g);
    float4 dk[2][D / 64], dv[2][D / 64];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < D / 64; i++) dk[r][i] = dv[r][i] = {0, 0, 0, 0};
    int end = queries_end<Options, TILE_F32>(a, tile);
    for (int h = g * a.group; h < (g + 1) * a.group; h++)
        for (int i0 = a.causal ? tile.row : 0; i0 < end; i0 += TILE_F32) {
            __syncthreads();
            load_queries_f32<D>(m, a, tile, i0, h);
            __syncthreads();
            float s[2][2], dp[2][2];
            dots_f32<D, 2, 2>(s, m.k, m.q, ty, tx);
            dots_f32<D, 2, 2>(dp, m.v, m.dy, ty, tx);
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    int j = ty * 2 + r, i = tx + 16 * c;
                    float slope, p = probability_f32<Options>(a, s[r][c], m.lse[i], i0 + i,
                                                              tile.row + j, tile.length, &slope);
                    m.p[j * PITCH_F32 + i] = p;
                    m.ds[j * PITCH_F32 + i] = slope * p * (dp[r][c] - m.delta[i]);
                }
            __syncwarp();
            add_rows_f32<D, 2>(dv, m.p, PITCH_F32, m.dy, TILE_F32, ty, tx);
            add_rows_f32<D, 2>(dk, m.ds, PITCH_F32, m.q, TILE_F32, ty, tx);
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int j = tile.row + ty * 2 + r;
        if (j < tile.length && a.dk.data)
            store_row_f32<D>(a.dk.row(tile.first + j, g), dk[r], a.scale, a.d, tx);
        if (j < tile.length && a.dv.data)
            store_row_f32<D>(a.dv.row(tile.first + j, g), dv[r], 1, a.d, tx);
    }
}

template <int D, bool Options>
__global__ void __launch_bounds__(F32_THREADS) attention_backward_dq_f32(backward_args<float> a) {
    extern __shared__ __align__(1024) char memory[];
    backward_f32_memory<D> m(memory);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16, h = blockIdx.y;
    sequence_tile tile;
    if (!find_tile(a.cu, a.S, a.N, TILE_F32, blockIdx.x, false, &tile)) return;
    load_queries_f32<D>(m, a, tile, tile.row, h);
    float4 dq[2][D / 64];
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < D / 64; i++) dq[r][i] = {0, 0, 0, 0};
    int keys = a.causal ? min(tile.length, tile.row + TILE_F32) : tile.length;
    for (int j0 = first_tile<Options, TILE_F32>(tile.row, a.window); j0 < keys; j0 += TILE_F32) {
        __syncthreads();
        load_keys_f32<D>(m, a, tile, j0, h / a.group);
        __syncthreads();
        float s[2][2], dp[2][2];
        dots_f32<D, 2, 2>(s, m.q, m.k, ty, tx);
        dots_f32<D, 2, 2>(dp, m.dy, m.v, ty, tx);
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                int i = ty * 2 + r, j = tx + 16 * c;
                float slope, p = probability_f32<Options>(a, s[r][c], m.lse[i], tile.row + i,
                                                          j0 + j, tile.length, &slope);
                m.ds[i * PITCH_F32 + j] = slope * p * (dp[r][c] - m.delta[i]);
            }
        __syncwarp();
        add_rows_f32<D, 2>(dq, m.ds, PITCH_F32, m.k, TILE_F32, ty, tx);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = tile.row + ty * 2 + r;
        if (i < tile.length) store_row_f32<D>(a.dq.row(tile.first + i, h), dq[r], a.scale, a.d, tx);
    }
}

/* ---- launchers ---- */

template <class Products, class T, int D, bool Options>
static lg_status launch_backward(lg_context *ctx, const backward_args<T> &a) {
    using Tiles = backward_tiles<D>;
    unsigned tiles = (unsigned)num_sequence_tiles(a.N, a.S, Tiles::Rows);
    if (a.dk.data || a.dv.data)
        LG_TRY(launch(ctx, "attention_backward", attention_backward_dkdv<Products, T, D, Options>,
                      dim3(tiles, (unsigned)(a.H / a.group), Tiles::Slices), Tiles::Threads,
                      Tiles::bytes, a));
    if (a.dq.data)
        LG_TRY(launch(ctx, "attention_backward", attention_backward_dq<Products, T, D, Options>,
                      dim3(tiles, (unsigned)a.H), Tiles::Threads, Tiles::bytes, a));
    return LG_OK;
}

template <int D, bool Options>
static lg_status launch_backward_f32(lg_context *ctx, const backward_args<float> &a) {
    unsigned tiles = (unsigned)num_sequence_tiles(a.N, a.S, TILE_F32);
    if (a.dk.data || a.dv.data)
        LG_TRY(launch(ctx, "attention_backward", attention_backward_dkdv_f32<D, Options>,
                      dim3(tiles, (unsigned)(a.H / a.group)), F32_THREADS, backward_f32_bytes<D>(),
                      a));
    if (a.dq.data)
        LG_TRY(launch(ctx, "attention_backward", attention_backward_dq_f32<D, Options>,
                      dim3(tiles, (unsigned)a.H), F32_THREADS, backward_f32_bytes<D>(), a));
    return LG_OK;
}

/* A head size runs in the next larger one that there is. */
template <bool Options>
static lg_status backward_of_size(lg_context *ctx, const backward_args<float> &a) {
    if (a.d <= 64) return launch_backward_f32<64, Options>(ctx, a);
    if (a.d <= 128) return launch_backward_f32<128, Options>(ctx, a);
    return launch_backward_f32<256, Options>(ctx, a);
}

template <bool Options, class T>
static lg_status backward_of_size(lg_context *ctx, backward_args<T> a) {
    a.cap *= 2 * LOG2E; /* tanh_fast */
    if (has_wgmma() && a.d <= 64)
        return launch_backward<warpgroup_products, T, 64, Options>(ctx, a);
    if (has_wgmma() && a.d <= 128)
        return launch_backward<warpgroup_products, T, 128, Options>(ctx, a);
    if (a.d <= 32) return launch_backward<warp_products, T, 32, Options>(ctx, a);
    if (a.d <= 64) return launch_backward<warp_products, T, 64, Options>(ctx, a);
    if (a.d <= 96) return launch_backward<warp_products, T, 96, Options>(ctx, a);
    if (a.d <= 128) return launch_backward<warp_products, T, 128, Options>(ctx, a);
    return launch_backward<warp_products, T, 256, Options>(ctx, a);
}

extern "C" lg_status cuda_attention_backward(lg_context *ctx, const lg_tensor *dy,
                                             const lg_tensor *q, const lg_tensor *k,
                                             const lg_tensor *v, const lg_tensor *y,
                                             const lg_tensor *lse, const lg_tensor *cu_seqlens,
                                             const lg_tensor *sinks, double scale, bool causal,
                                             int64_t window, double softcap, lg_tensor *dq,
                                             lg_tensor *dk, lg_tensor *dv, lg_tensor *dsinks) {
    int64_t N = q->shape[0], H = q->shape[1], D = q->shape[2], G = k->shape[1],
            S = cu_seqlens->shape[0] - 1;
    LG_TRY(check_attention(ctx, "attention_backward", H, G, D, causal, window, softcap));
    if (!sinks) dsinks = NULL;
    if (N == 0 || S == 0 || H == 0 || (!dq && !dk && !dv && !dsinks)) return LG_OK;
    void *delta;
    LG_TRY(lg_scratch(ctx, N * H * 4, &delta));
    return dispatch_float(ctx, "attention_backward", q->dtype, [&](auto t) {
        using T = decltype(t);
        backward_args<T> a = {heads_of<const T>(dy),
                              heads_of<const T>(q),
                              heads_of<const T>(k),
                              heads_of<const T>(v),
                              heads_of<const T>(y),
                              heads_of<T>(dq),
                              heads_of<T>(dk),
                              heads_of<T>(dv),
                              (const float *)lse->data,
                              (float *)delta,
                              (const int32_t *)cu_seqlens->data,
                              (int)S,
                              (int)N,
                              (int)H,
                              (int)(H / G),
                              (int)D,
                              (float)scale,
                              causal,
                              heads_aligned(dy) && heads_aligned(q) && heads_aligned(k) &&
                                  heads_aligned(v) && heads_aligned(dq) && heads_aligned(dk) &&
                                  heads_aligned(dv),
                              sinks ? (const T *)sinks->data : NULL,
                              dsinks ? (float *)dsinks->data : NULL,
                              window_within(window, N),
                              softcap != 0 ? (float)(scale / softcap) : 0,
                              (float)(softcap != 0 ? softcap : scale)};
        LG_TRY(launch(ctx, "attention_backward", attention_backward_delta<T>,
                      dim3((unsigned)((N * H + 7) / 8)), 256, 0, a));
        if (dsinks)
            LG_TRY(launch(ctx, "attention_backward", attention_backward_sinks<T>, dim3((unsigned)H),
                          1024, 0, a));
        return with_options(a.window < N || softcap != 0, [&](auto options) {
            return backward_of_size<decltype(options)::value != 0>(ctx, a);
        });
    });
}
