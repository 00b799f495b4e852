/* The gradient of the losses between two rows of logits, given the rows' state: blocks read both rows
 * once and write the gradient; rows without one are zeroed unread. divergence.cuh has the formulas.
 */
#ifndef LIGER_DIVERGENCE_BACKWARD_CUH
#define LIGER_DIVERGENCE_BACKWARD_CUH

#include "divergence.cuh"

enum { PAIR_BWD_THREADS = 256, PAIR_BWD_ITEMS = 2 /* 16 bytes of each row a thread */ };

/* Blocks of a row's backward. */
template <class T>
__host__ __device__ __forceinline__ int64_t pair_bwd_blocks(int64_t columns) {
    constexpr int64_t Block = PAIR_BWD_THREADS * PAIR_BWD_ITEMS * (16 / sizeof(T));
    return (columns + Block - 1) / Block;
}

/* The gradient of a row's elements, with all that does not depend on them done. x' = x scale
 * log2(e); `more` and `less` are p's factors where p > q and p < q, or s's and t's in cosine. */
template <int Kind, class T>
struct pair_gradient {
    float scale, scale2, student, teacher, teacher_less, even, more, less, soft, pair, beta, hard,
        hard2;
    bool cool; /* the hard loss has a temperature of its own */

    __device__ __forceinline__ pair_gradient(pair_state st, float scale_, float weight_hard,
                                             float weight_soft, float beta_)
        : scale(scale_), scale2(scale * PAIR_LOG2_E), student(st.student * PAIR_LOG2_E),
          teacher(st.teacher * PAIR_LOG2_E), teacher_less(st.teacher - st.student),
          soft(weight_soft * scale), pair(st.pair), beta(beta_), hard(weight_hard),
          hard2(st.hard * PAIR_LOG2_E), cool(weight_hard != 0 && scale != 1) {
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
        if constexpr (Kind == PAIR_COSINE)
            return x == -INFINITY || y == -INFINITY ? 0 : fmaf(x, more, -(y * less));
        const float a = fmaf(x, scale2, -student), b = fmaf(y, scale2, -teacher);
        const float p = pair_exp2(a), more_of_p = fmaf(x - y, scale, teacher_less);
        float g = 0;
        if constexpr (Kind == PAIR_TVD)
            g = p * (more_of_p > 0 ? more : more_of_p < 0 ? less : even);
        if constexpr (Kind == PAIR_FORWARD) g = fmaf(even + soft, p, -(soft * pair_exp2(b)));
        if constexpr (Kind == PAIR_REVERSE)
            g = p > 0 ? p * fmaf(soft, fmaf(a - b, PAIR_LN_2, -pair), even) : 0;
        if constexpr (Kind == PAIR_JSD) {
            const float ratio = sizeof(T) == 2 ? pair_mix(b - a, beta).log2_ratio() * PAIR_LN_2
                                               : pair_log_ratios((b - a) * PAIR_LN_2, beta).x;
            g = p > 0 ? p * fmaf(soft * (1 - beta), ratio - pair, even) : 0;
        }
        return cool ? fmaf(hard, pair_exp2(fmaf(x, PAIR_LOG2_E, -hard2)), g) : g;
    }
};

/* weight_hard and weight_soft are the gradients from above. */
template <int Kind, class T>
static __global__ void __launch_bounds__(PAIR_BWD_THREADS)
    divergence_bwd(const __grid_constant__ pair_args<T, T, head_plain> a) {
    constexpr int W = piece<T>::N;
    const int64_t blocks = pair_bwd_blocks<T>(a.columns);
    const int64_t n = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int64_t v0 = (block * (PAIR_BWD_THREADS * PAIR_BWD_ITEMS) + threadIdx.x) * W;
    const float hard = a.weight_hard ? a.weight_hard[n] : 0,
                soft = a.weight_soft ? a.weight_soft[n] : 0;
    const pair_state st = a.state[n];
    const bool active = pair_is_kept(a, n, hard != 0) && (hard != 0 || soft != 0);
    T *to = a.gradient + a.gradient_rows.offset(n);
    if (!active) {
#pragma unroll
        for (int k = 0; k < PAIR_BWD_ITEMS; k++) {
            const int64_t v = v0 + k * PAIR_BWD_THREADS * W;
            store_piece(to + v, piece<T>{}, a.columns - v, a.gradient_vector);
        }
        return;
    }
    const T *s = a.student + a.student_rows.offset(n), *t = a.teacher + a.teacher_rows.offset(n);
    piece<T> x[PAIR_BWD_ITEMS], y[PAIR_BWD_ITEMS];
#pragma unroll
    for (int k = 0; k < PAIR_BWD_ITEMS; k++) {
        const int64_t v = v0 + k * PAIR_BWD_THREADS * W;
        x[k] = load_piece(s + v, a.V - v, a.vector);
        y[k] = load_piece(t + v, a.V - v, a.vector);
    }
    const int64_t target = hard != 0 ? a.target[n] : -1;
    const pair_gradient<Kind, T> gradient(st, a.scale, hard, soft, a.beta);
#pragma unroll
    for (int k = 0; k < PAIR_BWD_ITEMS; k++) {
        const int64_t v = v0 + k * PAIR_BWD_THREADS * W;
        float out[W];
#pragma unroll
        for (int e = 0; e < W; e++) out[e] = gradient(x[k][e], y[k][e]);
        if (target >= v && target < v + W) {
#pragma unroll
            for (int e = 0; e < W; e++)
                if (v + e == target) out[e] -= hard;
        }
        if (v + W > a.V) { /* the student's columns beyond the teacher's have none */
#pragma unroll
            for (int e = 0; e < W; e++)
                if (v + e >= a.V) out[e] = 0;
        }
        store_piece(to + v, pack_piece<T>(out), a.columns - v, a.gradient_vector);
    }
}

#endif
