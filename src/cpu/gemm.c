/* The matrix product: rectangles of C, cut for the threads, and a register tile of ROWS x WIDTH within.
 *
 * One operand, `lanes`, fills vector lanes and is packed into panels [k][WIDTH]; of the other, `rows`, single elements
 * are broadcast. Usually lanes are the columns of op(B). When A has few rows, lanes are A's rows and the tile is
 * transposed on its way to C, so that a large B is read once and never packed; when it has very few, B is transposed in
 * registers. All orders run the same chain acc = fma(a, b, acc) for k = 0, 1, ..., and blocks of k pass the chain on
 * through memory in full precision.
 *
 * A thread computes a rectangle alone, with packed copies of its own: a copy costs less than a barrier and another
 * core's cache. */
#include "gemm.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "cpu.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define EACH_QUAD(a, b, c, d)                                                                   \
    a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, \
        d + 12
enum { ROWS = 12, THIN = 8 };
#elif defined(__AVX__)
#include <immintrin.h>
#define LANES 8
#define EACH_QUAD(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
enum { ROWS = 6, THIN = 4 };
#else
#define LANES 4
#define EACH_QUAD(a, b, c, d) a, b, c, d
#if defined(__aarch64__)
#include <arm_neon.h>
enum { ROWS = 12, THIN = 8 };
#else
enum { ROWS = 6, THIN = 4 };
#endif
#endif

enum {
    WIDTH = 2 * LANES,
    BLOCK_K = 640,              /* a panel or a strip of this length fits the second-level cache */
    PANEL_BYTES = 1 << 20,      /* a rectangle's panels: half of a second-level cache */
    PACK_K = 64,                /* packing goes in pieces of k that stay in the first-level cache */
    GROUP = 16 * ROWS,          /* rows that stay in the second-level cache beside the panels */
    MAX_ROWS = 4096,            /* of a rectangle */
    MIN_THREADED_FMAS = 400000, /* below this a second thread costs more than it gives */
    AHEAD = 6,                  /* lines that packing across lines prefetches */
    ALIGN = 64,
};

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef float vec_half __attribute__((vector_size(2 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef vec vec_any __attribute__((aligned(4), may_alias));
typedef quad quad_any __attribute__((aligned(4), may_alias));

/* An operand: `count` rows or columns of the product, each a line of length k in memory or a column of lines. */
typedef struct operand {
    const void *data;
    int64_t ld, count;
    bool bf16, k_dense;
} operand;

/* Where a tile's elements lie: element (row, lane) at row * row_stride + lane * lane_stride. */
typedef struct view {
    void *data;
    int64_t row_stride, lane_stride;
    lg_dtype dtype;
} view;

/* A product as the loops see it, and the rectangle and block of k at hand. */
typedef struct product {
    operand lanes, rows;
    int64_t k, block_k;
    view c;
    bool accumulate, thin;
    int64_t lane0, num_lanes, row0, num_rows, k0, num_k;
    float *panels; /* packed lanes */
    float *strips; /* packed rows, GROUP of them; NULL when rows can be read in place */
    float *
        partial; /* fp32 home of the rectangle between blocks of k; NULL when C is fp32 or there is one block */
} product;

static inline vec fma_vec(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* c[ROWS][vecs * LANES] = or += rows x panel over num_k. The elements of a row lie in a line of their own, or
 * interleaved, [k][ROWS], from rows[0] on. `vecs` and `interleaved` are constants at every call. */
static inline __attribute__((always_inline)) void
multiply_tile(int vecs, bool interleaved, int64_t num_k, const float *const *rows,
              const float *panel, bool load, float *c, int64_t ld) {
    vec acc[ROWS][2];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++)
            acc[i][v] = load ? (vec) * (const vec_any *)(c + i * ld + v * LANES) : (vec){0};
    const float *line[ROWS];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++) line[i] = rows[i];
    for (int64_t k = 0; k < num_k; k++) {
        vec b[2];
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) b[v] = *(const vec *)(panel + k * WIDTH + v * LANES);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; i++) {
            vec a = (interleaved ? line[0][k * ROWS + i] : line[i][k]) - (vec){0};
#pragma GCC unroll 2
            for (int v = 0; v < vecs; v++) acc[i][v] = fma_vec(a, b[v], acc[i][v]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 2
        for (int v = 0; v < vecs; v++) *(vec_any *)(c + i * ld + v * LANES) = acc[i][v];
}

/* Writes the 4 x 4 floats at x0..x3 transposed. */
static inline void transpose_4x4(const float *x0, const float *x1, const float *x2, const float *x3,
                                 float *y, int64_t ld) {
    quad a = *(const quad_any *)x0, b = *(const quad_any *)x1;
    quad c = *(const quad_any *)x2, d = *(const quad_any *)x3;
    quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
    quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
    quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    quad cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    *(quad_any *)y = __builtin_shufflevector(ab, cd, 0, 1, 4, 5);
    *(quad_any *)(y + ld) = __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
    *(quad_any *)(y + 2 * ld) = __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5);
    *(quad_any *)(y + 3 * ld) = __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7);
}

/* Shuffles every four lanes alike; indices from LANES on mean y. */
#define SHUFFLE(x, y, a, b, c, d) __builtin_shufflevector(x, y, EACH_QUAD(a, b, c, d))

/* to[j][lane] = from[lane][j] for 4 elements of each of LANES lines. */
static inline __attribute__((always_inline)) void transpose_lines(const float *const *from,
                                                                  int64_t at, vec *to) {
    vec r[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        quad q[LANES / 4];
#pragma GCC unroll 4
        for (int i = 0; i < LANES / 4; i++) q[i] = *(const quad_any *)(from[4 * i + j] + at);
#if LANES == 16
        vec_half low = __builtin_shufflevector(q[0], q[1], 0, 1, 2, 3, 4, 5, 6, 7);
        vec_half high = __builtin_shufflevector(q[2], q[3], 0, 1, 2, 3, 4, 5, 6, 7);
        r[j] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                       15);
#elif LANES == 8
        r[j] = __builtin_shufflevector(q[0], q[1], 0, 1, 2, 3, 4, 5, 6, 7);
#else
        r[j] = q[0];
#endif
    }
    vec a = SHUFFLE(r[0], r[1], 0, LANES, 1, LANES + 1);
    vec b = SHUFFLE(r[2], r[3], 0, LANES, 1, LANES + 1);
    vec c = SHUFFLE(r[0], r[1], 2, LANES + 2, 3, LANES + 3);
    vec d = SHUFFLE(r[2], r[3], 2, LANES + 2, 3, LANES + 3);
    to[0] = SHUFFLE(a, b, 0, 1, LANES, LANES + 1);
    to[1] = SHUFFLE(a, b, 2, 3, LANES + 2, LANES + 3);
    to[2] = SHUFFLE(c, d, 0, 1, LANES, LANES + 1);
    to[3] = SHUFFLE(c, d, 2, 3, LANES + 2, LANES + 3);
}

