/* Element-wise functions of one tensor, in fp32. A block owns a piece of the flat tensors
 * (element.cuh) and reads and writes each element once. In a backward u is dy and v the op's input
 * or its result, as ops.h has it.
 */
#include "element.cuh"
#include "op/abs.h"
#include "op/affine.h"
#include "op/clamp.h"
#include "op/exp.h"
#include "op/fill.h"
#include "op/log.h"
#include "op/log_sigmoid.h"
#include "op/power.h"
#include "op/relu_squared.h"
#include "op/sigmoid.h"

/* The exponential of a number that is not positive cannot overflow. */
__device__ __forceinline__ float logistic(float x) {
    const float e = expf(-fabsf(x));
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

/* Written so that NaN stays NaN. */
__device__ __forceinline__ float positive_part(float x) { return x < 0 ? 0.0f : x; }

/* A bound as x's dtype holds it, so that an x that was stored at the bound is at the bound. */
static float as_dtype(double bound, int32_t dtype) {
    if (dtype == LG_BF16) return __bfloat162float(from_double<bf16>(bound));
    if (dtype == LG_F16) return __half2float(from_double<f16>(bound));
    return (float)bound;
}

extern "C" lg_status cuda_affine(lg_context *ctx, const lg_tensor *x, double scale, double shift,
                                 lg_tensor *y) {
    const float a = (float)scale, b = (float)shift;
    return map1(ctx, "affine", y, x, [=] __device__(float u) { return fmaf(a, u, b); });
}

extern "C" lg_status cuda_affine_backward(lg_context *ctx, const lg_tensor *dy, double scale,
                                          lg_tensor *dx) {
    if (!dx) return LG_OK;
    const float a = (float)scale;
    return map1(ctx, "affine_backward", dx, dy, [=] __device__(float u) { return a * u; });
}

extern "C" lg_status cuda_exp(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return map1(ctx, "exp", y, x, [] __device__(float u) { return expf(u); });
}

extern "C" lg_status cuda_exp_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                                       lg_tensor *dx) {
    if (!dx) return LG_OK;
    return map2(ctx, "exp_backward", dx, dy, y, [] __device__(float u, float v) { return u * v; });
}

extern "C" lg_status cuda_log(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return map1(ctx, "log", y, x, [] __device__(float u) { return logf(u); });
}

extern "C" lg_status cuda_log_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                       lg_tensor *dx) {
    if (!dx) return LG_OK;
    return map2(ctx, "log_backward", dx, dy, x, [] __device__(float u, float v) { return u / v; });
}

extern "C" lg_status cuda_abs(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return map1(ctx, "abs", y, x, [] __device__(float u) { return fabsf(u); });
}

extern "C" lg_status cuda_abs_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                       lg_tensor *dx) {
    if (!dx) return LG_OK;
    return map2(ctx, "abs_backward", dx, dy, x, [] __device__(float u, float v) {
        return v > 0 ? u : v < 0 ? -u : 0.0f;
    });
}

extern "C" lg_status cuda_power(lg_context *ctx, const lg_tensor *x, double p, lg_tensor *y) {
    const float q = (float)p;
    return map1(ctx, "power", y, x, [=] __device__(float u) { return powf(u, q); });
}

/* p = 0 has no slope, at x = 0 either, where the formula says 0 * inf. */
extern "C" lg_status cuda_power_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                         double p, lg_tensor *dx) {
    if (!dx) return LG_OK;
    if (p == 0) return cuda_fill(ctx, 0, dx);
    const float q = (float)p, q1 = (float)(p - 1);
    return map2(ctx, "power_backward", dx, dy, x,
                [=] __device__(float u, float v) { return u * q * powf(v, q1); });
}

extern "C" lg_status cuda_sigmoid(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return map1(ctx, "sigmoid", y, x, [] __device__(float u) { return logistic(u); });
}

extern "C" lg_status cuda_sigmoid_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                                           lg_tensor *dx) {
    if (!dx) return LG_OK;
    return map2(ctx, "sigmoid_backward", dx, dy, y,
                [] __device__(float u, float v) { return u * v * (1.0f - v); });
}

extern "C" lg_status cuda_log_sigmoid(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return map1(ctx, "log_sigmoid", y, x,
                [] __device__(float u) { return (u < 0 ? u : 0.0f) - log1pf(expf(-fabsf(u))); });
}

extern "C" lg_status cuda_log_sigmoid_backward(lg_context *ctx, const lg_tensor *dy,
                                               const lg_tensor *x, lg_tensor *dx) {
    if (!dx) return LG_OK;
    return map2(ctx, "log_sigmoid_backward", dx, dy, x,
                [] __device__(float u, float v) { return u * logistic(-v); });
}

extern "C" lg_status cuda_relu_squared(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    return map1(ctx, "relu_squared", y, x,
                [] __device__(float u) { return positive_part(u) * positive_part(u); });
}

extern "C" lg_status cuda_relu_squared_backward(lg_context *ctx, const lg_tensor *dy,
                                                const lg_tensor *x, lg_tensor *dx) {
    if (!dx) return LG_OK;
    return map2(ctx, "relu_squared_backward", dx, dy, x,
                [] __device__(float u, float v) { return 2.0f * u * positive_part(v); });
}

extern "C" lg_status cuda_clamp(lg_context *ctx, const lg_tensor *x, double low, double high,
                                lg_tensor *y) {
    const float least = as_dtype(low, x->dtype), most = as_dtype(high, x->dtype);
    return map1(ctx, "clamp", y, x,
                [=] __device__(float u) { return u != u ? u : fminf(fmaxf(u, least), most); });
}

extern "C" lg_status cuda_clamp_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                         double low, double high, lg_tensor *dx) {
    if (!dx) return LG_OK;
    const float least = as_dtype(low, x->dtype), most = as_dtype(high, x->dtype);
    return map2(ctx, "clamp_backward", dx, dy, x,
                [=] __device__(float u, float v) { return v >= least && v <= most ? u : 0.0f; });
}
