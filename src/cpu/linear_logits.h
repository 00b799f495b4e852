/* What the ops on a vocabulary head share: logits of gathered rows, and the products of their
 * gradient. Logits are kept in fp32, or double for f64. */
#ifndef LIGER_LINEAR_LOGITS_H
#define LIGER_LINEAR_LOGITS_H

#include "cpu.h"
#include "vec.h"

typedef struct lm_head {
    const lg_tensor *x, *w, *b; /* [N, C], [V, C], [V] or NULL */
    double temperature, softcap;
} lm_head;

static inline lg_dtype logits_dtype(const lm_head *head) {
    return head->x->dtype == LG_F64 ? LG_F64 : LG_F32;
}

/* z = softcap tanh(z / softcap) / temperature of a row of logits, fp32 or, of f64, double. */
void head_finish(const lm_head *head, void *z, int64_t V);
/* Rows a chunk: 2048, fewer where their logits would take more than 64 MiB. */
int64_t head_chunk_rows(const lm_head *head);
/* The rows row[0..n) of x, n > 0: x itself where they are consecutive, else copies in `packed`
 * [n, C]. */
const void *head_gather(const lm_head *head, const int32_t *row, int64_t n, void *packed);
/* z [n, V] = softcap tanh((x w^T + b) / softcap) / temperature of n rows of x. */
lg_status head_logits(lg_context *ctx, const lm_head *head, const void *x, int64_t n, void *z);
/* Of n rows: dx[row[i]] = dlogits[i] w, dw += dlogits^T x, db += sum of dlogits; each may be
 * NULL. `x` is what head_gather gave, `packed` may be where it gathered: it is overwritten. */
lg_status head_products(lg_context *ctx, const lm_head *head, const void *dlogits, const void *x,
                        const int32_t *row, int64_t n, void *packed, lg_tensor *dx, lg_tensor *dw,
                        lg_tensor *db);

/* dz / d(x w^T + b), given z: (1 - tanh^2) / temperature, and tanh = z temperature / softcap. */
static inline double head_slope(const lm_head *head, double z) {
    const double t = head->softcap != 0 ? z * head->temperature / head->softcap : 0;
    return (1 - t * t) / head->temperature;
}

VEC_INLINE f32x16 head_slope16(const lm_head *head, f32x16 z) {
    const float slope = (float)(1 / head->temperature);
    if (head->softcap == 0) return splat16(slope);
    const f32x16 t = z * (float)(head->temperature / head->softcap);
    return (1.0f - t * t) * slope;
}

/* The rows whose target is not `ignore`, in scratch; *kept is how many the caller says, or -1, and
 * becomes their number. Fails at the first target that is neither in [0, V) nor `ignore`, and
 * where the caller is wrong. */
lg_status head_kept_rows(lg_context *ctx, const char *op, const lg_tensor *target, int64_t V,
                         int64_t ignore, int32_t **row, int64_t *kept);

/* The address of an element. */
static inline void *logits_at(void *data, int64_t element, lg_dtype dtype) {
    return (char *)data + element * lg_dtype_bytes(dtype);
}

#endif
