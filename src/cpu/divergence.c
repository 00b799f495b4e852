/* Losses between the rows of two matrices of logits, and their gradients with respect to the first: ce_tvd, tvd, jsd, cosine.
 * All is computed in double. With a and b the log-probabilities, p = e^a, q = e^b:
 *   tvd      1/2 sum |p - q|;        gradient p (sign(a - b) - sigma) / 2, sigma = sum p sign(a - b)
 *   jsd      beta sum q log(q / m) + (1 - beta) sum p log(p / m);  (1 - beta) p (log(p / m) - sum p log(p / m))
 *   cosine   1 - s.t / (|s| |t|);    -(t / |t| - cos s / |s|) / |s|
 */
#include "divergence.h"

#include <float.h>

static const double LEAST_NORM = 1e-8;

double divergence_logsumexp(const double *z, int64_t n, double scale) {
    double max = -DBL_MAX, sum = 0;
    for (int64_t v = 0; v < n; v++) max = z[v] > max ? z[v] : max;
    for (int64_t v = 0; v < n; v++) sum += exp((z[v] - max) * scale);
    return max * scale + log(sum);
}

static double sign(double x) { return (x > 0) - (x < 0); }

void divergence_log_ratios(double difference, double beta, double *of_p, double *of_q) {
    const double away = fabs(difference);
    if (difference > 0) {
        *of_q = -log1p((1 - beta) * expm1(-away));
        *of_p = *of_q - away;
    } else {
        *of_p = -log1p(beta * expm1(-away));
        *of_q = *of_p - away;
    }
}

/* Sums over a row: the loss, and what its gradient subtracts. */
static void softmax_loss(const divergence *d, const double *student, const double *teacher,
                         row_loss *row) {
    const double scale = 1 / d->temperature, beta = d->beta;
    double loss = 0, pair = 0;
    for (int64_t v = 0; v < d->V; v++) {
        const double a = student[v] * scale - row->state[OF_STUDENT],
                     b = teacher[v] * scale - row->state[OF_TEACHER];
        const double p = exp(a), q = exp(b);
        if (d->kind == LG_TVD) {
            loss += fabs(p - q) / 2;
            if (p > 0) pair += p * sign(a - b);
        } else if (beta == 0) {
            if (q > 0) loss += q * (b - a);
        } else if (beta == 1) {
            if (p > 0) pair += p * (a - b);
        } else if (p > 0 || q > 0) {
            double of_p, of_q;
            divergence_log_ratios(b - a, beta, &of_p, &of_q);
            if (p > 0) pair += p * of_p;
            if (q > 0) loss += beta * q * of_q;
        }
    }
    row->state[OF_PAIR] = pair;
    row->soft = d->kind == LG_TVD ? loss : loss + (beta == 1 ? 1 : 1 - beta) * pair;
}

static bool both_finite(double a, double b) { return a > -INFINITY && b > -INFINITY; }

static void cosine_loss(const divergence *d, const double *student, const double *teacher,
                        row_loss *row) {
    const double scale = 1 / d->temperature;
    double dot = 0, ss = 0, tt = 0;
    for (int64_t v = 0; v < d->V; v++) {
        const double s = student[v] * scale, t = teacher[v] * scale;
        if (!both_finite(s, t)) continue;
        dot += s * t;
        ss += s * s;
        tt += t * t;
    }
    const double norm_s = sqrt(ss), norm_t = sqrt(tt);
    row->state[OF_STUDENT] = norm_s;
    row->state[OF_TEACHER] = norm_t;
    row->state[OF_PAIR] = dot / (fmax(norm_s, LEAST_NORM) * fmax(norm_t, LEAST_NORM));
    row->soft = 1 - row->state[OF_PAIR];
}

static double entropy_of(const double *z, int64_t n, double scale, double lse) {
    double sum = 0;
    for (int64_t v = 0; v < n; v++) {
        const double a = z[v] * scale - lse, p = exp(a);
        if (p > 0) sum -= p * a;
    }
    return sum;
}

