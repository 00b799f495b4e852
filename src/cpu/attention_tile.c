/* Attention's packing and tile products. A tile is TILE_ROWS rows by up to four vectors of 16,
 * held in registers. */
#include "attention.h"

/* n <= 16 elements of a row, then zeros. */
VEC_INLINE f32x16 load_lanes(const head_rows *rows, int64_t offset, int64_t n) {
    if (rows->dtype == LG_F32) return load16_part((const float *)rows->data + offset, n, 0.0f);
    const uint16_t *x = (const uint16_t *)rows->data + offset;
    float lane[VEC_LANES] = {0};
    if (n == VEC_LANES)
        for (int l = 0; l < VEC_LANES; l++) lane[l] = bf16_to_f32(x[l]);
    else
        for (int64_t l = 0; l < n; l++) lane[l] = bf16_to_f32(x[l]);
    return load16(lane);
}

/* Swaps the off-diagonal blocks of size `half` in every square of 2 half: four such steps
 * transpose. */
#define SWAP_BLOCKS(v, half)                                 \
    do {                                                     \
        i32x16 low, high;                                    \
        for (int l = 0; l < 16; l++) {                       \
            low[l] = l & (half) ? 16 + l - (half) : l;       \
            high[l] = l & (half) ? 16 + l : l + (half);      \
        }                                                    \
        for (int i = 0; i < 16; i++) {                       \
            if (i & (half)) continue;                        \
            const f32x16 a = (v)[i], b = (v)[i + (half)];    \
            (v)[i] = __builtin_shuffle(a, b, low);           \
            (v)[i + (half)] = __builtin_shuffle(a, b, high); \
        }                                                    \
    } while (0)

VEC_INLINE void transpose16(f32x16 v[16]) {
    SWAP_BLOCKS(v, 8);
    SWAP_BLOCKS(v, 4);
    SWAP_BLOCKS(v, 2);
    SWAP_BLOCKS(v, 1);
}

/* How many of n rows from j on lie one stride apart. */
static int64_t run_length(const head_rows *rows, int64_t j, int64_t n) {
    const int64_t run = rows->page ? rows->page_size - j % rows->page_size : n;
    return run < n ? run : n;
}

void pack_rows(const head_rows *rows, int64_t j0, int64_t n, int64_t D, float *out) {
    for (int64_t j = j0, run; j < j0 + n; j += run) {
        int64_t offset = head_row(rows, j);
        run = run_length(rows, j, j0 + n - j);
        for (int64_t i = 0; i < run; i++, offset += rows->stride)
            for (int64_t d = 0; d < D; d += VEC_LANES, out += VEC_LANES)
                store16(out, load_lanes(rows, offset + d, D - d < VEC_LANES ? D - d : VEC_LANES));
    }
}

void pack_panels(const head_rows *rows, int64_t j0, int64_t n, int64_t D, float *out) {
    for (const int64_t end = j0 + n; j0 < end; j0 += VEC_LANES) {
        const int64_t num = end - j0 < VEC_LANES ? end - j0 : VEC_LANES;
        int64_t offset[VEC_LANES] = {0}, lanes[VEC_LANES] = {0};
        for (int64_t j = 0, run; j < num; j += run) {
            const int64_t start = head_row(rows, j0 + j);
            run = run_length(rows, j0 + j, num - j);
            for (int64_t i = 0; i < run; i++) offset[j + i] = start + i * rows->stride;
        }
        for (int64_t d = 0; d < D; d += VEC_LANES, out += VEC_LANES * VEC_LANES) {
            for (int64_t j = 0; j < num; j++) lanes[j] = D - d < VEC_LANES ? D - d : VEC_LANES;
            f32x16 v[VEC_LANES];
            if (rows->dtype == LG_F32)
                for (int j = 0; j < VEC_LANES; j++)
                    v[j] = load16_part((const float *)rows->data + offset[j] + d, lanes[j], 0.0f);
            else
                for (int j = 0; j < VEC_LANES; j++)
                    v[j] = load_lanes(rows, offset[j] + d, lanes[j]);
            transpose16(v);
            for (int i = 0; i < VEC_LANES; i++) store16(out + i * VEC_LANES, v[i]);
        }
    }
}

