/* How a row-major product is put to cuBLASLt, for gemm.cu and its bench.
 *
 * cuBLASLt thinks in columns: row-major C = op(A) op(B) is its C^T = op(B)^T op(A)^T, so it gets B
 * first. A row-major matrix that is not transposed is already the transpose it wants.
 */
#ifndef LIGER_GEMM_CUH
#define LIGER_GEMM_CUH

#include <cublasLt.h>
#include <stdint.h>
#include <string.h>

#include "liger.h"

/* All that the choice of an algorithm depends on; compared by its bytes, so it has no padding. */
typedef struct gemm_problem {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t in_dtype, out_dtype; /* lg_dtype of A and B, and of C */
    int32_t a_trans, b_trans, has_bias, accumulate;
    int32_t a_align, b_align, c_align; /* bytes that the addresses are multiples of, at most 16 */
    int32_t pad;
} gemm_problem;

typedef struct gemm_descriptors {
    cublasLtMatmulDescOpaque_t product;
    cublasLtMatrixLayoutOpaque_t a, b, c;
} gemm_descriptors;

/* Past 16 bytes no kernel asks for more. */
static inline int32_t gemm_alignment(const void *data) {
    uintptr_t at = (uintptr_t)data | 16;
    return (int32_t)(at & (~at + 1));
}

static inline cudaDataType_t gemm_type(int32_t dtype) {
    return dtype == LG_F32 ? CUDA_R_32F : dtype == LG_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* `bias` [n] is of C's dtype. Sums run in fp32, never in TF32. */
static inline cublasStatus_t gemm_describe(const gemm_problem *p, const void *bias,
                                           gemm_descriptors *d) {
    const cudaDataType_t in = gemm_type(p->in_dtype), out = gemm_type(p->out_dtype);
    const cublasOperation_t first = p->b_trans ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = p->a_trans ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t s = cublasLtMatmulDescInit(&d->product, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulDescSetAttribute(&d->product, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                           sizeof first);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = cublasLtMatmulDescSetAttribute(&d->product, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                           sizeof second);
    if (s == CUBLAS_STATUS_SUCCESS && p->has_bias) {
        const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        s = cublasLtMatmulDescSetAttribute(&d->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                           sizeof epilogue);
        if (s == CUBLAS_STATUS_SUCCESS)
            s = cublasLtMatmulDescSetAttribute(&d->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                               &bias, sizeof bias);
    }
    if (s == CUBLAS_STATUS_SUCCESS)
        s = p->b_trans ? cublasLtMatrixLayoutInit(&d->b, in, p->k, p->n, p->ldb)
                       : cublasLtMatrixLayoutInit(&d->b, in, p->n, p->k, p->ldb);
    if (s == CUBLAS_STATUS_SUCCESS)
        s = p->a_trans ? cublasLtMatrixLayoutInit(&d->a, in, p->m, p->k, p->lda)
                       : cublasLtMatrixLayoutInit(&d->a, in, p->k, p->m, p->lda);
    if (s == CUBLAS_STATUS_SUCCESS) s = cublasLtMatrixLayoutInit(&d->c, out, p->n, p->m, p->ldc);
    return s;
}

/* A row's result must not depend on how many rows there are, so that a forward never splits k over
 * blocks. A weight's gradient may: its k is the rows. So may a gradient of x whose k is a
 * vocabulary, where one wave of tiles would leave half the chip idle. The parts are added in
 * order, in fp32. */
static inline uint32_t gemm_reductions(const gemm_problem *p) {
    const bool may_split = p->a_trans || (!p->b_trans && p->k >= 16384);
    return may_split ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
}

/* The algorithms that cuBLASLt proposes, best guess first; returns how many, at most `wanted`. */
static inline int gemm_algorithms(cublasLtHandle_t handle, const gemm_problem *p,
                                  gemm_descriptors *d, uint64_t workspace_bytes, int wanted,
                                  cublasLtMatmulHeuristicResult_t *results) {
    cublasLtMatmulPreferenceOpaque_t preference;
    const uint32_t schemes = gemm_reductions(p);
    const uint32_t a = (uint32_t)p->b_align, b = (uint32_t)p->a_align, c = (uint32_t)p->c_align;
    int found = 0;
    cublasLtMatmulPreferenceInit(&preference);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &workspace_bytes, sizeof workspace_bytes);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                         &schemes, sizeof schemes);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                                         &a, sizeof a);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                         &b, sizeof b);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                                         &c, sizeof c);
    cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                                         &c, sizeof c);
    if (cublasLtMatmulAlgoGetHeuristic(handle, &d->product, &d->b, &d->a, &d->c, &d->c, &preference,
                                       wanted, results, &found) != CUBLAS_STATUS_SUCCESS)
        return 0;
    return found;
}

/* Rows, rounded up to 2^i or 3 * 2^(i-1), at least 64: the sizes that algorithms are chosen for. A
 * row keeps its bits within one of these ranges, and compaction's many counts need few choices. */
static inline int64_t gemm_row_class(int64_t rows) {
    int64_t size = 64;
    while (size < rows) size += size & (size - 1) ? size / 3 : size / 2;
    return size;
}

/* The problem that stands for `p` when an algorithm is chosen. */
static inline gemm_problem gemm_class(gemm_problem p) {
    if (p.a_trans)
        p.k = gemm_row_class(p.k);
    else
        p.m = gemm_row_class(p.m);
    return p;
}

#endif
