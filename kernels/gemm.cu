/* The matrix product of all layers and heads: cuBLASLt with a choice of algorithm of our own.
 *
 * An algorithm is chosen once for a class of shapes (gemm_class) and kept in the context, so that
 * the same shapes always run the same kernel: the same bits, and no search on the hot path. Where
 * `tuned` has no entry the choice is cuBLASLt's first proposal.
 */
#include "common.cuh"
#include "gemm.cuh"
#include "state.cuh"

enum { MOST_PROPOSALS = 32, BIAS_THREADS = 256 };

/* Which proposal to take, where it is not the first. Every operand is bf16. For Hopper; made on an H200:
 *   nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Isrc -Ikernels -Ibuild/gen \
 *       bench/gemm.cu -lcublasLt -o build/gemm_bench
 *   build/gemm_bench --table > kernels/gemm_tuned.cuh */
typedef struct tuned_choice {
    int32_t a_trans, b_trans, out_dtype;
    int64_t m, n, k;
    int32_t index;
} tuned_choice;

#include "gemm_tuned.cuh"

static int tuned_index(const cuda_state *s, const gemm_problem *p) {
    if (p->in_dtype != LG_BF16 || s->compute != 90 || cublasLtGetVersion() != TUNED_VERSION)
        return 0;
    for (size_t i = 0; i < sizeof tuned / sizeof tuned[0]; i++) {
        const tuned_choice *t = &tuned[i];
        if (t->m == p->m && t->n == p->n && t->k == p->k && t->a_trans == p->a_trans &&
            t->b_trans == p->b_trans && t->out_dtype == p->out_dtype)
            return t->index;
    }
    return 0;
}

/* ---- the plans of a context ---- */

static uint64_t hash_of(const gemm_problem *p) {
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *p; i++) h = (h ^ ((const uint8_t *)p)[i]) * 0x100000001b3u;
    return h;
}

/* The plan of a problem, searched for if it is new; NULL when cuBLASLt has no algorithm. A full
 * table forgets the plan that stands where the new one belongs. */
static const gemm_plan *plan_of(cuda_state *s, const gemm_problem *p, const void *bias) {
    const uint64_t home = hash_of(p) % NUM_PLANS;
    gemm_plan *plan = &s->plans[home];
    for (int i = 0; i < PLAN_PROBES; i++) {
        gemm_plan *at = &s->plans[(home + i) % NUM_PLANS];
        if (at->used && memcmp(&at->problem, p, sizeof *p) == 0) return at;
        if (!at->used) {
            plan = at;
            break;
        }
    }
    cublasLtMatmulHeuristicResult_t results[MOST_PROPOSALS];
    gemm_descriptors d;
    const int index = tuned_index(s, p);
    if (gemm_describe(p, bias, &d) != CUBLAS_STATUS_SUCCESS) return NULL;
    const int found =
        gemm_algorithms(s->cublas, p, &d, WORKSPACE_BYTES, index > 0 ? MOST_PROPOSALS : 1, results);
    if (found == 0) return NULL;
    *plan = gemm_plan{*p, results[index < found ? index : 0].algo, true};
    return plan;
}

static cublasStatus_t run(cuda_state *s, const gemm_problem *p, const gemm_plan *plan,
                          const void *a, const void *b, void *c, const void *bias) {
    gemm_descriptors d;
    const float alpha = 1, beta = p->accumulate ? 1.0f : 0.0f;
    const cublasStatus_t status = gemm_describe(p, bias, &d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    return cublasLtMatmul(s->cublas, &d.product, &alpha, b, &d.b, a, &d.a, &beta, c, &d.c, c, &d.c,
                          &plan->algo, s->workspace, WORKSPACE_BYTES, s->stream);
}

/* By the plan of its class; a shape that this plan cannot do gets one of its own. */
static cublasStatus_t multiply(cuda_state *s, const gemm_problem *p, const void *a, const void *b,
                               void *c, const void *bias) {
    const gemm_problem of_class = gemm_class(*p);
    const gemm_plan *plan = plan_of(s, &of_class, bias);
    if (plan) {
        const cublasStatus_t status = run(s, p, plan, a, b, c, bias);
        if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE)
            return status;
    }
    plan = plan_of(s, p, bias);
    return plan ? run(s, p, plan, a, b, c, bias) : CUBLAS_STATUS_NOT_SUPPORTED;
}

