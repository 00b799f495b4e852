/* The context: a device, its backend, the last error, threads and counters. */
#include "context.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "internal.h"

lg_context *lg_context_open(int32_t device) {
    if (device != LG_CPU) return NULL;
    lg_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return NULL;
    ctx->backend = lg_cpu_backend();
    lg_context_set_threads(ctx, 0);
    return ctx;
}

void lg_context_close(lg_context *ctx) {
    if (!ctx) return;
    lg_scratch_end(ctx);
    free(ctx->scratch);
    free(ctx);
}

const char *lg_error(const lg_context *ctx) {
    return ctx->error;
}

lg_status lg_fail(lg_context *ctx, lg_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(ctx->error, sizeof ctx->error, format, args);
    va_end(args);
    return status;
}

lg_status lg_context_set_threads(lg_context *ctx, int64_t threads) {
    if (threads < 0 || threads > 4096)
        return lg_fail(ctx, LG_EINVAL, "threads: number is %lld, wanted 0 (all cores) to 4096", (long long)threads);
#ifdef _OPENMP
    if (threads == 0) threads = omp_get_num_procs();
#else
    threads = 1;
#endif
    ctx->threads = threads;
    return LG_OK;
}

int64_t lg_context_threads(const lg_context *ctx) {
    return ctx->threads;
}

lg_stats *lg_context_stats(lg_context *ctx) {
    return &ctx->stats;
}

const struct lg_backend *lg_context_backend(lg_context *ctx) {
    return ctx->backend;
}