/* tile[m][WIDTH] += rows x lines, whose elements are transposed in registers: for a product that reads B once. */
static inline __attribute__((always_inline)) void multiply_thin(int m, int64_t num_k,
                                                                const float *const *rows,
                                                                const float *const *lines,
                                                                float (*tile)[WIDTH]) {
    vec acc[THIN][2];
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) acc[i][v] = *(const vec *)(tile[i] + v * LANES);
    int64_t k = 0;
    for (; k + 4 <= num_k; k += 4) {
        vec b[2][4];
        transpose_lines(lines, k, b[0]);
        transpose_lines(lines + LANES, k, b[1]);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
#pragma GCC unroll 8
            for (int i = 0; i < m; i++) {
                vec a = rows[i][k + j] - (vec){0};
                acc[i][0] = fma_vec(a, b[0][j], acc[i][0]);
                acc[i][1] = fma_vec(a, b[1][j], acc[i][1]);
            }
    }
#pragma GCC unroll 8
    for (int i = 0; i < m; i++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) *(vec *)(tile[i] + v * LANES) = acc[i][v];
    for (; k < num_k; k++)
        for (int i = 0; i < m; i++)
            for (int j = 0; j < WIDTH; j++) tile[i][j] = fmaf(rows[i][k], lines[j][k], tile[i][j]);
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/* ---- packing ---- */

static inline const void *line_at(const operand *x, int64_t line, int64_t start) {
    return (const char *)x->data + (line * x->ld + start) * (x->bf16 ? 2 : 4);
}

/* `n` elements of a memory line as fp32: in place, or converted into `buffer`. */
static inline const float *line_f32(const operand *x, int64_t line, int64_t start, int64_t n,
                                    float *buffer) {
    const void *data = line_at(x, line, start);
    if (!x->bf16) return data;
    for (int64_t i = 0; i < n; i++) buffer[i] = bf16_to_f32(((const uint16_t *)data)[i]);
    return buffer;
}

