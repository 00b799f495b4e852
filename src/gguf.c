/* GGUF versions 2 and 3, little endian: magic, version, counts, key-value pairs, tensor
 * directory, aligned data. Each count, length and offset is compared with the bytes that are
 * left before anything is read or allocated. The key-value pairs become one JSON object;
 * dimensions are turned round, outermost first. */
#include "file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Element types by number: a block's elements and bytes. */
static const struct element {
    const char *name;
    int32_t dtype;
    int block, bytes;
} elements[] = {
    [0] = {"F32", LG_F32, 1, 4},     [1] = {"F16", LG_F16, 1, 2},
    [2] = {"Q4_0", -1, 32, 18},      [3] = {"Q4_1", -1, 32, 20},
    [6] = {"Q5_0", -1, 32, 22},      [7] = {"Q5_1", -1, 32, 24},
    [8] = {"Q8_0", -1, 32, 34},      [9] = {"Q8_1", -1, 32, 36},
    [10] = {"Q2_K", -1, 256, 84},    [11] = {"Q3_K", -1, 256, 110},
    [12] = {"Q4_K", -1, 256, 144},   [13] = {"Q5_K", -1, 256, 176},
    [14] = {"Q6_K", -1, 256, 210},   [15] = {"Q8_K", -1, 256, 292},
    [16] = {"IQ2_XXS", -1, 256, 66}, [17] = {"IQ2_XS", -1, 256, 74},
    [18] = {"IQ3_XXS", -1, 256, 98}, [19] = {"IQ1_S", -1, 256, 50},
    [20] = {"IQ4_NL", -1, 32, 18},   [21] = {"IQ3_S", -1, 256, 110},
    [22] = {"IQ2_S", -1, 256, 82},   [23] = {"IQ4_XS", -1, 256, 136},
    [24] = {"I8", -1, 1, 1},         [25] = {"I16", -1, 1, 2},
    [26] = {"I32", LG_I32, 1, 4},    [27] = {"I64", LG_I64, 1, 8},
    [28] = {"F64", LG_F64, 1, 8},    [29] = {"IQ1_M", -1, 256, 56},
    [30] = {"BF16", LG_BF16, 1, 2},  [34] = {"TQ1_0", -1, 256, 54},
    [35] = {"TQ2_0", -1, 256, 66},   [39] = {"MXFP4", -1, 32, 17},
};

enum { NUM_ELEMENTS = sizeof elements / sizeof *elements, MAX_NESTING = 8 };

enum kind { U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64, NUM_KINDS };

static const int kind_bytes[NUM_KINDS] = {1, 1, 2,  2, 4, 4, 4,
                                          1, 8, 12, 8, 8, 8}; /* the least a value takes */

typedef struct reader {
    lg_context *ctx;
    lg_file *file;
    int64_t at;
} reader;

static lg_status need(const reader *r, uint64_t bytes, const char *what) {
    int64_t left = r->file->bytes - r->at;
    if (bytes > (uint64_t)left) {
        return lg_fail(
            r->ctx, LG_EFORMAT,
            "%s: %s needs %llu bytes at %lld, wanted at most %lld (the file is cut short)",
            r->file->path, what, (unsigned long long)bytes, (long long)r->at, (long long)left);
    }
    return LG_OK;
}

static uint64_t take(reader *r, int bytes) {
    const unsigned char *s = (const unsigned char *)r->file->map + r->at;
    uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; i--) value = value << 8 | s[i];
    r->at += bytes;
    return value;
}

static lg_status read_uint(reader *r, int bytes, const char *what, uint64_t *value) {
    LG_TRY(need(r, (uint64_t)bytes, what));
    *value = take(r, bytes);
    return LG_OK;
}

static lg_status read_string(reader *r, const char *what, const char **text, int64_t *bytes) {
    uint64_t length;
    LG_TRY(read_uint(r, 8, what, &length));
    LG_TRY(need(r, length, what));
    *text = r->file->map + r->at;
    *bytes = (int64_t)length;
    r->at += *bytes;
    return LG_OK;
}

/* Integers of any size: printf is slow for the 100,000 token types of a vocabulary. */
static void append_integer(lg_buffer *json, uint64_t magnitude, bool negative) {
    char digits[24];
    int n = sizeof digits;
    do {
        digits[--n] = (char)('0' + magnitude % 10);
        magnitude /= 10;
    } while (magnitude);
    if (negative) digits[--n] = '-';
    lg_buffer_append(json, digits + n, (int64_t)sizeof digits - n);
}

static void append_double(lg_buffer *json, double value) {
    if (!isfinite(value)) {
        lg_buffer_append(json, "null", 4);
    } else if (value == trunc(value) && fabs(value) < 1e15 && !(value == 0 && signbit(value))) {
        append_integer(json, (uint64_t)fabs(value), value < 0);
        lg_buffer_append(json, ".0", 2);
    } else {
        char text[40];
        lg_buffer_append(json, text, snprintf(text, sizeof text, "%.17g", value));
    }
}

