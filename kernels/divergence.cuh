/* A row of student logits against one of teacher logits: cross entropy, divergence, and the
 * gradient with respect to the student's. Used by the ops on logits and by linear_distill.
 *
 * With scale = 1 / temperature and the log-probabilities a = scale s - lse, b = scale t - lse',
 * p = e^a, q = e^b over the V columns that both rows have:
 *   tvd      1/2 sum |p - q|             gradient p (sign(a - b) - sigma) / 2,
 *                                        sigma = sum p sign(a - b)
 *   jsd      beta sum q log(q / m)
 *            + (1 - beta) sum p log(p / m)   (1 - beta) p (log(p / m) - sum p log(p / m))
 *   forward  sum q (b - a)               p - q
 *   reverse  sum p (a - b)               p (a - b - sum p (a - b))
 *   cosine   1 - s.t / (|s| |t|)         (cos s / |s| - t / |t|) / |s|
 *
 * divergence_row: a cluster owns a row pair, its blocks a slice each. The slices are copied to
 * shared memory where they fit, so that a logit is read once: a pass for the log-sum-exps, one for
 * the loss, one for the gradient where it is wanted. Forwards of 16-bit logits on chips with clusters
 * are divergence_stream.cuh's, backwards from a row's state divergence_backward.cuh's.
 */
#ifndef LIGER_DIVERGENCE_CUH
#define LIGER_DIVERGENCE_CUH

#include "element.cuh"
#include "head_row.cuh"
#include "piece.cuh"

enum { PAIR_TVD = 0, PAIR_JSD, PAIR_FORWARD, PAIR_REVERSE, PAIR_COSINE };
static constexpr float PAIR_LEAST_NORM = 1e-8f;

/* As cpu/divergence.h: what the gradient needs of a row. */
struct alignas(16) pair_state {
    float student, teacher, pair, hard;
};

/* What a launch works on. T: the logits' type, O: the gradient's. */
template <class T, class O, class Finish>
struct pair_args {
    const T *student, *teacher;
    strided_rows student_rows, teacher_rows, gradient_rows;
    Finish finish, teacher_finish; /* from products to logits */
    int64_t N, V, columns;         /* V: of the losses; columns: of the gradient, zeros from V on */
    float scale, beta;
    const int32_t *row, *target; /* row i of the logits is row[i] of the rest; NULL: i itself */
    int64_t ignore;
    bool vector, gradient_vector;           /* rows start at multiples of 16 bytes */
    bool held;                              /* slices fit in shared memory */
    float *hard, *soft, *entropy;           /* [N], hard and entropy or NULL */
    pair_state *state;                      /* [N] or NULL */
    const float *weight_hard, *weight_soft; /* [N] of the gradient, or NULL: 0 */
    O *gradient;                            /* or NULL */
    device_error *error;
};

/* ---- pieces of both rows ---- */

/* W elements from v on, finished; -inf from `end` on. */
template <class T, class Finish, int W>
__device__ __forceinline__ void pair_load(const T *z, int64_t v, int64_t end, bool vector,
                                          Finish finish, float (&x)[W]) {
    if (v + W <= end) {
        const piece<T> p = load_piece<T>(z + v, W, vector);
#pragma unroll
        for (int e = 0; e < W; e++) x[e] = finish(p[e]);
    } else {
        const int left = v < end ? (int)(end - v) : 0;
        const piece<T> p = load_piece<T>(z + v, left, vector);
#pragma unroll
        for (int e = 0; e < W; e++) x[e] = e < left ? finish(p[e]) : -INFINITY;
    }
}

__device__ __forceinline__ float pair_log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* A slice to shared memory, each thread what it will read itself. */
template <class T>
__device__ __forceinline__ void pair_keep(const T *z, head_slice slice, bool vector, T *kept) {
    constexpr int W = 16 / sizeof(T);
    for (int64_t v = slice.begin + threadIdx.x * W; v < slice.end; v += blockDim.x * W) {
        T *to = kept + (v - slice.begin);
        if (vector && v + W <= slice.end) {
            const unsigned at = (unsigned)__cvta_generic_to_shared(to);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(z + v)
                         : "memory");
        } else {
#pragma unroll
            for (int e = 0; e < W; e++)
                if (v + e < slice.end) to[e] = z[v + e];
        }
    }
}

