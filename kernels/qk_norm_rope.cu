/* RMS norm of each head, then half-split rope: with u = f x rstd, f = offset + w, and the angle of the
 * token's position, y[i] = u[i] cos - u[i+R] sin, y[i+R] = u[i+R] cos + u[i] sin, i < R; y = u from
 * 2R on. Backward: g is dy turned by the opposite angle, then as in an RMS norm: with a = rstd^3
 * mean(g f x), dx = rstd g f - a x, dw += sum over heads of g x rstd.
 *
 * A row is a head of a token. A group of LANES threads owns ROWS rows at a time, all loaded before the
 * first is summed; thread l has W columns of each half (or W columns that do not turn). Backward: the
 * blocks walk over the rows; each thread keeps the sums of its columns, a block writes them to
 * partial[block,D]. Heads that do not fall into such pieces go a warp a row through shared memory.
 * How rows go to blocks depends on the sizes alone, so the bits do.
 */
#include "norm_backward.cuh"
#include "op/qk_norm_rope.h"

enum {
    THREADS = 256,
    FWD_ROWS = 2,
    BWD_ROWS = 2,
    BLOCKS = 2 * BWD_BLOCKS, /* of the backward */
    ANY_WARPS = 2,
    MOST_DIMS = 1024,
};

/* Everything that the two directions read and write. */
template <class T>
struct head_args {
    const T *x, *dy, *w;
    const float *cos, *sin;
    const int32_t *position;
    T *y, *dx;
    float *rstd, *partial; /* partial [blocks, D], or NULL */
    float eps, offset;
    int64_t N, P;
    int H, D, R;
    int64_t x_token, x_head, y_token, y_head, dy_token, dy_head, dx_token, dx_head;
    bool vector;
    device_error *error;
};

/* A row's place; `there` is false past the end, and without a valid position (then an error is noted). */
struct head_row {
    int64_t n, index;
    unsigned h;
    int32_t p;
    bool inside, there;
};

template <class T>
__device__ __forceinline__ head_row row_at(const head_args<T> &a, int64_t start, unsigned i,
                                           int lane) {
    head_row r;
    split_index(start, i, (unsigned)a.H, &r.n, &r.h);
    r.index = start + i;
    r.inside = r.n < a.N;
    r.p = r.inside ? a.position[r.n] : 0;
    r.there = r.inside && r.p >= 0 && r.p < a.P;
    if (r.inside && !r.there && r.h == 0 && lane == 0)
        note_error(a.error, ERROR_POSITION, r.n, r.p, a.P);
    return r;
}

/* The columns of a thread: c and, where it turns, c + R. */
struct head_columns {
    int c;
    bool any, turns;
};

template <class T>
__device__ __forceinline__ head_columns columns_of(const head_args<T> &a, int lane) {
    constexpr int W = piece<T>::N;
    const int pairs = a.R / W, parts = pairs + (a.D - 2 * a.R) / W;
    const bool turns = lane < pairs;
    return {turns ? lane * W : 2 * a.R + (lane - pairs) * W, lane < parts, turns};
}

/* The thread's two pieces of a row (or of the weights), zeros where it has none. */
template <class T>
__device__ __forceinline__ void load_halves(const head_args<T> &a, const T *row, bool there,
                                            head_columns of, piece<T> *low, piece<T> *high) {
    constexpr int W = piece<T>::N;
    *low = load_piece(row + of.c, there && of.any ? W : 0, a.vector);
    *high = load_piece(row + of.c + a.R, there && of.turns ? W : 0, a.vector);
}

template <class T>
__device__ __forceinline__ void store_halves(const head_args<T> &a, T *row, head_columns of,
                                             const float *low, const float *high) {
    constexpr int W = piece<T>::N;
    if (of.any) store_piece(row + of.c, pack_piece<T>(low), W, a.vector);
    if (of.turns) store_piece(row + of.c + a.R, pack_piece<T>(high), W, a.vector);
}

