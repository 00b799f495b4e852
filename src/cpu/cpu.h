/* What the CPU operators share: bf16 and f16 conversion, rows of strided tensors, dtype dispatch by loading rows into fp32 or
 * double, and the vector exponential. */
#ifndef LIGER_CPU_H
#define LIGER_CPU_H

#include <math.h>
#include <omp.h>
#include <string.h>

#include "../internal.h"
#include "backend.h"

/* ---- conversion ---- */

static inline float bf16_to_f32(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Rounds to nearest even; NaN stays NaN. */
static inline uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

static inline float f16_to_f32(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, fraction = x & 0x3ff;
    if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * (float)fraction;
    uint32_t bits = sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | fraction << 13;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Rounds to nearest even; from 65520 on infinite. */
static inline uint16_t f32_to_f16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (bits < 0x38800000u) { /* below 2^-14: the addition rounds to a multiple of 2^-24 */
        float y = fabsf(x) + 0.5f;
        memcpy(&bits, &y, 4);
        return (uint16_t)(sign | (bits - 0x3f000000u));
    }
    bits += 0xfffu + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - (112u << 23)) >> 13);
}

/* Rounds to odd: a rounding to bf16 or f16 after it is as good as one straight from x. */
static inline float f64_to_f32_odd(double x) {
    float y = (float)x;
    if (y == x || x != x) return y;
    uint32_t bits;
    memcpy(&bits, &y, 4);
    bits = (bits - (fabs(y) > fabs(x))) | 1;
    memcpy(&y, &bits, 4);
    return y;
}

/* A whole number of a double, as CUDA converts: cut towards 0, the nearest bound when out of range, 0 for NaN. */
static inline int64_t to_integer(double value, int64_t low, int64_t high) {
    if (value != value) return 0;
    if (value <= (double)low) return low;
    return value >= (double)high ? high : (int64_t)value;
}

/* ---- elements and rows ---- */

static inline int64_t tensor_numel(const lg_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

/* Number of rows: the product of all dimensions but the last; 1 for a scalar. */
static inline int64_t tensor_rows(const lg_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i + 1 < t->ndim; i++) n *= t->shape[i];
    return n;
}

static inline int64_t tensor_cols(const lg_tensor *t) {
    return t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
}

/* Offset in elements of row r: leading dimensions may have any stride. */
static inline int64_t row_offset(const lg_tensor *t, int64_t r) {
    int64_t offset = 0;
    for (int i = t->ndim - 2; i >= 0; i--) {
        offset += r % t->shape[i] * t->stride[i];
        r /= t->shape[i];
    }
    return offset;
}

/* The element at `offset` as double and back: for the small tensors of losses, where clarity counts. */
static inline double load(const lg_tensor *t, int64_t offset) {
    switch (t->dtype) {
    case LG_F32: return ((const float *)t->data)[offset];
    case LG_F64: return ((const double *)t->data)[offset];
    case LG_BF16: return bf16_to_f32(((const uint16_t *)t->data)[offset]);
    case LG_F16: return f16_to_f32(((const uint16_t *)t->data)[offset]);
    case LG_I32: return ((const int32_t *)t->data)[offset];
    case LG_I64: return (double)((const int64_t *)t->data)[offset];
    case LG_U8: return ((const uint8_t *)t->data)[offset];
    default: return NAN;
    }
}

static inline void store(lg_tensor *t, int64_t offset, double value) {
    switch (t->dtype) {
    case LG_F32: ((float *)t->data)[offset] = (float)value; break;
    case LG_F64: ((double *)t->data)[offset] = value; break;
    case LG_BF16: ((uint16_t *)t->data)[offset] = f32_to_bf16(f64_to_f32_odd(value)); break;
    case LG_F16: ((uint16_t *)t->data)[offset] = f32_to_f16(f64_to_f32_odd(value)); break;
    case LG_I32:
        ((int32_t *)t->data)[offset] = (int32_t)to_integer(value, INT32_MIN, INT32_MAX);
        break;
    case LG_I64: ((int64_t *)t->data)[offset] = to_integer(value, INT64_MIN, INT64_MAX); break;
    case LG_U8: ((uint8_t *)t->data)[offset] = (uint8_t)to_integer(value, 0, UINT8_MAX); break;
    default: break;
    }
}