/* Packs lanes first..first + n - 1 at k..k + num_k - 1 as [num_k][WIDTH]. Lanes past n repeat the last or are 0. */
static void pack_panel(const operand *x, int64_t first, int64_t n, int64_t k, int64_t num_k,
                       float *panel) {
    float buffer[LANES][PACK_K];
    if (!x->k_dense) {
        for (int64_t i = 0; i < num_k; i++) {
            const float *from = line_f32(x, k + i, first, n, buffer[0]);
            float *to = panel + i * WIDTH;
            if (n == WIDTH) {
                memcpy(to, from, WIDTH * sizeof(float));
            } else {
                memcpy(to, from, (size_t)n * sizeof(float));
                memset(to + n, 0, (size_t)(WIDTH - n) * sizeof(float));
            }
        }
        return;
    }
    for (int64_t lane = 0; lane < n; lane += LANES) {
        const float *from[LANES];
        for (int j = 0; j < LANES; j++)
            from[j] = line_f32(x, first + min64(lane + j, n - 1), k, num_k, buffer[j]);
        int64_t i = 0;
        for (; i + 4 <= num_k; i += 4) {
            vec to[4];
            transpose_lines(from, i, to);
            for (int j = 0; j < 4; j++) *(vec *)(panel + (i + j) * WIDTH + lane) = to[j];
        }
        for (; i < num_k; i++)
            for (int j = 0; j < LANES; j++) panel[i * WIDTH + lane + j] = from[j][i];
    }
}

/* Packs rows first..first + n - 1, at most GROUP, as lines [GROUP][block_k] or as strips [block_k][ROWS]. */
static void pack_rows(const product *p, int64_t first, int64_t n) {
    const operand *x = &p->rows;
    if (x->k_dense) {
        for (int64_t i = 0; i < n; i++)
            line_f32(x, first + i, p->k0, p->num_k, p->strips + i * p->block_k);
        return;
    }
    int64_t line_bytes = n * (x->bf16 ? 2 : 4);
    float buffer[GROUP];
    for (int64_t k = 0; k < p->num_k; k++) {
        const float *from = line_f32(x, p->k0 + k, first, n, buffer);
        float *to = p->strips + k * ROWS;
        const char *ahead = line_at(x, p->k0 + min64(k + AHEAD, p->num_k - 1), first);
        for (int64_t i = 0; i < line_bytes; i += 64) __builtin_prefetch(ahead + i);
        int64_t i = 0;
        for (; i + ROWS <= n; i += ROWS)
            memcpy(to + i * p->block_k, from + i, ROWS * sizeof(float));
        for (int64_t r = 0; r < ROWS && i < n; r++)
            to[i * p->block_k + r] = i + r < n ? from[i + r] : 0;
    }
}

/* ---- tiles ---- */

static void load_tile(float (*tile)[WIDTH], const view *c, int64_t offset, int64_t rows,
                      int64_t lanes) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < lanes; j++) {
            int64_t at = offset + i * c->row_stride + j * c->lane_stride;
            tile[i][j] = c->dtype == LG_BF16 ? bf16_to_f32(((const uint16_t *)c->data)[at])
                                             : ((const float *)c->data)[at];
        }
}

static void store_tile(float (*tile)[WIDTH], const view *c, int64_t offset, int64_t rows,
                       int64_t lanes) {
    int64_t row_stride = c->row_stride, lane_stride = c->lane_stride;
    if (c->dtype == LG_F32 && row_stride == 1) {
        float *to = (float *)c->data + offset;
        int64_t i = 0, whole = lanes & ~(int64_t)3;
        for (; i + 4 <= rows; i += 4)
            for (int64_t j = 0; j < whole; j += 4)
                transpose_4x4(tile[i] + j, tile[i + 1] + j, tile[i + 2] + j, tile[i + 3] + j,
                              to + j * lane_stride + i, lane_stride);
        for (int64_t j = 0; j < lanes; j++)
            for (int64_t r = j < whole ? i : 0; r < rows; r++) to[j * lane_stride + r] = tile[r][j];
        return;
    }
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < lanes; j++) {
            int64_t at = offset + i * row_stride + j * lane_stride;
            if (c->dtype == LG_BF16) {
                ((uint16_t *)c->data)[at] = f32_to_bf16(tile[i][j]);
            } else {
                ((float *)c->data)[at] = tile[i][j];
            }
        }
}

