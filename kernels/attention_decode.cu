/* Attention of one new position a sequence over the paged cache, in the bits of the forward's last
 * row.
 *
 *   y[b,h] = sum_j p[j] v[j],  p = softmax_j(scale q[b,h] . k[j]),  j < length[b]
 *
 * with the forward's options: window, cap, sinks.
 *
 * 16-bit types in two launches that each read their half of the cache once: scores, parallel over
 * keys, to scratch; values, where a warp owns 32 columns of up to 16 heads of a group and takes
 * the keys in the forward's tiles and order, so that no partial results have to be merged. fp32
 * runs the forward's own rows. */
#include "attention.cuh"
#include "mma.cuh"
#include "wgmma.cuh"
#include "op/attention_decode.h"

template <class T>
struct decode_args {
    head_rows<const T> q, k, v;
    head_rows<T> y;
    const int32_t *page, *length;
    /* By row, block of heads, 8 keys, lane: a lane's part of the fragment, 2 or 4 numbers. */
    float *scores;
    int64_t slots; /* in the cache */
    int H, G, group, d, pages, page_size, capacity;
    float scale; /* as in the forward */
    bool negate, aligned;
    device_error *error;
    const T *sinks; /* these as in the forward */
    int window;
    float cap;

    /* Whether row b has keys; a bad length is noted once. */
    __device__ bool row_length(int b, bool note, int *n) const {
        *n = length[b];
        if (*n >= 1 && *n <= (int64_t)pages * page_size) return true;
        if (note) note_error(error, ERROR_LENGTH, b, *n, (int64_t)pages * page_size + 1, 1);
        return false;
    }
    /* Where position j of row b lies, or -1. */
    __device__ int64_t slot(int b, int j, int n, bool note) const {
        if (j >= n) return -1;
        int64_t at = (int64_t)page[(int64_t)b * pages + j / page_size] * page_size + j % page_size;
        if (at >= 0 && at < slots) return at;
        if (note) note_error(error, ERROR_SLOT, (int64_t)b * pages + j / page_size, at, slots);
        return -1;
    }
};

constexpr int DECODE_THREADS = 128, HEADS = 16; /* heads of a group that share a read */

/* Heads [first, first + count) of key/value head g, for block y. */
struct head_group {
    int g, first, count;
    __device__ head_group(int block, int group) {
        int tiles = (group + HEADS - 1) / HEADS, tile = block % tiles;
        g = block / tiles;
        first = g * group + tile * HEADS;
        count = min(HEADS, group - tile * HEADS);
    }
};

constexpr int PIECE = 32; /* keys that a warp loads at a time: a lane looks up the slot of one */

/* A row's slots are below 2^31. */
template <class T>
__device__ __forceinline__ int piece_slot(const decode_args<T> &a, int b, int j0, int n,
                                          bool note) {
    return (int)a.slot(b, j0 + threadIdx.x % 32, n, note);
}

/* Columns [column, column + 8 * Chunks) of the piece's rows; `at(r, c)` is where chunk c of row r
 * goes. */
template <int Chunks, class T, class F>
__device__ __forceinline__ void load_piece(const head_rows<const T> &x, int slot, int g, int column,
                                           int d, bool aligned, F at) {
    int lane = threadIdx.x % 32;
    if (aligned) {
#pragma unroll
        for (int i = 0; i < Chunks; i++) {
            int r = (lane + 32 * i) / Chunks, c = (lane + 32 * i) % Chunks,
                row = __shfl_sync(0xffffffffu, slot, r);
            copy_async(at(r, c), x.row(row, g) + column + 8 * c, row >= 0 && column + 8 * c < d);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < Chunks; i++) {
            int r = (lane + 32 * i) / Chunks, c = (lane + 32 * i) % Chunks,
                row = __shfl_sync(0xffffffffu, slot, r);
            copy_elements(at(r, c), x.row(row, g) + column + 8 * c,
                          row >= 0 ? d - column - 8 * c : 0);
        }
    }
}

/* ---- scores: a warp takes every so many pieces ---- */

template <int D>
constexpr int64_t decode_scores_bytes() {
    return (int64_t)(D + 63) / 64 * 128 * (HEADS + DECODE_THREADS / 32 * 2 * PIECE);
}

