/* Attention: forward over packed sequences, and decode of one position over a paged cache. Both
 * pack keys and values and call attend(), so a position's result has the same bits in either. */
#include "attention.h"

enum {
    BLOCK_QUERIES = 128, /* queries a task: enough to pay for packing the keys */
    QUERIES = 16,        /* queries that read a chunk of keys from the cache together */
    CHUNK_KEYS = 64,     /* values a chunk: 16 KiB at a head size of 64 */
};

/* Keys and values of one head, packed, and room for the work on them. */
typedef struct workspace {
    float *k_panels, *v; /* pack_panels, pack_rows */
    float *q, *s, *y;    /* QUERIES rows each: D, keys, D */
    int64_t num_s;       /* room of a row of s */
} workspace;

static int64_t workspace_floats(int64_t longest, int64_t D) {
    const int64_t n = round_up16(longest), width = round_up16(D);
    return 2 * n * width + QUERIES * (n + 2 * width);
}

static workspace workspace_at(float *memory, int64_t longest, int64_t D) {
    const int64_t n = round_up16(longest), width = round_up16(D);
    workspace ws = {.k_panels = memory, .num_s = n};
    ws.v = ws.k_panels + n * width;
    ws.q = ws.v + n * width;
    ws.y = ws.q + QUERIES * width;
    ws.s = ws.y + QUERIES * width;
    return ws;
}

/* s becomes exp(s - max), then zeros up to a multiple of 16; returns the sum, and the maximum of all
 * and `sink` in *max. */
static double exponentials(float *s, int64_t n, float sink, float *max) {
    if (n <= VEC_LANES) { /* what the loops below come to */
        const f32x16 x = load16_part(s, n, -INFINITY);
        *max = fmaxf(max_lanes(x), sink);
        const f32x16 p = exp16_negative(x - *max);
        store16(s, p);
        return sum_lanes(p);
    }
    double sum = 0;
    *max = fmaxf(max_f32(s, n), sink);
    for (int64_t j0 = 0; j0 < n; j0 += VEC_BLOCK) {
        const int64_t stop = n - j0 < VEC_BLOCK ? n : j0 + VEC_BLOCK;
        f32x16 lanes[4] = {{0}};
        for (int64_t j = j0; j < stop; j += 4 * VEC_LANES)
            for (int u = 0; u < 4; u++) {
                if (j + u * VEC_LANES >= stop) break;
                const f32x16 x = load16_at(s, j + u * VEC_LANES, n, -INFINITY);
                const f32x16 p = exp16_negative(x - *max);
                store16(s + j + u * VEC_LANES, p);
                lanes[u] += p;
            }
        sum += sum4(lanes);
    }
    return sum;
}

static int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

/* ws->y[r] += sum of s[r, j] v[j] over j in [j0, j1) that row r sees; neither end of `seen` falls. */
static void add_values(const workspace *ws, int64_t rows, const key_range *seen, int64_t j0,
                       int64_t j1, int64_t width) {
    for (int64_t r0 = 0; r0 < rows; r0 += TILE_ROWS) {
        const int64_t r1 = r0 + TILE_ROWS < rows ? r0 + TILE_ROWS : rows;
        /* All see [first, end), each alone what lies before and behind. */
        const int64_t first = clamp(seen[r1 - 1].first, j0, j1),
                      end = clamp(seen[r0].end, first, j1);
        for (int64_t r = r0; r < r1 && first > j0; r++) {
            const int64_t from = clamp(seen[r].first, j0, first),
                          to = clamp(seen[r].end, j0, first);
            if (to > from)
                tile_accumulate(ws->s + r * ws->num_s + from, ws->num_s, 1, 1, ws->v + from * width,
                                to - from, width, ws->y + r * width);
        }
        tile_accumulate(ws->s + r0 * ws->num_s + first, ws->num_s, 1, r1 - r0,
                        ws->v + first * width, end - first, width, ws->y + r0 * width);
        for (int64_t r = r0; r < r1; r++) {
            const int64_t to = clamp(seen[r].end, j0, j1);
            if (to > end)
                tile_accumulate(ws->s + r * ws->num_s + end, ws->num_s, 1, 1, ws->v + end * width,
                                to - end, width, ws->y + r * width);
        }
    }
}

