/* Divergences of given log-probabilities or probabilities, and their gradients with respect to the
 * student's as free numbers: jsd_logp, kl_logp, tvd_prob.
 *
 * given_divergence_fwd: a block owns a row, reads both once and sums its elements' parts.
 * given_divergence_bwd: blocks read both rows once and write the gradient; rows without one are
 * zeroed unread. The elements' formulas stand in given_element.
 */
#include "divergence_backward.cuh"
#include "op/jsd_logp.h"
#include "op/kl_logp.h"
#include "op/tvd_prob.h"

enum { GIVEN_JSD = 0, GIVEN_REVERSE, GIVEN_KL, GIVEN_KL_PROB, GIVEN_TVD };
enum { GIVEN_THREADS = 512, GIVEN_STEP = 2 /* pieces of each row a thread at a time */ };
static constexpr float LEAST_PROBABILITY = 1e-10f;

/* An element's part of the loss, and the derivative of that. Numbers of 16 bits take the fast
 * logarithms. */
template <int Kind, class T>
__device__ __forceinline__ float given_element(float s, float t, float beta, float &derivative) {
    constexpr bool FAST = sizeof(T) == 2;
    derivative = 0;
    if constexpr (Kind == GIVEN_TVD) {
        derivative = s > t ? 0.5f : s < t ? -0.5f : 0;
        return 0.5f * fabsf(s - t);
    } else if constexpr (Kind == GIVEN_KL || Kind == GIVEN_KL_PROB) {
        const float q = Kind == GIVEN_KL_PROB ? t : head_exp(t);
        derivative = -q;
        if (Kind == GIVEN_KL_PROB) {
            const float least = fmaxf(q, LEAST_PROBABILITY);
            t = FAST ? pair_log2(least) * HEAD_LN_2 : logf(least);
        }
        return q > 0 ? q * (t - s) : 0;
    } else if constexpr (Kind == GIVEN_REVERSE) {
        const float p = head_exp(s);
        if (p == 0) return 0;
        derivative = p * (s - t + 1);
        return p * (s - t);
    } else if constexpr (FAST) {
        const pair_mix mix((t - s) * HEAD_LOG2_E, beta);
        const float p = head_exp(s);
        derivative = p > 0 ? (1 - beta) * p * (mix.log2_ratio() * HEAD_LN_2) : 0;
        return mix.loss(head_exp(fmaxf(s, t))) * HEAD_LN_2;
    } else {
        const float p = head_exp(s), q = head_exp(t);
        if (p == 0 && q == 0) return 0;
        const float2 ratio = pair_log_ratios(t - s, beta);
        if (p > 0) derivative = (1 - beta) * p * ratio.x;
        return (q > 0 ? beta * q * ratio.y : 0) + derivative;
    }
}

template <int Kind, class T>
static __global__ void __launch_bounds__(GIVEN_THREADS)
    given_divergence_fwd(const __grid_constant__ pair_args<T, T, head_plain> a) {
    constexpr int W = piece<T>::N;
    constexpr int64_t STRIDE = GIVEN_THREADS * W;
    const int64_t n = blockIdx.x;
    const T *s = a.student + a.student_rows.offset(n), *t = a.teacher + a.teacher_rows.offset(n);
    const int64_t V = pair_is_kept(a, n, false) ? a.V : 0;
    float sum = 0, derivative;
    int64_t v = threadIdx.x * W;
    for (; v + (GIVEN_STEP - 1) * STRIDE + W <= V; v += GIVEN_STEP * STRIDE) {
        piece<T> x[GIVEN_STEP], y[GIVEN_STEP];
#pragma unroll
        for (int u = 0; u < GIVEN_STEP; u++) {
            x[u] = load_piece(s + v + u * STRIDE, W, a.vector);
            y[u] = load_piece(t + v + u * STRIDE, W, a.vector);
        }
#pragma unroll
        for (int u = 0; u < GIVEN_STEP; u++)
#pragma unroll
            for (int e = 0; e < W; e++)
                sum += given_element<Kind, T>(x[u][e], y[u][e], a.beta, derivative);
    }
    for (; v < V; v += STRIDE) {
        const piece<T> x = load_piece(s + v, V - v, a.vector),
                       y = load_piece(t + v, V - v, a.vector);
#pragma unroll
        for (int e = 0; e < W; e++)
            if (v + e < V) sum += given_element<Kind, T>(x[e], y[e], a.beta, derivative);
    }
    sum = block_reduce(sum, Sum(), 0);
    if (threadIdx.x == 0) a.soft[n] = sum;
}