template <class T, int D, int Halves, bool Options>
__global__ void __launch_bounds__(DECODE_THREADS) attention_decode_scores(decode_args<T> a) {
    extern __shared__ __align__(1024) char memory[];
    constexpr int TileBytes = (D + 63) / 64 * 128 * PIECE, Warps = DECODE_THREADS / 32;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.z, n;
    head_group heads(blockIdx.y, a.group);
    if (!a.row_length(b, blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0, &n)) return;
    int begin = first_tile<Options, PIECE>(n - 1, a.window);
    if (begin + (int)blockIdx.x * Warps * PIECE >= n) return;
    uint32_t q = shared_address(memory), k = q + (D + 63) / 64 * 128 * HEADS + warp * 2 * TileBytes;
    int step = gridDim.x * Warps * PIECE, j0 = begin + (blockIdx.x * Warps + warp) * PIECE;
    float *scores = a.scores + ((int64_t)b * gridDim.y + blockIdx.y) * a.capacity * 8 * Halves +
                    lane * 2 * Halves;
    auto load_keys = [&](int slot, int stage) {
        load_piece<D / 8>(a.k, slot, heads.g, 0, a.d, a.aligned, [&](int r, int c) {
            return k + stage * TileBytes + tile_at<PIECE>(r, c);
        });
    };
    load_tile<D, HEADS, DECODE_THREADS>(q, threadIdx.x, a.q.row(b, heads.first), a.q.head,
                                        heads.count, a.d, a.aligned);
    copy_commit();
    load_keys(piece_slot(a, b, j0, n, true), 0);
    int next = piece_slot(a, b, j0 + step, n, true);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    for (int stage = 0; j0 < n; j0 += step, stage ^= 1) {
        load_keys(next, stage ^ 1);
        copy_commit();
        next = piece_slot(a, b, j0 + 2 * step, n, true);
        copy_wait<1>();
        __syncwarp();
        float s[PIECE / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t x[4];
            load_a<HEADS>(x, q, 0, c, lane);
#pragma unroll
            for (int m = 0; m < PIECE / 16; m++) {
                uint32_t y[4];
                load_b<PIECE>(y, k + stage * TileBytes, 16 * m, c, lane);
                product(s[2 * m], x, y[0], y[1], T());
                product(s[2 * m + 1], x, y[2], y[3], T());
            }
        }
#pragma unroll
        for (int m = 0; m < PIECE / 8; m++) {
            vec<float, 2 * Halves> x;
#pragma unroll
            for (int e = 0; e < 2 * Halves; e++) {
                x[e] = a.negate ? -s[m][e] : s[m][e];
                if (Options && a.cap != 0) x[e] = tanh_fast(__fmul_rn(x[e], a.cap));
            }
            *(vec<float, 2 * Halves> *)(scores + ((int64_t)j0 / 8 + m) * 64 * Halves) = x;
        }
        __syncwarp();
    }
}

/* ---- values: a warp owns 32 columns ---- */

struct value_pieces {
    static constexpr int Stages = 8, Bytes = PIECE * 64, Columns = 32;
    /* Chunk c of 4 of row r: 8 rows in 8 different places of the banks. */
    static __device__ __forceinline__ uint32_t at(int r, int c) {
        return r * 64 + (((c ^ r >> 1) & 3) << 4);
    }
};

template <class T, int Keys, int Halves, bool Options>
__global__ void __launch_bounds__(256) attention_decode_values(decode_args<T> a) {
    using Pieces = value_pieces;
    constexpr int Stages = Pieces::Stages;
    extern __shared__ __align__(1024) char memory[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = warp * Pieces::Columns,
        b = blockIdx.z, n;
    head_group heads(blockIdx.y, a.group);
    if (!a.row_length(b, false, &n)) return;
    uint32_t v = shared_address(memory) + warp * Stages * Pieces::Bytes;
    const float *scores = a.scores +
                          ((int64_t)b * gridDim.y + blockIdx.y) * a.capacity * 8 * Halves +
                          lane * 2 * Halves;
    auto load_values = [&](int slot, int stage) {
        load_piece<4>(a.v, slot, heads.g, column, a.d, a.aligned,
                      [&](int r, int c) { return v + stage * Pieces::Bytes + Pieces::at(r, c); });
        copy_commit();
    };
    auto load_scores = [&](float(&s)[Keys / 8][4], int j0) {
#pragma unroll
        for (int m = 0; m < Keys / 8; m++) {
            vec<float, 2 *Halves> x = {};
            if (j0 + 8 * m < n)
                x = *(const vec<float, 2 * Halves> *)(scores + ((int64_t)j0 / 8 + m) * 64 * Halves);
#pragma unroll
            for (int e = 0; e < 2 * Halves; e++) s[m][e] = x[e];
        }
    };
    int begin = first_tile<Options, Keys>(n - 1, a.window), stage = 0;
    for (int i = 0; i < Stages - 1; i++)
        load_values(piece_slot(a, b, begin + i * PIECE, n, false), i);
    int next_slot = piece_slot(a, b, begin + (Stages - 1) * PIECE, n, false);
    float next[Keys / 8][4], y[4][4] = {}, sum[2] = {}, alpha[2] = {},
                             top[2] = {no_score<Options>(), no_score<Options>()};
    load_scores(next, begin);
    for (int j0 = begin; j0 < n; j0 += Keys) {
        float s[Keys / 8][4] = {};
#pragma unroll
        for (int m = 0; m < Keys / 8; m++)
#pragma unroll
            for (int e = 0; e < 2 * Halves; e++) {
                int j = j0 + 8 * m + lane % 4 * 2 + e % 2;
                s[m][e] = j < n && (!Options || j >= n - a.window) ? next[m][e] : -INFINITY;
            }
        load_scores(next, j0 + Keys);
        softmax_step<Halves>(s, a.scale, top, sum, alpha);
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int e = 0; e < 2 * Halves; e++) y[m][e] *= alpha[e / 2];
#pragma unroll
        for (int u = 0; u < Keys / PIECE; u++) {
            if (j0 + u * PIECE >= n) break;
            load_values(next_slot, (stage + Stages - 1) % Stages);
            next_slot = piece_slot(a, b, j0 + (u + Stages) * PIECE, n, false);
            copy_wait<Stages - 1>();
            __syncwarp();
#pragma unroll
            for (int c = 0; c < PIECE / 16; c++) {
                uint32_t x[4];
                accumulators_as_a<T>(x, s[4 * u + 2 * c], s[4 * u + 2 * c + 1]);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32_t z[4];
                    load_matrices_transposed(
                        z, v + stage * Pieces::Bytes +
                               Pieces::at(16 * c + (lane & 15), 2 * m + (lane >> 4)));
                    product(y[2 * m], x, z[0], z[1], T());
                    product(y[2 * m + 1], x, z[2], z[3], T());
                }
            }
            __syncwarp();
            stage = (stage + 1) % Stages;
        }
    }
