/* Which of cuBLASLt's proposals is fastest, for the table `tuned` of kernels/gemm.cu. Build and run
 * as it says there.
 *
 * For each product of a few models: all proposals, timed in rounds that take turns, L2 flushed
 * before each. Prints the times of the first proposal, the best and the chosen one, and a hash of
 * C's first rows under it: forward products are chosen so that it is one for all numbers of rows,
 * and a row keeps its bits from decoding to training. With `--table` these lines go to
 * stderr and the lines of `tuned` to stdout.
 */
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "gemm.cuh"

enum {
    PROPOSALS = 32,
    ROUNDS = 5,
    HASHED_ROWS = 64,
    WORKSPACE = 32 << 20,
    FLUSH = 256 << 20,
};

static const int64_t MOST_OUTPUTS = (int64_t)4096 * 151936; /* a chunk of the head's */

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

/* Of the first rows of C, as many as every class has. */
static uint32_t rows_hash(const bench &t, const gemm_problem &p) {
    std::vector<uint8_t> rows(HASHED_ROWS * p.n * (p.out_dtype == LG_F32 ? 4 : 2));
    uint32_t h = 0x811c9dc5u;
    CHECK(cudaMemcpyAsync(rows.data(), t.c, rows.size(), cudaMemcpyDeviceToHost, t.stream));
    CHECK(cudaStreamSynchronize(t.stream));
    for (uint8_t byte : rows) h = (h ^ byte) * 0x01000193u;
    return h;
}

static int32_t config_of(const cublasLtMatmulAlgo_t &algo,
                         cublasLtMatmulAlgoConfigAttributes_t what) {
    int32_t value = -1;
    size_t written;
    cublasLtMatmulAlgoConfigGetAttribute(&algo, what, &value, sizeof value, &written);
    return value;
}

/* One proposal of a product, as measured. */
struct proposal {
    float ms;
    uint32_t hash;
    int32_t tile, split;
};

struct product {
    const char *model, *layer;
    gemm_problem p;
    std::vector<proposal> proposals; /* by index */
};