/* One value that has no parts, appended as JSON. */
static lg_status read_scalar(reader *r, uint64_t kind, lg_buffer *json) {
    if (kind == STRING) {
        const char *text;
        int64_t bytes;
        LG_TRY(read_string(r, "a string", &text, &bytes));
        lg_buffer_json_string(json, text, bytes);
        return LG_OK;
    }
    uint64_t bits;
    LG_TRY(read_uint(r, kind_bytes[kind], "a value", &bits));
    if (kind == BOOL) {
        if (bits > 1)
            return lg_fail(r->ctx, LG_EFORMAT, "%s: a boolean is %d, wanted 0 or 1", r->file->path,
                           (int)bits);
        lg_buffer_append(json, bits ? "true" : "false", bits ? 4 : 5);
    } else if (kind == F32) {
        uint32_t word = (uint32_t)bits;
        float value;
        memcpy(&value, &word, sizeof value);
        append_double(json, value);
    } else if (kind == F64) {
        double value;
        memcpy(&value, &bits, sizeof value);
        append_double(json, value);
    } else if (kind == I8 || kind == I16 || kind == I32 || kind == I64) {
        int shift = 64 - 8 * kind_bytes[kind];
        bool negative = bits << shift >> 63;
        /* Sign-extend, then negate, all in unsigned arithmetic. */
        uint64_t extended = negative && shift ? bits | ~0ull << (64 - shift) : bits;
        append_integer(json, negative ? 0 - extended : extended, negative);
    } else {
        append_integer(json, bits, false);
    }
    return LG_OK;
}

static lg_status check_kind(const reader *r, uint64_t kind) {
    if (kind < NUM_KINDS) return LG_OK;
    return lg_fail(r->ctx, LG_EFORMAT, "%s: a value's type is %llu, wanted 0 to 12", r->file->path,
                   (unsigned long long)kind);
}

static lg_status read_value(reader *r, uint64_t kind, lg_buffer *json, int depth) {
    LG_TRY(check_kind(r, kind));
    if (kind != ARRAY) return read_scalar(r, kind, json);
    if (depth == MAX_NESTING)
        return lg_fail(r->ctx, LG_EFORMAT, "%s: arrays are more than 8 deep, wanted at most 8",
                       r->file->path);
    uint64_t item, n;
    LG_TRY(read_uint(r, 4, "an array", &item));
    LG_TRY(read_uint(r, 8, "an array", &n));
    LG_TRY(check_kind(r, item));
    if (n > (uint64_t)(r->file->bytes - r->at) / (uint64_t)kind_bytes[item]) {
        return lg_fail(r->ctx, LG_EFORMAT,
                       "%s: an array has %llu elements, wanted what %lld bytes can hold",
                       r->file->path, (unsigned long long)n, (long long)(r->file->bytes - r->at));
    }
    lg_buffer_append(json, "[", 1);
    for (uint64_t i = 0; i < n; i++) {
        if (i > 0) lg_buffer_append(json, ",", 1);
        LG_TRY(read_value(r, item, json, depth + 1));
    }
    lg_buffer_append(json, "]", 1);
    return LG_OK;
}

typedef struct pair_key {
    const char *text;
    int64_t bytes;
} pair_key;

static int by_key(const void *a, const void *b) {
    const pair_key *x = a, *y = b;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return memcmp(x->text, y->text, (size_t)x->bytes);
}

static lg_status read_alignment(const reader *r, uint64_t kind, int64_t at, int64_t *alignment) {
    if (kind != U32)
        return lg_fail(r->ctx, LG_EFORMAT, "%s: general.alignment has type %d, wanted 4 (u32)",
                       r->file->path, (int)kind);
    reader value = {r->ctx, r->file, at};
    *alignment = (int64_t)take(&value, 4);
    if (*alignment > 0 && (*alignment & (*alignment - 1)) == 0) return LG_OK;
    return lg_fail(r->ctx, LG_EFORMAT, "%s: general.alignment is %lld, wanted a power of two",
                   r->file->path, (long long)*alignment);
}

