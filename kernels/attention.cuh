/* What forward, backward and decode share: rows of heads, tiles of packed sequences, one step of
 * the online softmax, what windows, caps and sinks take, and exact fp32 attention of a block of rows. A row takes its keys in tiles,
 * first to last, with the same operations wherever it is computed: decode gives the bits of the
 * forward's last row. */
#ifndef LIGER_ATTENTION_CUH
#define LIGER_ATTENTION_CUH

#include "common.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

/* Rows of heads: element d of head h of token n lies at data[n * token + h * head + d]. */
template <class T>
struct head_rows {
    T *data;
    int64_t token, head;
    __device__ __forceinline__ T *row(int64_t n, int64_t h) const {
        return data + n * token + h * head;
    }
};

template <class T>
static inline head_rows<T> heads_of(const lg_tensor *t) {
    if (!t) return {NULL, 0, 0};
    return {(T *)t->data, t->stride[0], t->stride[1]};
}

/* Whether every row of every head starts at a multiple of 16 bytes and D fills whole vectors. */
static inline bool heads_aligned(const lg_tensor *t) {
    if (!t) return true;
    int64_t bytes = lg_dtype_bytes(t->dtype), D = t->shape[2];
    bool token = t->shape[0] <= 1 || t->stride[0] * bytes % 16 == 0;
    bool head = t->shape[1] <= 1 || t->stride[1] * bytes % 16 == 0;
    return token && head && D * bytes % 16 == 0 && (uintptr_t)t->data % 16 == 0;
}

/* ---- tiles of packed sequences ---- */

struct sequence_tile {
    int first, length, row; /* the sequence's first token and length; the tile's first row in it */
};

/* Tiles of R rows are numbered without a table: sequence s has the numbers from cu[s] / R + s on,
 * at least as many as it has tiles, so that N / R + S numbers cover all; a spare number has no
 * tile. Within a sequence the last rows come first. */
static inline int64_t num_sequence_tiles(int64_t N, int64_t S, int rows) {
    return S > 0 ? N / rows + S : 0;
}

/* For one thread: notes the first bound that does not lie between the one before it and N. */
__device__ __forceinline__ void check_sequences(const int32_t *cu, int S, int N,
                                                device_error *error) {
    for (int s = 0, low = 0; s <= S; s++) {
        int at = cu[s], high = s > 0 ? N : 0;
        if (s == S) low = N;
        if (at < low || at > high) return note_error(error, ERROR_SEQUENCE, s, at, high + 1ll, low);
        low = at;
    }
}

/* `forwards`: the first rows come first. */
__device__ __forceinline__ bool find_tile(const int32_t *cu, int S, int N, int rows, int number,
                                          bool forwards, sequence_tile *tile) {
    int low = 0, high = S - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (cu[middle] / rows + middle <= number)
            low = middle;
        else
            high = middle - 1;
    }
    int first = min(max(cu[low], 0), N), end = min(max(cu[low + 1], first), N);
    int index = number - (first / rows + low), tiles = (end - first + rows - 1) / rows;
    if (index < 0 || index >= tiles) return false;
    *tile = {first, end - first, (forwards ? index : tiles - 1 - index) * rows};
    return true;
}

/* ---- softmax ---- */

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- windows, caps, sinks: the kernels come in two variants, and the plain one has none ---- */

/* Where a running maximum starts. A row may see nothing of its first tiles: with windows it has to
 * be finite. */
template <bool Options>
__device__ __forceinline__ float no_score() {
    return Options ? -1e30f : -INFINITY;
}

/* The first tile of keys that query i sees any of. */
template <bool Options, int Keys>
__device__ __forceinline__ int first_tile(int i, int window) {
    return Options ? max(0, i + 1 - window) / Keys * Keys : 0;
}

/* tanh(x) of y = 2 x log2(e), within 3e-7. */
__device__ __forceinline__ float tanh_fast(float y) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(exp2_fast(y) + 1.0f));
    return __fmaf_rn(-2.0f, r, 1.0f);
}

/* One more score, with no value, among scores whose exponentials add up to *total times that of
 * *top; both move, and the values' sums are to be multiplied by what is returned. */