/* Where the tile at (row, lane) of the rectangle is read and written: `home` is C or the partial sums. */
static view locate(const product *p, bool home_is_c, int64_t row, int64_t lane, int64_t *offset) {
    if (home_is_c || !p->partial) {
        *offset = (p->row0 + row) * p->c.row_stride + (p->lane0 + lane) * p->c.lane_stride;
        return p->c;
    }
    view partial = {p->partial, round_up(p->num_lanes, WIDTH), 1, LG_F32};
    *offset = row * partial.row_stride + lane;
    return partial;
}

/* One tile of the rectangle, on the block of k. */
static void run_tile(const product *p, const float *const *strip, int64_t row, int64_t lane) {
    int64_t rows = min64(ROWS, p->num_rows - row), lanes = min64(WIDTH, p->num_lanes - lane);
    const float *panel = p->panels + lane * p->num_k;
    bool interleaved = !p->rows.k_dense, first = p->k0 == 0, last = p->k0 + p->num_k == p->k;
    bool load = !first || p->accumulate;
    int64_t offset_from, offset_to;
    view from = locate(p, first, row, lane, &offset_from);
    view to = locate(p, last, row, lane, &offset_to);

    _Alignas(ALIGN) float tile[ROWS][WIDTH];
    float *c = tile[0];
    int64_t ld = WIDTH;
    bool direct = rows == ROWS && lanes == WIDTH && to.dtype == LG_F32 && to.lane_stride == 1 &&
                  (from.data == to.data || !load);
    if (direct) {
        c = (float *)to.data + offset_to;
        ld = to.row_stride;
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < WIDTH; j += 16) __builtin_prefetch(c + i * ld + j, 1);
    } else if (load) {
        memset(tile, 0, sizeof tile);
        load_tile(tile, &from, offset_from, rows, lanes);
    }
    if (lanes <= LANES && interleaved) {
        multiply_tile(1, true, p->num_k, strip, panel, load, c, ld);
    } else if (lanes <= LANES) {
        multiply_tile(1, false, p->num_k, strip, panel, load, c, ld);
    } else if (interleaved) {
        multiply_tile(2, true, p->num_k, strip, panel, load, c, ld);
    } else {
        multiply_tile(2, false, p->num_k, strip, panel, load, c, ld);
    }
    if (!direct) store_tile(tile, &to, offset_to, rows, lanes);
}

/* ---- rectangles ---- */

/* The line of row `row` + i in a group of rows from `first` on; past the end, the last row's. */
static inline const float *row_at(const product *p, int64_t first, int64_t row, int64_t i) {
    int64_t r = min64(row + i, p->num_rows - 1);
    if (!p->strips) return line_at(&p->rows, p->row0 + r, p->k0);
    return p->strips + ((p->rows.k_dense ? r : row) - first) * p->block_k;
}

static void run_rectangle(product *p) {
    for (p->k0 = 0; p->k0 < p->k; p->k0 += p->block_k) {
        p->num_k = min64(p->block_k, p->k - p->k0);
        for (int64_t lane = 0; lane < p->num_lanes; lane += WIDTH)
            for (int64_t k = 0; k < p->num_k; k += PACK_K)
                pack_panel(&p->lanes, p->lane0 + lane, min64(WIDTH, p->num_lanes - lane), p->k0 + k,
                           min64(PACK_K, p->num_k - k), p->panels + lane * p->num_k + k * WIDTH);
        for (int64_t first = 0; first < p->num_rows; first += GROUP) {
            int64_t end = min64(first + GROUP, p->num_rows);
            if (p->strips) pack_rows(p, p->row0 + first, end - first);
            for (int64_t lane = 0; lane < p->num_lanes; lane += WIDTH)
                for (int64_t row = first; row < end; row += ROWS) {
                    const float *strip[ROWS];
                    for (int64_t i = 0; i < ROWS; i++) strip[i] = row_at(p, first, row, i);
                    run_tile(p, strip, row, lane);
                }
        }
    }
}

