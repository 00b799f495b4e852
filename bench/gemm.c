/* Checks the CPU's matrix product bit for bit against the three-line chain, then times it beside OpenBLAS, BLIS and
 * oneDNN. Both libraries with a cblas are opened at run time, so that their symbols stay apart.
 *
 *   luajit src/opgen.lua src/liger.h src/ops.h build/gen
 *   gcc -O3 -march=native -mprefer-vector-width=512 -fopenmp -std=gnu11 -D_GNU_SOURCE -Isrc -Ibuild/gen \
 *       bench/gemm.c src/cpu/gemm.c -o build/gemm_bench -lm -ldl
 *   build/gemm_bench [check | time] [text that a row's name must contain]
 *
 * A row interleaves the libraries, at least 7 rounds; figures are GFLOP/s of the fastest round, and the median over
 * rounds of the ratio ours / best other. */
#include <dlfcn.h>
#include <math.h>
#include <omp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cpu/cpu.h"
#include "cpu/gemm.h"

/* ---- the few functions of the library that the product calls ---- */

struct lg_context {
    int threads;
    void *scratch;
    int64_t scratch_bytes;
};

int64_t lg_context_threads(const lg_context *ctx) { return ctx->threads; }
const char *lg_dtype_name(int32_t dtype) { return dtype == LG_I32 ? "i32" : "float"; }
int64_t lg_dtype_bytes(int32_t dtype) { return dtype == LG_F64 ? 8 : dtype == LG_F32 ? 4 : 2; }

lg_status lg_fail(lg_context *ctx, lg_status status, const char *format, ...) {
    (void)ctx;
    (void)format;
    return status;
}

lg_scratch_mark lg_scratch_save(lg_context *ctx) {
    (void)ctx;
    return (lg_scratch_mark){NULL, 0};
}

void lg_scratch_restore(lg_context *ctx, lg_scratch_mark mark) {
    (void)ctx;
    (void)mark;
}

lg_status lg_scratch(lg_context *ctx, int64_t bytes, void **data) {
    if (bytes > ctx->scratch_bytes) {
        free(ctx->scratch);
        ctx->scratch_bytes = (bytes + 63) / 64 * 64;
        ctx->scratch = aligned_alloc(64, (size_t)ctx->scratch_bytes);
        if (!ctx->scratch) return LG_ENOMEM;
        memset(ctx->scratch, 0xff, (size_t)ctx->scratch_bytes); /* NaN: nobody may read it first */
    }
    *data = ctx->scratch;
    return LG_OK;
}

/* ---- values ---- */

static uint64_t random_state = 1;

static float random_float(void) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(random_state >> 32) * 0x1p-31f;
}

static void *random_array(int64_t n, lg_dtype dtype) {
    size_t bytes = (size_t)(n * lg_dtype_bytes(dtype));
    void *x = aligned_alloc(64, (bytes + 127) / 64 * 64);
    for (int64_t i = 0; i < n; i++) {
        float value = random_float();
        if (dtype == LG_F64) ((double *)x)[i] = value + random_float() * 0x1p-30;
        if (dtype == LG_F32) ((float *)x)[i] = value;
        if (dtype == LG_BF16) ((uint16_t *)x)[i] = f32_to_bf16(value);
    }
    return x;
}

static double element(const void *x, lg_dtype dtype, int64_t i) {
    if (dtype == LG_F64) return ((const double *)x)[i];
    if (dtype == LG_F32) return ((const float *)x)[i];
    return bf16_to_f32(((const uint16_t *)x)[i]);
}

/* ---- the check ---- */

static void chain(const gemm_args *g, void *c) {
    bool f64 = g->a.dtype == LG_F64;
    for (int64_t m = 0; m < g->m; m++)
        for (int64_t n = 0; n < g->n; n++) {
            int64_t at = m * g->ldc + n;
            double wide = g->accumulate ? element(c, g->c_dtype, at) : 0;
            float narrow = (float)wide;
            for (int64_t k = 0; k < g->k; k++) {
                double a =
                    element(g->a.data, g->a.dtype, g->a.trans ? k * g->a.ld + m : m * g->a.ld + k);
                double b =
                    element(g->b.data, g->b.dtype, g->b.trans ? n * g->b.ld + k : k * g->b.ld + n);
                if (f64) wide = fma(a, b, wide);
                narrow = fmaf((float)a, (float)b, narrow);
            }
            if (g->c_dtype == LG_F64) ((double *)c)[at] = f64 ? wide : narrow;
            if (g->c_dtype == LG_F32) ((float *)c)[at] = f64 ? (float)wide : narrow;
            if (g->c_dtype == LG_BF16)
                ((uint16_t *)c)[at] = f32_to_bf16(f64 ? (float)wide : narrow);
        }
}

