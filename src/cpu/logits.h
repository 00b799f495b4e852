/* A row of logits in fp32 or, of f64, double, and what the ops on rows compute with it: linear_logprob and
 * linear_cross_entropy on the rows of their products, logprob, cross_entropy and softmax on those of a tensor. */
#ifndef LIGER_LOGITS_H
#define LIGER_LOGITS_H

#include "linear_logits.h"

typedef struct logits_row {
    const void *data; /* [V] */
    int64_t V;
    lg_dtype dtype; /* f32 or f64 */
} logits_row;

static inline double row_at(logits_row z, int64_t v) {
    return z.dtype == LG_F64 ? ((const double *)z.data)[v] : ((const float *)z.data)[v];
}

/* log sum_v exp z[v], and the entropy unless NULL: logsoftmax.h. */
double row_logsumexp(logits_row z, double *entropy);
/* The smallest index of the largest element. */
int32_t row_argmax(logits_row z);

/* ---- rows of a tensor ---- */

/* Room for `num` rows of V numbers, fp32 or double, for each of `threads`. */
lg_status rows_reserve(lg_context *ctx, const lg_tensor *x, int threads, int num, void **room);
/* Row `i` of this thread's. */
void *rows_room(const lg_tensor *x, void *room, int num, int i);
/* Row n of head->x, capped and divided by the temperature: the tensor's own memory where that
 * changes nothing, else in `buffer`. */
logits_row row_load(const lm_head *head, int64_t n, void *buffer);
/* Where to make row n of y: in place, or in `buffer` for row_store to round. */
void *row_begin(lg_tensor *y, int64_t n, void *buffer);
void row_store(lg_tensor *y, int64_t n, const void *row);
void row_clear(lg_tensor *y, int64_t n);

/* Fails at the first target that is neither in [0, V) nor `ignore`. */
lg_status check_targets(lg_context *ctx, const char *op, const lg_tensor *target, int64_t V,
                        int64_t ignore);
lg_status check_temperature(lg_context *ctx, const char *op, double temperature);

/* ---- log-probabilities ---- */

/* What the gradient of a row's log-probabilities and entropy depends on; dlogp is their sum. */
typedef struct row_gradient {
    double dlogp, dentropy, lse, entropy;
} row_gradient;

/* dz[v] = -p (dlogp + dentropy (ln p + entropy)), through the head's slope; `dz` may be the row.
 * -inf logits have probability 0 and get 0. */
void row_logprob_backward(const lm_head *head, const row_gradient *g, logits_row z, void *dz);
/* The same where logit z is a target, with the gradient of its own log-probability, in double. */
double target_logprob_backward(const lm_head *head, const row_gradient *g, double z, double dlogp);

/* ---- cross entropy ---- */

typedef struct cross_entropy_terms {
    const lm_head *head;
    const lg_tensor *class_weight; /* [V], or NULL: 1 */
    double weight_sum;             /* over the classes */
    double label_smoothing;
} cross_entropy_terms;

lg_status cross_entropy_terms_of(lg_context *ctx, const char *op, const lm_head *head,
                                 const lg_tensor *class_weight, int64_t V, double label_smoothing,
                                 cross_entropy_terms *terms);

static inline double class_weight_of(const cross_entropy_terms *terms, int64_t v) {
    return terms->class_weight ? load(terms->class_weight, v) : 1;
}

double row_cross_entropy(const cross_entropy_terms *terms, logits_row z, int32_t target,
                         double lse);
/* The gradient of dloss * the cross entropy + dlse * lse through the head's slope; `dz` may be
 * the row. */
void row_cross_entropy_backward(const cross_entropy_terms *terms, logits_row z, int32_t target,
                                double lse, double dloss, double dlse, void *dz);

#endif