template <int Kind, class T>
static __global__ void __launch_bounds__(PAIR_BWD_THREADS)
    given_divergence_bwd(const __grid_constant__ pair_args<T, T, head_plain> a) {
    constexpr int W = piece<T>::N;
    const int64_t blocks = pair_bwd_blocks<T>(a.V);
    const int64_t n = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int64_t v0 = (block * (PAIR_BWD_THREADS * PAIR_BWD_ITEMS) + threadIdx.x) * W;
    const float weight = a.weight_soft[n], d = pair_is_kept(a, n, false) ? weight : 0;
    const T *s = a.student + a.student_rows.offset(n), *t = a.teacher + a.teacher_rows.offset(n);
    T *to = a.gradient + a.gradient_rows.offset(n);
    piece<T> x[PAIR_BWD_ITEMS] = {}, y[PAIR_BWD_ITEMS] = {};
#pragma unroll
    for (int k = 0; k < PAIR_BWD_ITEMS; k++) {
        const int64_t v = v0 + k * PAIR_BWD_THREADS * W;
        if (d == 0) continue;
        x[k] = load_piece(s + v, a.V - v, a.vector);
        y[k] = load_piece(t + v, a.V - v, a.vector);
    }
#pragma unroll
    for (int k = 0; k < PAIR_BWD_ITEMS; k++) {
        const int64_t v = v0 + k * PAIR_BWD_THREADS * W;
        float out[W] = {};
        if (d != 0) {
#pragma unroll
            for (int e = 0; e < W; e++) {
                float derivative;
                given_element<Kind, T>(x[k][e], y[k][e], a.beta, derivative);
                out[e] = d * derivative;
            }
        }
        store_piece(to + v, pack_piece<T>(out), a.V - v, a.gradient_vector);
    }
}

/* ---- the host's side ---- */

/* An op at work. */
struct given {
    lg_context *ctx;
    const char *op;
    int kind;
    double beta;
    const lg_tensor *student, *teacher, *target;
    int64_t ignore;
};

template <class F>
static lg_status with_kind(const given &g, F f) {
    switch (g.kind) {
    case GIVEN_TVD: return f(width_of<GIVEN_TVD>());
    case GIVEN_KL: return f(width_of<GIVEN_KL>());
    case GIVEN_KL_PROB: return f(width_of<GIVEN_KL_PROB>());
    }
    if (g.beta == 0) return f(width_of<GIVEN_KL>());
    if (g.beta == 1) return f(width_of<GIVEN_REVERSE>());
    return f(width_of<GIVEN_JSD>());
}

template <class T>
static pair_args<T, T, head_plain> args_of(const given &g) {
    pair_args<T, T, head_plain> a = {};
    a.student = (const T *)g.student->data, a.teacher = (const T *)g.teacher->data;
    a.student_rows = rows_of(g.student), a.teacher_rows = rows_of(g.teacher);
    a.N = tensor_rows(g.student), a.V = a.columns = tensor_cols(g.student);
    a.scale = 1, a.beta = (float)g.beta;
    a.target = g.target ? (const int32_t *)g.target->data : NULL;
    a.ignore = g.ignore;
    a.vector = rows_vectorise<T>(g.student) && rows_vectorise<T>(g.teacher);
    return a;
}

