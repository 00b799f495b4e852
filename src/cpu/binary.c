/* Element-wise functions of two tensors. In a backward u is dy, v is a and w is b. */
#include "map.h"

lg_status cpu_add(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u + v);
    return LG_OK;
}

lg_status cpu_add_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da, lg_tensor *db) {
    if (da) LG_TRY(cpu_copy(ctx, dy, da));
    if (db) LG_TRY(cpu_copy(ctx, dy, db));
    return LG_OK;
}

lg_status cpu_sub(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u - v);
    return LG_OK;
}

lg_status cpu_sub_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da, lg_tensor *db) {
    if (da) LG_TRY(cpu_copy(ctx, dy, da));
    if (db) MAP1(db, dy, -u);
    return LG_OK;
}

lg_status cpu_mul(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u * v);
    return LG_OK;
}

lg_status cpu_mul_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                           const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da) MAP2(da, dy, b, u * v);
    if (db) MAP2(db, dy, a, u * v);
    return LG_OK;
}

lg_status cpu_div(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u / v);
    return LG_OK;
}

lg_status cpu_div_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                           const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da) MAP2(da, dy, b, u / v);
    if (db) MAP3(db, dy, a, b, -(u / w) * (v / w));
    return LG_OK;
}

/* Where neither is smaller both get the gradient: halves of it when equal, all of it beside a NaN.
 * */
lg_status cpu_minimum(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u < v || u != u ? u : v);
    return LG_OK;
}

lg_status cpu_minimum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                               const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da) MAP3(da, dy, a, b, v > w ? 0 : v == w ? u / 2 : u);
    if (db) MAP3(db, dy, a, b, w > v ? 0 : v == w ? u / 2 : u);
    return LG_OK;
}

lg_status cpu_maximum(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u > v || u != u ? u : v);
    return LG_OK;
}

lg_status cpu_maximum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                               const lg_tensor *b, lg_tensor *da, lg_tensor *db) {
    if (da) MAP3(da, dy, a, b, v < w ? 0 : v == w ? u / 2 : u);
    if (db) MAP3(db, dy, a, b, w < v ? 0 : v == w ? u / 2 : u);
    return LG_OK;
}
