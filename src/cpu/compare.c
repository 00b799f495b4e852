/* Comparisons, which give 1 and 0 in the dtype of what is compared, and the choice by them. A NaN
 * compares false. */
#include "map.h"

lg_status cpu_less(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u < v);
    return LG_OK;
}

lg_status cpu_less_equal(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u <= v);
    return LG_OK;
}

lg_status cpu_equal(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y) {
    MAP2(y, a, b, u == v);
    return LG_OK;
}

lg_status cpu_where(lg_context *ctx, const lg_tensor *mask, const lg_tensor *a, const lg_tensor *b,
                    lg_tensor *y) {
    MAP3(y, mask, a, b, u != 0 ? v : w);
    return LG_OK;
}

lg_status cpu_where_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *mask,
                             lg_tensor *da, lg_tensor *db) {
    if (da) MAP2(da, dy, mask, v != 0 ? u : 0);
    if (db) MAP2(db, dy, mask, v != 0 ? 0 : u);
    return LG_OK;
}
