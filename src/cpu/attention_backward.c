/* Attention's backward. A task is one key/value head of one sequence: its query heads in order,
 * queries in blocks, keys in blocks, with dk and dv summed in fp32 in the task's memory.
 * Probabilities are made again from the saved log-sum-exp. */
#include "attention.h"

enum {
    QUERIES = 32,
    KEYS = 256
}; /* a block's two matrices of 32 KiB stay in the second-level cache */

typedef struct workspace {
    float *k_panels, *v_panels, *k, *dk, *dv; /* all keys of the sequence */
    float *q, *dy, *dq;                       /* a block of queries */
    float *y_panels, *dy_panels;
    float *p, *ds; /* [QUERIES, KEYS] */
} workspace;

static int64_t workspace_floats(int64_t longest, int64_t D) {
    return round_up16(D) * (5 * round_up16(longest) + 5 * QUERIES) + 2 * QUERIES * KEYS;
}

static workspace workspace_at(float *memory, int64_t longest, int64_t D) {
    const int64_t keys = round_up16(longest) * round_up16(D), queries = QUERIES * round_up16(D);
    workspace ws = {.k_panels = memory};
    ws.v_panels = ws.k_panels + keys;
    ws.k = ws.v_panels + keys;
    ws.dk = ws.k + keys;
    ws.dv = ws.dk + keys;
    ws.q = ws.dv + keys;
    ws.dy = ws.q + queries;
    ws.dq = ws.dy + queries;
    ws.y_panels = ws.dq + queries;
    ws.dy_panels = ws.y_panels + queries;
    ws.p = ws.dy_panels + queries;
    ws.ds = ws.p + QUERIES * KEYS;
    return ws;
}

/* Of one row: p = exp(s - lse) and ds = scale p (dp - delta), in place of s and dp, ds times the
 * slope of the cap where there is one. Keys [first, n) of `width` count, and width may be rounded
 * up to 16. */
static void row_backward(float *p, float *ds, int64_t first, int64_t n, int64_t width, float lse,
                         float delta, float scale, float softcap) {
    if (softcap != 0) cap_scores(p, n, softcap);
    for (int64_t j = 0; j < first && j < n; j++) p[j] = -INFINITY;
    for (int64_t j = 0; j < n; j += VEC_LANES) {
        const f32x16 s = load16_at(p, j, n, -INFINITY);
        const f32x16 e = exp16_negative(s - lse);
        f32x16 by_scale = e * scale;
        if (softcap != 0) {
            const f32x16 t = max16(s, splat16(-softcap)) / softcap; /* of -inf, too */
            by_scale *= 1.0f - t * t;
        }
        store16(p + j, e);
        store16(ds + j, by_scale * (load16(ds + j) - delta));
    }
    for (int64_t j = round_up16(n); j < width; j++) p[j] = ds[j] = 0.0f;
}

/* Queries [i0, i0 + rows) of a head: `lse` and `delta` are theirs. */
static void block_backward(const workspace *ws, int64_t T, int64_t i0, int64_t rows, int64_t D,
                           const float *lse, const float *delta, const score_rule *rule,
                           bool want_dq, bool want_dk, bool want_dv) {
    const int64_t width = round_up16(D), end = keys_seen(rule, i0 + rows - 1, T).end;
    const float scale = (float)rule->scale, softcap = (float)rule->softcap;
    if (want_dq) memset(ws->dq, 0, (size_t)(rows * width) * 4);
    for (int64_t j0 = keys_seen(rule, i0, T).first / 16 * 16; j0 < end; j0 += KEYS) {
        const int64_t n = end - j0 < KEYS ? end - j0 : KEYS;
        tile_scores(ws->q, width, rows, ws->k_panels + j0 * width, n, D, scale, ws->p, KEYS);
        tile_scores(ws->dy, width, rows, ws->v_panels + j0 * width, n, D, 1.0f, ws->ds, KEYS);
        for (int64_t r = 0; r < rows; r++) {
            const key_range seen = keys_seen(rule, i0 + r, T);
            int64_t num = seen.end - j0;
            num = num < 0 ? 0 : num > n ? n : num;
            row_backward(ws->p + r * KEYS, ws->ds + r * KEYS, seen.first - j0, num, n, lse[r],
                         delta[r], scale, softcap);
        }
        if (want_dq) tile_accumulate(ws->ds, KEYS, 1, rows, ws->k + j0 * width, n, width, ws->dq);
        if (want_dk) tile_accumulate(ws->ds, 1, KEYS, n, ws->q, rows, width, ws->dk + j0 * width);
        if (want_dv) tile_accumulate(ws->p, 1, KEYS, n, ws->dy, rows, width, ws->dv + j0 * width);
    }
}

/* delta[r] = dy[r] . y[r], summed as scores are: where a query sees one key, dy . v - delta is
 * exactly 0. */
static void row_deltas(const workspace *ws, const head_rows *dy, const head_rows *y, int64_t rows,
                       int64_t D, float *delta) {
    pack_panels(dy, 0, rows, D, ws->dy_panels);
    pack_panels(y, 0, rows, D, ws->y_panels);
    for (int64_t r = 0; r < rows; r += VEC_LANES) {
        f32x16 sum = splat16(0.0f);
        for (int64_t d = 0; d < D; d++)
            sum += load16(ws->dy_panels + r * round_up16(D) + d * VEC_LANES) *
                   load16(ws->y_panels + r * round_up16(D) + d * VEC_LANES);
        store16(delta + r, sum);
    }
}