template <class Exp>
__device__ __forceinline__ float add_sink(float sink, float *top, float *total, Exp exponential) {
    float before = *top;
    *top = fmaxf(before, sink);
    float factor = exponential(before - *top);
    *total = __fmaf_rn(*total, factor, exponential(sink - *top));
    return factor;
}

/* The end of a 16-bit row: what its sums of values are to be multiplied by, and its log-sum-exp. */
template <class T>
__device__ __forceinline__ float with_sink(float top, float scale, float *total, const T *sinks,
                                           int h, float *lse) {
    float shift = __fmul_rn(top, scale), factor = 1;
    if (sinks)
        factor = add_sink(to_float(sinks[h]) * LOG2E, &shift, total,
                          [](float x) { return exp2_fast(x); });
    *lse = (shift + log2f(*total)) * LN2;
    return factor / *total;
}

/* Over the four lanes that hold a row of a fragment. */
template <class Op>
__device__ __forceinline__ float quad_reduce(float x, Op op) {
    x = op(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return op(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/* The largest of a lane's scores of one row (half 0 or 1 of its fragments) and `top`. */
template <int Tiles>
__device__ __forceinline__ float largest_score(const float (&s)[Tiles][4], int half, float top) {
    float other = top;
#pragma unroll
    for (int n = 0; n < Tiles; n++) {
        top = fmaxf(top, s[n][2 * half]);
        other = fmaxf(other, s[n][2 * half + 1]);
    }
    return fmaxf(top, other);
}

/* A lane's scores of one row become 2^(c (s - top)); returns their sum. */
template <int Tiles>
__device__ __forceinline__ float exponentials(float (&s)[Tiles][4], int half, float c, float top) {
    float sum[2] = {0, 0}, shift = top * c;
#pragma unroll
    for (int n = 0; n < Tiles; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[n][2 * half + e] = exp2_fast(__fmaf_rn(s[n][2 * half + e], c, -shift));
            sum[e] += s[n][2 * half + e];
        }
    return sum[0] + sum[1];
}

/* One tile of scores of 16 rows (8 when Halves is 1), in a warp's accumulators: s becomes 2^(c (s
 * - max)), c > 0; max and this lane's part of sum go on, and alpha is what all earlier sums have
 * to be multiplied by. */
template <int Halves = 2, int Tiles>
__device__ __forceinline__ void softmax_step(float (&s)[Tiles][4], float c, float (&max)[2],
                                             float (&sum)[2], float (&alpha)[2]) {
#pragma unroll
    for (int half = 0; half < Halves; half++) {
        float top = quad_reduce(largest_score(s, half, max[half]), Max());
        alpha[half] = exp2_fast((max[half] - top) * c);
        max[half] = top;
        sum[half] = __fmaf_rn(sum[half], alpha[half], exponentials(s, half, c, top));
    }
}

/* ---- fp32 ---- */

constexpr int F32_KEYS = 32, F32_THREADS = 256;

template <int D, int RowsPerThread>
constexpr int64_t attend_f32_bytes() {
    return (int64_t)((16 * RowsPerThread + 2 * F32_KEYS) * (D + 4) +
                     16 * RowsPerThread * (F32_KEYS + 4)) *
           4;
}

/* Rows of d floats into shared memory at a pitch of D + 4, zeros beyond. */
template <int D, class F>
__device__ __forceinline__ void load_rows_f32(float *to, int rows, int d, F source) {
    for (int at = threadIdx.x; at < rows * D; at += F32_THREADS) {
        const float *row = source(at / D);
        to[at / D * (D + 4) + at % D] = row && at % D < d ? row[at % D] : 0.0f;
    }
}

/* out[r][c] = chain over d ascending of a[ty * R + r] . b[tx + 16 c] */
template <int D, int R, int C>
__device__ __forceinline__ void dots_f32(float (&out)[R][C], const float *a, const float *b, int ty,
                                         int tx) {
#pragma unroll
    for (int r = 0; r < R; r++)
#pragma unroll
        for (int c = 0; c < C; c++) out[r][c] = 0;
#pragma unroll 4
    for (int i = 0; i < D; i += 4) {
        float4 x[R], y[C];
#pragma unroll
        for (int r = 0; r < R; r++) x[r] = *(const float4 *)(a + (ty * R + r) * (D + 4) + i);
#pragma unroll
        for (int c = 0; c < C; c++) y[c] = *(const float4 *)(b + (tx + 16 * c) * (D + 4) + i);
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++) {
                float s = __fmaf_rn(x[r].x, y[c].x, out[r][c]);
                s = __fmaf_rn(x[r].y, y[c].y, s);
                s = __fmaf_rn(x[r].z, y[c].z, s);
                out[r][c] = __fmaf_rn(x[r].w, y[c].w, s);
            }
    }
}

/* out[r][i] += chain over j ascending of p[ty * R + r][j] v[j][4 tx + 64 i ...], j < n; p at a
 * pitch of `pitch`. */
template <int D, int R>
__device__ __forceinline__ void add_rows_f32(float4 (&out)[R][D / 64], const float *p, int pitch,
                                             const float *v, int n, int ty, int tx) {
#pragma unroll 2
    for (int j = 0; j < n; j++) {
        float x[R];
#pragma unroll
        for (int r = 0; r < R; r++) x[r] = p[(ty * R + r) * pitch + j];
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
            float4 y = *(const float4 *)(v + j * (D + 4) + 4 * tx + 64 * i);
#pragma unroll
            for (int r = 0; r < R; r++) {
                out[r][i].x = __fmaf_rn(x[r], y.x, out[r][i].x);
                out[r][i].y = __fmaf_rn(x[r], y.y, out[r][i].y);
                out[r][i].z = __fmaf_rn(x[r], y.z, out[r][i].z);
                out[r][i].w = __fmaf_rn(x[r], y.w, out[r][i].w);
            }
        }
    }
}

/* Writes d floats of a row whose lanes hold 4 columns each. */
template <int D>
__device__ __forceinline__ void store_row_f32(float *to, const float4 (&row)[D / 64], float factor,
                                              int d, int tx) {
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        float x[4] = {row[i].x, row[i].y, row[i].z, row[i].w};
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (4 * tx + 64 * i + e < d) to[4 * tx + 64 * i + e] = x[e] * factor;
    }
}