static lg_status forward(const given &g, lg_tensor *loss) {
    LG_TRY(pair_check(g.ctx, g.op, LG_JSD, g.beta, 1));
    return dispatch_computed(g.ctx, g.op, g.student->dtype, [&](auto t) {
        using T = decltype(t);
        auto a = args_of<T>(g);
        a.soft = (float *)loss->data;
        if (a.N == 0) return LG_OK;
        return with_kind(g, [&](auto kind) {
            given_divergence_fwd<kind.value, T>
                <<<(unsigned)a.N, GIVEN_THREADS, 0, cuda_stream(g.ctx)>>>(a);
            return cuda_launched(g.ctx, g.op);
        });
    });
}

static lg_status backward(const given &g, const lg_tensor *dloss, lg_tensor *dstudent) {
    LG_TRY(pair_check(g.ctx, g.op, LG_JSD, g.beta, 1));
    if (!dstudent || tensor_numel(dstudent) == 0) return LG_OK;
    return dispatch_computed(g.ctx, g.op, g.student->dtype, [&](auto t) {
        using T = decltype(t);
        auto a = args_of<T>(g);
        a.weight_soft = (const float *)dloss->data;
        a.gradient = (T *)dstudent->data;
        a.gradient_rows = rows_of(dstudent);
        a.gradient_vector = rows_vectorise<T>(dstudent);
        return with_kind(g, [&](auto kind) {
            given_divergence_bwd<kind.value, T><<<(unsigned)(a.N * pair_bwd_blocks<T>(a.V)),
                                                  PAIR_BWD_THREADS, 0, cuda_stream(g.ctx)>>>(a);
            return cuda_launched(g.ctx, g.op);
        });
    });
}

extern "C" lg_status cuda_jsd_logp(lg_context *ctx, const lg_tensor *student,
                                   const lg_tensor *teacher, const lg_tensor *target, double beta,
                                   int64_t ignore, lg_tensor *loss) {
    return forward({ctx, "jsd_logp", GIVEN_JSD, beta, student, teacher, target, ignore}, loss);
}

extern "C" lg_status cuda_jsd_logp_backward(lg_context *ctx, const lg_tensor *dloss,
                                            const lg_tensor *student, const lg_tensor *teacher,
                                            const lg_tensor *target, double beta, int64_t ignore,
                                            lg_tensor *dstudent) {
    return backward({ctx, "jsd_logp_backward", GIVEN_JSD, beta, student, teacher, target, ignore},
                    dloss, dstudent);
}

extern "C" lg_status cuda_kl_logp(lg_context *ctx, const lg_tensor *student,
                                  const lg_tensor *teacher, const lg_tensor *target,
                                  bool log_target, int64_t ignore, lg_tensor *loss) {
    const int kind = log_target ? GIVEN_KL : GIVEN_KL_PROB;
    return forward({ctx, "kl_logp", kind, 0, student, teacher, target, ignore}, loss);
}

extern "C" lg_status cuda_kl_logp_backward(lg_context *ctx, const lg_tensor *dloss,
                                           const lg_tensor *student, const lg_tensor *teacher,
                                           const lg_tensor *target, bool log_target, int64_t ignore,
                                           lg_tensor *dstudent) {
    const int kind = log_target ? GIVEN_KL : GIVEN_KL_PROB;
    return backward({ctx, "kl_logp_backward", kind, 0, student, teacher, target, ignore}, dloss,
                    dstudent);
}

extern "C" lg_status cuda_tvd_prob(lg_context *ctx, const lg_tensor *student,
                                   const lg_tensor *teacher, const lg_tensor *target,
                                   int64_t ignore, lg_tensor *loss) {
    return forward({ctx, "tvd_prob", GIVEN_TVD, 0, student, teacher, target, ignore}, loss);
}

extern "C" lg_status cuda_tvd_prob_backward(lg_context *ctx, const lg_tensor *dloss,
                                            const lg_tensor *student, const lg_tensor *teacher,
                                            const lg_tensor *target, int64_t ignore,
                                            lg_tensor *dstudent) {
    return backward({ctx, "tvd_prob_backward", GIVEN_TVD, 0, student, teacher, target, ignore},
                    dloss, dstudent);
}
