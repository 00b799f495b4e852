/* The paged key/value cache: rows written to slots and copied between them.
 *
 *   cache_write  k_cache[slot[n]] = k[n], v_cache[slot[n]] = v[n]
 *   cache_copy   k_cache[to[n]] = k_cache[from[n]], v_cache likewise
 *
 * A thread moves one unit of 16, 8, 4 or 2 bytes, the widest that all rows allow, of keys and of
 * values. A slot outside the cache is noted and its row skipped. */
#include "common.cuh"
#include "op/cache_copy.h"
#include "op/cache_write.h"

struct cache_args {
    const char *k, *v;
    char *k_cache, *v_cache;
    const int32_t *from, *to;
    int64_t k_token, k_head, v_token, v_head; /* bytes */
    int64_t N, slots, heads, head_units, row_bytes;
    device_error *error;
};

/* Whether n names a slot. */
__device__ __forceinline__ bool cache_slot(const cache_args &a, const int32_t *list, int64_t n,
                                           bool note, int64_t *slot) {
    *slot = list[n];
    if (*slot >= 0 && *slot < a.slots) return true;
    if (note) note_error(a.error, ERROR_SLOT, n, *slot, a.slots);
    return false;
}

template <class Unit>
__global__ void __launch_bounds__(256) cache_write_rows(cache_args a) {
    int64_t units = a.heads * a.head_units;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < a.N * units;
         i += (int64_t)gridDim.x * 256) {
        int64_t n = i / units, e = i % units, slot, h = e / a.head_units,
                at = e % a.head_units * sizeof(Unit);
        if (!cache_slot(a, a.to, n, e == 0, &slot)) continue;
        Unit k = *(const Unit *)(a.k + n * a.k_token + h * a.k_head + at);
        Unit v = *(const Unit *)(a.v + n * a.v_token + h * a.v_head + at);
        *(Unit *)(a.k_cache + slot * a.row_bytes + e * sizeof(Unit)) = k;
        *(Unit *)(a.v_cache + slot * a.row_bytes + e * sizeof(Unit)) = v;
    }
}

template <class Unit>
__global__ void __launch_bounds__(256) cache_copy_rows(cache_args a) {
    int64_t units = a.heads * a.head_units;
    for (int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x; i < a.N * units;
         i += (int64_t)gridDim.x * 256) {
        int64_t n = i / units, at = i % units * sizeof(Unit), from, to;
        bool good = cache_slot(a, a.from, n, at == 0, &from);
        if (!cache_slot(a, a.to, n, at == 0, &to) || !good) continue;
        Unit k = *(const Unit *)(a.k_cache + from * a.row_bytes + at),
             v = *(const Unit *)(a.v_cache + from * a.row_bytes + at);
        *(Unit *)(a.k_cache + to * a.row_bytes + at) = k;
        *(Unit *)(a.v_cache + to * a.row_bytes + at) = v;
    }
}

/* Calls f with the widest unit of up to 16 bytes that divides everything in `bits`. */
template <class F>
static lg_status dispatch_unit(lg_context *ctx, const char *op, uint64_t bits, F f) {
    if (bits % 16 == 0) return f(uint4());
    if (bits % 8 == 0) return f(uint2());
    if (bits % 4 == 0) return f(uint32_t());
    if (bits % 2 == 0) return f(uint16_t());
    return lg_fail(ctx, LG_EUNSUPPORTED, "%s: elements are of one byte, wanted two or more", op);
}

static cache_args args_of(lg_context *ctx, const char *op, const lg_tensor *to,
                          const lg_tensor *k_cache, const lg_tensor *v_cache) {
    cache_args a = {};
    a.k_cache = (char *)k_cache->data, a.v_cache = (char *)v_cache->data;
    a.to = (const int32_t *)to->data;
    a.N = to->shape[0], a.slots = k_cache->shape[0], a.heads = k_cache->shape[1];
    a.head_units =
        k_cache->shape[2] * lg_dtype_bytes(k_cache->dtype); /* until the unit is known: bytes */
    a.row_bytes = a.heads * a.head_units;
    a.error = cuda_error_slot(ctx, op);
    return a;
}

extern "C" lg_status cuda_cache_write(lg_context *ctx, const lg_tensor *k, const lg_tensor *v,
                                      const lg_tensor *slot, lg_tensor *k_cache,
                                      lg_tensor *v_cache) {
    cache_args a = args_of(ctx, "cache_write", slot, k_cache, v_cache);
    int64_t width = lg_dtype_bytes(k->dtype);
    a.k = (const char *)k->data, a.v = (const char *)v->data;
    a.k_token = k->stride[0] * width, a.k_head = k->stride[1] * width;
    a.v_token = v->stride[0] * width, a.v_head = v->stride[1] * width;
    if (a.N == 0 || a.row_bytes == 0) return LG_OK;
    uint64_t bits = (uint64_t)(uintptr_t)a.k | (uintptr_t)a.v | (uintptr_t)a.k_cache |
                    (uintptr_t)a.v_cache |
                    (uint64_t)(a.k_token | a.k_head | a.v_token | a.v_head | a.head_units);
    return dispatch_unit(ctx, "cache_write", bits, [&](auto unit) {
        using Unit = decltype(unit);
        a.head_units /= (int64_t)sizeof(Unit);
        cache_write_rows<Unit>
            <<<blocks_for(a.N * a.heads * a.head_units, 256), 256, 0, cuda_stream(ctx)>>>(a);
        return cuda_launched(ctx, "cache_write");
    });
}

extern "C" lg_status cuda_cache_copy(lg_context *ctx, const lg_tensor *from, const lg_tensor *to,
                                     lg_tensor *k_cache, lg_tensor *v_cache) {
    cache_args a = args_of(ctx, "cache_copy", to, k_cache, v_cache);
    a.from = (const int32_t *)from->data;
    if (a.N == 0 || a.row_bytes == 0) return LG_OK;
    uint64_t bits = (uint64_t)(uintptr_t)a.k_cache | (uintptr_t)a.v_cache | (uint64_t)a.head_units;
    return dispatch_unit(ctx, "cache_copy", bits, [&](auto unit) {
        using Unit = decltype(unit);
        a.head_units /= (int64_t)sizeof(Unit);
        cache_copy_rows<Unit>
            <<<blocks_for(a.N * a.heads * a.head_units, 256), 256, 0, cuda_stream(ctx)>>>(a);
        return cuda_launched(ctx, "cache_copy");
    });
}
