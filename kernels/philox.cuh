/* Philox 4x32-10 (Salmon and others 2011), in cuRAND's order: block b of the stream (seed, stream)
 * holds words 4b to 4b + 3.
 */
#ifndef LIGER_PHILOX_CUH
#define LIGER_PHILOX_CUH

#include <stdint.h>

/* Written out: of a C product the compiler makes one of 64 bits by 64, several times as long. */
__device__ __forceinline__ void multiply_wide(uint32_t a, uint32_t b, uint32_t *high,
                                              uint32_t *low) {
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    asm("mov.b64 {%0, %1}, %2;" : "=r"(*low), "=r"(*high) : "l"(product));
}

__device__ __forceinline__ uint4 random_words(uint64_t seed, uint64_t stream, uint64_t block) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32);
    uint32_t c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint32_t a_high, a_low, b_high, b_low;
        multiply_wide(c0, 0xd2511f53u, &a_high, &a_low);
        multiply_wide(c2, 0xcd9e8d57u, &b_high, &b_low);
        c0 = b_high ^ c1 ^ k0;
        c1 = b_low;
        c2 = a_high ^ c3 ^ k1;
        c3 = a_low;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

#endif
