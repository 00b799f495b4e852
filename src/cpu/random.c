/* Random tensors. Element i depends on the seed, the stream and i alone, so blocks of any size may
 * run on any thread. */
#include "../philox.h"
#include "cpu.h"

enum { BLOCK = 1024 }; /* even: a Box-Muller pair never straddles two blocks */

lg_status cpu_random_uniform(lg_context *ctx, int64_t seed, int64_t stream, lg_tensor *y) {
    const int64_t n = tensor_numel(y);
    const int threads = op_threads(ctx, n, 16 * BLOCK);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
        const int64_t count = n - i0 < BLOCK ? n - i0 : BLOCK;
        uint32_t words[BLOCK];
        lg_philox((uint64_t)seed, (uint64_t)stream, (uint64_t)i0, count, words);
        for (int64_t i = 0; i < count; i++) store(y, i0 + i, philox_uniform(words[i]));
    }
    return LG_OK;
}

/* The cosine comes first (Box and Muller 1958, equation 1); the last element of an odd number has
 * no partner. */
lg_status cpu_random_normal(lg_context *ctx, int64_t seed, int64_t stream, double mean, double std,
                            lg_tensor *y) {
    const int64_t n = tensor_numel(y);
    const int threads = op_threads(ctx, n, 4 * BLOCK);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i0 = 0; i0 < n; i0 += BLOCK) {
        const int64_t count = n - i0 < BLOCK ? n - i0 : BLOCK;
        uint32_t words[BLOCK];
        lg_philox((uint64_t)seed, (uint64_t)stream, (uint64_t)i0, (count + 1) / 2 * 2, words);
        for (int64_t i = 0; i < count; i += 2) {
            const double radius = std * sqrt(-2 * log(philox_uniform(words[i])));
            const double angle = 2 * M_PI * philox_uniform(words[i + 1]);
            store(y, i0 + i, mean + radius * cos(angle));
            if (i + 1 < count) store(y, i0 + i + 1, mean + radius * sin(angle));
        }
    }
    return LG_OK;
}
