/* RMS normalisation: y = f x rstd, f = offset + w. The kernels are those of norm.cuh and
 * norm_backward.cuh.
 */
#include "norm_backward.cuh"
#include "op/rms_norm.h"

extern "C" lg_status cuda_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                   double eps, double offset, bool round, lg_tensor *y,
                                   lg_tensor *rstd) {
    if (tensor_rows(x) == 0) return LG_OK;
    return dispatch_computed(ctx, "rms_norm", x->dtype, [&](auto t) {
        using T = decltype(t);
        norm_forward<T> a = {};
        a.x = (const T *)x->data, a.w = (const T *)(w ? w->data : NULL);
        a.x_rows = rows_of(x), a.N = tensor_rows(x), a.C = tensor_cols(x);
        a.eps = (float)eps, a.offset = (float)offset, a.round = round;
        a.vector = rows_vectorise<T>(x) && rows_vectorise<T>(w) && rows_vectorise<T>(y);
        a.y = (T *)y->data, a.rstd = (float *)rstd->data;
        if (offset == 0 && (round || sizeof(T) == 4))
            return launch_norm<NORM_RMS>(ctx, "rms_norm", a);
        return launch_norm<NORM_OFFSET>(ctx, "rms_norm", a);
    });
}

extern "C" lg_status cuda_rms_norm_backward(lg_context *ctx, const lg_tensor *dy,
                                            const lg_tensor *x, const lg_tensor *w,
                                            const lg_tensor *rstd, double offset, lg_tensor *dx,
                                            lg_tensor *dw) {
    if (tensor_rows(x) == 0 || (!dx && !dw)) return LG_OK;
    return dispatch_computed(ctx, "rms_norm_backward", x->dtype, [&](auto t) {
        using T = decltype(t);
        norm_backward<T> a = {};
        a.dy = (const T *)dy->data, a.x = (const T *)x->data;
        a.w = (const T *)(w ? w->data : NULL), a.rstd = (const float *)rstd->data;
        a.dx = (T *)(dx ? dx->data : NULL), a.offset = (float)offset;
        a.x_rows = rows_of(x), a.dx_rows = rows_of(dx ? dx : x);
        a.N = tensor_rows(x), a.C = tensor_cols(x);
        a.vector = rows_vectorise<T>(dy) && rows_vectorise<T>(x) && rows_vectorise<T>(w) &&
                   rows_vectorise<T>(dx);
        if (offset == 0 || !w)
            return launch_norm_backward<NORM_RMS>(ctx, "rms_norm_backward", a, dw, NULL);
        return launch_norm_backward<NORM_OFFSET>(ctx, "rms_norm_backward", a, dw, NULL);
    });
}