row_loss divergence_row(const divergence *d, const double *student, const double *teacher,
                        int32_t target, bool hard, bool entropy) {
    const double scale = 1 / d->temperature;
    const double lse = divergence_logsumexp(student, d->V, scale);
    row_loss row = {0};
    if (hard) {
        row.state[OF_HARD] = d->temperature == 1 ? lse : divergence_logsumexp(student, d->V, 1);
        row.hard = row.state[OF_HARD] - student[target];
    }
    if (entropy) row.entropy = entropy_of(student, d->V, scale, lse);
    if (d->kind == LG_COSINE) {
        cosine_loss(d, student, teacher, &row);
    } else {
        row.state[OF_STUDENT] = lse;
        row.state[OF_TEACHER] = divergence_logsumexp(teacher, d->V, scale);
        for (int i = OF_STUDENT; d->rounded == LG_F32 && i <= OF_TEACHER; i++)
            row.state[i] = (float)row.state[i];
        softmax_loss(d, student, teacher, &row);
    }
    return row;
}

/* The gradient of the divergence with respect to element s of scale * student. */
static double soft_gradient(const divergence *d, const double *state, double s, double t) {
    if (d->kind == LG_COSINE) {
        const double norm_s = fmax(state[OF_STUDENT], LEAST_NORM),
                     norm_t = fmax(state[OF_TEACHER], LEAST_NORM);
        if (!both_finite(s, t)) return 0;
        /* A norm that is held at its least is a constant. */
        const double back = state[OF_STUDENT] >= LEAST_NORM ? state[OF_PAIR] * s / norm_s : 0;
        return (back - t / norm_t) / norm_s;
    }
    const double a = s - state[OF_STUDENT], b = t - state[OF_TEACHER], p = exp(a);
    if (d->kind == LG_JSD && d->beta == 0) return p - exp(b);
    if (p == 0) return 0;
    if (d->kind == LG_TVD) return p * (sign(a - b) - state[OF_PAIR]) / 2;
    if (d->beta == 1) return p * (a - b - state[OF_PAIR]);
    double of_p, of_q;
    divergence_log_ratios(b - a, d->beta, &of_p, &of_q);
    return (1 - d->beta) * p * (of_p - state[OF_PAIR]);
}

void divergence_gradient(const divergence *d, const double *state, double dhard, double dsoft,
                         const double *student, const double *teacher, int32_t target, double *dz) {
    const double scale = 1 / d->temperature;
    for (int64_t v = 0; v < d->V; v++) {
        const double s = student[v];
        double gradient = 0;
        if (dsoft != 0)
            gradient = dsoft * scale * soft_gradient(d, state, s * scale, teacher[v] * scale);
        if (dhard != 0) gradient += dhard * (exp(s - state[OF_HARD]) - (v == target));
        dz[v] = gradient;
    }
}

lg_status divergence_check(lg_context *ctx, const char *op, int64_t kind, double beta,
                           double temperature) {
    if (kind < 0 || kind >= LG_NUM_DIVERGENCES)
        return lg_fail(ctx, LG_EINVAL, "%s: divergence is %lld, wanted 0 to %d", op,
                       (long long)kind, LG_NUM_DIVERGENCES - 1);
    if (!(temperature > 0))
        return lg_fail(ctx, LG_EINVAL, "%s: temperature is %g, wanted above 0", op, temperature);
    if (!(beta >= 0 && beta <= 1))
        return lg_fail(ctx, LG_EINVAL, "%s: beta is %g, wanted 0 to 1", op, beta);
    return LG_OK;
}

void load_doubles(const lg_tensor *t, int64_t offset, int64_t n, double *row) {
    for (int64_t i = 0; i < n; i++) row[i] = load(t, offset + i);
}

/* ---- the ops ---- */

