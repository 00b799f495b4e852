/* The losses between two matrices of logits, ce_tvd, tvd, jsd and cosine: launches of the kernels
 * of divergence.cuh. The state of a row, 16 bytes, is all that is kept for the backward.
 */
#include "divergence_backward.cuh"
#include "divergence_stream.cuh"
#include "op/ce_tvd.h"
#include "op/cosine.h"
#include "op/jsd.h"
#include "op/tvd.h"

/* An op at work. */
struct pair {
    lg_context *ctx;
    const char *op;
    const lg_tensor *student, *teacher, *target;
    int64_t divergence;
    double beta, temperature;
    int64_t ignore;
};

template <class T>
static pair_args<T, T, head_plain> pair_args_of(const pair &p) {
    pair_args<T, T, head_plain> a = {};
    const int64_t V = tensor_cols(p.student), U = tensor_cols(p.teacher);
    a.student = (const T *)p.student->data, a.teacher = (const T *)p.teacher->data;
    a.student_rows = rows_of(p.student), a.teacher_rows = rows_of(p.teacher);
    a.N = tensor_rows(p.student), a.V = V < U ? V : U, a.columns = V;
    a.scale = (float)(1 / p.temperature), a.beta = (float)p.beta;
    a.target = p.target ? (const int32_t *)p.target->data : NULL;
    a.ignore = p.ignore;
    a.vector = rows_vectorise<T>(p.student) && rows_vectorise<T>(p.teacher);
    a.error = cuda_error_slot(p.ctx, p.op);
    return a;
}

enum { COSINE_THREADS = 512 };

/* The angle between rows: a block owns a row pair and reads both once. */
template <class T>
static __global__ void __launch_bounds__(COSINE_THREADS)
    cosine_fwd(const __grid_constant__ pair_args<T, T, head_plain> a) {
    constexpr int W = piece<T>::N, STEP = 4;
    constexpr int64_t STRIDE = COSINE_THREADS * W;
    __shared__ head_room_of<pair_sums> room;
    const int64_t n = blockIdx.x;
    const bool kept = pair_is_kept(a, n, false);
    const T *s = a.student + a.student_rows.offset(n), *t = a.teacher + a.teacher_rows.offset(n);
    pair_sums sums = pair_sums::none();
    for (int64_t v = threadIdx.x * W; kept && v < a.V; v += STEP * STRIDE) {
        piece<T> x[STEP], y[STEP];
#pragma unroll
        for (int u = 0; u < STEP; u++) {
            x[u] = load_piece(s + v + u * STRIDE, a.V - v - u * STRIDE, a.vector);
            y[u] = load_piece(t + v + u * STRIDE, a.V - v - u * STRIDE, a.vector);
        }
#pragma unroll
        for (int u = 0; u < STEP; u++)
#pragma unroll
            for (int e = 0; e < W; e++)
                pair_add<PAIR_COSINE>(sums, x[u][e], y[u][e], a.scale, {}, 0);
    }
    sums = head_merge(sums, &room);
    if (threadIdx.x > 0) return;
    pair_state st = {0, 0, 0, 0};
    const float loss = kept ? pair_finish<PAIR_COSINE>(sums, 0, st) : 0;
    a.soft[n] = loss;
    a.state[n] = st;
}

/* Rows of 16 bits are streamed where the chip has clusters for them. */
template <int Kind, class T>
static lg_status pair_launch_forward(const pair &p, const pair_args<T, T, head_plain> &a) {
    if constexpr (Kind == PAIR_COSINE) {
        cosine_fwd<<<(unsigned)a.N, COSINE_THREADS, 0, cuda_stream(p.ctx)>>>(a);
        return cuda_launched(p.ctx, p.op);
    } else {
        bool done = false;
        if constexpr (sizeof(T) == 2) LG_TRY((stream_launch_rows<Kind, T>(p.ctx, p.op, &done, a)));
        return done ? LG_OK : pair_launch_rows<Kind>(p.ctx, p.op, a.N, a);
    }
}

static lg_status pair_forward(const pair &p, lg_tensor *hard, lg_tensor *soft, lg_tensor *saved) {
    LG_TRY(pair_check(p.ctx, p.op, p.divergence, p.beta, p.temperature));
    return dispatch_float(p.ctx, p.op, p.student->dtype, [&](auto t) {
        using T = decltype(t);
        auto a = pair_args_of<T>(p);
        if (a.N == 0) return LG_OK;
        if (a.V == 0)
            return lg_fail(p.ctx, LG_EINVAL, "%s: student and teacher share no column, wanted one",
                           p.op);
        a.hard = hard ? (float *)hard->data : NULL;
        a.soft = (float *)soft->data;
        a.state = (pair_state *)saved->data;
        return pair_with_kind(p.divergence, p.beta,
                              [&](auto kind) { return pair_launch_forward<kind.value, T>(p, a); });
    });
}

