/* Softmax over the last dimension: y = exp(x - max) / sum. */
#include "logits.h"

static void softmax_f32(const float *x, int64_t V, float *y) {
    const float max = max_f32(x, V);
    double sum = 0;
    for (int64_t v0 = 0; v0 < V; v0 += VEC_BLOCK) {
        const int64_t end = V - v0 < VEC_BLOCK ? V : v0 + VEC_BLOCK;
        f32x16 s = {0};
        for (int64_t v = v0; v < end; v += VEC_LANES) {
            const f32x16 p = exp16_negative(load16_at(x, v, V, -INFINITY) - max);
            store16_part(y + v, end - v < VEC_LANES ? end - v : VEC_LANES, p);
            s += p;
        }
        sum += sum_lanes(s);
    }
    const float scale = (float)(1 / sum);
    for (int64_t v = 0; v < V; v++) y[v] *= scale;
}

static void softmax_f64(const double *x, int64_t V, double *y) {
    double max = -INFINITY, sum = 0;
    for (int64_t v = 0; v < V; v++) max = x[v] > max ? x[v] : max;
    for (int64_t v = 0; v < V; v++) sum += y[v] = exp(x[v] - max);
    for (int64_t v = 0; v < V; v++) y[v] /= sum;
}

lg_status cpu_softmax(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    const lm_head plain = {.x = x, .temperature = 1};
    const int64_t N = tensor_rows(x), V = tensor_cols(x);
    const int threads = op_threads(ctx, N * V, ROW_GRAIN);
    void *room;
    LG_TRY(rows_reserve(ctx, x, threads, 2, &room));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const logits_row row = row_load(&plain, n, rows_room(x, room, 2, 0));
        void *to = row_begin(y, n, rows_room(x, room, 2, 1));
        if (row.dtype == LG_F64)
            softmax_f64(row.data, V, to);
        else
            softmax_f32(row.data, V, to);
        row_store(y, n, to);
    }
    return LG_OK;
}

lg_status cpu_softmax_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                               lg_tensor *dx) {
    const lm_head plain_dy = {.x = dy, .temperature = 1}, plain_y = {.x = y, .temperature = 1};
    const int64_t N = tensor_rows(y), V = tensor_cols(y);
    const int threads = op_threads(ctx, N * V, ROW_GRAIN);
    void *room;
    if (!dx) return LG_OK;
    LG_TRY(rows_reserve(ctx, y, threads, 3, &room));
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t n = 0; n < N; n++) {
        const logits_row d = row_load(&plain_dy, n, rows_room(y, room, 3, 0)),
                         p = row_load(&plain_y, n, rows_room(y, room, 3, 1));
        void *to = row_begin(dx, n, rows_room(y, room, 3, 2));
        if (p.dtype == LG_F64) {
            double sum = 0;
            for (int64_t v = 0; v < V; v++) sum += row_at(d, v) * row_at(p, v);
            for (int64_t v = 0; v < V; v++) ((double *)to)[v] = row_at(p, v) * (row_at(d, v) - sum);
        } else {
            const float *a = d.data, *b = p.data, sum = (float)dot_f32(a, b, V);
            for (int64_t v = 0; v < V; v++) ((float *)to)[v] = b[v] * (a[v] - sum);
        }
        row_store(dx, n, to);
    }
    return LG_OK;
}
