/* Attention in double: the formulas as loops, for gradient checks. */
#include "attention.h"

static const double *row_f64(const head_rows *rows, int64_t j) {
    return (const double *)rows->data + head_row(rows, j);
}

static double dot_f64(const double *a, const double *b, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

/* The scaled score of a key, capped; *slope is its derivative by the score before the cap. */
static double score_f64(const score_rule *rule, const double *q, const double *k, int64_t D,
                        double *slope) {
    const double s = rule->scale * dot_f64(q, k, D);
    const double t = rule->softcap != 0 ? tanh(s / rule->softcap) : 0;
    *slope = 1 - t * t;
    return rule->softcap != 0 ? rule->softcap * t : s;
}

double attention_row_f64(const double *q, const head_rows *k, const head_rows *v, key_range seen,
                         int64_t D, const score_rule *rule, double sink, double *s, double *y) {
    double max = sink, sum = 0, slope;
    for (int64_t j = seen.first; j < seen.end; j++) {
        s[j] = score_f64(rule, q, row_f64(k, j), D, &slope);
        max = s[j] > max ? s[j] : max;
    }
    for (int64_t j = seen.first; j < seen.end; j++) sum += s[j] = exp(s[j] - max);
    if (sink > -INFINITY) sum += exp(sink - max);
    for (int64_t d = 0; d < D; d++) y[d] = 0;
    for (int64_t j = seen.first; j < seen.end; j++)
        for (int64_t d = 0; d < D; d++) y[d] += s[j] / sum * row_f64(v, j)[d];
    return max + log(sum);
}

static double *gradient(lg_tensor *t, int64_t n, int64_t h) {
    return t ? (double *)t->data + n * t->stride[0] + h * t->stride[1] : NULL;
}

static void clear(lg_tensor *t) {
    for (int64_t n = 0; t && n < t->shape[0]; n++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            memset(gradient(t, n, h), 0, (size_t)t->shape[2] * 8);
}

static void add_scaled(double *sum, double a, const double *x, int64_t n) {
    for (int64_t i = 0; sum && i < n; i++) sum[i] += a * x[i];
}

void attention_backward_f64(const lg_tensor *dy, const lg_tensor *q, const lg_tensor *k,
                            const lg_tensor *v, const lg_tensor *y, const lg_tensor *lse,
                            const lg_tensor *cu_seqlens, const score_rule *rule, lg_tensor *dq,
                            lg_tensor *dk, lg_tensor *dv) {
    const int64_t H = q->shape[1], D = q->shape[2], group = H / k->shape[1],
                  S = cu_seqlens->shape[0] - 1;
    const int32_t *cu = cu_seqlens->data;
    clear(dq);
    clear(dk);
    clear(dv);
    for (int64_t b = 0; b < S; b++)
        for (int64_t h = 0; h < H; h++) {
            const int64_t g = h / group;
            const head_rows q_rows = head_rows_of(q, 0, h), k_rows = head_rows_of(k, 0, g);
            const head_rows v_rows = head_rows_of(v, 0, g);
            for (int64_t i = cu[b]; i < cu[b + 1]; i++) {
                const double *q_row = row_f64(&q_rows, i),
                             *dy_row = (const double *)dy->data + (i * H + h) * D;
                const double delta = dot_f64(dy_row, (const double *)y->data + (i * H + h) * D, D);
                const key_range seen = keys_seen(rule, i - cu[b], cu[b + 1] - cu[b]);
                for (int64_t j = cu[b] + seen.first; j < cu[b] + seen.end; j++) {
                    const double *k_row = row_f64(&k_rows, j);
                    double slope;
                    const double p = exp(score_f64(rule, q_row, k_row, D, &slope) -
                                         ((const double *)lse->data)[i * H + h]);
                    const double ds =
                        rule->scale * slope * p * (dot_f64(dy_row, row_f64(&v_rows, j), D) - delta);
                    add_scaled(gradient(dq, i, h), ds, k_row, D);
                    add_scaled(gradient(dk, j, g), ds, q_row, D);
                    add_scaled(gradient(dv, j, g), p, dy_row, D);
                }
            }
        }
}
