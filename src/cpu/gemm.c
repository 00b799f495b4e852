/* The matrix product: the loops around a register tile that holds ROWS x WIDTH elements of C.
 *
 * One operand, `lanes`, fills vector lanes and is packed into panels [k][WIDTH]; of the other, `rows`, single elements
 * are broadcast. Usually lanes are the columns of op(B). When A has few rows, lanes are A's rows and the tile is
 * transposed on its way to C, so that a large B is read once and never packed. Both orders run the same chain
 * acc = fma(a, b, acc) for k = 0, 1, ..., and blocks of k pass the chain on through memory in full precision.
 *
 * A product is cut into blocks of k and of lanes whose panels fit the second-level cache. All threads pack a block,
 * then share its tiles. */
#include "gemm.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#include "cpu.h"

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, ROWS = 12 };
#elif defined(__AVX__)
#include <immintrin.h>
enum { LANES = 8, ROWS = 6 };
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { LANES = 4, ROWS = 12 };
#else
enum { LANES = 4, ROWS = 6 };
#endif

enum {
    WIDTH = 2 * LANES,
    BLOCK_K = 384,         /* a strip of ROWS x BLOCK_K floats stays in the first-level cache */
    BLOCK_K_FEW = 2048,    /* the same when lanes are A's rows: fewer transposed tiles */
    PANEL_BYTES = 1 << 20, /* a block of packed panels: half of a second-level cache */
    MIN_THREADED_FMAS = 750000, /* below this a second thread costs more than it gives */
    FEW_ROWS = 128,             /* op(A) with fewer rows goes to the lanes */
    ALIGN = 64,
};

typedef float vec __attribute__((vector_size(4 * LANES)));
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

