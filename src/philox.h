/* Philox 4x32-10 (Salmon and others 2011, "Parallel random numbers: as easy as 1, 2, 3"): four
 * random words of a counter and a key. */
#ifndef LIGER_PHILOX_H
#define LIGER_PHILOX_H

#include <stdint.h>

void philox4x32_10(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

/* A word as a double in (0, 1), exactly. */
static inline double philox_uniform(uint32_t word) { return word * 0x1p-32 + 0x1p-33; }

#endif
