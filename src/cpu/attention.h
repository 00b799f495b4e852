/* What attention's forward, decode and backward share: reading keys from dense or paged memory,
 * packing them for the vector loops, and the two tile products. Every score is one chain of
 * fused multiply-adds over the head's dimensions and every output one over the keys, both
 * ascending; a result therefore depends on the numbers alone, not on tiles, pages or batch. */
#ifndef LIGER_ATTENTION_H
#define LIGER_ATTENTION_H

#include "cpu.h"
#include "vec.h"

enum { TILE_ROWS = 4 }; /* rows of a register tile */

/* What a score is and who sees what. */
typedef struct score_rule {
    const lg_tensor *sinks; /* [H] or NULL */
    double scale, softcap;  /* softcap 0: none */
    int64_t window;         /* keys that a query sees at most; 0: all */
    bool causal;
} score_rule;

typedef struct key_range {
    int64_t first, end;
} key_range;

/* The keys that query i of a sequence of T sees. */
static inline key_range keys_seen(const score_rule *rule, int64_t i, int64_t T) {
    const int64_t end = rule->causal ? i + 1 : T;
    return (key_range){rule->window && end > rule->window ? end - rule->window : 0, end};
}

static inline double sink_of(const score_rule *rule, int64_t h) {
    return rule->sinks ? load(rule->sinks, h) : -INFINITY;
}

/* Fails unless heads divide and the rule makes sense. */
lg_status check_attention(lg_context *ctx, const char *op, int64_t H, int64_t G,
                          const score_rule *rule);

/* Rows j = 0, 1, ... of one key or value head (or of queries): consecutive, or in pages when
 * `page` is given. */
typedef struct head_rows {
    const void *data;
    lg_dtype dtype;
    int64_t first, stride; /* elements */
    const int32_t *page;
    int64_t page_size;
} head_rows;

static inline head_rows head_rows_of(const lg_tensor *t, int64_t n, int64_t head) {
    return (head_rows){.data = t->data,
                       .dtype = t->dtype,
                       .stride = t->stride[0],
                       .first = n * t->stride[0] + head * t->stride[1]};
}

static inline int64_t head_row(const head_rows *rows, int64_t j) {
    if (rows->page)
        j = (int64_t)rows->page[j / rows->page_size] * rows->page_size + j % rows->page_size;
    return rows->first + j * rows->stride;
}

static inline int64_t round_up16(int64_t n) { return (n + 15) / 16 * 16; }

/* Rows [j, j + n) of D elements as fp32 [n, round_up16(D)], zeros behind. */
void pack_rows(const head_rows *rows, int64_t j, int64_t n, int64_t D, float *out);
/* Rows [j, j + n) transposed, as panels of 16 rows: [ceil(n / 16), round_up16(D), 16], zeros behind. */
void pack_panels(const head_rows *rows, int64_t j, int64_t n, int64_t D, float *out);

/* s[r, j] = scale q[r] . row j, for `rows` rows of q (their distance is ldq) and the first n
 * rows, rounded up to 16, of packed panels. */
void tile_scores(const float *q, int64_t ldq, int64_t rows, const float *panels, int64_t n,
                 int64_t D, float scale, float *s, int64_t lds);
/* out[r] += sum over k < K ascending of coef[r * row_stride + k * k_stride] b[k], vectors of D
 * elements, D a multiple of 16; out and b have rows of D. */
void tile_accumulate(const float *coef, int64_t row_stride, int64_t k_stride, int64_t rows,
                     const float *b, int64_t K, int64_t D, float *out);

/* s[j] = softcap tanh(s[j] / softcap), j < n; s has room for a multiple of 16. */
void cap_scores(float *s, int64_t n, float softcap);

/* Fails unless cu_seqlens rises from 0 to N; gives the longest sequence and the number of query-
 * key pairs / 2. */
lg_status check_sequences(lg_context *ctx, const char *op, const lg_tensor *cu_seqlens, int64_t N,
                          int64_t *longest, int64_t *pairs);

/* The double versions: plain loops over one query, `s` has room for the scores of keys [0, seen.end). */
double attention_row_f64(const double *q, const head_rows *k, const head_rows *v, key_range seen,
                         int64_t D, const score_rule *rule, double sink, double *s, double *y);
void attention_backward_f64(const lg_tensor *dy, const lg_tensor *q, const lg_tensor *k,
                            const lg_tensor *v, const lg_tensor *y, const lg_tensor *lse,
                            const lg_tensor *cu_seqlens, const score_rule *rule, lg_tensor *dq,
                            lg_tensor *dk, lg_tensor *dv);

#endif
