/* The log-softmax of a row of logits: the one reduction behind linear_logprob,
 * linear_cross_entropy and sample, so that their log-probabilities agree bit for bit: logp =
 * (double)z[v] - logsumexp, rounded once. */
#ifndef LIGER_LOGSOFTMAX_H
#define LIGER_LOGSOFTMAX_H

#include <stdint.h>

/* log sum_v exp z[v]. -inf logits have probability 0. `entropy`, unless NULL, gets -sum_v p[v]
 * log p[v]; it does not change the result. A row of V = 1 gives z[0] and entropy 0. */
double row_logsumexp_f32(const float *z, int64_t V, double *entropy);
double row_logsumexp_f64(const double *z, int64_t V, double *entropy);

#endif
