/* What the three heads share: which rows take part, logits of a chunk of them, and the gradient's
 * products; head_row.cuh has the rows' reductions.
 *
 * Rows are found by head_index (one block, integers), gathered to the front, and worked on in
 * chunks, so that no more than a chunk of fp32 logits is held. The host needs their number for the
 * products' sizes. Of a forward the caller may know it (`kept`); else it is read, while the device
 * clears outputs and gathers the first chunk. A caller that is wrong is noted: the rows that are
 * missing then have the number -1 and take no part in outputs and gradients.
 */
#ifndef LIGER_HEAD_CUH
#define LIGER_HEAD_CUH

#include "head_row.cuh"
#include "linear.cuh"

enum {
    HEAD_CHUNK = 4096, /* rows, for vocabularies up to HEAD_LARGE */
    HEAD_CHUNK_LARGE = 2048,
    HEAD_LARGE = 100000,
    HEAD_INDEX_THREADS = 1024,
    HEAD_INDEX_ITEMS = 8, /* rows a thread at a time */
    HEAD_THREADS = 256,   /* of kernels without reductions */
    HEAD_KEPT = -1,       /* the place of a noted target that stands for `kept`, see device.cu */
};

/* ---- which rows take part ---- */

/* Row n is kept if target[n] is an id, and active if its gradient is not 0, where one is given.
 * row[i] is active row i, from[i] its place among the kept ones. `told`: how many active rows the
 * host goes by, which *count then says too, or -1. One block; both counts run in the halves of one
 * number. */
template <int THREADS>
static __global__ void __launch_bounds__(THREADS)
    head_index(const int32_t *target, int64_t N, int64_t V, int64_t ignore, const float *dlogp,
               const float *dentropy, int64_t told, int32_t *row, int32_t *from, int32_t *count,
               int64_t *host_count, device_error *error) {
    __shared__ unsigned warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int kept = 0, active = 0;
    for (int64_t n0 = 0; n0 < N; n0 += THREADS * HEAD_INDEX_ITEMS) {
        const int64_t first = n0 + threadIdx.x * HEAD_INDEX_ITEMS;
        unsigned state[HEAD_INDEX_ITEMS], mine = 0; /* kept: 1, active: 1 << 16 too */
#pragma unroll
        for (int i = 0; i < HEAD_INDEX_ITEMS; i++) {
            const int64_t n = first + i;
            state[i] = 0;
            if (n >= N) continue;
            const int32_t t = target[n];
            if (t == ignore) continue;
            if (t < 0 || t >= V) {
                note_error(error, ERROR_TARGET, n, t, V);
                continue;
            }
            const bool zero = dlogp && dlogp[n] == 0 && (!dentropy || dentropy[n] == 0);
            state[i] = zero ? 1u : 1u | 1u << 16;
            mine += state[i];
        }
        unsigned before = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const unsigned other = __shfl_up_sync(0xffffffffu, before, step);
            if (lane >= step) before += other;
        }
        if (lane == 31) warps[warp] = before;
        __syncthreads();
        const unsigned others = lane < THREADS / 32 ? warps[lane] : 0;
        before += __reduce_add_sync(0xffffffffu, lane < warp ? others : 0) - mine;
        const unsigned all = __reduce_add_sync(0xffffffffu, others);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < HEAD_INDEX_ITEMS; i++) {
            if (state[i] >> 16) {
                const int at = active + (int)(before >> 16);
                row[at] = (int32_t)(first + i);
                from[at] = kept + (int)(before & 0xffff);
            }
            before += state[i];
        }
        kept += (int)(all & 0xffff);
        active += (int)(all >> 16);
    }
    if (told >= 0) {
        for (int64_t i = active + (int)threadIdx.x; i < told; i += THREADS) row[i] = -1;
        if (threadIdx.x > 0) return;
        *count = (int32_t)told;
        if (active != told) note_error(error, ERROR_TARGET, HEAD_KEPT, told, active);
    } else if (threadIdx.x == 0) {
        *count = active;
        *host_count = active;
        __threadfence_system();
    }
}

