/* Draws one id a row. The cuts leave what a boundary says: candidates that stand at or before one
 * of them in falling order. The draw then walks the row in id order, so nothing is ever sorted. */
#include <omp.h>

#include "../philox.h"
#include "cpu.h"
#include "logsoftmax.h"
#include "vec.h"

enum { BLOCK = VEC_BLOCK, GRAIN = 32768 };

typedef struct candidate {
    double z, w; /* the logit and e^(z - max) */
    int64_t id;
} candidate;

typedef struct cuts {
    int64_t top_k; /* 0: off */
    double top_p, min_p;
} cuts;

/* What a row needs while it is worked on; `z` and `w` are f64 if `wide`, else f32. */
typedef struct row {
    const void *z;
    void *w;
    double *block; /* a number for each block of the row */
    candidate *c;
    int64_t V;
    double max;
} row;

#define ROW_INLINE __attribute__((always_inline)) static inline

ROW_INLINE double at(const void *x, int64_t v, bool wide) {
    return wide ? ((const double *)x)[v] : ((const float *)x)[v];
}

ROW_INLINE int64_t block_end(const row *r, int64_t v) {
    return v + BLOCK < r->V ? v + BLOCK : r->V;
}

/* ---- falling order ---- */

static bool stands_before(candidate a, candidate b) {
    return a.z > b.z || (a.z == b.z && a.id < b.id);
}

static void swap(candidate *a, candidate *b) {
    candidate t = *a;
    *a = *b;
    *b = t;
}

/* Moves the candidates before the middle one of three to the front of c[0..n), it behind them;
 * returns where it is. */
static int64_t partition(candidate *c, int64_t n) {
    candidate *a = &c[0], *b = &c[n / 2], *last = &c[n - 1];
    if (stands_before(*b, *a)) swap(a, b);
    if (stands_before(*last, *b)) swap(b, last);
    if (stands_before(*b, *a)) swap(a, b);
    swap(b, last);
    int64_t front = 0;
    for (int64_t i = 0; i < n - 1; i++) {
        const candidate x = c[i];
        c[i] = c[front];
        c[front] = x;
        front += stands_before(x, *last);
    }
    swap(&c[front], last);
    return front;
}

/* Moves the shortest prefix in falling order whose weights reach `amount`, at least one candidate,
 * to the front and returns its length; the weights are w, or 1 each. As quickselect, a constant
 * number of passes on average. */
static int64_t take(candidate *c, int64_t n, double amount, bool count) {
    int64_t low = 0, high = n;
    double taken = 0;
    while (high - low > 1) {
        const int64_t middle = low + partition(c + low, high - low);
        double before = 0;
        for (int64_t i = low; i < middle; i++) before += count ? 1 : c[i].w;
        const double with = taken + before + (count ? 1 : c[middle].w);
        if (middle > low && taken + before >= amount) {
            high = middle;
        } else if (with >= amount) {
            return middle + 1;
        } else {
            taken = with;
            low = middle + 1;
        }
    }
    return high;
}

/* ---- the cuts ---- */

/* A logit that at least k candidates reach: the k-th largest of the blocks' largest. -inf when
 * there are fewer blocks. */
ROW_INLINE double floor_of(const row *r, int64_t k, bool wide) {
    enum { SMALL = 32 };
    const int64_t n = r->V / SMALL;
    if (n < k) return -INFINITY;
    for (int64_t b = 0; b < n; b++) {
        double max = -INFINITY;
        for (int64_t v = b * SMALL; v < (b + 1) * SMALL; v++) {
            const double z = at(r->z, v, wide);
            max = z > max ? z : max;
        }
        r->c[b] = (candidate){max, 0, b};
    }
    take(r->c, n, (double)k, true);
    double least = r->c[0].z;
    for (int64_t i = 1; i < k; i++) least = r->c[i].z < least ? r->c[i].z : least;
    return least;
}

/* Collects the candidates that a cut may keep. A probability under half of (1 - top_p) / V cannot
 * be in top_p's prefix: all of them together do not weigh 1 - top_p. */
ROW_INLINE int64_t collect(const row *r, const cuts *k, double total, bool wide) {
    const double z_floor = k->top_k ? floor_of(r, k->top_k, wide) : -INFINITY;
    const double w_floor = k->top_k ? 0 : 0.5 * (1 - k->top_p) * total / (double)r->V;
    int64_t n = 0;
    for (int64_t v = 0; v < r->V; v++) {
        const double z = at(r->z, v, wide), w = at(r->w, v, wide);
        if (z >= z_floor && w >= w_floor) r->c[n++] = (candidate){z, w, v};
    }
    return n;
}