__device__ __forceinline__ void pair_keep_done() {
    asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 0;" ::: "memory");
}

/* ---- log-sum-exps ---- */

/* Running sums: of exp(scale (s - max)), that times scale (s - max), exp(s - max), and the
 * teacher's. The maxima start at the lowest finite number, so that -inf gives exp(-inf) = 0. */
struct pair_stats {
    float max, sum, weighted, hard, teacher_max, teacher_sum, scale;

    static __device__ __forceinline__ pair_stats none() {
        return {-FLT_MAX, 0, 0, 0, -FLT_MAX, 0, 0};
    }
    /* To maxima that are no smaller. */
    __device__ __forceinline__ void rise(float to) {
        const float d = fminf(to - max, 1e30f), u = d * scale, c = head_exp(-u);
        weighted = (weighted - u * sum) * c;
        sum *= c;
        hard *= head_exp(-d);
        max = to;
    }
    __device__ __forceinline__ void rise_teacher(float to) {
        teacher_sum *= head_exp(-fminf(to - teacher_max, 1e30f) * scale);
        teacher_max = to;
    }
};

__device__ __forceinline__ pair_stats head_merge_warp(pair_stats s) {
    s.scale = warp_reduce(s.scale, Max()); /* none() has 0 */
    s.rise(warp_reduce(s.max, Max()));
    s.rise_teacher(warp_reduce(s.teacher_max, Max()));
    s.sum = warp_reduce(s.sum, Sum());
    s.weighted = warp_reduce(s.weighted, Sum());
    s.hard = warp_reduce(s.hard, Sum());
    s.teacher_sum = warp_reduce(s.teacher_sum, Sum());
    return s;
}

template <int W>
__device__ __forceinline__ float pair_largest(const float (&x)[W]) {
    float max = -FLT_MAX;
#pragma unroll
    for (int e = 0; e < W; e++) max = fmaxf(max, x[e]);
    return max;
}

/* One thread's share of a slice. */
template <bool Teacher, class T, class Args>
__device__ __forceinline__ pair_stats pair_reduce(const T *s, const T *t, bool vector,
                                                  head_slice slice, const Args &a) {
    constexpr int W = 16 / sizeof(T);
    const bool hard = a.hard && a.scale != 1, entropy = a.entropy != NULL;
    const float scale2 = a.scale * HEAD_LOG2_E;
    pair_stats stats = pair_stats::none();
    stats.scale = a.scale;
#pragma unroll 2
    for (int64_t v = slice.begin + threadIdx.x * W; v < slice.end; v += blockDim.x * W) {
        float x[W], y[W];
        pair_load(s, v, slice.end, vector, a.finish, x);
        if constexpr (Teacher) pair_load(t, v, slice.end, vector, a.teacher_finish, y);
        const float max = pair_largest(x);
        if (max > stats.max) stats.rise(max);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const float d = x[e] - stats.max, p = head_exp2(d * scale2);
            stats.sum += p;
            if (entropy) stats.weighted = fmaf(p, fmaxf(d * a.scale, -200.0f), stats.weighted);
            if (hard) stats.hard += head_exp(d);
        }
        if constexpr (Teacher) {
            const float teacher_max = pair_largest(y);
            if (teacher_max > stats.teacher_max) stats.rise_teacher(teacher_max);
#pragma unroll
            for (int e = 0; e < W; e++)
                stats.teacher_sum += head_exp2((y[e] - stats.teacher_max) * scale2);
        }
    }
    return stats;
}

/* ---- the losses, element by element ---- */

