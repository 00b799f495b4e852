/* What the CPU operators share: bf16 and f16 conversion, rows of strided tensors, dtype dispatch by loading rows into fp32 or
 * double, and the vector exponential. */
#ifndef LIGER_CPU_H
#define LIGER_CPU_H

#include <math.h>
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
    case LG_BF16: ((uint16_t *)t->data)[offset] = f32_to_bf16((float)value); break;
    case LG_I32: ((int32_t *)t->data)[offset] = (int32_t)value; break;
    case LG_I64: ((int64_t *)t->data)[offset] = (int64_t)value; break;
    case LG_U8: ((uint8_t *)t->data)[offset] = (uint8_t)value; break;
    default: break;
    }
}

#endif