/* The last candidate in falling order that top_k and top_p keep. */
ROW_INLINE candidate boundary(const row *r, const cuts *k, double total, bool wide) {
    int64_t n = collect(r, k, total, wide);
    if (k->top_k) n = take(r->c, n, (double)k->top_k, true);
    if (k->top_p < 1) {
        if (k->top_k) total = 0;
        for (int64_t i = 0; k->top_k && i < n; i++) total += r->c[i].w;
        n = take(r->c, n, k->top_p * total, false);
    }
    candidate last = r->c[0];
    for (int64_t i = 1; i < n; i++)
        if (stands_before(last, r->c[i])) last = r->c[i];
    return last;
}

/* Sets the weights of what the cuts drop to 0. */
ROW_INLINE void drop(const row *r, const cuts *k, double total, bool wide) {
    candidate last = {-INFINITY, 0, r->V};
    if (k->top_k || k->top_p < 1) last = boundary(r, k, total, wide);
    const double least = k->min_p > 0 ? r->max + log(k->min_p) : -INFINITY;
    for (int64_t v = 0; v < r->V; v++) {
        const double z = at(r->z, v, wide);
        const bool keep = (z > last.z || (z == last.z && v <= last.id)) && z >= least;
        if (wide)
            ((double *)r->w)[v] = keep ? ((double *)r->w)[v] : 0;
        else
            ((float *)r->w)[v] = keep ? ((float *)r->w)[v] : 0;
    }
}

/* ---- the draw ---- */

/* The sum of all weights, and of each block's. */
ROW_INLINE double weigh(const row *r, bool wide) {
    double total = 0;
    for (int64_t v0 = 0; v0 < r->V; v0 += BLOCK) {
        const int64_t end = block_end(r, v0);
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t v = v0; v < end; v++) sum += at(r->w, v, wide);
        r->block[v0 / BLOCK] = sum;
        total += sum;
    }
    return total;
}

/* The first id whose running weight reaches `target`. Blocks before it are passed over as a whole;
 * in its block the last candidate with any weight catches what rounding leaves. */
ROW_INLINE int64_t draw(const row *r, double target, bool wide) {
    double running = 0;
    int64_t v0 = 0, id = -1;
    for (; v0 + BLOCK < r->V && running + r->block[v0 / BLOCK] < target; v0 += BLOCK)
        running += r->block[v0 / BLOCK];
    for (int64_t v = v0; v < block_end(r, v0); v++) {
        const double w = at(r->w, v, wide);
        if (w == 0) continue;
        id = v;
        running += w;
        if (running >= target) break;
    }
    return id;
}

/* The row's largest logit, or NaN if one is NaN or +inf. */
ROW_INLINE double largest(const void *z, int64_t V, bool wide) {
    double max = -INFINITY;
    int bad = 0;
#pragma omp simd reduction(max : max) reduction(| : bad)
    for (int64_t v = 0; v < V; v++) {
        const double x = at(z, v, wide);
        max = x > max ? x : max;
        bad |= !(x < INFINITY);
    }
    return bad ? NAN : max;
}

/* The id that u draws from a row; -1 when a logit is NaN or infinite, or all are -inf. */
ROW_INLINE int64_t sample_row(row *r, const cuts *k, double u, bool wide) {
    r->max = largest(r->z, r->V, wide);
    if (!(r->max > -INFINITY)) return -1;
    if (k->top_k == 1 || k->top_p == 0) {
        int64_t v = 0;
        while (at(r->z, v, wide) != r->max) v++;
        return v;
    }
    if (wide)
        for (int64_t v = 0; v < r->V; v++)
            ((double *)r->w)[v] = exp(((const double *)r->z)[v] - r->max);
    else
        for (int64_t v = 0; v < r->V; v++)
            ((float *)r->w)[v] = exp_f32(((const float *)r->z)[v] - (float)r->max);
    double total = weigh(r, wide);
    if (k->top_k || k->top_p < 1 || k->min_p > 0) {
        drop(r, k, total, wide);
        total = weigh(r, wide);
    }
    return draw(r, u * total, wide);
}

/* ---- the op ---- */