/* -log(1 - w (1 - e^-x)), x >= 0, 0 < w < 1: exact near 0 too, where a fast logarithm is not. */
__device__ __forceinline__ float pair_log_share(float w, float x) {
    const float series = x * (1 - x * (0.5f - x * (1.0f / 6 - x * (1.0f / 24 - x / 120))));
    const float y = w * (x < 0.125f ? series : 1 - head_exp(-x));
    const float small =
        y * (1 + y * (0.5f + y * (1.0f / 3 + y * (0.25f + y * (0.2f + y * (1.0f / 6))))));
    return y < 0.0625f ? small : -__logf(1 - y);
}

/* log(p / m) and log(q / m), m = (1 - beta) p + beta q, given d = log q - log p. */
__device__ __forceinline__ float2 pair_log_ratios(float d, float beta) {
    const float away = fabsf(d);
    const float of_more = pair_log_share(d > 0 ? 1 - beta : beta, away), of_less = of_more - away;
    return d > 0 ? make_float2(of_less, of_more) : make_float2(of_more, of_less);
}

/* The mixture m at an element of 16-bit rows, given d = log2(q / p): r is the smaller of p and q over
 * the larger, g is m over the larger. Logarithms are right to 3e-7, and exactly 0 where d is 0. */
struct pair_mix {
    float away, share, r, g, l;
    bool below; /* p < q */

    __device__ __forceinline__ pair_mix(float d, float beta) {
        below = d > 0;
        away = fminf(fabsf(d), 300.0f); /* a NaN is two zeros, and counts nothing */
        share = below ? 1 - beta : beta;
        r = head_exp2(-away);
        g = fmaf(share, r - 1, 1);
        l = pair_log2(g);
    }
    /* (1 - beta) p log2(p / m) + beta q log2(q / m), given the larger of p and q. */
    __device__ __forceinline__ float loss(float larger) const {
        return -larger * fmaf(l, g, share * r * away);
    }
    /* log2(p / m) */
    __device__ __forceinline__ float log2_ratio() const { return below ? -(away + l) : -l; }
};

/* Sums over a row; what they are depends on the kind. */
struct pair_sums {
    float x[3];
    static __device__ __forceinline__ pair_sums none() { return {{0, 0, 0}}; }
};

__device__ __forceinline__ pair_sums head_merge_warp(pair_sums s) {
#pragma unroll
    for (int k = 0; k < 3; k++) s.x[k] = warp_reduce(s.x[k], Sum());
    return s;
}

template <int Kind>
__device__ __forceinline__ void pair_add(pair_sums &sums, float x, float y, float scale,
                                         pair_state st, float beta) {
    if constexpr (Kind == PAIR_COSINE) {
        const float s = x * scale, t = y * scale;
        if (s == -INFINITY || t == -INFINITY) return;
        sums.x[0] = fmaf(s, t, sums.x[0]);
        sums.x[1] = fmaf(s, s, sums.x[1]);
        sums.x[2] = fmaf(t, t, sums.x[2]);
        return;
    }
    const float a = fmaf(x, scale, -st.student), b = fmaf(y, scale, -st.teacher);
    const float p = head_exp(a), q = head_exp(b);
    if constexpr (Kind == PAIR_TVD) {
        sums.x[0] += fabsf(p - q);
        sums.x[1] += a > b ? p : a < b ? -p : 0;
    }
    if constexpr (Kind == PAIR_FORWARD)
        if (q > 0) sums.x[0] = fmaf(q, b - a, sums.x[0]);
    if constexpr (Kind == PAIR_REVERSE)
        if (p > 0) sums.x[1] = fmaf(p, a - b, sums.x[1]);
    if constexpr (Kind == PAIR_JSD) {
        const float2 ratio = pair_log_ratios(b - a, beta);
        if (q > 0) sums.x[0] = fmaf(q, ratio.y, sums.x[0]);
        if (p > 0) sums.x[1] = fmaf(p, ratio.x, sums.x[1]);
    }
}