/* Scores of row r become exponentials where it sees keys; returns their sum. Lanes of a sum are
 * counted from the panel of the first key, so that it does not matter which others were scored. */
static double row_softmax(const workspace *ws, int64_t r, key_range seen, const score_rule *rule,
                          float sink, float *max) {
    const int64_t start = seen.first / 16 * 16;
    float *s = ws->s + r * ws->num_s + start;
    if (rule->softcap != 0) cap_scores(s, seen.end - start, (float)rule->softcap);
    for (int64_t j = 0; j < seen.first - start; j++) s[j] = -INFINITY;
    const double sum = exponentials(s, seen.end - start, sink, max);
    return rule->sinks ? sum + exp((double)sink - *max) : sum;
}

/* ws->y[r] = attention of row i + r of q, with a sink, over the packed keys that it sees, ascending
 * in r; lse may be NULL. */
static void attend(const workspace *ws, const head_rows *q, int64_t i, int64_t rows,
                   const key_range *seen, int64_t D, const score_rule *rule, const float *sink,
                   double *lse) {
    const int64_t width = round_up16(D), start = seen[0].first / 16 * 16,
                  num_keys = seen[rows - 1].end;
    const float *panels = ws->k_panels + start * width, scale = (float)rule->scale;
    float inverse[QUERIES];
    if (q->dtype == LG_F32) {
        tile_scores((const float *)q->data + head_row(q, i), q->stride, rows, panels,
                    num_keys - start, D, scale, ws->s + start, ws->num_s);
    } else {
        pack_rows(q, i, rows, D, ws->q);
        tile_scores(ws->q, width, rows, panels, num_keys - start, D, scale, ws->s + start,
                    ws->num_s);
    }
    for (int64_t r = 0; r < rows; r++) {
        float max;
        const double sum = row_softmax(ws, r, seen[r], rule, sink[r], &max);
        inverse[r] = (float)(1 / sum);
        if (lse) lse[r] = max + log(sum);
    }
    memset(ws->y, 0, (size_t)(rows * width) * 4);
    for (int64_t j = start; j < num_keys; j += CHUNK_KEYS)
        add_values(ws, rows, seen, j, j + CHUNK_KEYS < num_keys ? j + CHUNK_KEYS : num_keys, width);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < width; d++) ws->y[r * width + d] *= inverse[r];
}

/* Writes ws->y[r] to y at head h of token n. */
static void store_head(const workspace *ws, int64_t r, lg_tensor *y, int64_t n, int64_t h) {
    const int64_t D = y->shape[2], offset = (n * y->shape[1] + h) * D;
    const float *row = ws->y + r * round_up16(D);
    if (y->dtype == LG_F32)
        memcpy((float *)y->data + offset, row, (size_t)D * 4);
    else
        store_row(y, offset, D, row);
}

lg_status check_sequences(lg_context *ctx, const char *op, const lg_tensor *cu_seqlens, int64_t N,
                          int64_t *longest, int64_t *pairs) {
    const int64_t S = cu_seqlens->shape[0] - 1;
    const int32_t *cu = cu_seqlens->data;
    *longest = *pairs = 0;
    if (cu[0] != 0) return lg_fail(ctx, LG_EINVAL, "%s: cu_seqlens[0] is %d, wanted 0", op, cu[0]);
    for (int64_t s = 0; s < S; s++) {
        const int64_t n = (int64_t)cu[s + 1] - cu[s];
        if (n < 0)
            return lg_fail(ctx, LG_EINVAL, "%s: cu_seqlens[%lld] is %d, wanted at least %d", op,
                           (long long)s + 1, cu[s + 1], cu[s]);
        if (n > *longest) *longest = n;
        *pairs += n * n / 2;
    }
    if (cu[S] != N)
        return lg_fail(ctx, LG_EINVAL, "%s: cu_seqlens ends at %d, wanted %lld", op, cu[S],
                       (long long)N);
    return LG_OK;
}