static product measure(const bench &t, const char *model, const char *layer, const char *kind,
                       int64_t m, int64_t n, int64_t k, int32_t out) {
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
    product result = {model, layer, p, std::vector<proposal>(found)};
    for (int i = 0; i < found; i++) {
        if (p.accumulate) CHECK(cudaMemsetAsync(t.c, 0, p.m * p.n * 4, t.stream));
        const bool ok = multiply(t, p, d, results[i].algo) == CUBLAS_STATUS_SUCCESS;
        result.proposals[i].hash = ok ? rows_hash(t, p) : 0;
        result.proposals[i].tile = config_of(results[i].algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
        result.proposals[i].split = config_of(results[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < found; i++) times[i].push_back(time_once(t, p, d, results[i].algo));
    for (int i = 0; i < found; i++) {
        std::sort(times[i].begin(), times[i].end());
        result.proposals[i].ms = times[i][ROUNDS / 2];
    }
    return result;
}

/* The fastest proposal; of those with the hash alone when there is one. -1: none. */
static int fastest(const product &x, const uint32_t *hash) {
    int best = -1;
    for (int i = 0; i < (int)x.proposals.size(); i++)
        if ((!hash || x.proposals[i].hash == *hash) && isfinite(x.proposals[i].ms) &&
            (best < 0 || x.proposals[i].ms < x.proposals[best].ms))
            best = i;
    return best;
}

static void print(const bench &t, const product &x, int chosen) {
    if (chosen < 0) {
        printf("%s %s [%ld,%ld] k %ld: no proposal\n", x.model, x.layer, (long)x.p.m, (long)x.p.n,
               (long)x.p.k);
        return;
    }
    const gemm_problem &p = x.p;
    const int best = fastest(x, NULL);
    const proposal &c = x.proposals[chosen], &b = x.proposals[best], &first = x.proposals[0];
    const double flops = 2.0 * (double)p.m * (double)p.n * (double)p.k;
    fprintf(
        t.table ? stderr : stdout,
        "%-12s %-8s %c%c %-4s m %6ld n %6ld k %6ld  first %8.1f us  best %8.1f us  chosen %8.1f "
        "us (%2d of %2d, %.0f%% of best, split %d, tile %d, rows %08x) %5.0f TFLOP/s\n",
        x.model, x.layer, p.a_trans ? 'T' : 'N', p.b_trans ? 'T' : 'N',
        p.out_dtype == LG_F32 ? "f32" : "bf16", (long)p.m, (long)p.n, (long)p.k, first.ms * 1e3,
        b.ms * 1e3, c.ms * 1e3, chosen, (int)x.proposals.size(), 100 * b.ms / c.ms, c.split, c.tile,
        c.hash, flops / c.ms * 1e-9);
    if (t.table && chosen > 0)
        printf("    {%d, %d, %s, %ld, %ld, %ld, %d}, /* %s %s: %.1f, the first %.1f us */\n",
               p.a_trans, p.b_trans, p.out_dtype == LG_F32 ? "LG_F32" : "LG_BF16", (long)p.m,
               (long)p.n, (long)p.k, chosen, x.model, x.layer, c.ms * 1e3, first.ms * 1e3);
    fflush(stdout);
}

/* Forward products of one weight over the row classes. A row shall have the same bits in all of
 * them, so they take the algorithms that agree on the first rows: of the hashes that every class
 * has, the one that costs the least, as the sum over classes of time / best time. */
static void forward(const bench &t, const char *model, const char *layer, int64_t C, int64_t O,
                    int32_t out) {
    std::vector<product> classes;
    for (int64_t rows = 64; rows <= 8192; rows += rows & (rows - 1) ? rows / 3 : rows / 2)
        if (rows * O <= MOST_OUTPUTS)
            classes.push_back(measure(t, model, layer, "NT", rows, O, C, out));
    const uint32_t *chosen = NULL;
    double least = INFINITY;
    for (const proposal &candidate : classes[0].proposals) {
        double cost = 0;
        for (const product &x : classes) {
            const int i = fastest(x, &candidate.hash);
            cost += i < 0 ? INFINITY : x.proposals[i].ms / x.proposals[fastest(x, NULL)].ms;
        }
        if (cost < least) least = cost, chosen = &candidate.hash;
    }
    if (!chosen) fprintf(stderr, "%s %s: no hash is in every class\n", model, layer);
    for (const product &x : classes) print(t, x, fastest(x, chosen));
}

static void backward(const bench &t, const char *model, const char *layer, int64_t rows, int64_t C,
                     int64_t O) {
    const product dx = measure(t, model, layer, "NN", rows, C, O, LG_BF16);
    const product dw = measure(t, model, layer, "TN", O, C, rows, LG_F32);
    for (const product *x : {&dx, &dw}) {
        const int best = fastest(*x, NULL);
        /* The first stays where the gain is within the noise. */
        const bool gain = best > 0 && x->proposals[0].ms > 1.02f * x->proposals[best].ms;
        print(t, *x, gain ? best : 0);
    }
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
        {"Qwen3-1.7B", 2048, 4096, 2048, 6144, 151936},
        {"Llama-3-8B", 4096, 6144, 4096, 14336, 128256},
    };
    bench t = {};
    t.table = argc > 1 && strcmp(argv[1], "--table") == 0;
    const char *only = argc > 1 + t.table ? argv[1 + t.table] : "";
    CHECK(cudaStreamCreate(&t.stream));
    CHECK(cudaEventCreate(&t.start));
    CHECK(cudaEventCreate(&t.end));
    CHECK(cublasLtCreate(&t.cublas));
    t.a = random_bf16(MOST_OUTPUTS);
    t.b = random_bf16((int64_t)151936 * 4096);
    CHECK(cudaMalloc(&t.c, MOST_OUTPUTS * 4));
    CHECK(cudaMalloc(&t.workspace, WORKSPACE));
    CHECK(cudaMalloc(&t.flush, FLUSH));
    CHECK(cudaDeviceSynchronize());
    if (t.table)
        printf("/* Made by bench/gemm.cu. Proposals differ between versions of cuBLASLt: the "
               "entries count for\n"
               " * TUNED_VERSION alone. a_trans, b_trans, C's dtype, m, n, k of gemm_class, index. "
               "*/\n"
               "enum { TUNED_VERSION = %zu };\n\nstatic const tuned_choice tuned[] = {\n",
               cublasLtGetVersion());
    for (const shape &s : shapes) {
        if (!strstr(s.model, only)) continue;
        const struct {
            const char *name;
            int64_t C, O;
        } layers[] = {
            {"qkv", s.hidden, s.qkv},
            {"out", s.attention, s.hidden},
            {"gate_up", s.hidden, 2 * s.intermediate},
            {"down", s.intermediate, s.hidden},
        };
        for (auto &l : layers) {
            forward(t, s.model, l.name, l.C, l.O, LG_BF16);
            for (int64_t rows : {1024, 2048, 4096, 8192, 16384})
                backward(t, s.model, l.name, rows, l.C, l.O);
        }
        forward(t, s.model, "head", s.hidden, s.vocabulary, LG_F32);
        for (int64_t rows : {1024, 2048, 4096})
            backward(t, s.model, "head", rows, s.hidden, s.vocabulary);
    }
    if (t.table) printf("};\n");
    return 0;
}