static lg_status pair_backward(const pair &p, const lg_tensor *dhard, const lg_tensor *dsoft,
                               const lg_tensor *saved, lg_tensor *dstudent) {
    LG_TRY(pair_check(p.ctx, p.op, p.divergence, p.beta, p.temperature));
    if (!dstudent || tensor_numel(dstudent) == 0) return LG_OK;
    return dispatch_float(p.ctx, p.op, p.student->dtype, [&](auto t) {
        using T = decltype(t);
        auto a = pair_args_of<T>(p);
        a.weight_hard = dhard ? (const float *)dhard->data : NULL;
        a.weight_soft = dsoft ? (const float *)dsoft->data : NULL;
        a.state = (pair_state *)saved->data;
        a.gradient = (T *)dstudent->data;
        a.gradient_rows = rows_of(dstudent);
        a.gradient_vector = rows_vectorise<T>(dstudent);
        const unsigned blocks = (unsigned)(a.N * pair_bwd_blocks<T>(a.columns));
        return pair_with_kind(p.divergence, p.beta, [&](auto kind) {
            divergence_bwd<kind.value, T><<<blocks, PAIR_BWD_THREADS, 0, cuda_stream(p.ctx)>>>(a);
            return cuda_launched(p.ctx, p.op);
        });
    });
}

extern "C" lg_status cuda_ce_tvd(lg_context *ctx, const lg_tensor *student,
                                 const lg_tensor *teacher, const lg_tensor *target,
                                 double temperature, int64_t ignore, lg_tensor *ce, lg_tensor *tvd,
                                 lg_tensor *saved) {
    return pair_forward({ctx, "ce_tvd", student, teacher, target, LG_TVD, 0, temperature, ignore},
                        ce, tvd, saved);
}

extern "C" lg_status cuda_ce_tvd_backward(lg_context *ctx, const lg_tensor *dce,
                                          const lg_tensor *dtvd, const lg_tensor *student,
                                          const lg_tensor *teacher, const lg_tensor *target,
                                          const lg_tensor *saved, double temperature,
                                          int64_t ignore, lg_tensor *dstudent) {
    return pair_backward(
        {ctx, "ce_tvd_backward", student, teacher, target, LG_TVD, 0, temperature, ignore}, dce,
        dtvd, saved, dstudent);
}

extern "C" lg_status cuda_tvd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                              const lg_tensor *target, double temperature, int64_t ignore,
                              lg_tensor *loss, lg_tensor *saved) {
    return pair_forward({ctx, "tvd", student, teacher, target, LG_TVD, 0, temperature, ignore},
                        NULL, loss, saved);
}

extern "C" lg_status cuda_tvd_backward(lg_context *ctx, const lg_tensor *dloss,
                                       const lg_tensor *student, const lg_tensor *teacher,
                                       const lg_tensor *target, const lg_tensor *saved,
                                       double temperature, int64_t ignore, lg_tensor *dstudent) {
    return pair_backward(
        {ctx, "tvd_backward", student, teacher, target, LG_TVD, 0, temperature, ignore}, NULL,
        dloss, saved, dstudent);
}

extern "C" lg_status cuda_jsd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                              const lg_tensor *target, double beta, double temperature,
                              int64_t ignore, lg_tensor *loss, lg_tensor *saved) {
    return pair_forward({ctx, "jsd", student, teacher, target, LG_JSD, beta, temperature, ignore},
                        NULL, loss, saved);
}

extern "C" lg_status cuda_jsd_backward(lg_context *ctx, const lg_tensor *dloss,
                                       const lg_tensor *student, const lg_tensor *teacher,
                                       const lg_tensor *target, const lg_tensor *saved, double beta,
                                       double temperature, int64_t ignore, lg_tensor *dstudent) {
    return pair_backward(
        {ctx, "jsd_backward", student, teacher, target, LG_JSD, beta, temperature, ignore}, NULL,
        dloss, saved, dstudent);
}

extern "C" lg_status cuda_cosine(lg_context *ctx, const lg_tensor *student,
                                 const lg_tensor *teacher, const lg_tensor *target,
                                 double temperature, int64_t ignore, lg_tensor *loss,
                                 lg_tensor *saved) {
    return pair_forward(
        {ctx, "cosine", student, teacher, target, LG_COSINE, 0, temperature, ignore}, NULL, loss,
        saved);
}

extern "C" lg_status cuda_cosine_backward(lg_context *ctx, const lg_tensor *dloss,
                                          const lg_tensor *student, const lg_tensor *teacher,
                                          const lg_tensor *target, const lg_tensor *saved,
                                          double temperature, int64_t ignore, lg_tensor *dstudent) {
    return pair_backward(
        {ctx, "cosine_backward", student, teacher, target, LG_COSINE, 0, temperature, ignore}, NULL,
        dloss, saved, dstudent);
}