/* The pairs; *alignment is general.alignment, or 32 when there is none. */
static lg_status read_pairs(reader *r, int64_t n, pair_key *keys, int64_t *alignment) {
    lg_buffer *json = &r->file->metadata;
    *alignment = 32;
    lg_buffer_append(json, "{", 1);
    for (int64_t i = 0; i < n; i++) {
        uint64_t kind;
        LG_TRY(read_string(r, "a key", &keys[i].text, &keys[i].bytes));
        LG_TRY(read_uint(r, 4, "a value", &kind));
        if (i > 0) lg_buffer_append(json, ",", 1);
        lg_buffer_json_string(json, keys[i].text, keys[i].bytes);
        lg_buffer_append(json, ":", 1);
        int64_t at = r->at;
        LG_TRY(read_value(r, kind, json, 0));
        if (keys[i].bytes == 17 && memcmp(keys[i].text, "general.alignment", 17) == 0)
            LG_TRY(read_alignment(r, kind, at, alignment));
    }
    lg_buffer_append(json, "}", 2); /* with the NUL */
    if (json->failed)
        return lg_fail(r->ctx, LG_ENOMEM, "%s: no memory for the metadata", r->file->path);
    qsort(keys, (size_t)n, sizeof *keys, by_key);
    for (int64_t i = 1; i < n; i++)
        if (by_key(&keys[i - 1], &keys[i]) == 0)
            return lg_fail(r->ctx, LG_EFORMAT, "%s: duplicate key %.*s, wanted each key once",
                           r->file->path, (int)(keys[i].bytes < 200 ? keys[i].bytes : 200),
                           keys[i].text);
    return LG_OK;
}

static lg_status fail_tensor(const reader *r, const lg_file_tensor *t, const char *what,
                             uint64_t got, const char *wanted) {
    return lg_fail(r->ctx, LG_EFORMAT, "%s: tensor %s: %s is %llu, wanted %s", r->file->path,
                   t->name, what, (unsigned long long)got, wanted);
}

/* One entry of the directory. */
static lg_status read_tensor(reader *r, int64_t alignment, lg_file_tensor *t, uint64_t *offset) {
    const char *name;
    int64_t name_bytes, n;
    uint64_t ndim, type, size;
    LG_TRY(read_string(r, "a tensor's name", &name, &name_bytes));
    if (memchr(name, 0, (size_t)name_bytes))
        return lg_fail(r->ctx, LG_EFORMAT, "%s: a tensor's name has a NUL, wanted none",
                       r->file->path);
    t->name = r->file->text.data + r->file->text.bytes;
    lg_buffer_append(&r->file->text, name, name_bytes);
    lg_buffer_append(&r->file->text, "", 1);
    LG_TRY(read_uint(r, 4, "a tensor", &ndim));
    if (ndim > 8) return fail_tensor(r, t, "number of dimensions", ndim, "at most 8");
    t->ndim = (int32_t)ndim;
    for (int32_t i = t->ndim - 1; i >= 0; i--) {
        LG_TRY(read_uint(r, 8, "a shape", &size));
        if (size > INT64_MAX) return fail_tensor(r, t, "a dimension", size, "less than 2^63");
        t->shape[i] = (int64_t)size;
    }
    LG_TRY(read_uint(r, 4, "a tensor", &type));
    LG_TRY(read_uint(r, 8, "a tensor", offset));
    if (type >= NUM_ELEMENTS || !elements[type].name)
        return fail_tensor(r, t, "element type", type, "a known one");
    t->type = elements[type].name;
    t->dtype = elements[type].dtype;
    if (!lg_shape_elements(t->shape, t->ndim, &n))
        return fail_tensor(r, t, "dimensions", ndim, "a product below 2^63");
    int64_t row = t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
    if (row % elements[type].block)
        return fail_tensor(r, t, "row", (uint64_t)row, "whole blocks of its element type");
    if (__builtin_mul_overflow(n / elements[type].block, elements[type].bytes, &t->data_bytes))
        return fail_tensor(r, t, "elements", (uint64_t)n, "less than 2^63 bytes");
    if (*offset % (uint64_t)alignment)
        return fail_tensor(r, t, "offset", *offset, "a multiple of general.alignment");
    return LG_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const lg_file_tensor *const *)a)->name,
                  (*(const lg_file_tensor *const *)b)->name);
}

/* No two tensors share bytes or a name. */
static lg_status check_apart(const reader *r, const lg_file_tensor **order) {
    const lg_file *file = r->file;
    for (int64_t i = 0; i < file->n; i++) order[i] = &file->tensors[i];
    qsort(order, (size_t)file->n, sizeof *order, lg_file_by_place);
    for (int64_t i = 1; i < file->n; i++) {
        const char *end = (const char *)order[i - 1]->data + order[i - 1]->data_bytes;
        if ((const char *)order[i]->data < end)
            return lg_fail(r->ctx, LG_EFORMAT, "%s: tensors %s and %s overlap, wanted them apart",
                           file->path, order[i - 1]->name, order[i]->name);
    }
    qsort(order, (size_t)file->n, sizeof *order, by_name);
    for (int64_t i = 1; i < file->n; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return lg_fail(r->ctx, LG_EFORMAT, "%s: duplicate tensor %s, wanted each name once",
                           file->path, order[i]->name);
    return LG_OK;
}

/* Walks the directory for the bytes of all names with their NULs: the entries point into one
 * block that may not move. */
static lg_status count_names(reader r, int64_t n, int64_t *bytes) {
    *bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *name;
        int64_t name_bytes;
        uint64_t ndim;
        LG_TRY(read_string(&r, "a tensor's name", &name, &name_bytes));
        LG_TRY(read_uint(&r, 4, "a tensor", &ndim));
        LG_TRY(need(&r, 8 * ndim + 12, "a tensor"));
        r.at += 8 * (int64_t)ndim + 12;
        *bytes += name_bytes + 1;
    }
    return LG_OK;
}