/* Completes the state; gives the loss. */
template <int Kind>
__device__ __forceinline__ float pair_finish(pair_sums sums, float beta, pair_state &st) {
    if constexpr (Kind == PAIR_COSINE) {
        st.student = sqrtf(sums.x[1]), st.teacher = sqrtf(sums.x[2]);
        st.pair =
            sums.x[0] / fmaxf(st.student, PAIR_LEAST_NORM) / fmaxf(st.teacher, PAIR_LEAST_NORM);
        return 1 - st.pair;
    }
    st.pair = sums.x[1];
    if constexpr (Kind == PAIR_TVD) return sums.x[0] / 2;
    if constexpr (Kind == PAIR_JSD) return beta * sums.x[0] + (1 - beta) * sums.x[1];
    return sums.x[0] + sums.x[1];
}

/* The gradient of a row's elements, with all that does not depend on them done. x' = x scale
 * log2(e); `more` and `less` are p's factors where p > q and p < q, or s's and t's in cosine. */
template <int Kind, class T>
struct pair_gradient {
    float scale, scale2, student, teacher, teacher_less, even, more, less, soft, pair, beta, hard,
        hard2;
    bool cool; /* the hard loss has probabilities of its own */

    __device__ __forceinline__ pair_gradient(pair_state st, float scale_, float weight_hard,
                                             float weight_soft, float beta_)
        : scale(scale_), scale2(scale * HEAD_LOG2_E), student(st.student * HEAD_LOG2_E),
          teacher(st.teacher * HEAD_LOG2_E), teacher_less(st.teacher - st.student),
          soft(weight_soft * scale), pair(st.pair), beta(beta_), hard(weight_hard),
          hard2(st.hard * HEAD_LOG2_E),
          cool(weight_hard != 0 && (scale != 1 || Kind == PAIR_COSINE)) {
        even = cool ? 0 : hard, more = less = 0;
        if constexpr (Kind == PAIR_TVD) {
            even -= soft * pair / 2;
            more = even + soft / 2, less = even - soft / 2;
        }
        if constexpr (Kind == PAIR_COSINE) {
            const float norm = fmaxf(st.student, PAIR_LEAST_NORM);
            /* A norm that is held at its least is a constant. */
            more = st.student >= PAIR_LEAST_NORM ? soft * scale * pair / norm / norm : 0;
            less = soft * scale / fmaxf(st.teacher, PAIR_LEAST_NORM) / norm;
        }
    }
    __device__ __forceinline__ float operator()(float x, float y) const {
        const float a = fmaf(x, scale2, -student), b = fmaf(y, scale2, -teacher);
        const float p = head_exp2(a), more_of_p = fmaf(x - y, scale, teacher_less);
        float g = 0;
        if constexpr (Kind == PAIR_COSINE)
            g = x == -INFINITY || y == -INFINITY ? 0 : fmaf(x, more, -(y * less));
        if constexpr (Kind == PAIR_TVD)
            g = p * (more_of_p > 0 ? more : more_of_p < 0 ? less : even);
        if constexpr (Kind == PAIR_FORWARD) g = fmaf(even + soft, p, -(soft * head_exp2(b)));
        if constexpr (Kind == PAIR_REVERSE)
            g = p > 0 ? p * fmaf(soft, fmaf(a - b, HEAD_LN_2, -pair), even) : 0;
        if constexpr (Kind == PAIR_JSD) {
            const float ratio = sizeof(T) == 2 ? pair_mix(b - a, beta).log2_ratio() * HEAD_LN_2
                                               : pair_log_ratios((b - a) * HEAD_LN_2, beta).x;
            g = p > 0 ? p * fmaf(soft * (1 - beta), ratio - pair, even) : 0;
        }
        return cool ? fmaf(hard, head_exp2(fmaf(x, HEAD_LOG2_E, -hard2)), g) : g;
    }
};

