/* Counted blocks of the device's memory, copies to and from it, and the scratch of the op that runs; what the CPU does for them. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "context.h"

enum {
    ALIGN = 256,
    FIRST_SCRATCH_BYTES = 1 << 21,
    DOUBLED_SCRATCH_BYTES = 1 << 26,
    PAGE_BYTES = 4096,
    HUGE_BYTES = 1 << 22
};

/* ---- the CPU as a device ---- */

static const char *cpu_describe(lg_context *ctx) {
    snprintf(ctx->description, sizeof ctx->description, "%lld CPU threads",
             (long long)ctx->threads);
    return ctx->description;
}

/* Aligned by hand, what malloc gave standing just before the data: aligned_alloc cannot take a freed block of its own size
 * again, so memory would grow. */
static void *cpu_alloc(lg_context *ctx, int64_t bytes) {
    (void)ctx;
    if (bytes < 0 || bytes > INT64_MAX / 2) return NULL;
    char *memory = malloc((size_t)bytes + ALIGN + sizeof(void *));
    if (!memory) return NULL;
#ifdef MADV_HUGEPAGE
    /* Large blocks on huge pages: a matrix is read across its lines, a page each. Where the system refuses, nothing is lost. */
    if (bytes >= HUGE_BYTES) {
        uintptr_t start = ((uintptr_t)memory + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
        uintptr_t end = ((uintptr_t)memory + (uintptr_t)bytes) / PAGE_BYTES * PAGE_BYTES;
        madvise((void *)start, end - start, MADV_HUGEPAGE);
    }
#endif
    uintptr_t at = ((uintptr_t)memory + sizeof(void *) + ALIGN - 1) / ALIGN * ALIGN;
    char *data = memory + (at - (uintptr_t)memory);
    memcpy(data - sizeof(void *), &memory, sizeof memory);
    return data;
}

static void cpu_free(lg_context *ctx, void *data) {
    (void)ctx;
    char *memory;
    memcpy(&memory, (char *)data - sizeof(void *), sizeof memory);
    free(memory);
}

static double cpu_available(lg_context *ctx) {
    (void)ctx;
    return (double)sysconf(_SC_AVPHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
}

static lg_status cpu_upload(lg_context *ctx, const void *host, void *data, int64_t bytes) {
    (void)ctx;
    if (bytes) memcpy(data, host, (size_t)bytes);
    return LG_OK;
}

static lg_status cpu_download(lg_context *ctx, const void *data, void *host, int64_t bytes) {
    (void)ctx;
    if (bytes) memcpy(host, data, (size_t)bytes);
    return LG_OK;
}

static lg_status cpu_sync(lg_context *ctx) {
    (void)ctx;
    return LG_OK;
}

static lg_status cpu_timer_start(lg_context *ctx) {
    ctx->timer_start = lg_sys_time();
    return LG_OK;
}

static lg_status cpu_timer_stop(lg_context *ctx, double *seconds) {
    *seconds = lg_sys_time() - ctx->timer_start;
    return LG_OK;
}

static void cpu_close(lg_context *ctx) { (void)ctx; }

const lg_device lg_cpu_device = {
    .describe = cpu_describe,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .available = cpu_available,
    .upload = cpu_upload,
    .download = cpu_download,
    .sync = cpu_sync,
    .timer_start = cpu_timer_start,
    .timer_stop = cpu_timer_stop,
    .close = cpu_close,
};

/* ---- blocks ---- */

static void count_live(lg_stats *stats, double bytes) {
    stats->live_bytes += bytes;
    if (stats->live_bytes > stats->peak_bytes) stats->peak_bytes = stats->live_bytes;
}

lg_block *lg_alloc(lg_context *ctx, int64_t bytes) {
    lg_block *block = malloc(sizeof *block);
    void *data = block ? ctx->device->alloc(ctx, bytes) : NULL;
    if (!data) {
        free(block);
        return NULL;
    }
    *block = (lg_block){data, bytes, ctx, false};
    ctx->stats.reserved_bytes += (double)bytes;
    count_live(&ctx->stats, (double)bytes);
    return block;
}

void lg_free(lg_block *block) {
    if (!block) return;
    lg_stats *stats = &block->ctx->stats;
    stats->reserved_bytes -= (double)block->bytes;
    if (!block->parked) stats->live_bytes -= (double)block->bytes;
    block->ctx->device->free(block->ctx, block->data);
    free(block);
}

double lg_available_bytes(lg_context *ctx) { return ctx->device->available(ctx); }

void lg_park(lg_block *block) {
    if (block->parked) return;
    block->parked = true;
    block->ctx->stats.live_bytes -= (double)block->bytes;
}

void lg_unpark(lg_block *block) {
    if (!block->parked) return;
    block->parked = false;
    count_live(&block->ctx->stats, (double)block->bytes);
}

void lg_stats_reset_peak(lg_context *ctx) { ctx->stats.peak_bytes = ctx->stats.live_bytes; }

static int64_t dense_bytes(const lg_tensor *t) {
    int64_t n = lg_dtype_bytes(t->dtype);
    for (int i = 0; i < t->ndim; i++) n *= t->shape[i];
    return n;
}

lg_status lg_upload(lg_context *ctx, const void *host, lg_tensor *y) {
    return ctx->device->upload(ctx, host, y->data, dense_bytes(y));
}

lg_status lg_download(lg_context *ctx, const lg_tensor *x, void *host) {
    ctx->stats.syncs++;
    return ctx->device->download(ctx, x->data, host, dense_bytes(x));
}

int64_t lg_dtype_bytes(int32_t dtype) {
    static const int64_t bytes[LG_NUM_DTYPES] = {4, 2, 2, 8, 4, 8, 1};
    return dtype >= 0 && dtype < LG_NUM_DTYPES ? bytes[dtype] : 0;
}

const char *lg_dtype_name(int32_t dtype) {
    static const char *const name[LG_NUM_DTYPES] = {"f32", "bf16", "f16", "f64",
                                                    "i32", "i64",  "u8"};
    return dtype >= 0 && dtype < LG_NUM_DTYPES ? name[dtype] : "no dtype";
}

/* ---- scratch ---- */

static void free_scratch(lg_context *ctx, lg_scratch_block *block) {
    while (block) {
        lg_scratch_block *older = block->older;
        ctx->stats.scratch_bytes -= (double)block->bytes;
        ctx->device->free(ctx, block->data);
        free(block);
        block = older;
    }
}

static lg_status add_scratch_block(lg_context *ctx, int64_t bytes) {
    lg_scratch_block *block = malloc(sizeof *block);
    char *data = block ? ctx->device->alloc(ctx, bytes) : NULL;
    if (!data) {
        free(block);
        return lg_fail(ctx, LG_ENOMEM, "scratch: no memory for %lld bytes", (long long)bytes);
    }
    *block = (lg_scratch_block){ctx->scratch, data, bytes, 0};
    ctx->scratch = block;
    ctx->stats.scratch_bytes += (double)bytes;
    return LG_OK;
}

lg_status lg_scratch(lg_context *ctx, int64_t bytes, void **data) {
    if (bytes < 0 || bytes > INT64_MAX / 2)
        return lg_fail(ctx, LG_EINVAL, "scratch: %lld bytes wanted", (long long)bytes);
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    lg_scratch_block *block = ctx->scratch;
    if (!block || block->bytes - block->used < bytes) {
        /* As much as this op has taken so far, so that the next time all of it fits in the new block. */
        int64_t wanted = bytes, least = FIRST_SCRATCH_BYTES;
        for (lg_scratch_block *b = block; b; b = b->older) wanted += b->used;
        if (block) least = block->bytes < DOUBLED_SCRATCH_BYTES ? 2 * block->bytes : block->bytes;
        if (block && !block->used && !block->older && !ctx->recording) {
            free_scratch(ctx, block);
            ctx->scratch = NULL;
        }
        LG_TRY(add_scratch_block(ctx, wanted > least ? wanted : least));
        block = ctx->scratch;
    }
    *data = block->data + block->used;
    block->used += bytes;
    return LG_OK;
}

lg_scratch_mark lg_scratch_save(lg_context *ctx) {
    return (lg_scratch_mark){ctx->scratch, ctx->scratch ? ctx->scratch->used : 0};
}

/* Blocks that were added since the mark stay, empty, until the op ends. */
void lg_scratch_restore(lg_context *ctx, lg_scratch_mark mark) {
    for (lg_scratch_block *block = ctx->scratch; block; block = block->older) {
        block->used = block == mark.block ? mark.used : 0;
        if (block == mark.block) break;
    }
}

/* Only the newest block, which is the largest, is kept: a steady state has one block and no allocation. A recording keeps all,
 * since its replays write to them. */
void lg_scratch_end(lg_context *ctx) {
    lg_scratch_block *kept = ctx->scratch;
    if (!kept) return;
    while (kept->older && !ctx->recording) {
        lg_scratch_block *old = kept->older;
        kept->older = old->older;
        ctx->stats.scratch_bytes -= (double)old->bytes;
        ctx->device->free(ctx, old->data);
        free(old);
    }
    kept->used = 0;
}

/* ---- graphs ---- */

lg_status lg_graph_begin(lg_context *ctx) {
    if (!ctx->device->graph_begin)
        return lg_fail(ctx, LG_EUNSUPPORTED, "graph: the CPU records none");
    LG_TRY(ctx->device->graph_begin(ctx));
    ctx->recording = true;
    return LG_OK;
}

/* What the recorded operators used as scratch stays theirs: the context starts anew. */
lg_status lg_graph_end(lg_context *ctx, lg_graph **graph) {
    void *state = NULL;
    *graph = NULL;
    ctx->recording = false;
    LG_TRY(ctx->device->graph_end(ctx, &state));
    *graph = malloc(sizeof **graph);
    if (!*graph) {
        ctx->device->graph_free(ctx, state);
        return lg_fail(ctx, LG_ENOMEM, "graph: no memory");
    }
    **graph = (lg_graph){ctx, state, ctx->scratch};
    ctx->scratch = NULL;
    return LG_OK;
}

lg_status lg_graph_launch(lg_graph *graph) {
    return graph->ctx->device->graph_launch(graph->ctx, graph->state);
}

void lg_graph_free(lg_graph *graph) {
    if (!graph) return;
    graph->ctx->device->graph_free(graph->ctx, graph->state);
    free_scratch(graph->ctx, graph->scratch);
    free(graph);
}