/* A product as the loops see it, and the block at hand. */
typedef struct product {
    operand lanes, rows;
    int64_t k;
    view c, partial; /* partial: fp32 home of a block of C between blocks of k when C is bf16 */
    bool accumulate;
    int64_t block_k, block_lanes, groups;
    int64_t k0, num_k, lane0, num_lanes;
    float *panels, *strips;
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

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/* ---- packing ---- */

/* `n` elements of a memory line as fp32: in place, or converted into `buffer`. */
static inline const float *line_f32(const operand *x, int64_t line, int64_t start, int64_t n,
                                    float *buffer) {
    int64_t offset = line * x->ld + start;
    if (!x->bf16) return (const float *)x->data + offset;
    const uint16_t *from = (const uint16_t *)x->data + offset;
    for (int64_t i = 0; i < n; i++) buffer[i] = bf16_to_f32(from[i]);
    return buffer;
}

/* Packs lanes first..first + n - 1 of the block's k as [num_k][WIDTH]. Lanes past n hold harmless values. */
static void pack_panel(const product *p, int64_t first, int64_t n, float *panel, float *buffer) {
    const operand *x = &p->lanes;
    if (!x->k_dense) {
        for (int64_t k = 0; k < p->num_k; k++) {
            const float *from = line_f32(x, p->k0 + k, first, n, buffer);
            float *to = panel + k * WIDTH;
            if (n == WIDTH) {
                memcpy(to, from, WIDTH * sizeof(float));
            } else {
                memcpy(to, from, (size_t)n * sizeof(float));
                memset(to + n, 0, (size_t)(WIDTH - n) * sizeof(float));
            }
        }
        return;
    }
    int64_t used = n <= LANES ? LANES : WIDTH;
    for (int64_t lane = 0; lane < used; lane += 4) {
        const float *from[4];
        for (int i = 0; i < 4; i++)
            from[i] = line_f32(x, first + min64(lane + i, n - 1), p->k0, p->num_k,
                               buffer + i * p->block_k);
        int64_t k = 0;
        for (; k + 4 <= p->num_k; k += 4)
            transpose_4x4(from[0] + k, from[1] + k, from[2] + k, from[3] + k,
                          panel + k * WIDTH + lane, WIDTH);
        for (; k < p->num_k; k++)
            for (int i = 0; i < 4; i++) panel[k * WIDTH + lane + i] = from[i][k];
    }
}

/* Makes rows first..first + n - 1 of the block's k ready to be broadcast; returns whether they are interleaved. */
static bool pack_strip(const product *p, int64_t first, int64_t n, float *strip,
                       const float **rows) {
    const operand *x = &p->rows;
    if (x->k_dense) {
        for (int64_t i = 0; i < ROWS; i++)
            rows[i] = line_f32(x, first + min64(i, n - 1), p->k0, p->num_k, strip + i * p->block_k);
        return false;
    }
    float buffer[ROWS] = {0};
    for (int64_t k = 0; k < p->num_k; k++) {
        const float *from = line_f32(x, p->k0 + k, first, n, buffer);
        for (int64_t i = 0; i < ROWS; i++) strip[k * ROWS + i] = i < n ? from[i] : 0;
    }
    rows[0] = strip;
    return true;
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

/* One tile of the block: rows from `row`, lanes from the block's `lane`. */
static void run_tile(const product *p, bool interleaved, const float *const *strip, int64_t row,
                     int64_t lane) {
    int64_t rows = min64(ROWS, p->rows.count - row), lanes = min64(WIDTH, p->num_lanes - lane);
    const float *panel = p->panels + lane * p->num_k;
    bool first = p->k0 == 0, last = p->k0 + p->num_k == p->k;
    const view *from = first || !p->partial.data ? &p->c : &p->partial;
    const view *to = last || !p->partial.data ? &p->c : &p->partial;
    bool load = !first || p->accumulate;
    int64_t offset_from = row * from->row_stride;
    offset_from += (from == &p->c ? p->lane0 + lane : lane) * from->lane_stride;
    int64_t offset_to = row * to->row_stride;
    offset_to += (to == &p->c ? p->lane0 + lane : lane) * to->lane_stride;

    _Alignas(ALIGN) float tile[ROWS][WIDTH];
    float *c = tile[0];
    int64_t ld = WIDTH;
    bool direct = rows == ROWS && lanes == WIDTH && to->dtype == LG_F32 && to->lane_stride == 1 &&
                  (from == to || !load);
    if (direct) {
        c = (float *)to->data + offset_to;
        ld = to->row_stride;
    } else if (load) {
        memset(tile, 0, sizeof tile);
        load_tile(tile, from, offset_from, rows, lanes);
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
    if (!direct) store_tile(tile, to, offset_to, rows, lanes);
}

/* ---- blocks ---- */

/* A task is a strip of rows times one of `groups` parts of the block's panels. */
static void run_task(const product *p, int64_t task, float *strip) {
    int64_t num_panels = ceil_div(p->num_lanes, WIDTH);
    int64_t row = task / p->groups * ROWS, group = task % p->groups;
    const float *rows[ROWS];
    bool interleaved = pack_strip(p, row, min64(ROWS, p->rows.count - row), strip, rows);
    int64_t end = (group + 1) * num_panels / p->groups;
    for (int64_t j = group * num_panels / p->groups; j < end; j++)
        run_tile(p, interleaved, rows, row, j * WIDTH);
}

/* All blocks, by every thread of a team or by the only one. */
static void run_blocks(product p, int threads) {
    float *strip = p.strips + omp_get_thread_num() * ROWS * p.block_k;
    int64_t num_strips = ceil_div(p.rows.count, ROWS);
    for (p.lane0 = 0; p.lane0 < p.lanes.count; p.lane0 += p.block_lanes) {
        p.num_lanes = min64(p.block_lanes, p.lanes.count - p.lane0);
        int64_t num_panels = ceil_div(p.num_lanes, WIDTH);
        /* Several tasks a thread even them out; with one thread, or many strips, a strip is a task. */
        p.groups = min64(threads == 1 ? 1 : ceil_div(4 * threads, num_strips), num_panels);
        int64_t num_tasks = num_strips * p.groups;
        int64_t chunk = ceil_div(num_tasks, 16 * threads);
        for (p.k0 = 0; p.k0 < p.k; p.k0 += p.block_k) {
            p.num_k = min64(p.block_k, p.k - p.k0);
#pragma omp for schedule(static)
            for (int64_t j = 0; j < num_panels; j++)
                pack_panel(&p, p.lane0 + j * WIDTH, min64(WIDTH, p.num_lanes - j * WIDTH),
                           p.panels + j * WIDTH * p.num_k, strip);
#pragma omp for schedule(dynamic, chunk)
            for (int64_t task = 0; task < num_tasks; task++) run_task(&p, task, strip);
        }
    }
}

/* ---- entry ---- */

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
    bool few = a.k_dense && b.k_dense && g->m < FEW_ROWS && g->m <= g->n;
    product p = {.lanes = few ? a : b, .rows = few ? b : a, .k = g->k, .accumulate = g->accumulate};
    p.c = (view){g->c, few ? 1 : g->ldc, few ? g->ldc : 1, g->c_dtype};
    int64_t most = few ? BLOCK_K_FEW : BLOCK_K;
    p.block_k = round_up(ceil_div(p.k, ceil_div(p.k, most)), 16);
    most = PANEL_BYTES / ((int64_t)sizeof(float) * p.block_k);
    p.block_lanes = round_up(ceil_div(p.lanes.count, ceil_div(p.lanes.count, most)), WIDTH);

    /* With one block of k, a bf16 C needs no home for partial sums. */
    bool partial = g->c_dtype == LG_BF16 && p.k > p.block_k;
    int64_t panel_floats = p.block_lanes * p.block_k, strip_floats = threads * ROWS * p.block_k;
    int64_t partial_floats = partial ? round_up(p.rows.count, ROWS) * p.block_lanes : 0;
    void *scratch;
    LG_TRY(lg_scratch(ctx, (int64_t)sizeof(float) * (panel_floats + strip_floats + partial_floats),
                      &scratch));
    p.panels = scratch;
    p.strips = p.panels + panel_floats;
    if (partial) p.partial = (view){p.strips + strip_floats, p.block_lanes, 1, LG_F32};
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        run_blocks(p, omp_get_num_threads());
    } else {
        run_blocks(p, 1);
    }
    return LG_OK;
}