static lg_status place_tensors(const reader *r, int64_t alignment, const uint64_t *offsets) {
    const lg_file *file = r->file;
    int64_t start = r->at + (alignment - r->at % alignment) % alignment;
    int64_t data_bytes = file->bytes > start ? file->bytes - start : 0;
    for (int64_t i = 0; i < file->n; i++) {
        lg_file_tensor *t = &file->tensors[i];
        if (t->data_bytes > data_bytes || offsets[i] > (uint64_t)(data_bytes - t->data_bytes)) {
            return lg_fail(r->ctx, LG_EFORMAT,
                           "%s: tensor %s: %lld bytes at offset %llu, wanted them inside %lld "
                           "bytes of data (cut short?)",
                           file->path, t->name, (long long)t->data_bytes,
                           (unsigned long long)offsets[i], (long long)data_bytes);
        }
        t->data = file->map + (start < file->bytes ? start : file->bytes) + (int64_t)offsets[i];
    }
    return LG_OK;
}

static lg_status read_directory(reader *r, int64_t n, int64_t alignment, uint64_t *offsets,
                                const lg_file_tensor **order) {
    lg_file *file = r->file;
    for (int64_t i = 0; i < n; i++)
        LG_TRY(read_tensor(r, alignment, &file->tensors[i], &offsets[i]));
    file->n = n;
    LG_TRY(place_tensors(r, alignment, offsets));
    return check_apart(r, order);
}

static lg_status read_all(reader *r, int64_t num_pairs, int64_t num_tensors, pair_key *keys,
                          uint64_t *offsets, const lg_file_tensor **order) {
    int64_t alignment, names_bytes;
    LG_TRY(read_pairs(r, num_pairs, keys, &alignment));
    LG_TRY(count_names(*r, num_tensors, &names_bytes));
    lg_file *file = r->file;
    file->text.data = malloc((size_t)names_bytes + 1);
    if (!file->text.data)
        return lg_fail(r->ctx, LG_ENOMEM, "%s: no memory for the names", file->path);
    file->text.capacity = names_bytes;
    return read_directory(r, num_tensors, alignment, offsets, order);
}

/* The least bytes that an entry takes: a tensor name's length, dimensions, type, offset; a key's
 * length, type, value. */
enum { MIN_TENSOR_BYTES = 24, MIN_PAIR_BYTES = 13 };

lg_status lg_gguf_read(lg_context *ctx, lg_file *file) {
    reader r = {ctx, file, 4};
    uint64_t version, num_tensors, num_pairs;
    LG_TRY(read_uint(&r, 4, "the version", &version));
    if (version != 2 && version != 3)
        return lg_fail(ctx, LG_EFORMAT, "%s: GGUF version is %llu, wanted 2 or 3, little endian",
                       file->path, (unsigned long long)version);
    LG_TRY(read_uint(&r, 8, "the number of tensors", &num_tensors));
    LG_TRY(read_uint(&r, 8, "the number of pairs", &num_pairs));
    uint64_t left = (uint64_t)(file->bytes - r.at);
    if (num_tensors > left / MIN_TENSOR_BYTES || num_pairs > left / MIN_PAIR_BYTES) {
        return lg_fail(ctx, LG_EFORMAT,
                       "%s: %llu tensors and %llu pairs, wanted what %llu bytes can hold",
                       file->path, (unsigned long long)num_tensors, (unsigned long long)num_pairs,
                       (unsigned long long)left);
    }
    size_t tensors = (size_t)num_tensors + 1, pairs = (size_t)num_pairs + 1;
    file->tensors = calloc(tensors, sizeof *file->tensors);
    pair_key *keys = malloc(pairs * sizeof *keys);
    uint64_t *offsets = malloc(tensors * sizeof *offsets);
    const lg_file_tensor **order = malloc(tensors * sizeof *order);
    lg_status status;
    if (!file->tensors || !keys || !offsets || !order) {
        status = lg_fail(ctx, LG_ENOMEM, "%s: no memory for %llu tensors", file->path,
                         (unsigned long long)num_tensors);
    } else {
        status = read_all(&r, (int64_t)num_pairs, (int64_t)num_tensors, keys, offsets, order);
    }
    free(keys);
    free(offsets);
    free(order);
    return status;
}
