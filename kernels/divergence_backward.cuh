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
