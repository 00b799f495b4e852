/* The context: a device, its backend, the last error, threads and counters. CUDA is a library of its own, opened here when a
 * context on it is wanted. */
#include "context.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* Loads CUDA's libraries from where the system keeps them or a Python environment does, when the
 * loader does not find them by itself: a library that is loaded satisfies what needs its name. */
static void load_cuda_libraries(void) {
    static const char *const names[] = {"libcudart.so.13", "libcublasLt.so.13"};
    const char *home = getenv("HOME"), *environment = getenv("VIRTUAL_ENV"),
               *conda = getenv("CONDA_PREFIX");
    const struct {
        const char *root, *rest;
    } places[] = {
        {"", "/usr/local/cuda*/lib64/"},
        {"", "/usr/lib/x86_64-linux-gnu/"},
        {environment, "/lib/python3*/site-packages/nvidia/*/lib/"},
        {conda, "/lib/"},
        {conda, "/lib/python3*/site-packages/nvidia/*/lib/"},
        {home, "/.local/lib/python3*/site-packages/nvidia/*/lib/"},
        {"", "/usr/local/lib/python3*/dist-packages/nvidia/*/lib/"},
        {"", "/usr/lib/python3*/site-packages/nvidia/*/lib/"},
        {"", "/opt/*/lib/python3*/site-packages/nvidia/*/lib/"},
        {"", "/opt/*/.venv/lib/python3*/site-packages/nvidia/*/lib/"},
    };
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        bool loaded = dlopen(names[n], RTLD_NOW | RTLD_GLOBAL) != NULL;
        for (size_t p = 0; !loaded && p < sizeof places / sizeof *places; p++) {
            char pattern[1024];
            glob_t found;
            if (!places[p].root) continue;
            snprintf(pattern, sizeof pattern, "%s%s%s", places[p].root, places[p].rest, names[n]);
            if (glob(pattern, 0, NULL, &found) == 0) {
                for (size_t i = 0; !loaded && i < found.gl_pathc; i++)
                    loaded = dlopen(found.gl_pathv[i], RTLD_NOW | RTLD_GLOBAL) != NULL;
                globfree(&found);
            }
        }
    }
}

/* libliger_cuda.so lies beside the library that holds this function. */
static lg_status open_cuda(lg_context *ctx, int32_t device) {
    char path[1024] = "libliger_cuda.so";
    Dl_info info;
    if (dladdr((void *)lg_context_open, &info) && info.dli_fname) {
        const char *slash = strrchr(info.dli_fname, '/');
        if (slash)
            snprintf(path, sizeof path, "%.*s/libliger_cuda.so", (int)(slash - info.dli_fname),
                     info.dli_fname);
    }
    load_cuda_libraries();
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return lg_fail(ctx, LG_EDEVICE, "cuda: cannot open the CUDA backend: %s", dlerror());
    lg_open_device *open = (lg_open_device *)dlsym(library, "lg_cuda_open");
    if (!open) return lg_fail(ctx, LG_EDEVICE, "cuda: %s has no lg_cuda_open", path);
    return open(ctx, device, &ctx->backend, &ctx->device, &ctx->state);
}

lg_context *lg_context_open(int32_t device) {
    lg_context *ctx = calloc(1, sizeof *ctx);
    if (!ctx) return NULL;
    ctx->device_id = device;
    ctx->backend = lg_cpu_backend();
    ctx->device = &lg_cpu_device;
    lg_context_set_threads(ctx, 0);
    if (device != LG_CPU) open_cuda(ctx, device);
    return ctx;
}

void lg_context_close(lg_context *ctx) {
    if (!ctx) return;
    while (ctx->scratch) {
        lg_scratch_block *block = ctx->scratch;
        ctx->scratch = block->older;
        ctx->device->free(ctx, block->data);
        free(block);
    }
    ctx->device->close(ctx);
    free(ctx);
}

int32_t lg_context_device(const lg_context *ctx) { return ctx->device_id; }

const char *lg_context_describe(lg_context *ctx) { return ctx->device->describe(ctx); }

const char *lg_error(const lg_context *ctx) { return ctx->error; }

lg_status lg_fail(lg_context *ctx, lg_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(ctx->error, sizeof ctx->error, format, args);
    va_end(args);
    return status;
}

lg_status lg_context_set_threads(lg_context *ctx, int64_t threads) {
    if (threads < 0 || threads > 4096)
        return lg_fail(ctx, LG_EINVAL, "threads: number is %lld, wanted 0 (all cores) to 4096",
                       (long long)threads);
#ifdef _OPENMP
    if (threads == 0) threads = omp_get_num_procs();
#else
    threads = 1;
#endif
    ctx->threads = threads;
    return LG_OK;
}

int64_t lg_context_threads(const lg_context *ctx) { return ctx->threads; }

lg_stats *lg_context_stats(lg_context *ctx) { return &ctx->stats; }

lg_status lg_sync(lg_context *ctx) {
    ctx->stats.syncs++;
    return ctx->device->sync(ctx);
}

lg_status lg_timer_start(lg_context *ctx) { return ctx->device->timer_start(ctx); }

lg_status lg_timer_stop(lg_context *ctx, double *seconds) {
    return ctx->device->timer_stop(ctx, seconds);
}

const struct lg_backend *lg_context_backend(lg_context *ctx) { return ctx->backend; }

void *lg_context_state(lg_context *ctx) { return ctx->state; }
