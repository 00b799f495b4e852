/* All that a kernel file includes: conversions, 16-byte vectors, reductions, strided rows, dtype dispatch, launch checks.
 *
 * Kernels run on the context's one stream, in order. They sum in fp32 in a fixed order, take no floating-point atomics, and
 * address rows with 64 bits. Bad values found on the device (an id out of range) are noted with `note_error` and reported by the
 * next call that waits.
 */
#ifndef LIGER_COMMON_CUH
#define LIGER_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <stdint.h>

#include "internal.h"

typedef __nv_bfloat16 bf16;
typedef __half f16;

/* ---- the host's side ---- */

/* What a kernel found wrong: an op's first one is kept. */
typedef struct device_error {
    int32_t code; /* 0: nothing; else an index into the texts of device.cu */
    int32_t pad;
    long long index, value, low, limit; /* wanted: [low, limit) */
} device_error;

enum {
    ERROR_NONE = 0,
    ERROR_IDS,
    ERROR_TARGET,
    ERROR_POSITION,
    ERROR_INDEX,
    ERROR_PLANE,
    ERROR_SLOT,
    ERROR_LENGTH,
    ERROR_SEQUENCE,
    ERROR_LOGIT
};

cudaStream_t cuda_stream(lg_context *ctx);
int cuda_num_sms(lg_context *ctx);
device_error *cuda_error_slot(lg_context *ctx, const char *op); /* for kernels; `op` stays */

/* A number that the host needs: a kernel writes it to the slot, `mark` follows the kernel, `wait` waits for that mark alone, so that
 * what was asked of the device in between goes on. */
int64_t *cuda_count_slot(lg_context *ctx); /* for kernels */
lg_status cuda_mark_count(lg_context *ctx, const char *op);
lg_status cuda_wait_count(lg_context *ctx, const char *op, int64_t *count);

/* Translates a CUDA status; LG_OK for cudaSuccess. After a sticky error every later call says the same. */
lg_status cuda_check(lg_context *ctx, const char *what, cudaError_t status);
/* After a launch: whether it was accepted. */
lg_status cuda_launched(lg_context *ctx, const char *op);

/* The matrix product of gemm.cu: C = op(A) op(B) + bias, or C += op(A) op(B); row-major, fp32 sums. `bias` [n] is of C's dtype. */
typedef struct cuda_matrix {
    const void *data;
    int64_t ld;
    int32_t dtype; /* f32, bf16 or f16; A and B the same */
    bool trans;    /* the product reads the transpose: data is [K, M] for A, [N, K] for B */
} cuda_matrix;

lg_status cuda_gemm(lg_context *ctx, const char *op, int64_t m, int64_t n, int64_t k, cuda_matrix a,
                    cuda_matrix b, void *c, int64_t ldc, int32_t c_dtype, const void *bias,
                    bool accumulate);

/* Calls `f(T())` with the C++ type of a float dtype. */
template <class F>
lg_status dispatch_float(lg_context *ctx, const char *op, int32_t dtype, F f) {
    switch (dtype) {
    case LG_F32: return f(float());
    case LG_BF16: return f(bf16());
    case LG_F16: return f(f16());
    default:
        return lg_fail(ctx, LG_EUNSUPPORTED, "%s: no %s on cuda, wanted f32, bf16 or f16", op,
                       lg_dtype_name(dtype));
    }
}

/* The same for ops that compute in no f16. */
template <class F>
lg_status dispatch_computed(lg_context *ctx, const char *op, int32_t dtype, F f) {
    if (dtype == LG_F32) return f(float());
    if (dtype == LG_BF16) return f(bf16());
    return lg_fail(ctx, LG_EUNSUPPORTED, "%s: no %s on cuda, wanted f32 or bf16", op,
                   lg_dtype_name(dtype));
}

static inline int64_t tensor_numel(const lg_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

static inline int64_t tensor_cols(const lg_tensor *t) {
    return t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
}

static inline int64_t tensor_rows(const lg_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i + 1 < t->ndim; i++) n *= t->shape[i];
    return n;
}

/* Blocks that cover n items, at most `most` (for grid-stride loops). */
static inline unsigned blocks_for(int64_t n, int64_t per_block, int64_t most = 1 << 20) {
    int64_t blocks = (n + per_block - 1) / per_block;
    return (unsigned)(blocks < 1 ? 1 : blocks > most ? most : blocks);
}