/* The gradient of elements v to v + W - 1, through what made logits of products. */
template <int Kind, class T, class O, int W, class Args>
__device__ __forceinline__ void pair_store_gradient(const pair_gradient<Kind, T> &gradient,
                                                    const float (&x)[W], const float (&y)[W],
                                                    int64_t v, int64_t end, int32_t target,
                                                    const Args &a, O *to) {
    vec<O, W> out;
#pragma unroll
    for (int e = 0; e < W; e++) {
        const float g = gradient(x[e], y[e]) - (v + e == target ? gradient.hard : 0);
        out[e] = from_float<O>(g * a.finish.slope(x[e]));
    }
    store_part<W>(to + v, out, end - v, a.gradient_vector);
}

/* ---- the kernels ---- */

/* Whether row n takes part, given its target; one that is none is noted, by the thread that `notes`. */
template <class Args>
__device__ __forceinline__ bool pair_target_counts(const Args &a, int64_t n, int32_t t, bool hard,
                                                   bool notes) {
    if (t == a.ignore) return false;
    if (!hard || (t >= 0 && t < a.V)) return true;
    if (notes) note_error(a.error, ERROR_TARGET, n, t, a.V);
    return false;
}

template <class Args>
__device__ __forceinline__ bool pair_is_kept(const Args &a, int64_t n, bool hard) {
    return !a.target || pair_target_counts(a, n, a.target[n], hard, threadIdx.x == 0);
}

template <int Kind, class T, class O, class Finish>
static __global__ void __launch_bounds__(HEAD_MOST_THREADS)
    divergence_row(const __grid_constant__ pair_args<T, O, Finish> a) {
    constexpr int W = 16 / sizeof(T);
    extern __shared__ float4 memory[];
    __shared__ head_room_of<pair_stats> stats_room;
    __shared__ head_room_of<pair_sums> sums_room;
    const int64_t i = blockIdx.x / head_num_slices(), n = a.row ? a.row[i] : i;
    const bool writes = head_slice_index() == 0 && threadIdx.x == 0;
    if (n < 0) { /* a row that a head misses */
        for (int64_t v = threadIdx.x; a.gradient && v < a.columns; v += blockDim.x)
            a.gradient[a.gradient_rows.offset(i) + v] = from_float<O>(0);
        return;
    }
    if (!pair_is_kept(a, n, a.hard != NULL)) { /* only the ops on logits meet one */
        if (!writes) return;
        if (a.hard) a.hard[n] = 0;
        a.soft[n] = 0;
        if (a.state) a.state[n] = {0, 0, 0, 0};
        return;
    }
    const head_slice slice = head_slice_of(a.V, 8);
    const T *s = a.student + a.student_rows.offset(i), *t = a.teacher + a.teacher_rows.offset(i);
    const T *row_s = s;
    bool vector = a.vector;
    if (a.held) {
        T *kept = (T *)memory, *teacher_kept = kept + (slice.end - slice.begin + 7) / 8 * 8;
        pair_keep(s, slice, vector, kept);
        pair_keep(t, slice, vector, teacher_kept);
        pair_keep_done();
        s = kept - slice.begin, t = teacher_kept - slice.begin, vector = true;
    }

    pair_state st = {0, 0, 0, 0};
    float hard = 0;
    if (Kind != PAIR_COSINE || a.hard || a.entropy) {
        const pair_stats stats =
            head_merge(pair_reduce<Kind != PAIR_COSINE>(s, t, vector, slice, a), &stats_room);
        const float log_sum = logf(stats.sum);
        st.student = fmaf(stats.max, a.scale, log_sum);
        st.teacher = fmaf(stats.teacher_max, a.scale, logf(stats.teacher_sum));
        if (a.hard) {
            const float log_hard = a.scale != 1 ? logf(stats.hard) : log_sum;
            hard = log_hard - (a.finish(to_float(row_s[a.target[n]])) - stats.max);
            st.hard = stats.max + log_hard;
        }
        if (a.entropy && writes) a.entropy[n] = log_sum - stats.weighted / stats.sum;
    }

    pair_sums sums = pair_sums::none();
#pragma unroll 2
    for (int64_t v = slice.begin + threadIdx.x * W; v < slice.end; v += blockDim.x * W) {
        float x[W], y[W];
        pair_load(s, v, slice.end, vector, a.finish, x);
        pair_load(t, v, slice.end, vector, a.teacher_finish, y);
#pragma unroll
        for (int e = 0; e < W; e++) pair_add<Kind>(sums, x[e], y[e], a.scale, st, a.beta);
    }
    if (Kind != PAIR_COSINE || a.hard || a.entropy) head_leave();
    sums = head_merge(sums, &sums_room);
    const float soft = pair_finish<Kind>(sums, a.beta, st);
    if (writes) {
        if (a.hard) a.hard[n] = hard;
        a.soft[n] = soft;
        if (a.state) a.state[n] = st;
    }

    if (a.gradient) {
        O *to = a.gradient + a.gradient_rows.offset(i);
        const pair_gradient<Kind, T> gradient(st, a.scale, a.weight_hard ? a.weight_hard[n] : 0,
                                              a.weight_soft ? a.weight_soft[n] : 0, a.beta);
        const int32_t target = a.hard ? a.target[n] : -1;
        for (int64_t v = slice.begin + threadIdx.x * W; v < slice.end; v += blockDim.x * W) {
            float x[W], y[W];
            pair_load(s, v, slice.end, vector, a.finish, x);
            pair_load(t, v, slice.end, vector, a.teacher_finish, y);
            pair_store_gradient(gradient, x, y, v, slice.end, target, a, to);
        }
        if (head_slice_index() == 0)
            for (int64_t v = a.V + threadIdx.x; v < a.columns; v += blockDim.x)
                to[v] = from_float<O>(0);
    }
    head_leave();
}

