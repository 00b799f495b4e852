/* Layer normalisation: y = w (x - mean) rstd + b, the variance about the mean, from the row on chip. The
 * kernels are those of norm.cuh and norm_backward.cuh.
 */
#include "norm_backward.cuh"
#include "op/layer_norm.h"

extern "C" lg_status cuda_layer_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                     const lg_tensor *b, double eps, lg_tensor *y, lg_tensor *mean,
                                     lg_tensor *rstd) {
    if (tensor_rows(x) == 0) return LG_OK;
    return dispatch_computed(ctx, "layer_norm", x->dtype, [&](auto t) {
        using T = decltype(t);
        norm_forward<T> a = {};
        a.x = (const T *)x->data, a.w = (const T *)(w ? w->data : NULL);
        a.b = (const T *)(b ? b->data : NULL);
        a.x_rows = rows_of(x), a.N = tensor_rows(x), a.C = tensor_cols(x), a.eps = (float)eps;
        a.vector = rows_vectorise<T>(x) && rows_vectorise<T>(w) && rows_vectorise<T>(b) &&
                   rows_vectorise<T>(y);
        a.y = (T *)y->data, a.mean = (float *)mean->data, a.rstd = (float *)rstd->data;
        return launch_norm<NORM_CENTERED>(ctx, "layer_norm", a);
    });
}

extern "C" lg_status cuda_layer_norm_backward(lg_context *ctx, const lg_tensor *dy,
                                              const lg_tensor *x, const lg_tensor *w,
                                              const lg_tensor *mean, const lg_tensor *rstd,
                                              lg_tensor *dx, lg_tensor *dw, lg_tensor *db) {
    if (tensor_rows(x) == 0 || (!dx && !dw && !db)) return LG_OK;
    return dispatch_computed(ctx, "layer_norm_backward", x->dtype, [&](auto t) {
        using T = decltype(t);
        norm_backward<T> a = {};
        a.dy = (const T *)dy->data, a.x = (const T *)x->data;
        a.w = (const T *)(w ? w->data : NULL), a.mean = (const float *)mean->data;
        a.rstd = (const float *)rstd->data, a.dx = (T *)(dx ? dx->data : NULL);
        a.x_rows = rows_of(x), a.dx_rows = rows_of(dx ? dx : x);
        a.N = tensor_rows(x), a.C = tensor_cols(x);
        a.vector = rows_vectorise<T>(dy) && rows_vectorise<T>(x) && rows_vectorise<T>(w) &&
                   rows_vectorise<T>(dx);
        return launch_norm_backward<NORM_CENTERED>(ctx, "layer_norm_backward", a, dw, db);
    });
}