/* Cosines and sines of a thread's columns at a position: heads of a token share them. */
template <class T>
struct head_angles {
    static constexpr int W = piece<T>::N;
    piece<float> cos[W / 4], sin[W / 4];
    int32_t p = -1;

    __device__ __forceinline__ void load(const head_args<T> &a, head_row row, head_columns of) {
        if (!row.there || row.p == p || !of.turns) return;
        p = row.p;
#pragma unroll
        for (int i = 0; i < W / 4; i++) {
            const int64_t at = (int64_t)p * a.R + of.c + 4 * i;
            cos[i] = load_piece(a.cos + at, 4, a.vector);
            sin[i] = load_piece(a.sin + at, 4, a.vector);
        }
    }
    /* (low, high) turned; the other way with sign -1. */
    __device__ __forceinline__ void turn(head_columns of, float sign, float *low,
                                         float *high) const {
        if (!of.turns) return;
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float u = low[e], v = high[e], c = cos[e / 4][e % 4],
                        s = sign * sin[e / 4][e % 4];
            low[e] = fmaf(u, c, -(v * s));
            high[e] = fmaf(v, c, u * s);
        }
    }
};

template <class T, int LANES>
static __global__ void __launch_bounds__(THREADS, 3)
    qk_norm_rope_fwd(const __grid_constant__ head_args<T> a) {
    constexpr int W = piece<T>::N, ROWS = FWD_ROWS;
    const int lane = threadIdx.x % LANES;
    const int64_t start = (int64_t)blockIdx.x * (THREADS / LANES * ROWS);
    const head_columns of = columns_of(a, lane);
    head_row row[ROWS];
    piece<T> x[ROWS][2], w[2];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        row[i] = row_at(a, start, threadIdx.x / LANES * ROWS + i, lane);
        load_halves(a, a.x + row[i].n * a.x_token + row[i].h * a.x_head, row[i].inside, of,
                    &x[i][0], &x[i][1]);
    }
    load_halves(a, a.w, true, of, &w[0], &w[1]);
    head_angles<T> angles;
    angles.load(a, row[0], of);
    const float share = 1 / (float)a.D;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        float sum = 0, u[2][W];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < W; e++) sum = fmaf(x[i][half][e], x[i][half][e], sum);
        const float r = rsqrtf(fmaf(warp_reduce<LANES>(sum, Sum()), share, a.eps));
        if (!row[i].there) continue;
        if (lane == 0) a.rstd[row[i].index] = r;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 0; e < W; e++) u[half][e] = x[i][half][e] * r * (a.offset + w[half][e]);
        angles.load(a, row[i], of);
        angles.turn(of, 1, u[0], u[1]);
        store_halves(a, a.y + row[i].n * a.y_token + row[i].h * a.y_head, of, u[0], u[1]);
    }
}