/* An op at work. */
typedef struct pair {
    const char *op;
    const lg_tensor *student, *teacher, *target;
    int64_t ignore;
    divergence d;
} pair;

static pair pair_of(const char *op, const lg_tensor *student, const lg_tensor *teacher,
                    const lg_tensor *target, int64_t ignore, lg_divergence kind, double beta,
                    double temperature) {
    const int64_t V = student->shape[1], U = teacher->shape[1];
    return (pair){
        op,
        student,
        teacher,
        target,
        ignore,
        {kind, beta, temperature, V < U ? V : U, student->dtype == LG_F64 ? LG_F64 : LG_F32}};
}

/* Room for two rows in double a thread. */
static lg_status pair_rows(lg_context *ctx, const pair *p, int threads, double **rows) {
    void *scratch;
    LG_TRY(lg_scratch(ctx, 2 * threads * p->d.V * (int64_t)sizeof(double), &scratch));
    *rows = scratch;
    return LG_OK;
}

static bool is_kept(const pair *p, int64_t n) {
    return !p->target || ((const int32_t *)p->target->data)[n] != p->ignore;
}

static lg_status check_pair(lg_context *ctx, const pair *p, bool hard) {
    LG_TRY(divergence_check(ctx, p->op, p->d.kind, p->d.beta, p->d.temperature));
    for (int64_t n = 0; n < p->student->shape[0]; n++) {
        if (!is_kept(p, n)) continue;
        if (p->d.V == 0)
            return lg_fail(ctx, LG_EINVAL, "%s: student and teacher share no column, wanted one",
                           p->op);
        const int32_t t = hard ? ((const int32_t *)p->target->data)[n] : 0;
        if (t < 0 || t >= p->d.V)
            return lg_fail(ctx, LG_EINVAL, "%s: target[%lld] is %d, wanted [0, %lld) or %lld",
                           p->op, (long long)n, t, (long long)p->d.V, (long long)p->ignore);
    }
    return LG_OK;
}

static lg_status pair_forward(lg_context *ctx, const pair *p, lg_tensor *hard, lg_tensor *soft,
                              lg_tensor *saved) {
    const int64_t N = p->student->shape[0], V = p->d.V;
    const int threads = op_threads(ctx, N * V, ROW_GRAIN / 4);
    double *rows;
    LG_TRY(check_pair(ctx, p, hard != NULL));
    LG_TRY(pair_rows(ctx, p, threads, &rows));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        double *s = rows + 2 * thread_index() * V, *t = s + V;
        row_loss row = {0};
        if (is_kept(p, n)) {
            load_doubles(p->student, row_offset(p->student, n), V, s);
            load_doubles(p->teacher, row_offset(p->teacher, n), V, t);
            row = divergence_row(&p->d, s, t, hard ? ((const int32_t *)p->target->data)[n] : 0,
                                 hard != NULL, false);
        }
        if (hard) store(hard, n, row.hard);
        store(soft, n, row.soft);
        for (int i = 0; i < STATE_SIZE; i++) store(saved, n * STATE_SIZE + i, row.state[i]);
    }
    return LG_OK;
}

static lg_status pair_backward(lg_context *ctx, const pair *p, const lg_tensor *dhard,
                               const lg_tensor *dsoft, const lg_tensor *saved,
                               lg_tensor *dstudent) {
    const int64_t N = p->student->shape[0], V = p->d.V;
    const int threads = op_threads(ctx, N * V, ROW_GRAIN / 4);
    double *rows;
    if (!dstudent) return LG_OK;
    LG_TRY(divergence_check(ctx, p->op, p->d.kind, p->d.beta, p->d.temperature));
    LG_TRY(pair_rows(ctx, p, threads, &rows));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        double *s = rows + 2 * thread_index() * V, *t = s + V;
        const int64_t to = row_offset(dstudent, n);
        const double hard = dhard ? load(dhard, n) : 0, soft = dsoft ? load(dsoft, n) : 0;
        const bool active = is_kept(p, n) && (hard != 0 || soft != 0);
        double of_row[STATE_SIZE];
        if (active) {
            load_doubles(saved, n * STATE_SIZE, STATE_SIZE, of_row);
            load_doubles(p->student, row_offset(p->student, n), V, s);
            load_doubles(p->teacher, row_offset(p->teacher, n), V, t);
            divergence_gradient(&p->d, of_row, hard, soft, s, t,
                                dhard ? ((const int32_t *)p->target->data)[n] : 0, s);
        }
        for (int64_t v = 0; v < dstudent->shape[1]; v++)
            store(dstudent, to + v, active && v < V ? s[v] : 0);
    }
    return LG_OK;
}