/* packed[i] = x[row[i]] or x[row[i]] = packed[i], for i0 <= i < min(i0 + n, count); nothing if
 * all N rows are active, for then they lie together. A row is `units` units long. In place of one
 * that is missing x[0] is gathered. */
template <class Unit, bool Scatter>
static __global__ void __launch_bounds__(HEAD_THREADS)
    head_move(Unit *x, Unit *packed, const int32_t *row, const int32_t *count, int64_t N,
              int64_t i0, int64_t n, unsigned units) {
    int64_t i;
    unsigned c;
    if (*count == N) return;
    split_index((int64_t)blockIdx.x * HEAD_THREADS, threadIdx.x, units, &i, &c);
    if (i >= n || i0 + i >= *count) return;
    const int64_t from = row[i0 + i];
    Unit *in_x = x + (from < 0 ? 0 : from) * units + c, *in_packed = packed + i * units + c;
    if (Scatter && from < 0) return;
    if (Scatter)
        *in_x = *in_packed;
    else
        *in_packed = *in_x;
}

template <class T>
static __global__ void head_to_float(const T *x, int64_t n, float *y) {
    const int64_t i = (int64_t)blockIdx.x * HEAD_THREADS + threadIdx.x;
    if (i < n) y[i] = to_float(x[i]);
}

/* ---- the host's side ---- */

/* A head at work. */
struct lm_head {
    lg_context *ctx;
    const char *op;
    const lg_tensor *x, *w, *b; /* [N, C], [V, C], [V] or NULL */
    float temperature, softcap;
    int64_t N, C, V, chunk; /* chunk: the most rows of one */
    int64_t classes;        /* targets are below it: V, unless fewer columns count */
    int64_t logits_ld, dlogits_ld;
    int32_t *row, *from, *count; /* of head_index, on the device */
    float *number;               /* one, the op's own */
    float *bias;                 /* [V], or NULL */
    void *packed;                /* [chunk, C]: gathered rows */
    float *logits;               /* [chunk, logits_ld] */
    void *dlogits;               /* [chunk, dlogits_ld], of x's dtype */
    float *sums;                 /* [chunk, C] */
};

static inline lm_head head_of(lg_context *ctx, const char *op, const lg_tensor *x,
                              const lg_tensor *w, const lg_tensor *b, double temperature,
                              double softcap) {
    lm_head head = {};
    head.ctx = ctx, head.op = op, head.x = x, head.w = w, head.b = b;
    head.temperature = (float)temperature, head.softcap = (float)softcap;
    head.N = x->shape[0], head.C = x->shape[1], head.V = head.classes = w->shape[0];
    head.chunk = head.V > HEAD_LARGE ? HEAD_CHUNK_LARGE : HEAD_CHUNK;
    if (head.chunk > head.N) head.chunk = head.N;
    head.logits_ld = (head.V + 3) / 4 * 4;
    head.dlogits_ld = (head.V + 7) / 8 * 8;
    return head;
}

/* Calls f(Finish()) with what makes z of the products. */
template <class F>
static lg_status head_with_finish(const lm_head &head, F f) {
    if (head.softcap == 0 && head.temperature == 1) return f(head_plain());
    return f(head_capped{head.softcap, head.temperature});
}

/* The pieces of a head's scratch, in order, from `at` on; returns where they end. */
static inline char *head_place(lm_head &head, char *at, bool logits, bool dlogits,
                               bool sums = false) {
    const auto take = [&](int64_t bytes) {
        char *piece = at;
        at += (bytes + 255) / 256 * 256;
        return piece;
    };
    const int64_t width = lg_dtype_bytes(head.x->dtype);
    head.row = (int32_t *)take(head.N * 4);
    head.from = (int32_t *)take(head.N * 4);
    head.count = (int32_t *)take(256);
    head.number = (float *)head.count + 32;
    head.bias = (float *)take(head.V * 4);
    head.packed = take(head.chunk * head.C * width);
    head.logits = logits ? (float *)take(head.chunk * head.logits_ld * 4) : NULL;
    head.dlogits = dlogits ? take(head.chunk * head.dlogits_ld * width) : NULL;
    head.sums = sums ? (float *)take(head.chunk * head.C * 4) : NULL;
    return at;
}