/* One shape in all transposes and dtypes, with and without accumulation, on 1, 2 and 3 threads. */
static int64_t check_shape(lg_context *ctx, int64_t m, int64_t n, int64_t k) {
    static const lg_dtype dtypes[][3] = {
        {LG_F32, LG_F32, LG_F32},  {LG_BF16, LG_BF16, LG_BF16}, {LG_BF16, LG_F32, LG_F32},
        {LG_F32, LG_BF16, LG_F32}, {LG_BF16, LG_BF16, LG_F32},  {LG_F32, LG_F32, LG_BF16},
        {LG_F64, LG_F64, LG_F64},  {LG_F64, LG_F64, LG_F32},
    };
    int64_t failures = 0;
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++)
        for (int flags = 0; flags < 8; flags++) {
            gemm_args g = {.m = m, .n = n, .k = k, .accumulate = flags & 4};
            g.a = (gemm_matrix){.dtype = dtypes[d][0], .trans = flags & 1};
            g.b = (gemm_matrix){.dtype = dtypes[d][1], .trans = flags & 2};
            g.c_dtype = dtypes[d][2];
            g.a.ld = (g.a.trans ? m : k) + 3;
            g.b.ld = (g.b.trans ? k : n) + 1;
            g.ldc = n + 2;
            g.a.data = random_array(g.a.ld * (g.a.trans ? k : m), g.a.dtype);
            g.b.data = random_array(g.b.ld * (g.b.trans ? n : k), g.b.dtype);
            size_t bytes = (size_t)(m * g.ldc * lg_dtype_bytes(g.c_dtype));
            void *start = random_array(m * g.ldc, g.c_dtype);
            void *want = malloc(bytes + 1), *got = malloc(bytes + 1);
            memcpy(want, start, bytes);
            chain(&g, want);
            for (ctx->threads = 1; ctx->threads <= 3; ctx->threads++) {
                memcpy(got, start, bytes);
                g.c = got;
                lg_status status = gemm(ctx, &g);
                if (status != LG_OK || memcmp(got, want, bytes) != 0) {
                    failures++;
                    printf("WRONG [%ld,%ld,%ld] dtypes %zu flags %d threads %d\n", (long)m, (long)n,
                           (long)k, d, flags, ctx->threads);
                }
            }
            free((void *)g.a.data);
            free((void *)g.b.data);
            free(start);
            free(want);
            free(got);
        }
    return failures;
}

/* Row 57 of 100 rows, alone, has the same bits. */
static int64_t check_one_row(lg_context *ctx, int64_t n, int64_t k, lg_dtype dtype) {
    int64_t bytes = lg_dtype_bytes(dtype);
    char *a = random_array(400 * k, dtype), *b = random_array(n * k, dtype);
    char *many = malloc((size_t)(400 * n * bytes)), *one = malloc((size_t)(n * bytes));
    gemm_args g = {.m = 400, .n = n, .k = k, .c = many, .ldc = n, .c_dtype = dtype};
    g.a = (gemm_matrix){a, k, dtype, false};
    g.b = (gemm_matrix){b, k, dtype, true};
    int64_t failures = 0;
    for (ctx->threads = 1; ctx->threads <= 2; ctx->threads++)
        for (g.m = 400; g.m > 57; g.m = g.m * 3 / 4) {
            g.a.data = a;
            g.c = many;
            failures += gemm(ctx, &g) != LG_OK;
            gemm_args row = g;
            row.m = 1;
            row.a.data = a + 57 * k * bytes;
            row.c = one;
            failures += gemm(ctx, &row) != LG_OK;
            failures += memcmp(one, many + 57 * n * bytes, (size_t)(n * bytes)) != 0;
        }
    if (failures) printf("WRONG one row of [%ld,%ld]\n", (long)n, (long)k);
    free(a);
    free(b);
    free(many);
    free(one);
    return failures;
}

