/* Divergences of given log-probabilities or probabilities, and their gradients with respect to the student's as free numbers:
 * jsd_logp, kl_logp, tvd_prob. Element by element in double, summed over a row. */
#include "divergence.h"

static const double LEAST_PROBABILITY = 1e-10;

typedef enum given_kind { JSD, KL, KL_OF_PROBABILITIES, TVD } given_kind;

/* An op at work. */
typedef struct given {
    const char *op;
    given_kind kind;
    double beta; /* of the jsd; at the ends it is a KL */
    const lg_tensor *student, *teacher, *target;
    int64_t ignore;
} given;

/* An element's part of the loss, and the derivative of that. */
static double element(const given *g, double s, double t, double *derivative) {
    if (g->kind == TVD) {
        *derivative = ((s > t) - (s < t)) / 2.0;
        return fabs(s - t) / 2;
    }
    const double q = g->kind == KL_OF_PROBABILITIES ? t : exp(t);
    if (g->kind != JSD || g->beta == 0) {
        const double log_q = g->kind == KL_OF_PROBABILITIES ? log(fmax(q, LEAST_PROBABILITY)) : t;
        *derivative = -q;
        return q > 0 ? q * (log_q - s) : 0;
    }
    const double p = exp(s);
    *derivative = 0;
    if (g->beta == 1) {
        if (p == 0) return 0;
        *derivative = p * (s - t + 1);
        return p * (s - t);
    }
    if (p == 0 && q == 0) return 0;
    double of_p, of_q, loss = 0;
    divergence_log_ratios(t - s, g->beta, &of_p, &of_q);
    if (q > 0) loss += g->beta * q * of_q;
    if (p > 0) {
        *derivative = (1 - g->beta) * p * of_p;
        loss += *derivative;
    }
    return loss;
}

static bool is_kept(const given *g, int64_t n) {
    return !g->target || ((const int32_t *)g->target->data)[n] != g->ignore;
}

static lg_status forward(lg_context *ctx, given g, lg_tensor *loss) {
    const int64_t N = g.student->shape[0], V = g.student->shape[1];
    const int threads = op_threads(ctx, N * V, ROW_GRAIN / 4);
    LG_TRY(divergence_check(ctx, g.op, LG_JSD, g.beta, 1));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int64_t s = row_offset(g.student, n), t = row_offset(g.teacher, n);
        double sum = 0, derivative;
        for (int64_t v = 0; v < V && is_kept(&g, n); v++)
            sum += element(&g, load(g.student, s + v), load(g.teacher, t + v), &derivative);
        store(loss, n, sum);
    }
    return LG_OK;
}

static lg_status backward(lg_context *ctx, given g, const lg_tensor *dloss, lg_tensor *dstudent) {
    const int64_t N = g.student->shape[0], V = g.student->shape[1];
    const int threads = op_threads(ctx, N * V, ROW_GRAIN / 4);
    LG_TRY(divergence_check(ctx, g.op, LG_JSD, g.beta, 1));
    if (!dstudent) return LG_OK;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const int64_t s = row_offset(g.student, n), t = row_offset(g.teacher, n),
                      to = row_offset(dstudent, n);
        const double d = is_kept(&g, n) ? load(dloss, n) : 0;
        for (int64_t v = 0; v < V; v++) {
            double derivative = 0;
            if (d != 0) element(&g, load(g.student, s + v), load(g.teacher, t + v), &derivative);
            store(dstudent, to + v, d * derivative);
        }
    }
    return LG_OK;
}

lg_status cpu_jsd_logp(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                       const lg_tensor *target, double beta, int64_t ignore, lg_tensor *loss) {
    return forward(ctx, (given){"jsd_logp", JSD, beta, student, teacher, target, ignore}, loss);
}

lg_status cpu_jsd_logp_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                                const lg_tensor *teacher, const lg_tensor *target, double beta,
                                int64_t ignore, lg_tensor *dstudent) {
    return backward(ctx, (given){"jsd_logp_backward", JSD, beta, student, teacher, target, ignore},
                    dloss, dstudent);
}

lg_status cpu_kl_logp(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                      const lg_tensor *target, bool log_target, int64_t ignore, lg_tensor *loss) {
    const given_kind kind = log_target ? KL : KL_OF_PROBABILITIES;
    return forward(ctx, (given){"kl_logp", kind, 0, student, teacher, target, ignore}, loss);
}

lg_status cpu_kl_logp_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                               const lg_tensor *teacher, const lg_tensor *target, bool log_target,
                               int64_t ignore, lg_tensor *dstudent) {
    const given_kind kind = log_target ? KL : KL_OF_PROBABILITIES;
    return backward(ctx, (given){"kl_logp_backward", kind, 0, student, teacher, target, ignore},
                    dloss, dstudent);
}

lg_status cpu_tvd_prob(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                       const lg_tensor *target, int64_t ignore, lg_tensor *loss) {
    return forward(ctx, (given){"tvd_prob", TVD, 0, student, teacher, target, ignore}, loss);
}

lg_status cpu_tvd_prob_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                                const lg_tensor *teacher, const lg_tensor *target, int64_t ignore,
                                lg_tensor *dstudent) {
    return backward(ctx, (given){"tvd_prob_backward", TVD, 0, student, teacher, target, ignore},
                    dloss, dstudent);
}
