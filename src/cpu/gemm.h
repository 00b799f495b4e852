/* The CPU's matrix product. Every element of C is one chain of fused multiply-adds over k in
 * ascending order, so its bits depend on its row of op(A) and its column of op(B) alone: not on how
 * many other rows or columns there are, on tiles, blocks or threads. */
#ifndef LIGER_GEMM_H
#define LIGER_GEMM_H

#include "../internal.h"

/* A row-major matrix; `ld` elements lie between the starts of two rows. */
typedef struct gemm_matrix {
    const void *data;
    int64_t ld;
    lg_dtype dtype;
    bool trans; /* the product reads the transpose: data is [K, M] for A, [N, K] for B */
} gemm_matrix;

typedef struct gemm_args {
    int64_t m, n, k;
    gemm_matrix a; /* op(A) [M, K], f32 or bf16; or f64, then B too */
    gemm_matrix b; /* op(B) [K, N] */
    void *c;       /* [M, N], apart from A and B */
    int64_t ldc;
    lg_dtype c_dtype; /* f32, bf16 (rounded once, at the end); f64 if A and B are f64 */
    bool accumulate;  /* the chain starts from C, else from 0 */
} gemm_args;

/* C = op(A) op(B) or C += op(A) op(B). fp32 accumulation; double when A and B are f64. Fails for other dtypes and
 * when there is no scratch memory, with C as it was. */
lg_status gemm(lg_context *ctx, const gemm_args *args);

#endif
