/* Which of cuBLASLt's proposals is fastest, for the table `tuned` of kernels/gemm.cu. Build and run
 * as it says there.
 *
 * For each product of a few models: all proposals, timed in rounds that take turns, L2 flushed
 * before each. Prints the first proposal's time, the best one's, its index and rate, and a hash
 * of the first row of C under either: where the hashes of all row classes agree, a row keeps its
 * bits from decoding to training. With `--table`, prints only the lines of `tuned`, for gains of
 * 2 per cent and more.
 */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "gemm.cuh"

enum { PROPOSALS = 32, ROUNDS = 7, WORKSPACE = 32 << 20, FLUSH = 256 << 20 };

#define CHECK(expr)                                                                      \
    do {                                                                                 \
        const int status_ = (int)(expr);                                                 \
        if (status_ != 0) {                                                              \
            fprintf(stderr, "%s:%d: %s gives %d\n", __FILE__, __LINE__, #expr, status_); \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

struct bench {
    cublasLtHandle_t cublas;
    cudaStream_t stream;
    cudaEvent_t start, end;
    void *a, *b, *c, *workspace, *flush;
    bool table;
};

/* Random bf16 in [-1, 1), the same everywhere. */
static __global__ void fill_random(__nv_bfloat16 *x, int64_t n) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t h = (uint64_t)i * 0x9e3779b97f4a7c15u;
        h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
        x[i] = __float2bfloat16((float)(h >> 40) * 0x1p-23f - 1.0f);
    }
}

static void *random_bf16(int64_t n) {
    void *x;
    CHECK(cudaMalloc(&x, n * 2));
    fill_random<<<1024, 256>>>((__nv_bfloat16 *)x, n);
    CHECK(cudaGetLastError());
    return x;
}

static cublasStatus_t multiply(const bench &t, const gemm_problem &p, gemm_descriptors &d,
                               const cublasLtMatmulAlgo_t &algo) {
    const float alpha = 1, beta = p.accumulate ? 1.0f : 0.0f;
    return cublasLtMatmul(t.cublas, &d.product, &alpha, t.b, &d.b, t.a, &d.a, &beta, t.c, &d.c, t.c,
                          &d.c, &algo, t.workspace, WORKSPACE, t.stream);
}

static float time_once(const bench &t, const gemm_problem &p, gemm_descriptors &d,
                       const cublasLtMatmulAlgo_t &algo) {
    float ms;
    CHECK(cudaMemsetAsync(t.flush, 0, FLUSH, t.stream));
    CHECK(cudaEventRecord(t.start, t.stream));
    if (multiply(t, p, d, algo) != CUBLAS_STATUS_SUCCESS) return INFINITY;
    CHECK(cudaEventRecord(t.end, t.stream));
    CHECK(cudaEventSynchronize(t.end));
    CHECK(cudaEventElapsedTime(&ms, t.start, t.end));
    return ms;
}

static uint32_t first_row_hash(const bench &t, const gemm_problem &p) {
    std::vector<uint8_t> row(p.n * (p.out_dtype == LG_F32 ? 4 : 2));
    uint32_t h = 0x811c9dc5u;
    CHECK(cudaMemcpyAsync(row.data(), t.c, row.size(), cudaMemcpyDeviceToHost, t.stream));
    CHECK(cudaStreamSynchronize(t.stream));
    for (uint8_t byte : row) h = (h ^ byte) * 0x01000193u;
    return h;
}

static int32_t config_of(const cublasLtMatmulAlgo_t &algo,
                         cublasLtMatmulAlgoConfigAttributes_t what) {
    int32_t value = -1;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(&algo, what, &value, sizeof value, &written);
    return value;
}

static void run(const bench &t, const char *model, const char *layer, const char *kind, int64_t m,
                int64_t n, int64_t k, int32_t out) {
    gemm_problem p = {};
    gemm_descriptors d;
    cublasLtMatmulHeuristicResult_t results[PROPOSALS];
    p.a_trans = kind[0] == 'T', p.b_trans = kind[1] == 'T', p.accumulate = p.a_trans;
    p.m = m, p.n = n, p.k = k;
    p.lda = p.a_trans ? m : k, p.ldb = p.b_trans ? k : n, p.ldc = n;
    p.in_dtype = LG_BF16, p.out_dtype = out;
    p.a_align = p.b_align = p.c_align = 16;
    p = gemm_class(p);
    CHECK(gemm_describe(&p, NULL, &d));
    const int found = gemm_algorithms(t.cublas, &p, &d, WORKSPACE, PROPOSALS, results);
    std::vector<std::vector<float>> times(found);
    std::vector<uint32_t> hash(found);
    for (int i = 0; i < found; i++) {
        if (p.accumulate) CHECK(cudaMemsetAsync(t.c, 0, p.m * p.n * 4, t.stream));
        if (multiply(t, p, d, results[i].algo) == CUBLAS_STATUS_SUCCESS)
            hash[i] = first_row_hash(t, p);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < found; i++) times[i].push_back(time_once(t, p, d, results[i].algo));
    int best = 0;
    for (int i = 0; i < found; i++) {
        std::sort(times[i].begin(), times[i].end());
        if (times[i][ROUNDS / 2] < times[best][ROUNDS / 2]) best = i;
    }
    if (found == 0) {
        printf("%s %s %s [%ld,%ld] k %ld: no proposal\n", model, layer, kind, (long)p.m, (long)p.n,
               (long)p.k);
        return;
    }
    const float first_ms = times[0][ROUNDS / 2], best_ms = times[best][ROUNDS / 2];
    const double flops = 2.0 * (double)p.m * (double)p.n * (double)p.k;
    if (!t.table)
        printf("%-12s %-8s %s %-4s m %6ld n %6ld k %6ld  first %8.1f us  best %8.1f us (%2d of "
               "%2d, %.2fx, split %d, tile %d) "
               "%5.0f TFLOP/s  row %08x %08x\n",
               model, layer, kind, out == LG_F32 ? "f32" : "bf16", (long)p.m, (long)p.n, (long)p.k,
               first_ms * 1e3, best_ms * 1e3, best, found, first_ms / best_ms,
               config_of(results[best].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
               config_of(results[best].algo, CUBLASLT_ALGO_CONFIG_TILE_ID), flops / best_ms * 1e-9,
               hash[0], hash[best]);
    else if (best > 0 && first_ms > 1.02f * best_ms)
        printf("    {%d, %d, %s, %ld, %ld, %ld, %d}, /* %s %s: %.1f, the first %.1f us */\n",
               p.a_trans, p.b_trans, out == LG_F32 ? "LG_F32" : "LG_BF16", (long)p.m, (long)p.n,
               (long)p.k, best, model, layer, best_ms * 1e3, first_ms * 1e3);
    fflush(stdout);
}

/* The three products of a layer of O outputs and C inputs over some rows. */
static void layer(const bench &t, const char *model, const char *name, int64_t rows, int64_t C,
                  int64_t O, int32_t out) {
    run(t, model, name, "NT", rows, O, C, out);
    run(t, model, name, "NN", rows, C, O, LG_BF16);
    run(t, model, name, "TN", O, C, rows, LG_F32);
}

struct shape {
    const char *model;
    int64_t hidden, qkv, attention, intermediate,
        vocabulary; /* qkv: all three side by side; attention: into the output layer */
};

int main(int argc, char **argv) {
    static const shape shapes[] = {
        {"SmolLM2-135M", 576, 960, 576, 1536, 49152},
        {"Qwen3-0.6B", 1024, 4096, 2048, 3072, 151936},
        {"Llama-3.2-1B", 2048, 3072, 2048, 8192, 128256},
        {"Llama-3-8B", 4096, 6144, 4096, 14336, 128256},
    };
    bench t = {};
    t.table = argc > 1 && strcmp(argv[1], "--table") == 0;
    const char *only = argc > 1 + t.table ? argv[1 + t.table] : "";
    CHECK(cudaStreamCreate(&t.stream));
    CHECK(cudaEventCreate(&t.start));
    CHECK(cudaEventCreate(&t.end));
    CHECK(cublasLtCreate(&t.cublas));
    t.a = random_bf16((int64_t)8192 * 151936);
    t.b = random_bf16((int64_t)151936 * 4096);
    CHECK(cudaMalloc(&t.c, (int64_t)8192 * 151936 * 4));
    CHECK(cudaMalloc(&t.workspace, WORKSPACE));
    CHECK(cudaMalloc(&t.flush, FLUSH));
    CHECK(cudaDeviceSynchronize());
    printf("%s cuBLASLt %zu\n", t.table ? "TUNED_VERSION:" : "#", cublasLtGetVersion());
    for (const shape &s : shapes) {
        if (!strstr(s.model, only)) continue;
        for (int64_t rows : {2048, 4096, 8192}) {
            layer(t, s.model, "qkv", rows, s.hidden, s.qkv, LG_BF16);
            layer(t, s.model, "out", rows, s.attention, s.hidden, LG_BF16);
            layer(t, s.model, "gate_up", rows, s.hidden, 2 * s.intermediate, LG_BF16);
            layer(t, s.model, "gate", rows, s.hidden, s.intermediate, LG_BF16);
            layer(t, s.model, "down", rows, s.intermediate, s.hidden, LG_BF16);
        }
        for (int64_t rows : {1024, 2048, 4096})
            layer(t, s.model, "head", rows, s.hidden, s.vocabulary, LG_F32);
        for (int64_t rows : {64, 256}) {
            run(t, s.model, "gate_up", "NT", rows, 2 * s.intermediate, s.hidden, LG_BF16);
            run(t, s.model, "down", "NT", rows, s.hidden, s.intermediate, LG_BF16);
            run(t, s.model, "head", "NT", rows, s.vocabulary, s.hidden, LG_F32);
        }
    }
    return 0;
}