static int64_t check(lg_context *ctx) {
    static const int64_t shapes[][3] = {
        {1, 1, 1},      {0, 5, 3},     {5, 0, 3},       {5, 7, 0},      {1, 100, 33},
        {2, 3, 5},      {12, 32, 64},  {13, 33, 65},    {11, 31, 17},   {100, 1, 40},
        {24, 64, 384},  {25, 65, 385}, {7, 16, 1000},   {33, 40, 1153}, {31, 100, 2050},
        {64, 17, 4100}, {130, 70, 90}, {200, 150, 800}, {3, 700, 500},  {140, 2100, 130},
    };
    int64_t failures = 0;
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        failures += check_shape(ctx, shapes[i][0], shapes[i][1], shapes[i][2]);
    failures += check_one_row(ctx, 128, 384, LG_F32) + check_one_row(ctx, 130, 3001, LG_F32);
    failures += check_one_row(ctx, 768, 2500, LG_BF16) + check_one_row(ctx, 513, 100, LG_F64);
    gemm_args bad = {.m = 1, .n = 1, .k = 1, .a.dtype = LG_I32, .b.dtype = LG_F32};
    failures += gemm(ctx, &bad) != LG_EUNSUPPORTED;
    printf("check: %ld failures\n", (long)failures);
    return failures;
}

/* ---- the others ---- */

typedef void sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                   const float *a, int lda, const float *b, int ldb, float beta, float *c, int ldc);
typedef int dnnl_sgemm(char trans_a, char trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                       const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                       float *c, int64_t ldc);

enum { OURS, OPENBLAS, BLIS, ONEDNN, NUM_LIBRARIES };
static const char *const names[NUM_LIBRARIES] = {"ours", "openblas", "blis", "onednn"};
static sgemm *cblas[NUM_LIBRARIES];
static dnnl_sgemm *dnnl;

static void *open_symbol(const char *library, const char *symbol) {
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    return handle ? dlsym(handle, symbol) : NULL;
}