#pragma unroll
    for (int half = 0; half < Halves; half++) {
        float total = quad_reduce(sum[half], Sum()), factor, lse;
        int r = lane / 4 + 8 * half;
        if (r >= heads.count) continue;
        if constexpr (Options)
            factor = with_sink(top[half], a.scale, &total, a.sinks, heads.first + r, &lse);
        else
            factor = 1 / total;
        T *to = a.y.row(b, heads.first + r);
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int d = column + 8 * m + lane % 4 * 2 + e;
                if (d < a.d) to[d] = from_float<T>(y[m][2 * half + e] * factor);
            }
    }
}

/* ---- fp32 ---- */

template <int D, bool Options>
__global__ void __launch_bounds__(F32_THREADS) attention_decode_f32(decode_args<float> a) {
    extern __shared__ __align__(1024) char memory[];
    int b = blockIdx.z, n;
    head_group heads(blockIdx.y, a.group);
    if (!a.row_length(b, blockIdx.y == 0 && threadIdx.x == 0, &n)) return;
    auto row = [&](const head_rows<const float> &x, int j) {
        int64_t at = a.slot(b, j, n, true);
        return at >= 0 ? x.row(at, heads.g) : NULL;
    };
    score_rule rule = {n, -1, a.window, a.scale, a.cap, a.sinks != NULL};
    attend_f32<D, 1, Options>(
        (float *)memory, rule, a.d,
        [&](int r) { return r < heads.count ? a.q.row(b, heads.first + r) : NULL; },
        [&](int j) { return row(a.k, j); }, [&](int j) { return row(a.v, j); },
        [&](int r) { return a.sinks[heads.first + r]; },
        [&](int r) { return r < heads.count ? a.y.row(b, heads.first + r) : NULL; },
        [](int, float) {});
}

/* ---- launchers ---- */

template <int D, bool Options>
static lg_status launch_decode_f32(lg_context *ctx, const decode_args<float> &a, int B,
                                   int head_tiles) {
    return launch(ctx, "attention_decode", attention_decode_f32<D, Options>,
                  dim3(1, (unsigned)head_tiles, (unsigned)B), F32_THREADS, attend_f32_bytes<D, 1>(),
                  a);
}

template <bool Options>
static lg_status decode_of_size(lg_context *ctx, decode_args<float> a, int B, int head_tiles,
                                double softcap) {
    natural_scores(&a.scale, &a.cap, softcap);
    if (a.d <= 64) return launch_decode_f32<64, Options>(ctx, a, B, head_tiles);
    if (a.d <= 128) return launch_decode_f32<128, Options>(ctx, a, B, head_tiles);
    return launch_decode_f32<256, Options>(ctx, a, B, head_tiles);
}

