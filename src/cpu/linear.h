/* What other ops take from linear. */
#ifndef LIGER_LINEAR_H
#define LIGER_LINEAR_H

#include "cpu.h"

/* db[O] += sum over the N dense rows of dy. */
void linear_bias_gradient(lg_context *ctx, const lg_tensor *dy, int64_t N, lg_tensor *db);

#endif