static void store_rows(const float *rows, int64_t n0, int64_t n, int64_t h, lg_tensor *out) {
    const int64_t D = out->shape[2];
    for (int64_t n1 = n0; n1 < n0 + n; n1++, rows += round_up16(D)) {
        const int64_t offset = n1 * out->stride[0] + h * out->stride[1];
        if (out->dtype == LG_F32)
            memcpy((float *)out->data + offset, rows, (size_t)D * 4);
        else
            store_row(out, offset, D, rows);
    }
}

/* A sequence of T tokens from `first` on, key/value head g. */
static void head_backward(const workspace *ws, const lg_tensor *dy, const lg_tensor *q,
                          const lg_tensor *k, const lg_tensor *v, const lg_tensor *y,
                          const lg_tensor *lse, int64_t first, int64_t T, int64_t g,
                          const score_rule *rule, lg_tensor *dq, lg_tensor *dk, lg_tensor *dv) {
    const int64_t H = q->shape[1], D = q->shape[2], width = round_up16(D), group = H / k->shape[1];
    const head_rows k_rows = head_rows_of(k, first, g), v_rows = head_rows_of(v, first, g);
    pack_panels(&k_rows, 0, T, D, ws->k_panels);
    pack_panels(&v_rows, 0, T, D, ws->v_panels);
    if (dq) pack_rows(&k_rows, 0, T, D, ws->k);
    if (dk) memset(ws->dk, 0, (size_t)(T * width) * 4);
    if (dv) memset(ws->dv, 0, (size_t)(T * width) * 4);
    for (int64_t h = g * group; h < (g + 1) * group; h++) {
        for (int64_t i = 0; i < T; i += QUERIES) {
            const int64_t rows = T - i < QUERIES ? T - i : QUERIES;
            float row_lse[QUERIES], delta[QUERIES];
            const head_rows q_rows = head_rows_of(q, first + i, h),
                            dy_rows = head_rows_of(dy, first + i, h);
            const head_rows y_rows = head_rows_of(y, first + i, h);
            pack_rows(&q_rows, 0, rows, D, ws->q);
            pack_rows(&dy_rows, 0, rows, D, ws->dy);
            row_deltas(ws, &dy_rows, &y_rows, rows, D, delta);
            for (int64_t r = 0; r < rows; r++)
                row_lse[r] = ((const float *)lse->data)[(first + i + r) * H + h];
            block_backward(ws, T, i, rows, D, row_lse, delta, rule, dq, dk, dv);
            if (dq) store_rows(ws->dq, first + i, rows, h, dq);
        }
    }
    if (dk) store_rows(ws->dk, first, T, g, dk);
    if (dv) store_rows(ws->dv, first, T, g, dv);
}

/* dsinks[h] -= sum over tokens of exp(sinks[h] - lse) dy . y, in double. */
static void sink_gradients(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                           const lg_tensor *lse, const score_rule *rule, lg_tensor *dsinks) {
    const int64_t N = y->shape[0], H = y->shape[1], D = y->shape[2];
    const int threads = op_threads(ctx, N * H * D, ROW_GRAIN);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t h = 0; h < H; h++) {
        double sum = 0;
        for (int64_t n = 0; n < N; n++) {
            const int64_t at = n * H + h;
            double delta = 0;
            for (int64_t d = 0; d < D; d++) delta += load(dy, at * D + d) * load(y, at * D + d);
            sum += exp(sink_of(rule, h) - load(lse, at)) * delta;
        }
        store(dsinks, h, load(dsinks, h) - sum);
    }
}

lg_status cpu_attention_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *q,
                                 const lg_tensor *k, const lg_tensor *v, const lg_tensor *y,
                                 const lg_tensor *lse, const lg_tensor *cu_seqlens,
                                 const lg_tensor *sinks, double scale, bool causal, int64_t window,
                                 double softcap, lg_tensor *dq, lg_tensor *dk, lg_tensor *dv,
                                 lg_tensor *dsinks) {
    const int64_t N = q->shape[0], H = q->shape[1], D = q->shape[2], G = k->shape[1],
                  S = cu_seqlens->shape[0] - 1;
    const int32_t *cu = cu_seqlens->data;
    const score_rule rule = {sinks, scale, softcap, window, causal};
    int64_t longest, pairs;
    LG_TRY(check_sequences(ctx, "attention_backward", cu_seqlens, N, &longest, &pairs));
    LG_TRY(check_attention(ctx, "attention_backward", H, G, &rule));
    if (dsinks && sinks) sink_gradients(ctx, dy, y, lse, &rule, dsinks);
    if (N == 0 || (!dq && !dk && !dv)) return LG_OK;
    if (q->dtype == LG_F64) {
        attention_backward_f64(dy, q, k, v, y, lse, cu_seqlens, &rule, dq, dk, dv);
        return LG_OK;
    }
    const int threads = op_threads(ctx, pairs * H * D / 4 + N * H * D, ROW_GRAIN);
    const int64_t floats = workspace_floats(longest, D);
    void *memory;
    LG_TRY(lg_scratch(ctx, threads * floats * 4, &memory));
    const int64_t chunk = chunk_of(S * G, threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < S * G; t++) {
        const int64_t first = cu[t / G], T = cu[t / G + 1] - first;
        const workspace ws = workspace_at((float *)memory + thread_index() * floats, longest, D);
        head_backward(&ws, dy, q, k, v, y, lse, first, T, t % G, &rule, dq, dk, dv);
    }
    return LG_OK;
}