static bool run_library(lg_context *ctx, int library, const gemm_args *g) {
    int m = (int)g->m, n = (int)g->n, k = (int)g->k, lda = (int)g->a.ld, ldb = (int)g->b.ld;
    float beta = g->accumulate ? 1 : 0;
    if (library == OURS) return gemm(ctx, g) == LG_OK;
    if (library == ONEDNN)
        return dnnl && dnnl(g->a.trans ? 'T' : 'N', g->b.trans ? 'T' : 'N', m, n, k, 1, g->a.data,
                            lda, g->b.data, ldb, beta, g->c, g->ldc) == 0;
    if (!cblas[library]) return false;
    cblas[library](101, g->a.trans ? 112 : 111, g->b.trans ? 112 : 111, m, n, k, 1, g->a.data, lda,
                   g->b.data, ldb, beta, g->c, (int)g->ldc);
    return true;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* `kind` is NT (y = x W^T), NN (dx = dy W) or TN (dw += dy^T x) of a layer with weight [n, k] and m rows. */
static void time_row(lg_context *ctx, const char *kind, int64_t m, int64_t n, int64_t k,
                     const char *filter) {
    char name[64];
    snprintf(name, sizeof name, "%s %ldx(%ld,%ld)", kind, (long)m, (long)n, (long)k);
    if (filter && !strstr(name, filter)) return;
    gemm_args g = {.m = m, .n = n, .k = k, .c_dtype = LG_F32};
    if (strcmp(kind, "NN") == 0) g.n = k, g.k = n;
    if (strcmp(kind, "TN") == 0) g.m = n, g.n = k, g.k = m;
    g.accumulate = g.a.trans = kind[0] == 'T';
    g.b.trans = kind[1] == 'T';
    g.a.dtype = g.b.dtype = LG_F32;
    g.a.ld = g.a.trans ? g.m : g.k;
    g.b.ld = g.b.trans ? g.k : g.n;
    g.ldc = g.n;
    g.a.data = random_array(g.m * g.k, LG_F32);
    g.b.data = random_array(g.n * g.k, LG_F32);
    g.c = random_array(g.m * g.n, LG_F32);

    enum { MAX_ROUNDS = 64 };
    double flops = 2.0 * (double)m * (double)n * (double)k, ratio[MAX_ROUNDS];
    double best[NUM_LIBRARIES] = {0}, start = now();
    int repeat = flops < 2e8 ? (int)(2e8 / flops) + 1 : 1, rounds = 0;
    for (int i = 0; i < NUM_LIBRARIES; i++) run_library(ctx, i, &g);
    for (; rounds < MAX_ROUNDS && (rounds < 7 || now() - start < 0.6); rounds++) {
        double speed[NUM_LIBRARIES] = {0}, other = 0;
        for (int i = 0; i < NUM_LIBRARIES; i++) {
            double t = now();
            bool ran = true;
            for (int j = 0; j < repeat; j++) ran = run_library(ctx, i, &g);
            if (ran) speed[i] = repeat * flops / (now() - t) * 1e-9;
            best[i] = fmax(best[i], speed[i]);
            if (i != OURS) other = fmax(other, speed[i]);
        }
        ratio[rounds] = speed[OURS] / other;
    }
    qsort(ratio, (size_t)rounds, sizeof *ratio, compare_doubles);
    printf("%-24s", name);
    for (int i = 0; i < NUM_LIBRARIES; i++) printf(" %8.1f", best[i]);
    double other = fmax(best[OPENBLAS], fmax(best[BLIS], best[ONEDNN]));
    printf("   %5.2f  median %5.2f\n", best[OURS] / other, ratio[rounds / 2]);
    fflush(stdout);
    free((void *)g.a.data);
    free((void *)g.b.data);
    free(g.c);
}

int main(int argc, char **argv) {
    lg_context ctx = {0};
    const char *mode = argc > 1 ? argv[1] : "", *filter = argc > 2 ? argv[2] : NULL;
    int64_t failures = strcmp(mode, "time") == 0 ? 0 : check(&ctx);
    if (failures || strcmp(mode, "check") == 0) {
        free(ctx.scratch);
        return failures != 0;
    }
    ctx.threads = 0;
    cblas[OPENBLAS] = (sgemm *)open_symbol("libopenblas.so.0", "cblas_sgemm");
    cblas[BLIS] = (sgemm *)open_symbol("libblis.so.4", "cblas_sgemm");
    dnnl = (dnnl_sgemm *)open_symbol("libdnnl.so.2", "dnnl_sgemm");
    void (*set_blis_threads)(int64_t) =
        (void (*)(int64_t))open_symbol("libblis.so.4", "bli_thread_set_num_threads");
    if (set_blis_threads) set_blis_threads(omp_get_max_threads());

    static const int64_t tiny[][2] = {{512, 128}, {128, 128}, {768, 128}, {128, 384}, {256, 128}};
    static const int64_t smol[][2] = {
        {960, 576}, {576, 576}, {3072, 576}, {576, 1536}, {49152, 576}};
    static const char *const kinds[] = {"NT", "NN", "TN"};
    printf("%-24s", "GFLOP/s");
    for (int i = 0; i < NUM_LIBRARIES; i++) printf(" %8s", names[i]);
    printf("   ours / best\n");
    for (int i = 0; i < 5; i++) time_row(&ctx, "NT", 32, tiny[i][0], tiny[i][1], filter);
    for (int i = 0; i < 5; i++) time_row(&ctx, "NT", 256, tiny[i][0], tiny[i][1], filter);
    for (int kind = 0; kind < 3; kind++) {
        for (int i = 0; i < 5; i++)
            time_row(&ctx, kinds[kind], 900, tiny[i][0], tiny[i][1], filter);
        for (int i = 0; i < 5; i++)
            time_row(&ctx, kinds[kind], 2560, tiny[i][0], tiny[i][1], filter);
    }
    for (int i = 0; i < 5; i++) time_row(&ctx, "NT", 1, smol[i][0], smol[i][1], filter);
    for (int i = 0; i < 5; i++) time_row(&ctx, "NT", 32, smol[i][0], smol[i][1], filter);
    for (int kind = 0; kind < 3; kind++)
        for (int i = 0; i < 5; i++)
            time_row(&ctx, kinds[kind], 1024, smol[i][0], smol[i][1], filter);
    free(ctx.scratch);
    return 0;
}
