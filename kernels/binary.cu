/* Element-wise functions of two tensors, in fp32. A block owns a piece of the flat tensors
 * (element.cuh) and reads and writes each element once. In a backward u is dy, v is a and w is b;
 * every gradient that is wanted is a pass of its own.
 */
#include "element.cuh"

extern "C" lg_status cuda_add(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                              lg_tensor *y) {
    return map2(ctx, "add", y, a, b, [] __device__(float u, float v) { return u + v; });
}

extern "C" lg_status cuda_add_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da,
                                       lg_tensor *db) {
    if (da) LG_TRY(cuda_copy(ctx, dy, da));
    if (db) LG_TRY(cuda_copy(ctx, dy, db));
    return LG_OK;
}

extern "C" lg_status cuda_sub(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                              lg_tensor *y) {
    return map2(ctx, "sub", y, a, b, [] __device__(float u, float v) { return u - v; });
}

extern "C" lg_status cuda_sub_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da,
                                       lg_tensor *db) {
    if (da) LG_TRY(cuda_copy(ctx, dy, da));
    if (db) LG_TRY(map1(ctx, "sub_backward", db, dy, [] __device__(float u) { return -u; }));
    return LG_OK;
}

extern "C" lg_status cuda_mul(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                              lg_tensor *y) {
    return map2(ctx, "mul", y, a, b, [] __device__(float u, float v) { return u * v; });
}

extern "C" lg_status cuda_mul_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                                       const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    auto product = [] __device__(float u, float v) { return u * v; };
    if (da) LG_TRY(map2(ctx, "mul_backward", da, dy, b, product));
    if (db) LG_TRY(map2(ctx, "mul_backward", db, dy, a, product));
    return LG_OK;
}

extern "C" lg_status cuda_div(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                              lg_tensor *y) {
    return map2(ctx, "div", y, a, b, [] __device__(float u, float v) { return u / v; });
}

extern "C" lg_status cuda_div_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                                       const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da)
        LG_TRY(map2(ctx, "div_backward", da, dy, b,
                    [] __device__(float u, float w) { return u / w; }));
    if (db)
        LG_TRY(map3(ctx, "div_backward", db, dy, a, b,
                    [] __device__(float u, float v, float w) { return -(u / w) * (v / w); }));
    return LG_OK;
}

/* Where neither is smaller both get it: halves of it when equal, all of it beside a NaN. */
extern "C" lg_status cuda_minimum(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                                  lg_tensor *y) {
    return map2(ctx, "minimum", y, a, b,
                [] __device__(float u, float v) { return u < v || u != u ? u : v; });
}

extern "C" lg_status cuda_minimum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                                           const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da)
        LG_TRY(
            map3(ctx, "minimum_backward", da, dy, a, b, [] __device__(float u, float v, float w) {
                return v > w ? 0.0f : v == w ? 0.5f * u : u;
            }));
    if (db)
        LG_TRY(
            map3(ctx, "minimum_backward", db, dy, a, b, [] __device__(float u, float v, float w) {
                return w > v ? 0.0f : v == w ? 0.5f * u : u;
            }));
    return LG_OK;
}

extern "C" lg_status cuda_maximum(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                                  lg_tensor *y) {
    return map2(ctx, "maximum", y, a, b,
                [] __device__(float u, float v) { return u > v || u != u ? u : v; });
}

extern "C" lg_status cuda_maximum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                                           const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da)
        LG_TRY(
            map3(ctx, "maximum_backward", da, dy, a, b, [] __device__(float u, float v, float w) {
                return v < w ? 0.0f : v == w ? 0.5f * u : u;
            }));
    if (db)
        LG_TRY(
            map3(ctx, "maximum_backward", db, dy, a, b, [] __device__(float u, float v, float w) {
                return w < v ? 0.0f : v == w ? 0.5f * u : u;
            }));
    return LG_OK;
}
