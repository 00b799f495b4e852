/* The paged key/value cache: rows written to slots and copied between them. */
#include "cpu.h"

static lg_status check_slots(lg_context *ctx, const char *op, const char *name,
                             const lg_tensor *slot, int64_t P) {
    const int32_t *s = slot->data;
    for (int64_t n = 0; n < slot->shape[0]; n++)
        if (s[n] < 0 || s[n] >= P)
            return lg_fail(ctx, LG_EINVAL, "%s: %s[%lld] is %d, wanted [0, %lld)", op, name,
                           (long long)n, s[n], (long long)P);
    return LG_OK;
}

/* Where heads lie side by side a row is one piece. */
static void write_row(const lg_tensor *x, int64_t n, int64_t slot, lg_tensor *cache) {
    const int64_t G = cache->shape[1], D = cache->shape[2], width = lg_dtype_bytes(x->dtype);
    const int64_t pieces = x->stride[1] == D ? 1 : G, bytes = G * D * width / pieces;
    for (int64_t g = 0; g < pieces; g++)
        memcpy((char *)cache->data + slot * G * D * width + g * bytes,
               (const char *)x->data + (n * x->stride[0] + g * x->stride[1]) * width,
               (size_t)bytes);
}

lg_status cpu_cache_write(lg_context *ctx, const lg_tensor *k, const lg_tensor *v,
                          const lg_tensor *slot, lg_tensor *k_cache, lg_tensor *v_cache) {
    LG_TRY(check_slots(ctx, "cache_write", "slot", slot, k_cache->shape[0]));
    const int32_t *s = slot->data;
    for (int64_t n = 0; n < slot->shape[0] && k->shape[1] > 0; n++) {
        write_row(k, n, s[n], k_cache);
        write_row(v, n, s[n], v_cache);
    }
    return LG_OK;
}

static void copy_rows(const int32_t *from, const int32_t *to, int64_t N, lg_tensor *cache) {
    const int64_t bytes = cache->shape[1] * cache->shape[2] * lg_dtype_bytes(cache->dtype);
    for (int64_t n = 0; n < N; n++)
        memmove((char *)cache->data + to[n] * bytes, (const char *)cache->data + from[n] * bytes,
                (size_t)bytes);
}

lg_status cpu_cache_copy(lg_context *ctx, const lg_tensor *from, const lg_tensor *to,
                         lg_tensor *k_cache, lg_tensor *v_cache) {
    LG_TRY(check_slots(ctx, "cache_copy", "from", from, k_cache->shape[0]));
    LG_TRY(check_slots(ctx, "cache_copy", "to", to, k_cache->shape[0]));
    copy_rows(from->data, to->data, from->shape[0], k_cache);
    copy_rows(from->data, to->data, from->shape[0], v_cache);
    return LG_OK;
}
