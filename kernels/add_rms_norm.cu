/* RMS normalisation of a sum: s = x + residual, y = f s rstd. The kernels are those of norm.cuh and
 * norm_backward.cuh: the forward reads x and residual and writes s and y, the backward reads s, dy
 * and ds and writes dx; dresidual is dx. Without a ds the backward is rms_norm's.
 */
#include "norm_backward.cuh"
#include "op/add_rms_norm.h"
#include "op/rms_norm.h"

extern "C" lg_status cuda_add_rms_norm(lg_context *ctx, const lg_tensor *x,
                                       const lg_tensor *residual, const lg_tensor *w, double eps,
                                       double offset, bool round, lg_tensor *s, lg_tensor *y,
                                       lg_tensor *rstd) {
    if (tensor_rows(x) == 0) return LG_OK;
    return dispatch_computed(ctx, "add_rms_norm", x->dtype, [&](auto t) {
        using T = decltype(t);
        norm_forward<T> a = {};
        a.x = (const T *)x->data, a.residual = (const T *)residual->data;
        a.w = (const T *)(w ? w->data : NULL);
        a.x_rows = rows_of(x), a.N = tensor_rows(x), a.C = tensor_cols(x);
        a.eps = (float)eps, a.offset = (float)offset, a.round = round;
        a.vector = rows_vectorise<T>(x) && rows_vectorise<T>(residual) && rows_vectorise<T>(w) &&
                   rows_vectorise<T>(s) && rows_vectorise<T>(y);
        a.s = (T *)s->data, a.y = (T *)y->data, a.rstd = (float *)rstd->data;
        if (offset == 0 && (round || sizeof(T) == 4))
            return launch_norm<NORM_ADD>(ctx, "add_rms_norm", a);
        return launch_norm<NORM_ADD + NORM_OFFSET>(ctx, "add_rms_norm", a);
    });
}

extern "C" lg_status cuda_add_rms_norm_backward(lg_context *ctx, const lg_tensor *dy,
                                                const lg_tensor *ds, const lg_tensor *s,
                                                const lg_tensor *w, const lg_tensor *rstd,
                                                double offset, lg_tensor *dx, lg_tensor *dresidual,
                                                lg_tensor *dw) {
    const char *op = "add_rms_norm_backward";
    lg_tensor *written = dx ? dx : dresidual;
    if (tensor_rows(s) == 0 || (!written && !dw)) return LG_OK;
    const auto launch = [&](auto t) {
        using T = decltype(t);
        norm_backward<T> a = {};
        a.dy = (const T *)dy->data, a.ds = (const T *)ds->data, a.x = (const T *)s->data;
        a.w = (const T *)(w ? w->data : NULL), a.rstd = (const float *)rstd->data;
        a.dx = (T *)(written ? written->data : NULL), a.offset = (float)offset;
        a.dx_too = (T *)(dx && dresidual ? dresidual->data : NULL);
        a.x_rows = a.dx_rows = rows_of(s);
        a.N = tensor_rows(s), a.C = tensor_cols(s);
        a.vector = rows_vectorise<T>(dy) && rows_vectorise<T>(ds) && rows_vectorise<T>(s) &&
                   rows_vectorise<T>(w) && rows_vectorise<T>(written) &&
                   rows_vectorise<T>(dresidual);
        if (offset == 0 || !w) return launch_norm_backward<NORM_ADD>(ctx, op, a, dw, NULL);
        return launch_norm_backward<NORM_ADD + NORM_OFFSET>(ctx, op, a, dw, NULL);
    };
    LG_TRY(ds ? dispatch_computed(ctx, op, s->dtype, launch)
              : cuda_rms_norm_backward(ctx, dy, s, w, rstd, offset, written, dw));
    if (ds || !dx || !dresidual) return LG_OK;
    const size_t bytes = (size_t)(tensor_numel(dx) * lg_dtype_bytes(dx->dtype));
    return cuda_check(ctx, op,
                      cudaMemcpyAsync(dresidual->data, dx->data, bytes, cudaMemcpyDeviceToDevice,
                                      cuda_stream(ctx)));
}
