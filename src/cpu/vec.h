/* Vector pieces of the CPU operators: an exponential that loops vectorise, and reductions whose order is fixed: element i
 * of a row always lands in lane i % 16, whatever the row's alignment or the thread count. */
#ifndef LIGER_VEC_H
#define LIGER_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* On targets without 512-bit registers these vectors are split; they are never passed between files. */
#pragma GCC diagnostic ignored "-Wpsabi"

enum { VEC_LANES = 16 };

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef f32x16 f32x16_any __attribute__((aligned(4), may_alias));

static inline f32x16 load16(const float *x) {
    return *(const f32x16_any *)x;
}

static inline void store16(float *x, f32x16 v) {
    *(f32x16_any *)x = v;
}

/* The first n elements, then `fill`. */
static inline f32x16 load16_part(const float *x, int64_t n, float fill) {
    float lane[VEC_LANES];
    for (int l = 0; l < VEC_LANES; l++) lane[l] = fill;
    memcpy(lane, x, (size_t)n * sizeof(float));
    return load16(lane);
}

static inline f32x16 select16(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* e^x within 1 ulp where the result is a normal number; 0 for -inf, inf on overflow, NaN for NaN.
 * x = n ln 2 + r, |r| <= ln 2 / 2; e^r is Cephes' polynomial; 2^n is applied in two halves, so that results below the normal
 * numbers and above them come out right. No branches: loops over it vectorise. */
static inline float exp_f32(float x) {
    const float round = 0x1.8p23f;
    x = x < -105.0f ? -105.0f : x;
    x = x > 89.0f ? 89.0f : x;
    float shifted = fmaf(x, 0x1.715476p+0f, round);
    float n = shifted - round;
    float r = fmaf(n, -0x1.62e400p-1f, x);
    r = fmaf(n, -0x1.7f7d1cp-20f, r);
    float p = fmaf(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    int32_t whole, half;
    memcpy(&whole, &shifted, 4);
    whole = (int32_t)((uint32_t)whole - 0x4b400000u);
    half = whole >> 1;
    uint32_t low = ((uint32_t)half + 127u) << 23, high = ((uint32_t)whole - (uint32_t)half + 127u) << 23;
    float a, b;
    memcpy(&a, &low, 4);
    memcpy(&b, &high, 4);
    return p * a * b;
}

/* The sum of 16 lanes, by halves. */
static inline float sum_lanes(f32x16 v) {
    float lane[VEC_LANES];
    store16(lane, v);
    for (int half = 8; half > 0; half /= 2)
        for (int l = 0; l < half; l++) lane[l] += lane[l + half];
    return lane[0];
}

/* The largest element; NaNs are passed over. -inf when n is 0. */
static inline float max_f32(const float *x, int64_t n) {
    f32x16 m = load16_part(x, 0, -INFINITY);
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) {
        f32x16 v = load16(x + i);
        m = select16(v > m, v, m);
    }
    f32x16 v = load16_part(x + i, n - i, -INFINITY);
    m = select16(v > m, v, m);
    float lane[VEC_LANES];
    store16(lane, m);
    for (int l = 1; l < VEC_LANES; l++) lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
    return lane[0];
}

/* Sums and dot products of up to a few hundred elements run in fp32 lanes; longer ones add such blocks in double. */
enum { VEC_BLOCK = 256 };

static inline float sum_block_f32(const float *x, int64_t n) {
    f32x16 s = load16_part(x, 0, 0.0f);
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) s += load16(x + i);
    if (i < n) s += load16_part(x + i, n - i, 0.0f);
    return sum_lanes(s);
}

static inline float dot_block_f32(const float *a, const float *b, int64_t n) {
    f32x16 s = load16_part(a, 0, 0.0f);
    int64_t i = 0;
    for (; i + VEC_LANES <= n; i += VEC_LANES) s += load16(a + i) * load16(b + i);
    if (i < n) s += load16_part(a + i, n - i, 0.0f) * load16_part(b + i, n - i, 0.0f);
    return sum_lanes(s);
}

static inline double dot_f32(const float *a, const float *b, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i += VEC_BLOCK)
        s += dot_block_f32(a + i, b + i, n - i < VEC_BLOCK ? n - i : VEC_BLOCK);
    return s;
}

#endif