lg_status cpu_ce_tvd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                     const lg_tensor *target, double temperature, int64_t ignore, lg_tensor *ce,
                     lg_tensor *tvd, lg_tensor *saved) {
    const pair p = pair_of("ce_tvd", student, teacher, target, ignore, LG_TVD, 0, temperature);
    return pair_forward(ctx, &p, ce, tvd, saved);
}

lg_status cpu_ce_tvd_backward(lg_context *ctx, const lg_tensor *dce, const lg_tensor *dtvd,
                              const lg_tensor *student, const lg_tensor *teacher,
                              const lg_tensor *target, const lg_tensor *saved, double temperature,
                              int64_t ignore, lg_tensor *dstudent) {
    const pair p =
        pair_of("ce_tvd_backward", student, teacher, target, ignore, LG_TVD, 0, temperature);
    return pair_backward(ctx, &p, dce, dtvd, saved, dstudent);
}

lg_status cpu_tvd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                  const lg_tensor *target, double temperature, int64_t ignore, lg_tensor *loss,
                  lg_tensor *saved) {
    const pair p = pair_of("tvd", student, teacher, target, ignore, LG_TVD, 0, temperature);
    return pair_forward(ctx, &p, NULL, loss, saved);
}

lg_status cpu_tvd_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                           const lg_tensor *teacher, const lg_tensor *target,
                           const lg_tensor *saved, double temperature, int64_t ignore,
                           lg_tensor *dstudent) {
    const pair p =
        pair_of("tvd_backward", student, teacher, target, ignore, LG_TVD, 0, temperature);
    return pair_backward(ctx, &p, NULL, dloss, saved, dstudent);
}

lg_status cpu_jsd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                  const lg_tensor *target, double beta, double temperature, int64_t ignore,
                  lg_tensor *loss, lg_tensor *saved) {
    const pair p = pair_of("jsd", student, teacher, target, ignore, LG_JSD, beta, temperature);
    return pair_forward(ctx, &p, NULL, loss, saved);
}

lg_status cpu_jsd_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                           const lg_tensor *teacher, const lg_tensor *target,
                           const lg_tensor *saved, double beta, double temperature, int64_t ignore,
                           lg_tensor *dstudent) {
    const pair p =
        pair_of("jsd_backward", student, teacher, target, ignore, LG_JSD, beta, temperature);
    return pair_backward(ctx, &p, NULL, dloss, saved, dstudent);
}

lg_status cpu_cosine(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                     const lg_tensor *target, double temperature, int64_t ignore, lg_tensor *loss,
                     lg_tensor *saved) {
    const pair p = pair_of("cosine", student, teacher, target, ignore, LG_COSINE, 0, temperature);
    return pair_forward(ctx, &p, NULL, loss, saved);
}

lg_status cpu_cosine_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                              const lg_tensor *teacher, const lg_tensor *target,
                              const lg_tensor *saved, double temperature, int64_t ignore,
                              lg_tensor *dstudent) {
    const pair p =
        pair_of("cosine_backward", student, teacher, target, ignore, LG_COSINE, 0, temperature);
    return pair_backward(ctx, &p, NULL, dloss, saved, dstudent);
}