static lg_status check(lg_context *ctx, const lg_tensor *position, double top_p, double min_p) {
    if (!(top_p >= 0 && top_p <= 1))
        return lg_fail(ctx, LG_EINVAL, "sample: top_p is %g, wanted [0, 1]", top_p);
    if (!(min_p >= 0 && min_p <= 1))
        return lg_fail(ctx, LG_EINVAL, "sample: min_p is %g, wanted [0, 1]", min_p);
    for (int64_t b = 0; b < position->shape[0]; b++) {
        const int32_t p = ((const int32_t *)position->data)[b];
        if (p < 0)
            return lg_fail(ctx, LG_EINVAL, "sample: position[%lld] is %d, wanted at least 0",
                           (long long)b, p);
    }
    return LG_OK;
}

/* Names what is wrong with row b of z. */
static lg_status fail(lg_context *ctx, const lg_tensor *z, int64_t b) {
    for (int64_t v = 0; v < z->shape[1]; v++) {
        const double x = load(z, b * z->stride[0] + v);
        if (!(x < INFINITY))
            return lg_fail(ctx, LG_ENUMERIC,
                           "sample: z[%lld,%lld] is %s, wanted a finite logit or -inf",
                           (long long)b, (long long)v, x != x ? "nan" : "inf");
    }
    return lg_fail(ctx, LG_ENUMERIC, "sample: z[%lld] has no finite logit", (long long)b);
}

/* Where the parts of a thread's working memory start: the row in fp32, weights, blocks, candidates,
 * the end. */
static void lay_out(int64_t V, bool wide, bool cut, int64_t start[5]) {
    const int64_t bytes[] = {wide ? 0 : V * (int64_t)sizeof(float),
                             V * (int64_t)(wide ? sizeof(double) : sizeof(float)),
                             (V + BLOCK - 1) / BLOCK * (int64_t)sizeof(double),
                             cut ? V * (int64_t)sizeof(candidate) : 0};
    start[0] = 0;
    for (int i = 0; i < 4; i++) start[i + 1] = start[i] + (bytes[i] + 63) / 64 * 64;
}

lg_status cpu_sample(lg_context *ctx, const lg_tensor *z, const lg_tensor *sequence,
                     const lg_tensor *position, int64_t seed, int64_t top_k, double top_p,
                     double min_p, lg_tensor *id, lg_tensor *logp) {
    LG_TRY(check(ctx, position, top_p, min_p));
    const int64_t B = z->shape[0], V = z->shape[1];
    const cuts k = {top_k > 0 && top_k < V ? top_k : 0, top_p, min_p};
    const bool wide = z->dtype == LG_F64;
    int threads = op_threads(ctx, B * V, GRAIN);
    if (threads > B) threads = B > 1 ? (int)B : 1;
    int64_t start[5];
    lay_out(V, wide, k.top_k || top_p < 1, start);
    void *ids, *logps, *memory;
    LG_TRY(lg_scratch(ctx, B * (int64_t)sizeof(int64_t), &ids));
    LG_TRY(lg_scratch(ctx, B * (int64_t)sizeof(double), &logps));
    LG_TRY(lg_scratch(ctx, threads * start[4], &memory));

#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < B; b++) {
        const int64_t offset = b * z->stride[0];
        char *own = (char *)memory + omp_get_thread_num() * start[4];
        row r = {.w = own + start[1],
                 .block = (double *)(own + start[2]),
                 .c = (candidate *)(own + start[3]),
                 .V = V};
        if (wide || z->dtype == LG_F32) {
            r.z = (const char *)z->data + offset * lg_dtype_bytes(z->dtype);
        } else {
            float *copy = (float *)(own + start[0]);
            for (int64_t v = 0; v < V; v++) copy[v] = (float)load(z, offset + v);
            r.z = copy;
        }
        uint32_t word;
        lg_philox((uint64_t)seed, (uint64_t)((const int64_t *)sequence->data)[b],
                  4 * (uint64_t)((const int32_t *)position->data)[b], 1, &word);
        const double u = philox_uniform(word);
        const int64_t drawn = wide ? sample_row(&r, &k, u, true) : sample_row(&r, &k, u, false);
        ((int64_t *)ids)[b] = drawn;
        if (drawn < 0) continue;
        const double lse = wide ? row_logsumexp_f64(r.z, V, NULL) : row_logsumexp_f32(r.z, V, NULL);
        ((double *)logps)[b] = (wide ? at(r.z, drawn, true) : at(r.z, drawn, false)) - lse;
    }

    for (int64_t b = 0; b < B; b++)
        if (((int64_t *)ids)[b] < 0) return fail(ctx, z, b);
    for (int64_t b = 0; b < B; b++) {
        ((int32_t *)id->data)[b] = (int32_t)((int64_t *)ids)[b];
        store(logp, b, ((double *)logps)[b]);
    }
    return LG_OK;
}
