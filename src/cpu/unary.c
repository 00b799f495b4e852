/* Element-wise functions of one tensor. In a backward u is dy and v the op's input or its result,
 * as ops.h has it. */
#include "map.h"

lg_status cpu_affine(lg_context *ctx, const lg_tensor *x, double scale, double shift,
                     lg_tensor *y) {
    MAP1(y, x, scale * u + shift);
    return LG_OK;
}

lg_status cpu_affine_backward(lg_context *ctx, const lg_tensor *dy, double scale, lg_tensor *dx) {
    if (dx) MAP1(dx, dy, scale * u);
    return LG_OK;
}

lg_status cpu_exp(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    MAP1(y, x, exp(u));
    return LG_OK;
}

lg_status cpu_exp_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                           lg_tensor *dx) {
    if (dx) MAP2(dx, dy, y, u * v);
    return LG_OK;
}

lg_status cpu_log(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    MAP1(y, x, log(u));
    return LG_OK;
}

lg_status cpu_log_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                           lg_tensor *dx) {
    if (dx) MAP2(dx, dy, x, u / v);
    return LG_OK;
}

lg_status cpu_abs(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    MAP1(y, x, fabs(u));
    return LG_OK;
}

lg_status cpu_abs_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                           lg_tensor *dx) {
    if (dx) MAP2(dx, dy, x, v > 0 ? u : v < 0 ? -u : 0);
    return LG_OK;
}

lg_status cpu_power(lg_context *ctx, const lg_tensor *x, double p, lg_tensor *y) {
    MAP1(y, x, pow(u, p));
    return LG_OK;
}

/* p = 0 has no slope, at x = 0 either, where the formula says 0 * inf. */
lg_status cpu_power_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x, double p,
                             lg_tensor *dx) {
    if (dx) MAP2(dx, dy, x, p == 0 ? 0 : u * p * pow(v, p - 1));
    return LG_OK;
}

/* The exponential of a number that is not positive cannot overflow. */
static double sigmoid(double x) {
    double e = exp(-fabs(x));
    return (x < 0 ? e : 1) / (1 + e);
}

lg_status cpu_sigmoid(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    MAP1(y, x, sigmoid(u));
    return LG_OK;
}

lg_status cpu_sigmoid_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                               lg_tensor *dx) {
    if (dx) MAP2(dx, dy, y, u * v * (1 - v));
    return LG_OK;
}

lg_status cpu_log_sigmoid(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    MAP1(y, x, (u < 0 ? u : 0) - log1p(exp(-fabs(u))));
    return LG_OK;
}

lg_status cpu_log_sigmoid_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                   lg_tensor *dx) {
    if (dx) MAP2(dx, dy, x, u * sigmoid(-v));
    return LG_OK;
}

/* Written so that NaN stays NaN. */
static double positive_part(double x) { return x < 0 ? 0 : x; }

lg_status cpu_relu_squared(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    MAP1(y, x, positive_part(u) * positive_part(u));
    return LG_OK;
}

lg_status cpu_relu_squared_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                    lg_tensor *dx) {
    if (dx) MAP2(dx, dy, x, 2 * u * positive_part(v));
    return LG_OK;
}

/* A bound as x's dtype holds it, so that an x that was stored at the bound is at the bound. */
static double as_dtype(double bound, int32_t dtype) {
    uint64_t element = 0;
    lg_tensor t = {.data = &element, .dtype = dtype};
    store(&t, 0, bound);
    return load(&t, 0);
}

lg_status cpu_clamp(lg_context *ctx, const lg_tensor *x, double low, double high, lg_tensor *y) {
    low = as_dtype(low, x->dtype);
    high = as_dtype(high, x->dtype);
    MAP1(y, x, u != u ? u : fmin(fmax(u, low), high));
    return LG_OK;
}

lg_status cpu_clamp_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x, double low,
                             double high, lg_tensor *dx) {
    low = as_dtype(low, x->dtype);
    high = as_dtype(high, x->dtype);
    if (dx) MAP2(dx, dy, x, v >= low && v <= high ? u : 0);
    return LG_OK;
}