VEC_INLINE void scores(const float *q, int64_t ldq, const int rows, const float *panel,
                       int64_t panel_size, const int panels, int64_t D, float scale, float *s,
                       int64_t lds) {
    f32x16 sum[TILE_ROWS][4] = {{{0}}};
    for (int64_t d = 0; d < D; d++)
        for (int p = 0; p < panels; p++) {
            const f32x16 k = load16(panel + p * panel_size + d * VEC_LANES);
            for (int r = 0; r < rows; r++) sum[r][p] += q[r * ldq + d] * k;
        }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) store16(s + r * lds + p * VEC_LANES, sum[r][p] * scale);
}

/* All rows over a few panels, which stay in the first-level cache. */
VEC_INLINE void scores_panels(const float *q, int64_t ldq, int64_t rows, const float *panel,
                              const int panels, int64_t D, float scale, float *s, int64_t lds) {
    const int64_t size = round_up16(D) * VEC_LANES;
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        scores(q + r * ldq, ldq, TILE_ROWS, panel, size, panels, D, scale, s + r * lds, lds);
    if (rows - r == 3)
        scores(q + r * ldq, ldq, 3, panel, size, panels, D, scale, s + r * lds, lds);
    else if (rows - r == 2)
        scores(q + r * ldq, ldq, 2, panel, size, panels, D, scale, s + r * lds, lds);
    else if (rows - r == 1)
        scores(q + r * ldq, ldq, 1, panel, size, panels, D, scale, s + r * lds, lds);
}

void tile_scores(const float *q, int64_t ldq, int64_t rows, const float *panels, int64_t n,
                 int64_t D, float scale, float *s, int64_t lds) {
    const int64_t width = round_up16(D), end = round_up16(n);
    int64_t j = 0;
    for (; j + 64 <= end; j += 64)
        scores_panels(q, ldq, rows, panels + j * width, 4, D, scale, s + j, lds);
    if (j + 32 <= end) {
        scores_panels(q, ldq, rows, panels + j * width, 2, D, scale, s + j, lds);
        j += 32;
    }
    if (j < end) scores_panels(q, ldq, rows, panels + j * width, 1, D, scale, s + j, lds);
}

void cap_scores(float *s, int64_t n, float softcap) {
    for (int64_t j = 0; j < n; j += VEC_LANES)
        for (int l = 0; l < VEC_LANES; l++) s[j + l] = softcap * tanh_f32(s[j + l] / softcap);
}

VEC_INLINE void accumulate(const float *coef, int64_t row_stride, int64_t k_stride, const int rows,
                           const float *b, int64_t K, int64_t D, const int vectors, float *out) {
    f32x16 sum[TILE_ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = load16(out + r * D + v * VEC_LANES);
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < vectors; v++) {
            const f32x16 x = load16(b + k * D + v * VEC_LANES);
            for (int r = 0; r < rows; r++) sum[r][v] += coef[r * row_stride + k * k_stride] * x;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store16(out + r * D + v * VEC_LANES, sum[r][v]);
}

VEC_INLINE void accumulate_rows(const float *coef, int64_t row_stride, int64_t k_stride,
                                const int rows, const float *b, int64_t K, int64_t D, float *out) {
    int64_t d = 0;
    for (; d + 64 <= D; d += 64)
        accumulate(coef, row_stride, k_stride, rows, b + d, K, D, 4, out + d);
    if (d + 32 <= D) {
        accumulate(coef, row_stride, k_stride, rows, b + d, K, D, 2, out + d);
        d += 32;
    }
    if (d < D) accumulate(coef, row_stride, k_stride, rows, b + d, K, D, 1, out + d);
}

void tile_accumulate(const float *coef, int64_t row_stride, int64_t k_stride, int64_t rows,
                     const float *b, int64_t K, int64_t D, float *out) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        accumulate_rows(coef + r * row_stride, row_stride, k_stride, TILE_ROWS, b, K, D,
                        out + r * D);
    if (rows - r >= 2) {
        accumulate_rows(coef + r * row_stride, row_stride, k_stride, 2, b, K, D, out + r * D);
        r += 2;
    }
    if (rows - r == 1)
        accumulate_rows(coef + r * row_stride, row_stride, k_stride, 1, b, K, D, out + r * D);
}
