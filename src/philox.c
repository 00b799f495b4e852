/* Philox 4x32-10 and cuRAND's stream of it. */
#include "philox.h"

#include "liger.h"

void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void lg_philox(uint64_t seed, uint64_t subsequence, uint64_t offset, int64_t n, uint32_t *words) {
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint64_t block = offset / 4;
    for (int64_t i = -(int64_t)(offset % 4); i < n; i += 4, block++) {
        const uint32_t counter[4] = {(uint32_t)block, (uint32_t)(block >> 32),
                                     (uint32_t)subsequence, (uint32_t)(subsequence >> 32)};
        uint32_t out[4];
        philox4x32_10(counter, key, out);
        for (int64_t j = i < 0 ? -i : 0; j < 4 && i + j < n; j++) words[i + j] = out[j];
    }
}