/* A rectangle of all rows, at most THIN, without packing. */
static void run_thin(product *p) {
    for (int64_t lane = 0; lane < p->num_lanes; lane += WIDTH) {
        _Alignas(ALIGN) float tile[ROWS][WIDTH] = {{0}};
        int64_t rows = p->rows.count, lanes = min64(WIDTH, p->num_lanes - lane);
        int64_t offset = (p->lane0 + lane) * p->c.lane_stride;
        int64_t most = p->lanes.bf16 || p->rows.bf16 ? PACK_K : p->k;
        if (p->accumulate) load_tile(tile, &p->c, offset, rows, lanes);
        for (int64_t k = 0; k < p->k; k += most) {
            int64_t num_k = min64(most, p->k - k);
            float line_buffer[WIDTH][PACK_K], row_buffer[THIN][PACK_K];
            const float *lines[WIDTH], *x[THIN];
            for (int64_t j = 0; j < WIDTH; j++)
                lines[j] = line_f32(&p->lanes, p->lane0 + lane + min64(j, lanes - 1), k, num_k,
                                    line_buffer[j]);
            for (int64_t i = 0; i < THIN; i++)
                x[i] = line_f32(&p->rows, min64(i, rows - 1), k, num_k, row_buffer[i]);
            if (rows == 1) {
                multiply_thin(1, num_k, x, lines, tile);
            } else if (rows == 2) {
                multiply_thin(2, num_k, x, lines, tile);
            } else if (rows <= 4) {
                multiply_thin(4, num_k, x, lines, tile);
            } else {
                multiply_thin(THIN, num_k, x, lines, tile);
            }
        }
        store_tile(tile, &p->c, offset, rows, lanes);
    }
}

/* Rows and lanes of a rectangle: the grid with the smallest cost, in cycles for each k, of a thread's share. */
static void choose_grid(const product *p, bool pack, int threads, int64_t *part_rows,
                        int64_t *part_lanes) {
    int64_t most_lanes = PANEL_BYTES / (int64_t)sizeof(float) / p->block_k;
    int64_t least_l = ceil_div(p->lanes.count, most_lanes);
    int64_t least_r = ceil_div(p->rows.count, MAX_ROWS);
    double best = INFINITY;
    for (int64_t l = least_l; l < 64 * least_l; l *= 2)
        for (int waves = 1; waves <= 4; waves *= 2) {
            int64_t r = max64(least_r, ceil_div(waves * threads, l));
            int64_t rows = round_up(ceil_div(p->rows.count, r), ROWS);
            int64_t lanes = round_up(ceil_div(p->lanes.count, l), WIDTH);
            int64_t parts = ceil_div(p->rows.count, rows) * ceil_div(p->lanes.count, lanes);
            double cost = (double)rows * (double)lanes / (2 * LANES);
            cost += (pack ? 0.8 : 0.5) * (double)rows;
            if (!p->thin) cost += (p->lanes.k_dense ? 0.3 : 0.15) * (double)lanes;
            /* The end of the work is uneven by a part of a rectangle. */
            cost *= (double)ceil_div(parts, threads) + 0.1;
            if (cost < best) {
                best = cost;
                *part_rows = rows;
                *part_lanes = lanes;
            }
            if (threads == 1) return;
        }
}

/* ---- entry ---- */

/* Whether A's rows shall be the lanes. In cycles for each k: tiles, packing (0.4 a lane), and 450 a tile for the
 * transposed store; measured on Sapphire Rapids, where it tells 24 rows of 16 and 32. */
static bool few_rows(int64_t m, int64_t n, int64_t k) {
    double tiles_b = (double)round_up(m, ROWS) * (double)round_up(n, LANES) / WIDTH;
    double tiles_a = (double)round_up(n, ROWS) * (double)round_up(m, LANES) / WIDTH;
    double store = tiles_a / ROWS * 450 / (double)k;
    return tiles_a + 0.4 * (double)m + store < tiles_b + 0.4 * (double)n;
}

/* The f64 product, for gradient checks: the chain as plain loops. */
static void gemm_f64(const gemm_args *g, int threads) {
    const double *a = g->a.data, *b = g->b.data;
    int64_t a_m = g->a.trans ? 1 : g->a.ld, a_k = g->a.trans ? g->a.ld : 1;
    int64_t b_n = g->b.trans ? g->b.ld : 1, b_k = g->b.trans ? 1 : g->b.ld;
    view c = {g->c, g->ldc, 1, g->c_dtype};
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t m = 0; m < g->m; m++)
        for (int64_t n = 0; n < g->n; n++) {
            int64_t at = m * c.row_stride + n;
            double acc = 0;
            if (g->accumulate)
                acc = c.dtype == LG_F64   ? ((double *)c.data)[at]
                      : c.dtype == LG_F32 ? ((float *)c.data)[at]
                                          : bf16_to_f32(((uint16_t *)c.data)[at]);
            for (int64_t k = 0; k < g->k; k++)
                acc = fma(a[m * a_m + k * a_k], b[k * b_k + n * b_n], acc);
            if (c.dtype == LG_F64) {
                ((double *)c.data)[at] = acc;
            } else if (c.dtype == LG_F32) {
                ((float *)c.data)[at] = (float)acc;
            } else {
                ((uint16_t *)c.data)[at] = f32_to_bf16((float)acc);
            }
        }
}