/* One piece of scratch for all: a second one would not fit beside it the first time. */
static inline lg_status head_reserve(lm_head &head, bool logits, bool dlogits, bool sums = false) {
    void *scratch;
    const int64_t bytes = head_place(head, NULL, logits, dlogits, sums) - (char *)NULL;
    LG_TRY(lg_scratch(head.ctx, bytes, &scratch));
    head_place(head, (char *)scratch, logits, dlogits, sums);
    return LG_OK;
}

/* The bias in fp32, for the products' epilogue. */
static inline lg_status head_bias(lm_head &head) {
    if (!head.b) {
        head.bias = NULL;
        return LG_OK;
    }
    return dispatch_float(head.ctx, head.op, head.b->dtype, [&](auto t) {
        using T = decltype(t);
        head_to_float<T><<<blocks_for(head.V, HEAD_THREADS, INT32_MAX), HEAD_THREADS, 0,
                           cuda_stream(head.ctx)>>>((const T *)head.b->data, head.V, head.bias);
        return cuda_launched(head.ctx, head.op);
    });
}

template <bool Scatter>
static lg_status head_move_rows(const lm_head &head, void *x, int64_t i0, int64_t n) {
    const int64_t bytes = head.C * lg_dtype_bytes(head.x->dtype);
    const cudaStream_t stream = cuda_stream(head.ctx);
    if (bytes == 0 || n == 0) return LG_OK;
    if (((uintptr_t)x | (uintptr_t)bytes) % 16 == 0)
        head_move<uint4, Scatter>
            <<<blocks_for(n * (bytes / 16), HEAD_THREADS, INT32_MAX), HEAD_THREADS, 0, stream>>>(
                (uint4 *)x, (uint4 *)head.packed, head.row, head.count, head.N, i0, n,
                (unsigned)(bytes / 16));
    else
        head_move<uint16_t, Scatter>
            <<<blocks_for(n * (bytes / 2), HEAD_THREADS, INT32_MAX), HEAD_THREADS, 0, stream>>>(
                (uint16_t *)x, (uint16_t *)head.packed, head.row, head.count, head.N, i0, n,
                (unsigned)(bytes / 2));
    return cuda_launched(head.ctx, head.op);
}

/* Whether `kept` may be true; whether it is head_index finds out. */
static inline lg_status head_check_kept(lg_context *ctx, const char *op, int64_t kept, int64_t N) {
    if (kept >= -1 && kept <= N) return LG_OK;
    return lg_fail(ctx, LG_EINVAL, "%s: kept is %lld, wanted [-1, %lld]", op, (long long)kept,
                   (long long)N);
}

/* Starts to find the active rows, of which head_wait_rows tells the number; kept is what the caller
 * knows it to be, or -1. Work asked for in between overlaps with the host's waiting. */
static inline lg_status head_find_rows(const lm_head &head, const lg_tensor *target, int64_t ignore,
                                       const lg_tensor *dlogp, const lg_tensor *dentropy,
                                       int64_t kept) {
    head_index<HEAD_INDEX_THREADS><<<1, HEAD_INDEX_THREADS, 0, cuda_stream(head.ctx)>>>(
        (const int32_t *)target->data, head.N, head.classes, ignore,
        dlogp ? (const float *)dlogp->data : NULL, dentropy ? (const float *)dentropy->data : NULL,
        kept, head.row, head.from, head.count, cuda_count_slot(head.ctx),
        cuda_error_slot(head.ctx, head.op));
    LG_TRY(cuda_launched(head.ctx, head.op));
    if (kept == head.N) return LG_OK;
    if (kept >= 0)
        return head_move_rows<false>(head, head.x->data, 0, kept < head.chunk ? kept : head.chunk);
    LG_TRY(cuda_mark_count(head.ctx, head.op));
    return head_move_rows<false>(head, head.x->data, 0, head.chunk);
}

