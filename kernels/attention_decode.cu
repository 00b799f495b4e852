/* Attention of one new position a sequence over the paged cache, in the bits of the forward's last row.
 *
 *   y[b,h] = sum_j p[j] v[j],  p = softmax_j(scale q[b,h] . k[j]),  j < length[b]
 *
 * 16-bit types in two launches that each read their half of the cache once: scores, parallel over keys, to scratch (B, H,
 * capacity); values, where a warp owns 16 columns of up to 16 heads of a group and takes the keys in the forward's tiles and
 * order, so that no partial results have to be merged. fp32 runs the forward's own rows.
 */
#include "attention.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

template <class T>
struct decode_args {
    head_rows<const T> q, k, v;
    head_rows<T> y;
    const int32_t *page, *length;
    float *scores; /* [B, H, capacity] */
    int64_t slots; /* in the cache */
    int H, G, group, d, pages, page_size, capacity;
    float scale; /* as in the forward */
    bool negate, aligned;
    device_error *error;

    /* Whether row b has keys; a bad length is noted once. */
    __device__ bool row_length(int b, bool note, int *n) const {
        *n = length[b];
        if (*n >= 1 && *n <= (int64_t)pages * page_size) return true;
        if (note) note_error(error, ERROR_LENGTH, b, *n, (int64_t)pages * page_size + 1);
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

/* ---- scores ---- */

constexpr int SCORE_KEYS = 32; /* a warp's tile: one key a lane when slots are looked up */

template <int D>
constexpr int64_t decode_scores_bytes() {
    return (int64_t)(D + 63) / 64 * 128 * (HEADS + DECODE_THREADS / 32 * 2 * SCORE_KEYS);
}

template <class T, int D>
__global__ void __launch_bounds__(DECODE_THREADS) attention_decode_scores(decode_args<T> a) {
    extern __shared__ __align__(1024) char memory[];
    constexpr int TileBytes = (D + 63) / 64 * 128 * SCORE_KEYS, Warps = DECODE_THREADS / 32;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.z, n;
    head_group heads(blockIdx.y, a.group);
    if (!a.row_length(b, blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0, &n)) return;
    uint32_t q = shared_address(memory), k = q + (D + 63) / 64 * 128 * HEADS + warp * 2 * TileBytes;
    int step = gridDim.x * Warps * SCORE_KEYS, j0 = (blockIdx.x * Warps + warp) * SCORE_KEYS;
    if ((int)blockIdx.x * Warps * SCORE_KEYS >= n) return;
    auto load_keys = [&](int first, int stage) {
        int slot = (int)a.slot(b, first + lane, n, true);
        load_tile<D, SCORE_KEYS, 32>(k + stage * TileBytes, lane, a.d, a.aligned, a.k.data,
                                     [&](int r) {
                                         int at = __shfl_sync(0xffffffffu, slot, r);
                                         return at >= 0 ? a.k.row(at, heads.g) : NULL;
                                     });
    };
    load_tile<D, HEADS, DECODE_THREADS>(q, threadIdx.x, a.d, a.aligned, a.q.data, [&](int r) {
        return r < heads.count ? a.q.row(b, heads.first + r) : NULL;
    });
    copy_commit();
    if (j0 < n) load_keys(j0, 0);
    copy_commit();
    copy_wait<1>();
    __syncthreads();
    for (int stage = 0; j0 < n; j0 += step, stage ^= 1) {
        __syncwarp();
        if (j0 + step < n) load_keys(j0 + step, stage ^ 1);
        copy_commit();
        copy_wait<1>();
        __syncwarp();
        float s[SCORE_KEYS / 8][4] = {};
#pragma unroll
        for (int c = 0; c < D / 16; c++) {
            uint32_t x[4];
            load_a<HEADS>(x, q, 0, c, lane);
#pragma unroll
            for (int m = 0; m < SCORE_KEYS / 16; m++) {
                uint32_t y[4];
                load_b<SCORE_KEYS>(y, k + stage * TileBytes, 16 * m, c, lane);
                product(s[2 * m], x, y[0], y[1], T());
                product(s[2 * m + 1], x, y[2], y[3], T());
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = lane / 4 + 8 * half;
            if (r >= heads.count) continue;
            float *row =
                a.scores + ((int64_t)b * a.H + heads.first + r) * a.capacity + j0 + lane % 4 * 2;
#pragma unroll
            for (int m = 0; m < SCORE_KEYS / 8; m++) {
                float2 x = {s[m][2 * half], s[m][2 * half + 1]};
                if (a.negate) x = {-x.x, -x.y};
                *(float2 *)(row + 8 * m) = x;
            }
        }
    }
}

/* ---- values ---- */

template <int Keys>
struct value_tiles {
    static constexpr int Stages = 4, bytes = Keys * 32; /* of a stage of a warp: 16 columns */
    /* Chunk c of 2 of row r: 8 rows in 8 different banks. */
    static __device__ __forceinline__ uint32_t at(int r, int c) {
        return r * 32 + ((c ^ (r >> 2 & 1)) << 4);
    }
};

template <class T, int Keys>
__global__ void __launch_bounds__(DECODE_THREADS) attention_decode_values(decode_args<T> a) {
    using Tiles = value_tiles<Keys>;
    extern __shared__ __align__(1024) char memory[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.z, n;
    int column = (blockIdx.x * (DECODE_THREADS / 32) + warp) * 16;
    head_group heads(blockIdx.y, a.group);
    if (column >= a.d || !a.row_length(b, false, &n)) return;
    uint32_t v = shared_address(memory) + warp * Tiles::Stages * Tiles::bytes;
    auto load_values = [&](int j0, int stage) {
        if (j0 < n) {
            int slot[Keys / 32];
#pragma unroll
            for (int i = 0; i < Keys / 32; i++)
                slot[i] = (int)a.slot(b, j0 + 32 * i + lane, n, false);
#pragma unroll
            for (int i = 0; i < Keys / 16; i++) {
                int r = lane / 2 + 16 * i, c = lane % 2,
                    at = __shfl_sync(0xffffffffu, slot[i / 2], r % 32);
                const T *row = at >= 0 ? a.v.row(at, heads.g) + column + 8 * c : NULL;
                uint32_t to = v + stage * Tiles::bytes + Tiles::at(r, c);
                if (a.aligned) {
                    bool valid = row && column + 8 * c < a.d;
                    copy_async(to, valid ? row : a.v.data, valid);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        uint16_t x = row && column + 8 * c + e < a.d ? *(const uint16_t *)(row + e)
                                                                     : (uint16_t)0;
                        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to + 2 * e), "h"(x)
                                     : "memory");
                    }
                }
            }
        }
        copy_commit();
    };
    auto load_scores = [&](float(&s)[Keys / 8][4], int j0) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = lane / 4 + 8 * half;
            const float *row =
                a.scores + ((int64_t)b * a.H + heads.first + r) * a.capacity + j0 + lane % 4 * 2;
#pragma unroll
            for (int m = 0; m < Keys / 8; m++) {
                float2 x = {0, 0};
                if (r < heads.count && j0 + 8 * m < n) x = *(const float2 *)(row + 8 * m);
                s[m][2 * half] = x.x, s[m][2 * half + 1] = x.y;
            }
        }
    };
