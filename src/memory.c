/* Memory on the CPU: counted blocks with a header in front, and the scratch of the op that runs. */
#include <stdlib.h>

#include "context.h"
#include "internal.h"

enum { ALIGN = 64, HUGE_BYTES = 1 << 21 };

/* Stands in the 64 bytes before a block's data. */
typedef struct header {
    lg_context *ctx;
    int64_t bytes;
    bool parked;
} header;

_Static_assert(sizeof(header) <= ALIGN, "the header fits before the data");

static header *header_of(void *data) {
    return (header *)((char *)data - ALIGN);
}

static void *aligned_block(int64_t bytes) {
    if (bytes < 0 || bytes > INT64_MAX - 2 * ALIGN) return NULL;
    return aligned_alloc(ALIGN, (size_t)(bytes + 2 * ALIGN - 1) / ALIGN * ALIGN);
}

static void count_live(lg_stats *stats, double bytes) {
    stats->live_bytes += bytes;
    if (stats->live_bytes > stats->peak_bytes) stats->peak_bytes = stats->live_bytes;
}

void *lg_alloc(lg_context *ctx, int64_t bytes) {
    char *block = aligned_block(bytes);
    if (!block) return NULL;
    *(header *)block = (header){ctx, bytes, false};
    ctx->stats.reserved_bytes += (double)bytes;
    count_live(&ctx->stats, (double)bytes);
    return block + ALIGN;
}

void lg_free(void *data) {
    if (!data) return;
    header *h = header_of(data);
    h->ctx->stats.reserved_bytes -= (double)h->bytes;
    if (!h->parked) h->ctx->stats.live_bytes -= (double)h->bytes;
    free(h);
}

void lg_park(void *data) {
    header *h = header_of(data);
    if (h->parked) return;
    h->parked = true;
    h->ctx->stats.live_bytes -= (double)h->bytes;
}

void lg_unpark(void *data) {
    header *h = header_of(data);
    if (!h->parked) return;
    h->parked = false;
    count_live(&h->ctx->stats, (double)h->bytes);
}

void lg_stats_reset_peak(lg_context *ctx) {
    ctx->stats.peak_bytes = ctx->stats.live_bytes;
}

int64_t lg_dtype_bytes(int32_t dtype) {
    static const int64_t bytes[LG_NUM_DTYPES] = {4, 2, 2, 8, 4, 8, 1};
    return dtype >= 0 && dtype < LG_NUM_DTYPES ? bytes[dtype] : 0;
}

const char *lg_dtype_name(int32_t dtype) {
    static const char *const name[LG_NUM_DTYPES] = {"f32", "bf16", "f16", "f64", "i32", "i64", "u8"};
    return dtype >= 0 && dtype < LG_NUM_DTYPES ? name[dtype] : "no dtype";
}

static lg_status add_scratch_block(lg_context *ctx, int64_t bytes) {
    lg_scratch_block *block = aligned_block(bytes);
    if (!block) return lg_fail(ctx, LG_ENOMEM, "scratch: no memory for %lld bytes", (long long)bytes);
    *block = (lg_scratch_block){ctx->scratch, bytes, 0};
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
        int64_t least = block ? 2 * block->bytes : HUGE_BYTES;
        LG_TRY(add_scratch_block(ctx, bytes > least ? bytes : least));
        block = ctx->scratch;
    }
    *data = (char *)block + ALIGN + block->used;
    block->used += bytes;
    return LG_OK;
}

/* Several blocks become one of their joint size next time, so that a steady state has one block and no allocation. */
void lg_scratch_end(lg_context *ctx) {
    if (!ctx->scratch) return;
    if (ctx->scratch->older) {
        int64_t bytes = 0;
        while (ctx->scratch) {
            lg_scratch_block *block = ctx->scratch;
            ctx->scratch = block->older;
            bytes += block->bytes;
            free(block);
        }
        ctx->stats.scratch_bytes = 0;
        if (add_scratch_block(ctx, bytes) != LG_OK) return;
    }
    ctx->scratch->used = 0;
}