lg_status check_attention(lg_context *ctx, const char *op, int64_t H, int64_t G,
                          const score_rule *rule) {
    if (G == 0 || H % G != 0)
        return lg_fail(ctx, LG_EINVAL, "%s: heads are %lld, wanted a multiple of %lld", op,
                       (long long)H, (long long)G);
    if (rule->window < 0 || (rule->window > 0 && !rule->causal))
        return lg_fail(ctx, LG_EINVAL, "%s: window is %lld, wanted %s", op, (long long)rule->window,
                       rule->causal ? "0 or more" : "0 where causal is false");
    if (!(rule->softcap >= 0 && rule->softcap < INFINITY))
        return lg_fail(ctx, LG_EINVAL, "%s: softcap is %g, wanted 0 or more", op, rule->softcap);
    return LG_OK;
}

/* One query block of one key/value head. */
static void attention_block(const workspace *ws, const lg_tensor *q, const lg_tensor *k,
                            const lg_tensor *v, int64_t first, int64_t T, int64_t i0, int64_t g,
                            const score_rule *rule, lg_tensor *y, lg_tensor *lse) {
    const int64_t H = q->shape[1], D = q->shape[2], group = H / k->shape[1];
    const int64_t i1 = i0 + BLOCK_QUERIES < T ? i0 + BLOCK_QUERIES : T;
    const int64_t base = keys_seen(rule, i0, T).first / 16 * 16,
                  num_keys = keys_seen(rule, i1 - 1, T).end - base;
    const head_rows k_rows = head_rows_of(k, first, g), v_rows = head_rows_of(v, first, g);
    pack_panels(&k_rows, base, num_keys, D, ws->k_panels);
    pack_rows(&v_rows, base, num_keys, D, ws->v);
    for (int64_t h = g * group; h < (g + 1) * group; h++) {
        const head_rows q_rows = head_rows_of(q, first, h);
        float sink[QUERIES];
        for (int64_t r = 0; r < QUERIES; r++) sink[r] = (float)sink_of(rule, h);
        for (int64_t i = i0; i < i1; i += QUERIES) {
            const int64_t rows = i1 - i < QUERIES ? i1 - i : QUERIES;
            key_range seen[QUERIES];
            double row_lse[QUERIES];
            for (int64_t r = 0; r < rows; r++) {
                const key_range range = keys_seen(rule, i + r, T);
                seen[r] = (key_range){range.first - base, range.end - base};
            }
            attend(ws, &q_rows, i, rows, seen, D, rule, sink, row_lse);
            for (int64_t r = 0; r < rows; r++) {
                store_head(ws, r, y, first + i + r, h);
                ((float *)lse->data)[(first + i + r) * H + h] = (float)row_lse[r];
            }
        }
    }
}

static lg_status attention_f64(lg_context *ctx, const lg_tensor *q, const lg_tensor *k,
                               const lg_tensor *v, const lg_tensor *cu_seqlens, int64_t longest,
                               const score_rule *rule, lg_tensor *y, lg_tensor *lse) {
    const int64_t H = q->shape[1], D = q->shape[2], group = H / k->shape[1],
                  S = cu_seqlens->shape[0] - 1;
    const int32_t *cu = cu_seqlens->data;
    void *s;
    LG_TRY(lg_scratch(ctx, longest * 8, &s));
    for (int64_t b = 0; b < S; b++)
        for (int64_t i = cu[b]; i < cu[b + 1]; i++)
            for (int64_t h = 0; h < H; h++) {
                const head_rows k_rows = head_rows_of(k, cu[b], h / group),
                                v_rows = head_rows_of(v, cu[b], h / group);
                const double *q_row = (const double *)q->data + i * q->stride[0] + h * q->stride[1];
                const key_range seen = keys_seen(rule, i - cu[b], cu[b + 1] - cu[b]);
                ((double *)lse->data)[i * H + h] =
                    attention_row_f64(q_row, &k_rows, &v_rows, seen, D, rule, sink_of(rule, h), s,
                                      (double *)y->data + (i * H + h) * D);
            }
    return LG_OK;
}

