/* What the heads take from linear. */
#ifndef LIGER_LINEAR_CUH
#define LIGER_LINEAR_CUH

#include "common.cuh"

/* db[O] += sum over N rows of dy, whose rows lie `ld` elements apart. Uses scratch memory. */
lg_status linear_bias_gradient(lg_context *ctx, const char *op, const void *dy, int64_t ld,
                               int32_t dtype, int64_t N, int64_t O, void *db);

#endif