static bool is_float(lg_dtype dtype) { return dtype == LG_F32 || dtype == LG_BF16; }

lg_status gemm(lg_context *ctx, const gemm_args *g) {
    bool f64 = g->a.dtype == LG_F64 && g->b.dtype == LG_F64;
    if (!f64 && !(is_float(g->a.dtype) && is_float(g->b.dtype)))
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "gemm: operands are %s and %s, wanted f32, bf16 or both f64",
                       lg_dtype_name(g->a.dtype), lg_dtype_name(g->b.dtype));
    if (!is_float(g->c_dtype) && !(f64 && g->c_dtype == LG_F64))
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "gemm: result of %s is %s, wanted f32, bf16 or, of f64, f64",
                       lg_dtype_name(g->a.dtype), lg_dtype_name(g->c_dtype));
    if (g->m <= 0 || g->n <= 0) return LG_OK;
    if (g->k <= 0) {
        int64_t bytes = lg_dtype_bytes(g->c_dtype);
        for (int64_t m = 0; m < g->m && !g->accumulate; m++)
            memset((char *)g->c + m * g->ldc * bytes, 0, (size_t)(g->n * bytes));
        return LG_OK;
    }
    int threads = (int)lg_context_threads(ctx);
    if (threads <= 0) threads = omp_get_max_threads();
    if ((double)g->m * (double)g->n * (double)g->k < MIN_THREADED_FMAS) threads = 1;
    if (f64) {
        gemm_f64(g, threads);
        return LG_OK;
    }

    operand a = {g->a.data, g->a.ld, g->m, g->a.dtype == LG_BF16, !g->a.trans};
    operand b = {g->b.data, g->b.ld, g->n, g->b.dtype == LG_BF16, g->b.trans};
    bool along_k = a.k_dense && b.k_dense && g->m <= g->n, thin = along_k && g->m <= THIN;
    bool few = along_k && !thin && few_rows(g->m, g->n, g->k);
    product p = {.lanes = few ? a : b, .rows = few ? b : a, .k = g->k, .accumulate = g->accumulate};
    p.thin = thin;
    p.c = (view){g->c, few ? 1 : g->ldc, few ? g->ldc : 1, g->c_dtype};
    /* An odd multiple of 16 spreads the packed strips over the cache's sets. */
    p.block_k = round_up(ceil_div(p.k, ceil_div(p.k, BLOCK_K)), 32) + 16;
    bool pack = !thin && (p.rows.bf16 || !p.rows.k_dense);
    bool partial = !thin && g->c_dtype == LG_BF16 && p.k > p.block_k;

    int64_t part_rows = 0, part_lanes = 0;
    choose_grid(&p, pack, threads, &part_rows, &part_lanes);
    int64_t row_parts = ceil_div(p.rows.count, part_rows);
    int64_t lane_parts = ceil_div(p.lanes.count, part_lanes);
    int64_t panel_floats = thin ? 0 : part_lanes * p.block_k;
    int64_t strip_floats = pack ? GROUP * p.block_k : 0;
    int64_t partial_floats = partial ? part_rows * part_lanes : 0;
    int64_t floats = panel_floats + strip_floats + partial_floats;
    void *scratch;
    lg_scratch_mark mark = lg_scratch_save(ctx);
    LG_TRY(lg_scratch(ctx, threads * floats * (int64_t)sizeof(float), &scratch));

#pragma omp parallel for schedule(dynamic) num_threads(threads) firstprivate(p) if (threads > 1)
    for (int64_t i = 0; i < row_parts * lane_parts; i++) {
        p.panels = (float *)scratch + omp_get_thread_num() * floats;
        p.strips = pack ? p.panels + panel_floats : NULL;
        p.partial = partial ? p.panels + panel_floats + strip_floats : NULL;
        p.row0 = i % row_parts * part_rows;
        p.num_rows = min64(part_rows, p.rows.count - p.row0);
        p.lane0 = i / row_parts * part_lanes;
        p.num_lanes = min64(part_lanes, p.lanes.count - p.lane0);
        if (thin) {
            run_thin(&p);
        } else {
            run_rectangle(&p);
        }
    }
    lg_scratch_restore(ctx, mark);
    return LG_OK;
}