/* What a score is and who sees it, in attend_f32. */
struct score_rule {
    int keys, position; /* position >= 0: row r sees the keys up to position + r */
    int window;         /* and as many of them, at most */
    float scale, cap;   /* cap 0: none; else scale tanh(cap x) */
    bool has_sinks;
};

/* A block of 256 threads: attention of 16 R rows. `query(r)`, `key(j)`, `value(j)` are rows or
 * NULL; `sink(r)` is one more score; `out(r)` is where row r goes or NULL; `lse(r, x)` takes the
 * log-sum-exp. */
template <int D, int R, bool Options, class Q, class K, class V, class S, class Y, class L>
__device__ __forceinline__ void attend_f32(float *memory, const score_rule &rule, int d, Q query,
                                           K key, V value, S sink, Y out, L lse) {
    const int keys = rule.keys, position = rule.position;
    constexpr int Rows = 16 * R, Columns = F32_KEYS / 16, Pitch = F32_KEYS + 4;
    float *q = memory, *k = q + Rows * (D + 4), *v = k + F32_KEYS * (D + 4),
          *p = v + F32_KEYS * (D + 4);
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    float top[R], sum[R];
    float4 y[R][D / 64];
#pragma unroll
    for (int r = 0; r < R; r++) {
        top[r] = no_score<Options>(), sum[r] = 0;
#pragma unroll
        for (int i = 0; i < D / 64; i++) y[r][i] = {0, 0, 0, 0};
    }
    load_rows_f32<D>(q, Rows, d, query);
    int begin = first_tile<Options, F32_KEYS>(position < 0 ? keys - 1 : position, rule.window);
    for (int j0 = begin; j0 < keys; j0 += F32_KEYS) {
        __syncthreads();
        load_rows_f32<D>(k, F32_KEYS, d, [&](int j) { return j0 + j < keys ? key(j0 + j) : NULL; });
        load_rows_f32<D>(v, F32_KEYS, d,
                         [&](int j) { return j0 + j < keys ? value(j0 + j) : NULL; });
        __syncthreads();
        float s[R][Columns];
        dots_f32<D, R, Columns>(s, q, k, ty, tx);
#pragma unroll
        for (int r = 0; r < R; r++) {
            int last = position < 0 ? keys - 1 : min(keys - 1, position + ty * R + r);
            int first =
                Options ? (position < 0 ? keys : position + ty * R + r + 1) - rule.window : 0;
            float most = top[r];
#pragma unroll
            for (int c = 0; c < Columns; c++) {
                int j = j0 + tx + 16 * c;
                if (Options && rule.cap != 0) s[r][c] = tanhf(__fmul_rn(s[r][c], rule.cap));
                s[r][c] = j <= last && (!Options || j >= first) ? s[r][c] * rule.scale : -INFINITY;
                most = fmaxf(most, s[r][c]);
            }
            most = warp_reduce<16>(most, Max());
            float alpha = expf(top[r] - most), part = 0;
#pragma unroll
            for (int c = 0; c < Columns; c++) {
                float e = expf(s[r][c] - most);
                part += e;
                p[(ty * R + r) * Pitch + tx + 16 * c] = e;
            }
            top[r] = most;
            sum[r] = __fmaf_rn(sum[r], alpha, part);
#pragma unroll
            for (int i = 0; i < D / 64; i++)
                y[r][i] = {y[r][i].x * alpha, y[r][i].y * alpha, y[r][i].z * alpha,
                           y[r][i].w * alpha};
        }
        __syncwarp();
        add_rows_f32<D, R>(y, p, Pitch, v, min(F32_KEYS, keys - j0), ty, tx);
        __syncwarp();
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        float total = warp_reduce<16>(sum[r], Sum()), factor = 1;
        float *to = out(ty * R + r);
        if (Options && to && rule.has_sinks)
            factor = add_sink(sink(ty * R + r), &top[r], &total, [](float x) { return expf(x); });
        if (to) store_row_f32<D>(to, y[r], factor / total, d, tx);
        if (to && tx == 0) lse(ty * R + r, top[r] + logf(total));
    }
}

