/* Comparisons, which give 1 and 0 in the dtype of what is compared, and the choice by them. A NaN
 * compares false. A block owns a piece of the flat tensors (element.cuh) and reads and writes each
 * element once.
 */
#include "element.cuh"
#include "op/equal.h"
#include "op/less.h"
#include "op/less_equal.h"
#include "op/where.h"

extern "C" lg_status cuda_less(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                               lg_tensor *y) {
    return map2(ctx, "less", y, a, b,
                [] __device__(float u, float v) { return u < v ? 1.0f : 0.0f; });
}

extern "C" lg_status cuda_less_equal(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                                     lg_tensor *y) {
    return map2(ctx, "less_equal", y, a, b,
                [] __device__(float u, float v) { return u <= v ? 1.0f : 0.0f; });
}

extern "C" lg_status cuda_equal(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                                lg_tensor *y) {
    return map2(ctx, "equal", y, a, b,
                [] __device__(float u, float v) { return u == v ? 1.0f : 0.0f; });
}

extern "C" lg_status cuda_where(lg_context *ctx, const lg_tensor *mask, const lg_tensor *a,
                                const lg_tensor *b, lg_tensor *y) {
    return map3(ctx, "where", y, mask, a, b,
                [] __device__(float u, float v, float w) { return u != 0 ? v : w; });
}

extern "C" lg_status cuda_where_backward(lg_context *ctx, const lg_tensor *dy,
                                         const lg_tensor *mask, lg_tensor *da, lg_tensor *db) {
    if (da)
        LG_TRY(map2(ctx, "where_backward", da, dy, mask,
                    [] __device__(float u, float v) { return v != 0 ? u : 0.0f; }));
    if (db)
        LG_TRY(map2(ctx, "where_backward", db, dy, mask,
                    [] __device__(float u, float v) { return v != 0 ? 0.0f : u; }));
    return LG_OK;
}