/* Rows of a tensor whose leading dimensions have any strides, by value to a kernel. */
struct strided_rows {
    int64_t size[3],
        stride
            [3]; /* of the up to three leading dimensions, innermost first; missing ones have size 1 */
    bool dense; /* row r lies at r * cols */
    bool even;  /* row r lies at r * pitch */
    int64_t cols, pitch;

    __host__ __device__ int64_t offset(int64_t r) const {
        if (even) return r * pitch;
        int64_t at = r % size[0] * stride[0];
        r /= size[0];
        if (r == 0) return at;
        at += r % size[1] * stride[1];
        return at + r / size[1] * stride[2];
    }
};

static inline strided_rows rows_of(const lg_tensor *t) {
    strided_rows r = {{1, 1, 1}, {0, 0, 0}, true, true, tensor_cols(t), 0};
    int64_t dense = r.cols, next = -1;
    for (int i = t->ndim - 2, at = 0; i >= 0; i--, at++) {
        r.size[at] = t->shape[i] > 0 ? t->shape[i] : 1;
        r.stride[at] = t->stride[i];
        if (t->shape[i] > 1) {
            if (t->stride[i] != dense) r.dense = false;
            if (next < 0) r.pitch = next = t->stride[i];
            if (t->stride[i] != next) r.even = false;
            next = t->stride[i] * t->shape[i];
        }
        dense *= t->shape[i];
    }
    return r;
}

/* A number as a type, for the choice of a vector's width by a lambda's argument. */
template <int N>
struct width_of {
    static constexpr int value = N;
};

/* ---- the device's side ---- */

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(f16 x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
    return __float2half_rn(x);
}

/* N values that load and store as one access of up to 16 bytes; N * sizeof(T) is a power of two. */
template <class T, int N>
struct alignas(sizeof(T) * N) vec {
    T v[N];
    __device__ __forceinline__ T &operator[](int i) { return v[i]; }
    __device__ __forceinline__ const T &operator[](int i) const { return v[i]; }
};

/* The widest vector that a row pitch and an address allow: 16 bytes where both are multiples. */
template <class T>
static inline bool can_vectorise(const void *data, int64_t pitch) {
    return ((uintptr_t)data | (uintptr_t)(pitch * (int64_t)sizeof(T))) % 16 == 0;
}

/* Row and column of item start + i, where a row has `cols` items (below 2^31). `start` is the block's, so that the 64-bit
 * division is the same for all its threads. */
__device__ __forceinline__ void split_index(int64_t start, unsigned i, unsigned cols, int64_t *row,
                                            unsigned *col) {
    const int64_t r = start / cols;
    const unsigned c = (unsigned)(start - r * cols) + i;
    *row = r + c / cols;
    *col = c % cols;
}

/* Whether all rows of a tensor allow vectors of 16 bytes; NULL asks for nothing. */
template <class T>
static inline bool rows_vectorise(const lg_tensor *t) {
    if (!t) return true;
    bool fine = can_vectorise<T>(t->data, tensor_cols(t));
    for (int i = 0; i + 1 < t->ndim; i++)
        fine = fine && (t->shape[i] <= 1 || can_vectorise<T>(t->data, t->stride[i]));
    return fine;
}

struct Sum {
    __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
    __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/* All lanes get the result; the order is a fixed butterfly. */
template <int Width = 32, class Op>
__device__ __forceinline__ float warp_reduce(float x, Op op) {
#pragma unroll
    for (int step = Width / 2; step > 0; step /= 2)
        x = op(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

/* All threads of a block of up to 1,024 (a multiple of 32) get the result. */
template <class Op>
__device__ __forceinline__ float block_reduce(float x, Op op, float identity) {
    __shared__ float partial[32];
    x = warp_reduce(x, op);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    if (warps == 1) return x;
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_reduce(lane < warps ? partial[lane] : identity, op);
}

/* Keeps the first error of a run. */
__device__ __forceinline__ void note_error(device_error *slot, int code, long long index,
                                           long long value, long long limit, long long low = 0) {
    if (atomicCAS(&slot->code, 0, code) == 0) {
        slot->index = index;
        slot->value = value;
        slot->low = low;
        slot->limit = limit;
        __threadfence_system();
    }
}

#endif