template <class T, int LANES>
static __global__ void __launch_bounds__(THREADS, 2)
    qk_norm_rope_bwd(const __grid_constant__ head_args<T> a) {
    constexpr int W = piece<T>::N, ROWS = BWD_ROWS, GROUPS = THREADS / LANES;
    __shared__ float sums[THREADS * 2 * W];
    const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
    const int64_t rows = a.N * a.H, step = (int64_t)gridDim.x * (GROUPS * ROWS);
    const head_columns of = columns_of(a, lane);
    piece<T> w[2];
    const float share = 1 / (float)a.D;
    float dw[2][W] = {};
    load_halves(a, a.w, true, of, &w[0], &w[1]);
    /* As many turns for all groups of the block: those of a warp sum together. */
    for (int64_t start = (int64_t)blockIdx.x * (GROUPS * ROWS); start < rows; start += step) {
        head_row row[ROWS];
        head_angles<T> angles;
        float rstd[ROWS];
        piece<T> x[ROWS][2], d[ROWS][2];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            row[i] = row_at(a, start, group * ROWS + i, lane);
            load_halves(a, a.x + row[i].n * a.x_token + row[i].h * a.x_head, row[i].there, of,
                        &x[i][0], &x[i][1]);
            load_halves(a, a.dy + row[i].n * a.dy_token + row[i].h * a.dy_head, row[i].there, of,
                        &d[i][0], &d[i][1]);
            rstd[i] = row[i].there ? a.rstd[row[i].index] : 0;
        }
        angles.load(a, row[0], of);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const float r = rstd[i];
            float g[2][W], sum = 0;
#pragma unroll
            for (int e = 0; e < W; e++) g[0][e] = d[i][0][e], g[1][e] = d[i][1][e];
            angles.load(a, row[i], of);
            if (row[i].there) angles.turn(of, -1, g[0], g[1]);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < W; e++) {
                    dw[half][e] = fmaf(g[half][e], x[i][half][e] * r, dw[half][e]);
                    g[half][e] *= a.offset + w[half][e];
                    sum = fmaf(g[half][e], x[i][half][e], sum);
                }
            const float slope = warp_reduce<LANES>(sum, Sum()) * r * r * r * share;
            if (!row[i].there || !a.dx) continue;
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int e = 0; e < W; e++)
                    g[half][e] = fmaf(g[half][e], r, -(x[i][half][e] * slope));
            store_halves(a, a.dx + row[i].n * a.dx_token + row[i].h * a.dx_head, of, g[0], g[1]);
        }
    }
    if (!a.partial) return;
        /* Column c of group k lies at k D + c. */
#pragma unroll
    for (int e = 0; e < W; e++) {
        if (of.any) sums[group * a.D + of.c + e] = dw[0][e];
        if (of.turns) sums[group * a.D + of.c + a.R + e] = dw[1][e];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < a.D; c += THREADS) {
        float total = 0;
        for (int k = 0; k < GROUPS; k++) total += sums[k * a.D + c];
        a.partial[(int64_t)blockIdx.x * a.D + c] = total;
    }
}

/* ---- any head: a warp a row ---- */

/* Columns i and i + R of a row in shared memory, turned. */
template <class T>
__device__ __forceinline__ void turn_row(const head_args<T> &a, int32_t p, float sign, float *row,
                                         int lane) {
    __syncwarp();
    for (int i = lane; i < a.R; i += 32) {
        const float c = a.cos[(int64_t)p * a.R + i], s = sign * a.sin[(int64_t)p * a.R + i],
                    u = row[i], v = row[i + a.R];
        row[i] = fmaf(u, c, -(v * s));
        row[i + a.R] = fmaf(v, c, u * s);
    }
    __syncwarp();
}