#pragma unroll
    for (int i = 0; i < Tiles::Stages - 1; i++) load_values(i * Keys, i);
    float next[Keys / 8][4], y[2][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {}, alpha[2];
    load_scores(next, 0);
    for (int j0 = 0, stage = 0; j0 < n; j0 += Keys, stage = (stage + 1) % Tiles::Stages) {
        load_values(j0 + (Tiles::Stages - 1) * Keys, (stage + Tiles::Stages - 1) % Tiles::Stages);
        float s[Keys / 8][4];
#pragma unroll
        for (int m = 0; m < Keys / 8; m++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                s[m][e] = j0 + 8 * m + lane % 4 * 2 + e % 2 < n ? next[m][e] : -INFINITY;
        if (j0 + Keys < n) load_scores(next, j0 + Keys);
        softmax_step(s, a.scale, top, sum, alpha);
#pragma unroll
        for (int e = 0; e < 8; e++) y[e / 4][e % 4] *= alpha[e % 4 / 2];
        copy_wait<Tiles::Stages - 1>();
        __syncwarp();
#pragma unroll
        for (int c = 0; c < Keys / 16; c++) {
            uint32_t x[4], z[4];
            accumulators_as_a<T>(x, s[2 * c], s[2 * c + 1]);
            load_matrices_transposed(z, v + stage * Tiles::bytes +
                                            Tiles::at(16 * c + (lane & 15), lane >> 4));
            product(y[0], x, z[0], z[1], T());
            product(y[1], x, z[2], z[3], T());
        }
        __syncwarp();
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float factor = 1 / quad_reduce(sum[half], Sum());
        int r = lane / 4 + 8 * half;
        if (r >= heads.count) continue;
        T *to = a.y.row(b, heads.first + r);
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int d = column + 8 * m + lane % 4 * 2 + e;
                if (d < a.d) to[d] = from_float<T>(y[m][2 * half + e] * factor);
            }
    }
}

/* ---- fp32 ---- */