/* Scores take as many blocks as fill the device four times over, each going on to further keys. */
template <class T, int D, int Keys, int Halves, bool Options>
static lg_status launch_decode(lg_context *ctx, const decode_args<T> &a, int B, int head_tiles) {
    int64_t span = (int64_t)a.window + PIECE, keys = span < a.capacity ? span : a.capacity;
    int64_t most = (keys + 4 * PIECE - 1) / (4 * PIECE);
    int64_t wanted = 12 * (int64_t)cuda_num_sms(ctx) / ((int64_t)B * head_tiles) + 1;
    LG_TRY(
        launch(ctx, "attention_decode", attention_decode_scores<T, D, Halves, Options>,
               dim3((unsigned)(wanted < most ? wanted : most), (unsigned)head_tiles, (unsigned)B),
               DECODE_THREADS, decode_scores_bytes<D>(), a));
    int warps = (a.d + value_pieces::Columns - 1) / value_pieces::Columns;
    return launch(ctx, "attention_decode", attention_decode_values<T, Keys, Halves, Options>,
                  dim3(1, (unsigned)head_tiles, (unsigned)B), 32 * warps,
                  warps * value_pieces::Stages * value_pieces::Bytes, a);
}

/* Keys is the forward's tile. Groups of up to 8 heads use half of a fragment's rows. */
template <int D, int Keys, bool Options, class T>
static lg_status launch_decode(lg_context *ctx, decode_args<T> a, int B, int head_tiles) {
    int halves = a.group <= 8 ? 1 : 2;
    void *scores;
    LG_TRY(lg_scratch(ctx, (int64_t)B * head_tiles * a.capacity * 8 * halves * 4, &scores));
    a.scores = (float *)scores;
    if (halves == 1) return launch_decode<T, D, Keys, 1, Options>(ctx, a, B, head_tiles);
    return launch_decode<T, D, Keys, 2, Options>(ctx, a, B, head_tiles);
}

template <bool Options, class T>
static lg_status decode_of_size(lg_context *ctx, decode_args<T> a, int B, int head_tiles,
                                double softcap) {
    base2_scores(&a.scale, &a.negate, &a.cap, softcap);
    if (has_wgmma() && a.d <= 64) return launch_decode<64, 128, Options>(ctx, a, B, head_tiles);
    if (has_wgmma() && a.d <= 128) return launch_decode<128, 128, Options>(ctx, a, B, head_tiles);
    if (a.d <= 64) return launch_decode<64, 64, Options>(ctx, a, B, head_tiles);
    if (a.d <= 128) return launch_decode<128, 64, Options>(ctx, a, B, head_tiles);
    return launch_decode<256, 64, Options>(ctx, a, B, head_tiles);
}

extern "C" lg_status cuda_attention_decode(lg_context *ctx, const lg_tensor *q,
                                           const lg_tensor *k_cache, const lg_tensor *v_cache,
                                           const lg_tensor *page, const lg_tensor *length,
                                           const lg_tensor *sinks, int64_t page_size, double scale,
                                           int64_t window, double softcap, lg_tensor *y) {
    int64_t B = q->shape[0], H = q->shape[1], D = q->shape[2], P = k_cache->shape[0],
            G = k_cache->shape[1];
    int64_t M = page->shape[1], capacity = M * page_size / PIECE * PIECE + PIECE;
    LG_TRY(check_attention(ctx, "attention_decode", H, G, D, true, window, softcap));
    if (page_size <= 0)
        return lg_fail(ctx, LG_EINVAL, "attention_decode: page_size is %lld, wanted above 0",
                       (long long)page_size);
    if (B == 0 || H == 0) return LG_OK;
    if (capacity > INT32_MAX || P > INT32_MAX || B > 65535)
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "attention_decode: positions are %lld, slots %lld, rows %lld, wanted fewer",
                       (long long)capacity, (long long)P, (long long)B);
    return dispatch_float(ctx, "attention_decode", q->dtype, [&](auto t) {
        using T = decltype(t);
        decode_args<T> a = {heads_of<const T>(q),
                            heads_of<const T>(k_cache),
                            heads_of<const T>(v_cache),
                            heads_of<T>(y),
                            (const int32_t *)page->data,
                            (const int32_t *)length->data,
                            NULL,
                            P,
                            (int)H,
                            (int)G,
                            (int)(H / G),
                            (int)D,
                            (int)M,
                            (int)page_size,
                            (int)capacity,
                            (float)scale,
                            false,
                            heads_aligned(q) && heads_aligned(k_cache) && heads_aligned(v_cache),
                            cuda_error_slot(ctx, "attention_decode"),
                            sinks ? (const T *)sinks->data : NULL,
                            window_within(window, capacity),
                            0};
        int head_tiles = (int)(G * ((a.group + HEADS - 1) / HEADS));
        return with_options(sinks || a.window < capacity || softcap != 0, [&](auto options) {
            return decode_of_size<decltype(options)::value != 0>(ctx, a, (int)B, head_tiles,
                                                                 softcap);
        });
    });
}
