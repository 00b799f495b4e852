/* Element-wise functions of two tensors, in fp32. A block owns a piece of the flat tensors
 * (element.cuh) and reads and writes each element once. In a backward u is dy, v is a and w is b;
 * every gradient that is wanted is a pass of its own, but those of a sum and of a difference, which
 * read dy once for both.
 */
#include "element.cuh"
#include "op/add.h"
#include "op/copy.h"
#include "op/div.h"
#include "op/maximum.h"
#include "op/minimum.h"
#include "op/mul.h"
#include "op/sub.h"

/* a = x, b = sign x, as map_elements goes. */
template <class T>
static __global__ void __launch_bounds__(MAP_THREADS)
    share_gradient(const T *x, T *a, T *b, int64_t n, float sign, bool aligned) {
    constexpr int N = 16 / sizeof(T);
    constexpr int64_t Step = MAP_THREADS * N;
    const int64_t first = blockIdx.x * (MAP_VECTORS * Step) + threadIdx.x * N;
    vec<T, N> v[MAP_VECTORS];
#pragma unroll
    for (int u = 0; u < MAP_VECTORS; u++)
        v[u] = load_part<N>(x + first + u * Step, n - first - u * Step, aligned, T());
#pragma unroll
    for (int u = 0; u < MAP_VECTORS; u++) {
        store_part<N>(a + first + u * Step, v[u], n - first - u * Step, aligned);
#pragma unroll
        for (int j = 0; j < N; j++) v[u][j] = from_float<T>(sign * to_float(v[u][j]));
        store_part<N>(b + first + u * Step, v[u], n - first - u * Step, aligned);
    }
}

static lg_status share(lg_context *ctx, const char *op, const lg_tensor *dy, float sign,
                       lg_tensor *da, lg_tensor *db) {
    return dispatch_float(ctx, op, dy->dtype, [&](auto t) {
        using T = decltype(t);
        const int64_t n = tensor_numel(dy);
        if (n == 0) return LG_OK;
        const bool aligned = can_vectorise<T>(dy->data, 0) && can_vectorise<T>(da->data, 0) &&
                             can_vectorise<T>(db->data, 0);
        share_gradient<<<blocks_for(n, MAP_THREADS * MAP_VECTORS * (16 / sizeof(T)), INT32_MAX),
                         MAP_THREADS, 0, cuda_stream(ctx)>>>((const T *)dy->data, (T *)da->data,
                                                             (T *)db->data, n, sign, aligned);
        return cuda_launched(ctx, op);
    });
}

extern "C" lg_status cuda_add(lg_context *ctx, const lg_tensor *a, const lg_tensor *b,
                              lg_tensor *y) {
    return map2(ctx, "add", y, a, b, [] __device__(float u, float v) { return u + v; });
}

extern "C" lg_status cuda_add_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da,
                                       lg_tensor *db) {
    if (da && db) return share(ctx, "add_backward", dy, 1, da, db);
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
    if (da && db) return share(ctx, "sub_backward", dy, -1, da, db);
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