/* The number of active rows; waits for it unless it is `kept`. */
static inline lg_status head_wait_rows(const lm_head &head, int64_t kept, int64_t *active) {
    if (kept < 0) return cuda_wait_count(head.ctx, head.op, active);
    *active = kept;
    return LG_OK;
}

/* The x of active rows [i0, i0 + n): x itself where all rows are active, else copies. Those of the
 * first chunk are there already if head_find_rows gathered them. */
static inline lg_status head_rows(const lm_head &head, int64_t active, int64_t i0, int64_t n,
                                  bool gathered, const void **x) {
    *x = head.packed;
    if (active == head.N)
        *x = (const char *)head.x->data + i0 * head.C * lg_dtype_bytes(head.x->dtype);
    else if (!gathered)
        return head_move_rows<false>(head, head.x->data, i0, n);
    return LG_OK;
}

/* Calls f(first active row, rows, their x) chunk by chunk; chunks are about equal. */
template <class F>
static lg_status head_for_chunks(const lm_head &head, int64_t active, F f) {
    if (active == 0) return LG_OK;
    const int64_t chunks = (active + head.chunk - 1) / head.chunk;
    int64_t size = ((active + chunks - 1) / chunks + 127) / 128 * 128;
    if (size > head.chunk) size = head.chunk;
    for (int64_t i0 = 0; i0 < active; i0 += size) {
        const int64_t n = active - i0 < size ? active - i0 : size;
        const void *x;
        LG_TRY(head_rows(head, active, i0, n, i0 == 0, &x));
        LG_TRY(f(i0, n, x));
    }
    return LG_OK;
}

/* The products of n rows of x, with the bias: a [n, ld]. */
static inline lg_status head_logits(const lm_head &head, const void *x, int64_t n, float *a,
                                    int64_t ld) {
    lg_context_stats(head.ctx)->gemm_rows += (double)n;
    return cuda_gemm(head.ctx, head.op, n, head.V, head.C, {x, head.C, head.x->dtype, false},
                     {head.w->data, head.C, head.w->dtype, true}, a, ld, LG_F32, head.bias, false);
}

/* Of active rows [i0, i0 + n): dx[row[i]] = dlogits w, dw += dlogits^T x, db += sum of dlogits;
 * each may be NULL. */
static inline lg_status head_products(const lm_head &head, int64_t active, int64_t i0, int64_t n,
                                      const void *x, lg_tensor *dx, lg_tensor *dw, lg_tensor *db) {
    const int64_t C = head.C, V = head.V, ld = head.dlogits_ld;
    const int32_t dtype = head.x->dtype;
    lg_context_stats(head.ctx)->gemm_rows += (double)n;
    if (dw)
        LG_TRY(cuda_gemm(head.ctx, head.op, V, C, n, {head.dlogits, ld, dtype, true},
                         {x, C, dtype, false}, dw->data, C, dw->dtype, NULL, true));
    if (dx) {
        const bool together = active == head.N;
        void *y = together ? (char *)dx->data + i0 * C * lg_dtype_bytes(dtype) : head.packed;
        LG_TRY(cuda_gemm(head.ctx, head.op, n, C, V, {head.dlogits, ld, dtype, false},
                         {head.w->data, C, dtype, false}, y, C, dtype, NULL, false));
        if (!together) LG_TRY(head_move_rows<true>(head, dx->data, i0, n));
    }
    if (!db) return LG_OK;
    return linear_bias_gradient(head.ctx, head.op, head.dlogits, ld, dtype, n, V, db->data);
}

/* Zeros, or -1 in every element, in stream order. */
static inline lg_status head_clear(const lm_head &head, lg_tensor *y, int byte) {
    if (!y || tensor_numel(y) == 0) return LG_OK;
    return cuda_check(head.ctx, head.op,
                      cudaMemsetAsync(y->data, byte,
                                      (size_t)(tensor_numel(y) * lg_dtype_bytes(y->dtype)),
                                      cuda_stream(head.ctx)));
}

#endif
