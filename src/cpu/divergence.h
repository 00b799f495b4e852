/* One row of a student's logits against one of a teacher's: cross entropy, divergence, and their gradient. Rows come as double,
 * whatever the dtype of the logits. */
#ifndef LIGER_DIVERGENCE_H
#define LIGER_DIVERGENCE_H

#include "cpu.h"

typedef struct divergence {
    lg_divergence kind;
    double beta, temperature;
    int64_t V;        /* columns that both have */
    lg_dtype rounded; /* of the state: the gradient must see what the loss saw */
} divergence;

/* What the gradient needs of a row. Softmaxes: log-sum-exps of student and teacher at the temperature, and sigma or the
 * student's KL. Cosine: both norms and the cosine. Last: the student's log-sum-exp at temperature 1. */
enum { OF_STUDENT = 0, OF_TEACHER, OF_PAIR, OF_HARD, STATE_SIZE };

typedef struct row_loss {
    double hard, soft, entropy;
    double state[STATE_SIZE];
} row_loss;

/* `target` is read where `hard` is wanted; what is not wanted is 0. */
row_loss divergence_row(const divergence *d, const double *student, const double *teacher,
                        int32_t target, bool hard, bool entropy);
/* dz[v] = the gradient of dhard * hard + dsoft * soft; dz may be the student's row. */
void divergence_gradient(const divergence *d, const double *state, double dhard, double dsoft,
                         const double *student, const double *teacher, int32_t target, double *dz);

/* log sum exp of scale z; -inf where all are. */
double divergence_logsumexp(const double *z, int64_t n, double scale);

/* log(p / m) and log(q / m), m = (1 - beta) p + beta q, given log q - log p: without the cancellation of three logarithms. */
void divergence_log_ratios(double difference, double beta, double *of_p, double *of_q);

/* Fails unless the kind is one, and temperature and beta are in range. */
lg_status divergence_check(lg_context *ctx, const char *op, int64_t kind, double beta,
                           double temperature);

/* n elements from `offset` on as double. */
void load_doubles(const lg_tensor *t, int64_t offset, int64_t n, double *row);

#endif