lg_status cpu_attention(lg_context *ctx, const lg_tensor *q, const lg_tensor *k, const lg_tensor *v,
                        const lg_tensor *cu_seqlens, const lg_tensor *sinks, double scale,
                        bool causal, int64_t window, double softcap, lg_tensor *y, lg_tensor *lse) {
    const int64_t N = q->shape[0], H = q->shape[1], D = q->shape[2], G = k->shape[1],
                  S = cu_seqlens->shape[0] - 1;
    const int32_t *cu = cu_seqlens->data;
    const score_rule rule = {sinks, scale, softcap, window, causal};
    int64_t longest, pairs;
    LG_TRY(check_sequences(ctx, "attention", cu_seqlens, N, &longest, &pairs));
    LG_TRY(check_attention(ctx, "attention", H, G, &rule));
    if (N == 0) return LG_OK;
    if (q->dtype == LG_F64) return attention_f64(ctx, q, k, v, cu_seqlens, longest, &rule, y, lse);

    /* A task is a query block of a sequence; the last blocks, with the most keys, come first. */
    int64_t num_blocks = 0;
    for (int64_t s = 0; s < S; s++)
        num_blocks += (cu[s + 1] - cu[s] + BLOCK_QUERIES - 1) / BLOCK_QUERIES;
    const int threads = op_threads(ctx, pairs * H * D / 8 + N * H * D, ROW_GRAIN);
    const int64_t floats = workspace_floats(longest, D);
    void *tasks, *memory;
    LG_TRY(lg_scratch(ctx, num_blocks * 8, &tasks));
    LG_TRY(lg_scratch(ctx, threads * floats * 4, &memory));
    int32_t(*task)[2] = tasks;
    for (int64_t s = 0, t = 0; s < S; s++)
        for (int64_t b = (cu[s + 1] - cu[s] + BLOCK_QUERIES - 1) / BLOCK_QUERIES - 1; b >= 0;
             b--, t++) {
            task[t][0] = (int32_t)s;
            task[t][1] = (int32_t)b;
        }
    const int64_t chunk = chunk_of(num_blocks * G, threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < num_blocks * G; t++) {
        const int32_t *block = task[t / G];
        const workspace ws = workspace_at((float *)memory + thread_index() * floats, longest, D);
        const int64_t first = cu[block[0]], T = cu[block[0] + 1] - first;
        attention_block(&ws, q, k, v, first, T, (int64_t)block[1] * BLOCK_QUERIES, t % G, &rule, y,
                        lse);
    }
    return LG_OK;
}

static lg_status check_pages(lg_context *ctx, const lg_tensor *page, const lg_tensor *length,
                             int64_t page_size, int64_t P, int64_t *longest, int64_t *total) {
    const int64_t B = page->shape[0], M = page->shape[1];
    const int32_t *n = length->data, *p = page->data;
    *longest = *total = 0;
    if (page_size <= 0)
        return lg_fail(ctx, LG_EINVAL, "attention_decode: page_size is %lld, wanted above 0",
                       (long long)page_size);
    for (int64_t b = 0; b < B; b++) {
        if (n[b] < 1 || n[b] > M * page_size)
            return lg_fail(ctx, LG_EINVAL, "attention_decode: length[%lld] is %d, wanted [1, %lld]",
                           (long long)b, n[b], (long long)(M * page_size));
        for (int64_t j = 0; j * page_size < n[b]; j++) {
            const int64_t end = n[b] - j * page_size < page_size ? n[b] - j * page_size : page_size;
            const int64_t id = p[b * M + j];
            if (id < 0 || id * page_size + end > P)
                return lg_fail(
                    ctx, LG_EINVAL, "attention_decode: page[%lld,%lld] is %lld, wanted [0, %lld)",
                    (long long)b, (long long)j, (long long)id, (long long)(P / page_size));
        }
        if (n[b] > *longest) *longest = n[b];
        *total += n[b];
    }
    return LG_OK;
}