/* ---- the host's side ---- */

/* A launch with more shared memory than the default allows. */
template <class K, class... Args>
static lg_status launch(lg_context *ctx, const char *op, K kernel, dim3 grid, int threads,
                        int64_t bytes, Args... args) {
    if (bytes > 48 * 1024)
        LG_TRY(cuda_check(
            ctx, op,
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes)));
    kernel<<<grid, threads, bytes, cuda_stream(ctx)>>>(args...);
    return cuda_launched(ctx, op);
}

/* The variant of a kernel, as the type that `f` gets. */
template <class F>
static lg_status with_options(bool options, F f) {
    return options ? f(width_of<1>()) : f(width_of<0>());
}

/* A window of `most` keys is none. */
static inline int window_within(int64_t window, int64_t most) {
    return (int)(window > 0 && window < most ? window : most);
}

static inline void natural_scores(float *scale, float *cap, double softcap) {
    if (softcap == 0) return;
    *cap = (float)(*scale / softcap);
    *scale = (float)softcap;
}

/* The 16-bit kernels take exponentials to the base 2 of products times a scale above 0. */
static inline void base2_scores(float *scale, bool *negate, float *cap, double softcap) {
    if (softcap != 0) {
        *cap = (float)(2 * LOG2E * *scale / softcap);
        *scale = (float)softcap * LOG2E;
        return;
    }
    *negate = *scale < 0;
    *scale = fmaxf(fabsf(*scale) * LOG2E, 1e-30f); /* 0 times -inf is NaN */
}

/* What every kernel asks of shapes and options. */
static inline lg_status check_attention(lg_context *ctx, const char *op, int64_t H, int64_t G,
                                        int64_t D, bool causal, int64_t window, double softcap) {
    if (G == 0 || H % G != 0)
        return lg_fail(ctx, LG_EINVAL, "%s: heads are %lld, wanted a multiple of %lld", op,
                       (long long)H, (long long)G);
    if (window < 0 || (window > 0 && !causal))
        return lg_fail(ctx, LG_EINVAL, "%s: window is %lld, wanted %s", op, (long long)window,
                       causal ? "0 or more" : "0 where causal is false");
    if (!(softcap >= 0 && softcap < INFINITY))
        return lg_fail(ctx, LG_EINVAL, "%s: softcap is %g, wanted 0 or more", op, softcap);
    if (D > 256)
        return lg_fail(ctx, LG_EUNSUPPORTED, "%s: head size is %lld, wanted at most 256", op,
                       (long long)D);
    return LG_OK;
}

#endif
