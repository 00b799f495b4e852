/* copy, fill and accumulate: rows of any leading strides and any dtype. Rows that lie end to end are one long row. */
#include "cpu.h"

enum { PIECE = 16384 }; /* elements that a thread takes at a time */

typedef struct rows {
    int64_t num, cols;
} rows;

static bool is_dense(const lg_tensor *t) {
    int64_t dense = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] > 1 && t->stride[i] != dense) return false;
        dense *= t->shape[i];
    }
    return true;
}

/* How `y` (and `x`, unless NULL) is walked: rows of the last dimension, or pieces of the whole when both are dense. */
static rows rows_of(const lg_tensor *x, const lg_tensor *y) {
    if (tensor_numel(y) == 0) return (rows){0, 0};
    if ((x && !is_dense(x)) || !is_dense(y)) return (rows){tensor_rows(y), tensor_cols(y)};
    return (rows){(tensor_numel(y) + PIECE - 1) / PIECE, 0};
}

/* Where row r begins. */
static int64_t row_begin(const lg_tensor *t, rows w, int64_t r) {
    return w.cols ? row_offset(t, r) : r * PIECE;
}

static int64_t row_size(const lg_tensor *t, rows w, int64_t r) {
    if (w.cols) return w.cols;
    const int64_t left = tensor_numel(t) - r * PIECE;
    return left < PIECE ? left : PIECE;
}

static char *at(const lg_tensor *t, int64_t offset) {
    return (char *)t->data + offset * lg_dtype_bytes(t->dtype);
}

static void copy_row(const lg_tensor *x, int64_t xi, lg_tensor *y, int64_t yi, int64_t n) {
    if (x->dtype == y->dtype) {
        memcpy(at(y, yi), at(x, xi), (size_t)(n * lg_dtype_bytes(x->dtype)));
    } else if (x->dtype == LG_BF16 && y->dtype == LG_F32) {
        const uint16_t *px = (const uint16_t *)x->data + xi;
        float *py = (float *)y->data + yi;
        for (int64_t i = 0; i < n; i++) py[i] = bf16_to_f32(px[i]);
    } else if (x->dtype == LG_F32 && y->dtype == LG_BF16) {
        const float *px = (const float *)x->data + xi;
        uint16_t *py = (uint16_t *)y->data + yi;
        for (int64_t i = 0; i < n; i++) py[i] = f32_to_bf16(px[i]);
    } else {
        for (int64_t i = 0; i < n; i++) store(y, yi + i, load(x, xi + i));
    }
}

lg_status cpu_copy(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    const rows w = rows_of(x, y);
    const int threads = op_threads(ctx, tensor_numel(y), 8 * PIECE);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < w.num; r++)
        copy_row(x, row_begin(x, w, r), y, row_begin(y, w, r), row_size(y, w, r));
    return LG_OK;
}

static void fill_row(const void *value, int64_t bytes, char *y, int64_t n) {
    if (bytes == 4) {
        uint32_t bits, *py = (uint32_t *)y;
        memcpy(&bits, value, 4);
        for (int64_t i = 0; i < n; i++) py[i] = bits;
    } else {
        for (int64_t i = 0; i < n; i++) memcpy(y + i * bytes, value, (size_t)bytes);
    }
}

lg_status cpu_fill(lg_context *ctx, double value, lg_tensor *y) {
    const rows w = rows_of(NULL, y);
    const int threads = op_threads(ctx, tensor_numel(y), 8 * PIECE);
    const int64_t bytes = lg_dtype_bytes(y->dtype);
    uint64_t bits = 0; /* one element of y's dtype */
    lg_tensor one = {.data = &bits, .dtype = y->dtype};
    store(&one, 0, value);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < w.num; r++)
        fill_row(&bits, bytes, at(y, row_begin(y, w, r)), row_size(y, w, r));
    return LG_OK;
}

static void accumulate_row(const lg_tensor *x, int64_t xi, lg_tensor *y, int64_t yi, int64_t n) {
    if (x->dtype == LG_F32 && y->dtype == LG_F32) {
        const float *px = (const float *)x->data + xi;
        float *py = (float *)y->data + yi;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) py[i] += px[i];
    } else if (x->dtype == LG_BF16 && y->dtype == LG_F32) {
        const uint16_t *px = (const uint16_t *)x->data + xi;
        float *py = (float *)y->data + yi;
        for (int64_t i = 0; i < n; i++) py[i] += bf16_to_f32(px[i]);
    } else if (x->dtype == LG_BF16 && y->dtype == LG_BF16) {
        const uint16_t *px = (const uint16_t *)x->data + xi;
        uint16_t *py = (uint16_t *)y->data + yi;
#pragma omp simd
        for (int64_t i = 0; i < n; i++)
            py[i] = f32_to_bf16(bf16_to_f32(py[i]) + bf16_to_f32(px[i]));
    } else {
        for (int64_t i = 0; i < n; i++) store(y, yi + i, load(y, yi + i) + load(x, xi + i));
    }
}

lg_status cpu_accumulate(lg_context *ctx, const lg_tensor *x, lg_tensor *y) {
    const rows w = rows_of(x, y);
    const int threads = op_threads(ctx, tensor_numel(y), 8 * PIECE);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t r = 0; r < w.num; r++)
        accumulate_row(x, row_begin(x, w, r), y, row_begin(y, w, r), row_size(y, w, r));
    return LG_OK;
}