/* Walks the rows of a tensor in order: row_offset without its divisions. */
typedef struct row_walk {
    const lg_tensor *t;
    int64_t index[LG_MAX_DIMS];
    int64_t offset;
} row_walk;

static inline row_walk row_walk_from(const lg_tensor *t, int64_t r) {
    row_walk walk = {.t = t, .offset = 0};
    for (int i = t->ndim - 2; i >= 0; i--) {
        walk.index[i] = t->shape[i] ? r % t->shape[i] : 0;
        walk.offset += walk.index[i] * t->stride[i];
        r = t->shape[i] ? r / t->shape[i] : 0;
    }
    return walk;
}

static inline void row_walk_next(row_walk *walk) {
    for (int i = walk->t->ndim - 2; i >= 0; i--) {
        walk->offset += walk->t->stride[i];
        if (++walk->index[i] < walk->t->shape[i] || i == 0) return;
        walk->offset -= walk->index[i] * walk->t->stride[i];
        walk->index[i] = 0;
    }
}

/* n elements from `offset` on as fp32: in place when the tensor is f32, else converted into `buffer`. */
static inline const float *load_row(const lg_tensor *t, int64_t offset, int64_t n, float *buffer) {
    if (t->dtype == LG_F32) return (const float *)t->data + offset;
    const uint16_t *x = (const uint16_t *)t->data + offset;
    if (t->dtype == LG_F16)
        for (int64_t i = 0; i < n; i++) buffer[i] = f16_to_f32(x[i]);
    else
        for (int64_t i = 0; i < n; i++) buffer[i] = bf16_to_f32(x[i]);
    return buffer;
}

/* Where to make a row of n elements: in place when the tensor is f32, else in `buffer`, for store_row to round. */
static inline float *begin_row(lg_tensor *t, int64_t offset, float *buffer) {
    return t->dtype == LG_F32 ? (float *)t->data + offset : buffer;
}

static inline void store_row(lg_tensor *t, int64_t offset, int64_t n, const float *row) {
    if (t->dtype == LG_F32) return;
    uint16_t *y = (uint16_t *)t->data + offset;
    if (t->dtype == LG_F16)
        for (int64_t i = 0; i < n; i++) y[i] = f32_to_f16(row[i]);
    else
        for (int64_t i = 0; i < n; i++) y[i] = f32_to_bf16(row[i]);
}

/* ---- threads ---- */

/* This thread's place in its team: 0 outside of one. */
static inline int64_t thread_index(void) { return omp_get_thread_num(); }

/* Number of threads for `n` elements when each should get at least `grain`. */
static inline int op_threads(const lg_context *ctx, int64_t n, int64_t grain) {
    int64_t threads = lg_context_threads(ctx);
    if (threads > n / grain) threads = n / grain;
    return threads > 1 ? (int)threads : 1;
}

/* Elements a thread for row operators, a few vector operations on each: a fork and join takes 2 to 5 us, in which one core
 * does about this many. */
enum { ROW_GRAIN = 16384 };

/* Tasks that a thread of a dynamic loop takes at once: one by one, 1024 of them cost two threads more
 * (attention 663 against 504 us, its decode 142 against 88). */
static inline int64_t chunk_of(int64_t num_tasks, int threads) {
    return num_tasks / (threads * 32) + 1;
}

/* Copies one row of `bytes` to each of N rows: a bias before a product is added to it. */
static inline void fill_rows(lg_context *ctx, const void *row, void *rows, int64_t N,
                             int64_t bytes) {
    const int threads = op_threads(ctx, N * bytes / 4, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) memcpy((char *)rows + n * bytes, row, (size_t)bytes);
}

#endif