template <class T>
static __global__ void __launch_bounds__(ANY_WARPS * 32)
    qk_norm_rope_fwd_any(const __grid_constant__ head_args<T> a) {
    __shared__ float rows[ANY_WARPS][MOST_DIMS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const head_row row = row_at(a, (int64_t)blockIdx.x * ANY_WARPS, warp, lane);
    if (!row.there) return;
    const T *x = a.x + row.n * a.x_token + row.h * a.x_head;
    float *u = rows[warp], sum = 0;
    for (int c = lane; c < a.D; c += 32) {
        u[c] = to_float(x[c]);
        sum = fmaf(u[c], u[c], sum);
    }
    const float r = 1.0f / sqrtf(warp_reduce(sum, Sum()) / (float)a.D + a.eps);
    if (lane == 0) a.rstd[row.index] = r;
    for (int c = lane; c < a.D; c += 32) u[c] *= r * (a.offset + to_float(a.w[c]));
    turn_row(a, row.p, 1, u, lane);
    T *y = a.y + row.n * a.y_token + row.h * a.y_head;
    for (int c = lane; c < a.D; c += 32) y[c] = from_float<T>(u[c]);
}

template <class T>
static __global__ void __launch_bounds__(ANY_WARPS * 32)
    qk_norm_rope_bwd_any(const __grid_constant__ head_args<T> a) {
    __shared__ float turned[ANY_WARPS][MOST_DIMS], sums[ANY_WARPS][MOST_DIMS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t rows = a.N * a.H, step = (int64_t)gridDim.x * ANY_WARPS;
    float *g = turned[warp], *dw = sums[warp];
    for (int c = lane; c < a.D; c += 32) dw[c] = 0;
    for (int64_t start = (int64_t)blockIdx.x * ANY_WARPS; start < rows; start += step) {
        const head_row row = row_at(a, start, warp, lane);
        if (!row.there) continue;
        const T *x = a.x + row.n * a.x_token + row.h * a.x_head,
                *dy = a.dy + row.n * a.dy_token + row.h * a.dy_head;
        const float r = a.rstd[row.index];
        float sum = 0;
        for (int c = lane; c < a.D; c += 32) g[c] = to_float(dy[c]);
        turn_row(a, row.p, -1, g, lane);
        for (int c = lane; c < a.D; c += 32) {
            const float v = to_float(x[c]);
            dw[c] = fmaf(g[c], v * r, dw[c]);
            g[c] *= a.offset + to_float(a.w[c]);
            sum = fmaf(g[c], v, sum);
        }
        const float slope = warp_reduce(sum, Sum()) * r * r * r / (float)a.D;
        T *dx = a.dx ? a.dx + row.n * a.dx_token + row.h * a.dx_head : NULL;
        for (int c = lane; dx && c < a.D; c += 32)
            dx[c] = from_float<T>(fmaf(g[c], r, -(to_float(x[c]) * slope)));
        __syncwarp();
    }
    __syncthreads();
    for (int c = threadIdx.x; a.partial && c < a.D; c += ANY_WARPS * 32) {
        float total = 0;
        for (int k = 0; k < ANY_WARPS; k++) total += sums[k][c];
        a.partial[(int64_t)blockIdx.x * a.D + c] = total;
    }
}

/* ---- launchers ---- */

template <class T>
static head_args<T> arguments(lg_context *ctx, const char *op, const lg_tensor *x,
                              const lg_tensor *w, const lg_tensor *cos, const lg_tensor *sin,
                              const lg_tensor *position, double offset) {
    head_args<T> a = {};
    a.x = (const T *)x->data, a.w = (const T *)w->data;
    a.cos = (const float *)cos->data, a.sin = (const float *)sin->data;
    a.position = (const int32_t *)position->data, a.offset = (float)offset;
    a.N = x->shape[0], a.P = cos->shape[0];
    a.H = (int)x->shape[1], a.D = (int)x->shape[2], a.R = (int)cos->shape[1];
    a.x_token = x->stride[0], a.x_head = x->stride[1];
    a.vector = rows_vectorise<T>(x) && rows_vectorise<T>(w) && can_vectorise<T>(w->data, a.R) &&
               can_vectorise<float>(cos->data, a.R) && can_vectorise<float>(sin->data, a.R);
    a.error = cuda_error_slot(ctx, op);
    return a;
}

static lg_status check_sizes(lg_context *ctx, const char *op, const lg_tensor *x,
                             const lg_tensor *cos) {
    const long long D = x->shape[2], R = cos->shape[1];
    if (2 * R > D)
        return lg_fail(ctx, LG_EINVAL, "%s: cos has %lld pairs, wanted at most %lld", op, R, D / 2);
    if (D > MOST_DIMS)
        return lg_fail(ctx, LG_EUNSUPPORTED, "%s: head size is %lld, wanted at most %d", op, D,
                       MOST_DIMS);
    return LG_OK;
}

/* Calls f(threads a row), 0 where heads do not fall into pieces of 16 bytes. */
template <class T, class F>
static lg_status with_lanes(const head_args<T> &a, F f) {
    constexpr int W = piece<T>::N;
    const int parts = (a.D - a.R) / W;
    if (a.R % W || a.D % W || parts > 32) return f(width_of<0>());
    if (parts <= 4) return f(width_of<4>());
    if (parts <= 8) return f(width_of<8>());
    if (parts <= 16) return f(width_of<16>());
    return f(width_of<32>());
}

extern "C" lg_status cuda_qk_norm_rope(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                       const lg_tensor *cos, const lg_tensor *sin,
                                       const lg_tensor *position, double eps, double offset,
                                       lg_tensor *y, lg_tensor *rstd) {
    LG_TRY(check_sizes(ctx, "qk_norm_rope", x, cos));
    if (tensor_rows(x) == 0) return LG_OK;
    return dispatch_computed(ctx, "qk_norm_rope", x->dtype, [&](auto t) {
        using T = decltype(t);
        head_args<T> a = arguments<T>(ctx, "qk_norm_rope", x, w, cos, sin, position, offset);
        a.y = (T *)y->data, a.rstd = (float *)rstd->data, a.eps = (float)eps;
        a.y_token = y->stride[0], a.y_head = y->stride[1];
        a.vector = a.vector && rows_vectorise<T>(y);
        return with_lanes(a, [&](auto lanes) {
            constexpr int LANES = decltype(lanes)::value;
            const int64_t rows = tensor_rows(x);
            const cudaStream_t stream = cuda_stream(ctx);
            if constexpr (LANES > 0)
                qk_norm_rope_fwd<T, LANES>
                    <<<blocks_for(rows, THREADS / LANES * FWD_ROWS, INT32_MAX), THREADS, 0,
                       stream>>>(a);
            else
                qk_norm_rope_fwd_any<T>
                    <<<blocks_for(rows, ANY_WARPS, INT32_MAX), ANY_WARPS * 32, 0, stream>>>(a);
            return cuda_launched(ctx, "qk_norm_rope");
        });
    });
}

extern "C" lg_status cuda_qk_norm_rope_backward(lg_context *ctx, const lg_tensor *dy,
                                                const lg_tensor *x, const lg_tensor *w,
                                                const lg_tensor *cos, const lg_tensor *sin,
                                                const lg_tensor *position, const lg_tensor *rstd,
                                                double offset, lg_tensor *dx, lg_tensor *dw) {
    const char *op = "qk_norm_rope_backward";
    LG_TRY(check_sizes(ctx, op, x, cos));
    if (tensor_rows(x) == 0 || x->shape[2] == 0 || (!dx && !dw)) return LG_OK;
    return dispatch_computed(ctx, op, x->dtype, [&](auto t) {
        using T = decltype(t);
        head_args<T> a = arguments<T>(ctx, op, x, w, cos, sin, position, offset);
        const lg_tensor *to = dx ? dx : x;
        a.dy = (const T *)dy->data, a.dx = (T *)(dx ? dx->data : NULL);
        a.rstd = (float *)rstd->data;
        a.dy_token = dy->stride[0], a.dy_head = dy->stride[1];
        a.dx_token = to->stride[0], a.dx_head = to->stride[1];
        a.vector = a.vector && rows_vectorise<T>(dy) && rows_vectorise<T>(dx);
        return with_lanes(a, [&](auto lanes) {
            constexpr int LANES = decltype(lanes)::value;
            constexpr int rows =
                LANES > 0 ? THREADS / (LANES > 0 ? LANES : 1) * BWD_ROWS : ANY_WARPS;
            const unsigned blocks = blocks_for(tensor_rows(x), rows, BLOCKS);
            const cudaStream_t stream = cuda_stream(ctx);
            void *partial = NULL;
            if (dw) LG_TRY(lg_scratch(ctx, (int64_t)blocks * a.D * 4, &partial));
            a.partial = (float *)partial;
            if constexpr (LANES > 0)
                qk_norm_rope_bwd<T, LANES><<<blocks, THREADS, 0, stream>>>(a);
            else
                qk_norm_rope_bwd_any<T><<<blocks, ANY_WARPS * 32, 0, stream>>>(a);
            LG_TRY(cuda_launched(ctx, op));
            return launch_norm_sums(ctx, op, a.partial, dw, NULL, NULL, (int)blocks, a.D);
        });
    });
}