/* ---- a bias where there is no epilogue for it ---- */

/* C[r] = bias, a thread an element of a row, blocks over rows. */
template <class T>
static __global__ void gemm_bias_rows(const T *bias, T *c, int64_t m, int64_t n, int64_t ldc) {
    const int64_t i = (int64_t)blockIdx.x * BIAS_THREADS + threadIdx.x;
    if (i >= n) return;
    const T value = bias ? bias[i] : from_float<T>(0);
    for (int64_t r = blockIdx.y; r < m; r += gridDim.y) c[r * ldc + i] = value;
}

/* C = bias in every row, or 0 without one. */
static lg_status fill_rows(lg_context *ctx, const char *op, const gemm_problem *p, void *c,
                           const void *bias) {
    return dispatch_float(ctx, op, p->out_dtype, [&](auto t) {
        using T = decltype(t);
        const dim3 grid(blocks_for(p->n, BIAS_THREADS, INT32_MAX), blocks_for(p->m, 1, 4096));
        gemm_bias_rows<T><<<grid, BIAS_THREADS, 0, cuda_stream(ctx)>>>((const T *)bias, (T *)c,
                                                                       p->m, p->n, p->ldc);
        return cuda_launched(ctx, op);
    });
}

/* C = op(A) op(B) + bias, or C += op(A) op(B). `bias` [n] is of C's dtype and not for `accumulate`.
 */
lg_status cuda_gemm(lg_context *ctx, const char *op, int64_t m, int64_t n, int64_t k, cuda_matrix a,
                    cuda_matrix b, void *c, int64_t ldc, int32_t c_dtype, const void *bias,
                    bool accumulate) {
    cuda_state *s = (cuda_state *)lg_context_state(ctx);
    if (m == 0 || n == 0) return LG_OK;
    if (a.dtype != b.dtype)
        return lg_fail(ctx, LG_EUNSUPPORTED, "%s: a product of %s and %s", op,
                       lg_dtype_name(a.dtype), lg_dtype_name(b.dtype));
    gemm_problem p = {};
    p.m = m, p.n = n, p.k = k, p.lda = a.ld, p.ldb = b.ld, p.ldc = ldc;
    p.in_dtype = a.dtype, p.out_dtype = c_dtype;
    p.a_trans = a.trans, p.b_trans = b.trans, p.accumulate = accumulate;
    p.a_align = gemm_alignment(a.data), p.b_align = gemm_alignment(b.data);
    p.c_align = gemm_alignment(c);
    if (k == 0) return accumulate ? LG_OK : fill_rows(ctx, op, &p, c, bias);

    p.has_bias = bias != NULL && gemm_alignment(bias) == 16;
    cublasStatus_t status = CUBLAS_STATUS_NOT_SUPPORTED;
    if (p.has_bias || !bias) status = multiply(s, &p, a.data, b.data, c, bias);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED && bias) {
        LG_TRY(fill_rows(ctx, op, &p, c, bias));
        p.has_bias = 0, p.accumulate = 1;
        status = multiply(s, &p, a.data, b.data, c, NULL);
    }
    if (status == CUBLAS_STATUS_SUCCESS) return LG_OK;
    LG_TRY(cuda_launched(ctx, op));
    return lg_fail(ctx, LG_EDEVICE, "%s: cuBLASLt: %s, for [%lld,%lld] of k %lld", op,
                   cublasLtGetStatusString(status), (long long)m, (long long)n, (long long)k);
}
