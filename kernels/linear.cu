/* The linear layer: three matrix products and the column sums of the bias gradient.
 *
 * db[o] += sum over n of dy[n,o], in two kernels: linear_bwd_db_partial's blocks sum the 16 bytes
 * wide columns of COLUMN_LANES threads over a share of the rows, 8 rows at a time, into
 * partial[share,O]; linear_bwd_db adds the shares in order. Which rows are a share depends on N and
 * O alone, so the bits do.
 */
#include "linear.cuh"
#include "op/linear.h"

enum { COLUMN_LANES = 32, ROW_LANES = 8, MOST_SHARES = 64, SUM_THREADS = 256 };

/* Thread (x, y) sums its columns of rows y, y + ROW_LANES, ... of the share; then y is summed in
 * order. */
template <class T>
static __global__ void linear_bwd_db_partial(const T *dy, int64_t ld, int64_t N, int64_t O,
                                             int64_t share_rows, bool vector, float *partial) {
    constexpr int W = 16 / sizeof(T);
    __shared__ float sums[ROW_LANES][COLUMN_LANES * W];
    const int64_t o = ((int64_t)blockIdx.x * COLUMN_LANES + threadIdx.x) * W;
    const int64_t first = blockIdx.y * share_rows;
    const int64_t last = first + share_rows < N ? first + share_rows : N;
    float sum[W] = {};
    if (o + W <= O && vector) {
#pragma unroll 4
        for (int64_t r = first + threadIdx.y; r < last; r += ROW_LANES) {
            const vec<T, W> x = *(const vec<T, W> *)(dy + r * ld + o);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += to_float(x[i]);
        }
    } else {
        for (int64_t r = first + threadIdx.y; r < last; r += ROW_LANES)
#pragma unroll
            for (int i = 0; i < W; i++)
                if (o + i < O) sum[i] += to_float(dy[r * ld + o + i]);
    }
#pragma unroll
    for (int i = 0; i < W; i++) sums[threadIdx.y][threadIdx.x * W + i] = sum[i];
    __syncthreads();
    const int64_t o0 = (int64_t)blockIdx.x * COLUMN_LANES * W;
    for (int c = threadIdx.y * COLUMN_LANES + threadIdx.x; c < COLUMN_LANES * W;
         c += COLUMN_LANES * ROW_LANES) {
        float total = 0;
#pragma unroll
        for (int y = 0; y < ROW_LANES; y++) total += sums[y][c];
        if (o0 + c < O) partial[blockIdx.y * O + o0 + c] = total;
    }
}

static __global__ void linear_bwd_db(const float *partial, int shares, int64_t O, float *db) {
    const int64_t o = (int64_t)blockIdx.x * SUM_THREADS + threadIdx.x;
    if (o >= O) return;
    float total = 0;
    for (int s = 0; s < shares; s++) total += partial[s * O + o];
    db[o] += total;
}

lg_status linear_bias_gradient(lg_context *ctx, const char *op, const void *dy, int64_t ld,
                               int32_t dtype, int64_t N, int64_t O, void *db) {
    if (N == 0 || O == 0) return LG_OK;
    return dispatch_float(ctx, op, dtype, [&](auto t) {
        using T = decltype(t);
        constexpr int W = 16 / sizeof(T);
        void *partial;
        /* About a thousand blocks; a share has no fewer than 64 rows. */
        const unsigned column_blocks = blocks_for(O, COLUMN_LANES * W, INT32_MAX);
        int64_t shares = (N + 63) / 64, most = (1024 + column_blocks - 1) / column_blocks;
        if (shares > most) shares = most;
        if (shares > MOST_SHARES) shares = MOST_SHARES;
        const int64_t share_rows = (N + shares - 1) / shares;
        shares = (N + share_rows - 1) / share_rows;
        LG_TRY(lg_scratch(ctx, shares * O * 4, &partial));
        linear_bwd_db_partial<T><<<dim3(column_blocks, (unsigned)shares),
                                   dim3(COLUMN_LANES, ROW_LANES), 0, cuda_stream(ctx)>>>(
            (const T *)dy, ld, N, O, share_rows, can_vectorise<T>(dy, ld), (float *)partial);
        linear_bwd_db<<<blocks_for(O, SUM_THREADS, INT32_MAX), SUM_THREADS, 0, cuda_stream(ctx)>>>(
            (const float *)partial, (int)shares, O, (float *)db);
        return cuda_launched(ctx, op);
    });
}

extern "C" lg_status cuda_linear(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                 const lg_tensor *b, lg_tensor *y) {
    const int64_t N = tensor_rows(x), C = tensor_cols(x), O = w->shape[0];
    return dispatch_float(ctx, "linear", x->dtype, [&](auto) {
        lg_context_stats(ctx)->gemm_rows += (double)N;
        return cuda_gemm(ctx, "linear", N, O, C, {x->data, C, x->dtype, false},
                         {w->data, C, w->dtype, true}, y->data, O, y->dtype, b ? b->data : NULL,
                         false);
    });
}

extern "C" lg_status cuda_linear_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                          const lg_tensor *w, lg_tensor *dx, lg_tensor *dw,
                                          lg_tensor *db) {
    const char *op = "linear_backward";
    const int64_t N = tensor_rows(x), C = tensor_cols(x), O = w->shape[0];
    return dispatch_float(ctx, op, x->dtype, [&](auto) {
        if (dx || dw) lg_context_stats(ctx)->gemm_rows += (double)N;
        if (dx)
            LG_TRY(cuda_gemm(ctx, op, N, C, O, {dy->data, O, dy->dtype, false},
                             {w->data, C, w->dtype, false}, dx->data, C, dx->dtype, NULL, false));
        if (dw)
            LG_TRY(cuda_gemm(ctx, op, O, C, N, {dy->data, O, dy->dtype, true},
                             {x->data, C, x->dtype, false}, dw->data, C, dw->dtype, NULL, true));
        if (!db) return LG_OK;
        return linear_bias_gradient(ctx, op, dy->data, O, dy->dtype, N, O, db->data);
    });
}