template <int D>
__global__ void __launch_bounds__(F32_THREADS) attention_decode_f32(decode_args<float> a) {
    extern __shared__ __align__(1024) char memory[];
    int b = blockIdx.z, n;
    head_group heads(blockIdx.y, a.group);
    if (!a.row_length(b, blockIdx.y == 0 && threadIdx.x == 0, &n)) return;
    auto row = [&](const head_rows<const float> &x, int j) {
        int64_t at = a.slot(b, j, n, true);
        return at >= 0 ? x.row(at, heads.g) : NULL;
    };
    attend_f32<D, 1>((float *)memory, n, -1, a.d, a.scale,
                     [&](int r) { return r < heads.count ? a.q.row(b, heads.first + r) : NULL; },
                     [&](int j) { return row(a.k, j); }, [&](int j) { return row(a.v, j); },
                     [&](int r) { return r < heads.count ? a.y.row(b, heads.first + r) : NULL; },
                     [](int, float) {});
}

/* ---- launchers ---- */

template <int D>
static lg_status launch_decode_f32(lg_context *ctx, const decode_args<float> &a, int B,
                                   int head_tiles) {
    return launch(ctx, "attention_decode", attention_decode_f32<D>,
                  dim3(1, (unsigned)head_tiles, (unsigned)B), F32_THREADS, attend_f32_bytes<D, 1>(),
                  a);
}

static lg_status decode_of_size(lg_context *ctx, const decode_args<float> &a, int B,
                                int head_tiles) {
    if (a.d <= 64) return launch_decode_f32<64>(ctx, a, B, head_tiles);
    if (a.d <= 128) return launch_decode_f32<128>(ctx, a, B, head_tiles);
    return launch_decode_f32<256>(ctx, a, B, head_tiles);
}

/* Keys is the forward's tile. Scores take as many blocks as fill the device four times over, each going on to further keys. */
template <class T, int D, int Keys = 64>
static lg_status launch_decode(lg_context *ctx, const decode_args<T> &a, int B, int head_tiles) {
    int64_t most = (a.capacity + 4 * SCORE_KEYS - 1) / (4 * SCORE_KEYS);
    int64_t wanted = 12 * (int64_t)cuda_num_sms(ctx) / ((int64_t)B * head_tiles) + 1;
    LG_TRY(
        launch(ctx, "attention_decode", attention_decode_scores<T, D>,
               dim3((unsigned)(wanted < most ? wanted : most), (unsigned)head_tiles, (unsigned)B),
               DECODE_THREADS, decode_scores_bytes<D>(), a));
    return launch(ctx, "attention_decode", attention_decode_values<T, Keys>,
                  dim3((unsigned)((a.d + 63) / 64), (unsigned)head_tiles, (unsigned)B),
                  DECODE_THREADS, 4 * value_tiles<Keys>::Stages * value_tiles<Keys>::bytes, a);
}

template <class T>
static lg_status decode_of_size(lg_context *ctx, decode_args<T> a, int B, int head_tiles) {
    void *scores;
    LG_TRY(lg_scratch(ctx, (int64_t)B * a.H * a.capacity * 4, &scores));
    a.scores = (float *)scores;
    a.negate = a.scale < 0;
    a.scale = fmaxf(fabsf(a.scale) * LOG2E, 1e-30f);
    if (has_wgmma() && a.d <= 64) return launch_decode<T, 64, 128>(ctx, a, B, head_tiles);
    if (has_wgmma() && a.d <= 128) return launch_decode<T, 128, 128>(ctx, a, B, head_tiles);
    if (a.d <= 32) return launch_decode<T, 32>(ctx, a, B, head_tiles);
    if (a.d <= 64) return launch_decode<T, 64>(ctx, a, B, head_tiles);
    if (a.d <= 96) return launch_decode<T, 96>(ctx, a, B, head_tiles);
    if (a.d <= 128) return launch_decode<T, 128>(ctx, a, B, head_tiles);
    return launch_decode<T, 256>(ctx, a, B, head_tiles);
}

extern "C" lg_status cuda_attention_decode(lg_context *ctx, const lg_tensor *q,
                                           const lg_tensor *k_cache, const lg_tensor *v_cache,
                                           const lg_tensor *page, const lg_tensor *length,
                                           int64_t page_size, double scale, lg_tensor *y) {
    int64_t B = q->shape[0], H = q->shape[1], D = q->shape[2], P = k_cache->shape[0],
            G = k_cache->shape[1];
    int64_t M = page->shape[1],
            capacity = (M * page_size + SCORE_KEYS - 1) / SCORE_KEYS * SCORE_KEYS;
    LG_TRY(check_heads(ctx, "attention_decode", H, G, D));
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
                            cuda_error_slot(ctx)};
        int head_tiles = (int)(G * ((a.group + HEADS - 1) / HEADS));
        return decode_of_size(ctx, a, (int)B, head_tiles);
    });
}