lg_status cpu_attention_decode(lg_context *ctx, const lg_tensor *q, const lg_tensor *k_cache,
                               const lg_tensor *v_cache, const lg_tensor *page,
                               const lg_tensor *length, const lg_tensor *sinks, int64_t page_size,
                               double scale, int64_t window, double softcap, lg_tensor *y) {
    const int64_t B = q->shape[0], H = q->shape[1], D = q->shape[2], G = k_cache->shape[1],
                  M = page->shape[1];
    const score_rule rule = {sinks, scale, softcap, window, true};
    int64_t longest, total;
    LG_TRY(check_attention(ctx, "attention_decode", H, G, &rule));
    LG_TRY(check_pages(ctx, page, length, page_size, k_cache->shape[0], &longest, &total));
    const int64_t group = H / G;
    const bool f64 = q->dtype == LG_F64;
    const int threads = f64 ? 1 : op_threads(ctx, 2 * total * H * D, ROW_GRAIN);
    const int64_t bytes = f64 ? longest * 8 : workspace_floats(longest, D) * 4;
    void *memory;
    LG_TRY(lg_scratch(ctx, threads * bytes, &memory));
    const int64_t chunk = chunk_of(B * G, threads);
#pragma omp parallel for schedule(dynamic, chunk) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < B * G; t++) {
        const int64_t b = t / G, g = t % G, num_keys = ((const int32_t *)length->data)[b];
        const key_range seen = keys_seen(&rule, num_keys - 1, num_keys);
        char *mine = (char *)memory + thread_index() * bytes;
        head_rows k_rows = head_rows_of(k_cache, 0, g), v_rows = head_rows_of(v_cache, 0, g);
        k_rows.page = v_rows.page = (const int32_t *)page->data + b * M;
        k_rows.page_size = v_rows.page_size = page_size;
        if (f64) {
            for (int64_t h = g * group; h < (g + 1) * group; h++)
                attention_row_f64((const double *)q->data + b * q->stride[0] + h * q->stride[1],
                                  &k_rows, &v_rows, seen, D, &rule, sink_of(&rule, h),
                                  (double *)mine, (double *)y->data + (b * H + h) * D);
            continue;
        }
        const workspace ws = workspace_at((float *)mine, longest, D);
        const int64_t base = seen.first / 16 * 16;
        pack_panels(&k_rows, base, num_keys - base, D, ws.k_panels);
        pack_rows(&v_rows, base, num_keys - base, D, ws.v);
        for (int64_t h = g * group; h < (g + 1) * group; h += QUERIES) {
            const int64_t rows = (g + 1) * group - h < QUERIES ? (g + 1) * group - h : QUERIES;
            key_range packed[QUERIES];
            float sink[QUERIES];
            for (int64_t r = 0; r < rows; r++) {
                packed[r] = (key_range){seen.first - base, num_keys - base};
                sink[r] = (float)sink_of(&rule, h + r);
            }
            head_rows q_rows = head_rows_of(q, b, h);
            q_rows.stride = q->stride[1];
            attend(&ws, &q_rows, 0, rows, packed, D, &rule, sink, NULL);
            for (int64_t r = 0; r < rows; r++) store_head(&ws, r, y, b, h + r);
        }
    }
    return LG_OK;
}