/* ---- the host's side ---- */

/* The rows of a matrix, `ld` elements apart. */
static inline strided_rows pair_rows_of(int64_t ld) {
    strided_rows rows = {{1, 1, 1}, {ld, 0, 0}, false, true, ld, ld};
    return rows;
}

static inline lg_status pair_check(lg_context *ctx, const char *op, int64_t divergence, double beta,
                                   double temperature) {
    if (divergence < 0 || divergence >= LG_NUM_DIVERGENCES)
        return lg_fail(ctx, LG_EINVAL, "%s: divergence is %lld, wanted 0 to %d", op,
                       (long long)divergence, LG_NUM_DIVERGENCES - 1);
    LG_TRY(head_check_temperature(ctx, op, temperature));
    if (!(beta >= 0 && beta <= 1))
        return lg_fail(ctx, LG_EINVAL, "%s: beta is %g, wanted 0 to 1", op, beta);
    return LG_OK;
}

/* Calls f(width_of<Kind>()) with the kernel's kind of a divergence. */
template <class F>
static lg_status pair_with_kind(int64_t divergence, double beta, F f) {
    if (divergence == LG_TVD) return f(width_of<PAIR_TVD>());
    if (divergence == LG_COSINE) return f(width_of<PAIR_COSINE>());
    if (beta == 0) return f(width_of<PAIR_FORWARD>());
    if (beta == 1) return f(width_of<PAIR_REVERSE>());
    return f(width_of<PAIR_JSD>());
}

/* Launches divergence_row on n rows of logits. */
template <int Kind, class T, class O, class Finish>
static lg_status pair_launch_rows(lg_context *ctx, const char *op, int64_t n,
                                  pair_args<T, O, Finish> args) {
    int device = 0, most = 0;
    const int64_t slices = head_launch_of(args.V).slices;
    int64_t bytes = 2 * ((args.V + 8 * slices - 1) / (8 * slices) * 8) * (int64_t)sizeof(T);
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    args.held = bytes <= most - 4096;
    if (!args.held) bytes = 0;
    const auto kernel = divergence_row<Kind, T, O, Finish>;
    LG_TRY(cuda_check(
        ctx, op,
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes)));
    return head_launch_rows(ctx, op, head_launch_of(args.V), n, (size_t)bytes, kernel, args);
}

#endif
