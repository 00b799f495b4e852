/* The step of AdamW that its variants share. */
#ifndef LIGER_CPU_ADAMW_H
#define LIGER_CPU_ADAMW_H

#include "cpu.h"

enum { ADAMW_GRAIN = 16384, ADAMW_BLOCK = 512 /* elements of a buffer on the stack */ };

/* `keep` is what decay leaves, `rate` and `vhat` hold the bias corrections. */
typedef struct adamw_rates {
    double grad_scale, keep, beta1, beta2, rate, vhat, eps;
} adamw_rates;

/* Checks the attributes of `op` and gives the rates of a step. */
lg_status adamw_rates_of(lg_context *ctx, const char *op, double grad_scale, double lr,
                         double beta1, double beta2, double eps, double weight_decay, int64_t step,
                         adamw_rates *r);

/* A step of n elements in fp32. The same bits for every variant: this is its only code. */
void adamw_steps(const float *g, float *p, float *m, float *v, int64_t n, const adamw_rates *r);

#endif
