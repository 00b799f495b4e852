/* Vector pieces of the CPU operators: an exponential and a tanh that loops vectorise, and reductions whose
 * order is fixed: element i of a row always lands in lane i % 16, whatever the row's alignment
 * or the thread count. */
#ifndef LIGER_VEC_H
#define LIGER_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

/* On targets without 512-bit registers these vectors are split; all is inlined, so none is passed. */
#pragma GCC diagnostic ignored "-Wpsabi"
#define VEC_INLINE static inline __attribute__((always_inline))

enum { VEC_LANES = 16 };

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef f32x16 f32x16_any __attribute__((aligned(4), may_alias));

VEC_INLINE f32x16 load16(const float *x) { return *(const f32x16_any *)x; }

VEC_INLINE void store16(float *x, f32x16 v) { *(f32x16_any *)x = v; }

VEC_INLINE f32x16 splat16(float x) { return x - (f32x16){0}; }

/* The first n elements, then `fill`. */
VEC_INLINE f32x16 load16_part(const float *x, int64_t n, float fill) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1u << n) - 1), x);
#else
    if (n == VEC_LANES) return load16(x);
    float lane[VEC_LANES];
    for (int l = 0; l < VEC_LANES; l++) lane[l] = fill;
    memcpy(lane, x, (size_t)n * sizeof(float));
    return load16(lane);
#endif
}

VEC_INLINE void store16_part(float *x, int64_t n, f32x16 v) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    memcpy(x, &v, (size_t)n * sizeof(float));
#endif
}

/* Elements [i, i + 16) of a row of n, `fill` from n on. */
VEC_INLINE f32x16 load16_at(const float *x, int64_t i, int64_t n, float fill) {
    if (i + VEC_LANES <= n) return load16(x + i);
    return i < n ? load16_part(x + i, n - i, fill) : splat16(fill);
}

VEC_INLINE f32x16 select16(i32x16 mask, f32x16 a, f32x16 b) {
    return (f32x16)((mask & (i32x16)a) | (~mask & (i32x16)b));
}

/* a > b ? a : b, which is b where either is NaN. */
VEC_INLINE f32x16 max16(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select16(a > b, a, b);
#endif
}

/* e^x within 1 ulp where the result is a normal number; 0 for -inf, inf on overflow, NaN for
 * NaN. x = n ln 2 + r, |r| <= ln 2 / 2; e^r is Cephes' polynomial; 2^n is applied in two halves,
 * so that results below the normal numbers and above them come out right. No branches: loops
 * over it vectorise. */
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
    uint32_t low = ((uint32_t)half + 127u) << 23, high = ((uint32_t)whole - (uint32_t)half + 127u)
                                                         << 23;
    float a, b;
    memcpy(&a, &low, 4);
    memcpy(&b, &high, 4);
    return p * a * b;
}

/* tanh within 3 ulp: Cephes' polynomial below 0.625, by the exponential above. */
static inline float tanh_f32(float x) {
    const float a = fabsf(x), s = x * x;
    float p = fmaf(-5.70498872745e-3f, s, 2.06390887954e-2f);
    p = fmaf(p, s, -5.37397155531e-2f);
    p = fmaf(p, s, 1.33314422036e-1f);
    p = fmaf(p, s, -3.33332819422e-1f);
    const float small = fmaf(p * s, x, x);
    const float large = copysignf(1.0f - 2.0f / (exp_f32(2.0f * a) + 1.0f), x);
    return a < 0.625f ? small : large;
}

/* e^x of x <= 0, for softmax: the same polynomial; results below the normal numbers are 0. */
VEC_INLINE f32x16 exp16_negative(f32x16 x) {
    x = max16(splat16(-88.0f), x); /* n is -127 there, and 2^n becomes the bits of 0 */
    const f32x16 shifted = x * 0x1.715476p+0f + 0x1.8p23f;
    const f32x16 n = shifted - 0x1.8p23f;
    f32x16 r = n * -0x1.62e400p-1f + x;
    r = n * -0x1.7f7d1cp-20f + r;
    f32x16 p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    return p * (f32x16)(((i32x16)shifted + (127 - 0x4b400000)) << 23);
}

/* ---- reductions ---- */

/* The sum of 16 lanes, by halves. */
VEC_INLINE float sum_lanes(f32x16 v) {
    v += __builtin_shuffle(v, (i32x16){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    v += __builtin_shuffle(v, (i32x16){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    v += __builtin_shuffle(v, (i32x16){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    v += __builtin_shuffle(v, (i32x16){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    return v[0];
}

VEC_INLINE float max_lanes(f32x16 v) {
    v = max16(v,
              __builtin_shuffle(v, (i32x16){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = max16(v,
              __builtin_shuffle(v, (i32x16){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = max16(v,
              __builtin_shuffle(v, (i32x16){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = max16(v,
              __builtin_shuffle(v, (i32x16){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

/* The largest element; NaNs are passed over. -inf when n is 0. */
static inline float max_f32(const float *x, int64_t n) {
    f32x16 m0 = splat16(-INFINITY), m1 = m0, m2 = m0, m3 = m0;
    int64_t i = 0;
    for (; i + 4 * VEC_LANES <= n; i += 4 * VEC_LANES) {
        m0 = max16(load16(x + i), m0);
        m1 = max16(load16(x + i + 16), m1);
        m2 = max16(load16(x + i + 32), m2);
        m3 = max16(load16(x + i + 48), m3);
    }
    for (; i < n; i += VEC_LANES) m0 = max16(load16_at(x, i, n, -INFINITY), m0);
    return max_lanes(max16(max16(m0, m1), max16(m2, m3)));
}

/* Long sums add blocks of 1024 elements, each summed in 64 fp32 lanes, in double. */
enum { VEC_BLOCK = 1024 };

static inline float sum4(const f32x16 s[4]) { return sum_lanes((s[0] + s[1]) + (s[2] + s[3])); }

/* n <= VEC_BLOCK. */
static inline float dot_block_f32(const float *a, const float *b, int64_t n) {
    f32x16 s[4] = {{0}};
    int64_t i = 0;
    for (; i + 4 * VEC_LANES <= n; i += 4 * VEC_LANES)
        for (int u = 0; u < 4; u++) s[u] += load16(a + i + 16 * u) * load16(b + i + 16 * u);
    for (int u = 0; u < 4; u++, i += VEC_LANES)
        if (i < n) s[u] += load16_at(a, i, n, 0.0f) * load16_at(b, i, n, 0.0f);
    return sum4(s);
}

static inline double dot_f32(const float *a, const float *b, int64_t n) {
    double s = 0;
    for (int64_t i = 0; i < n; i += VEC_BLOCK)
        s += dot_block_f32(a + i, b + i, n - i < VEC_BLOCK ? n - i : VEC_BLOCK);
    return s;
}

#endif
