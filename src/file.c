/* Tensor files: opening (mapped, told apart by content), reading a tensor into another dtype,
 * closing. The formats are in safetensors.c and gguf.c. A file that another process cuts short
 * while it is mapped raises SIGBUS: writers must rename whole files into place, as
 * lg_safetensors_write does. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static lg_status map_file(lg_context *ctx, lg_file *file) {
    int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return lg_fail(ctx, LG_EIO, "%s: cannot be opened: %s", file->path, strerror(errno));
    struct stat info;
    lg_status status = LG_OK;
    if (fstat(fd, &info) != 0) {
        status = lg_fail(ctx, LG_EIO, "%s: cannot be examined: %s", file->path, strerror(errno));
    } else if (!S_ISREG(info.st_mode)) {
        status = lg_fail(ctx, LG_EIO, "%s: is no regular file, wanted a tensor file", file->path);
    } else if (info.st_size < 8) {
        status = lg_fail(ctx, LG_EFORMAT, "%s: file is %lld bytes, wanted at least 8", file->path,
                         (long long)info.st_size);
    } else {
        void *map = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) {
            status = lg_fail(ctx, LG_EIO, "%s: cannot be mapped: %s", file->path, strerror(errno));
        } else {
            file->map = map;
            file->bytes = info.st_size;
        }
    }
    close(fd);
    return status;
}

lg_status lg_file_open(lg_context *ctx, const char *path, lg_file **file) {
    *file = NULL;
    if (!path) return lg_fail(ctx, LG_EINVAL, "file: path is NULL, wanted a text");
    lg_file *opened = calloc(1, sizeof *opened);
    if (opened) opened->path = strdup(path);
    if (!opened || !opened->path) {
        free(opened);
        return lg_fail(ctx, LG_ENOMEM, "%s: no memory to open it", path);
    }
    lg_status status = map_file(ctx, opened);
    if (status == LG_OK) {
        bool gguf = memcmp(opened->map, "GGUF", 4) == 0;
        status = gguf ? lg_gguf_read(ctx, opened) : lg_safetensors_read(ctx, opened);
    }
    if (status != LG_OK) {
        lg_file_close(opened);
        return status;
    }
    *file = opened;
    return LG_OK;
}

void lg_file_close(lg_file *file) {
    if (!file) return;
    if (file->map) munmap((void *)file->map, (size_t)file->bytes);
    lg_buffer_free(&file->text);
    lg_buffer_free(&file->metadata);
    free(file->tensors);
    free(file->path);
    free(file);
}

int64_t lg_file_num_tensors(const lg_file *file) { return file->n; }

const lg_file_tensor *lg_file_tensor_at(const lg_file *file, int64_t index) {
    return index >= 0 && index < file->n ? &file->tensors[index] : NULL;
}

const char *lg_file_metadata(const lg_file *file, int64_t *bytes) {
    if (bytes) *bytes = file->metadata.bytes - 1;
    return file->metadata.data;
}

bool lg_shape_elements(const int64_t *shape, int32_t ndim, int64_t *n) {
    *n = 1;
    for (int32_t i = 0; i < ndim; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(*n, shape[i], n)) return false;
    }
    return true;
}

int lg_file_by_place(const void *a, const void *b) {
    const lg_file_tensor *x = *(const lg_file_tensor *const *)a,
                         *y = *(const lg_file_tensor *const *)b;
    if (x->data != y->data) return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return x->data_bytes < y->data_bytes ? -1 : x->data_bytes > y->data_bytes;
}

/* ---- conversion: to f32 in blocks, exact, then rounded once to the wanted dtype ---- */

/* Dequantised values must have the bits of other readers: a product, rounded, then a sum,
 * rounded. */
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

enum { BLOCK = 32, RUN = 64 * BLOCK };

static uint16_t load_u16(const unsigned char *s) { return (uint16_t)(s[0] | s[1] << 8); }

static float float_of_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

static float float_of_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7F800000 | fraction << 13);
    if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    float f = (float)fraction * 0x1p-24f;
    return sign ? -f : f;
}

static uint16_t bf16_of_float(float f) {
    uint32_t bits = bits_of_float(f);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static uint16_t f16_of_float(float f) {
    uint32_t bits = bits_of_float(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    if (magnitude >= 0x477FF000)
        return (uint16_t)(sign | 0x7C00); /* 65520 and more round to infinity */
    if (magnitude < 0x38800000) {
        /* Subnormal: adding 0.5 puts the last place of the result at 2^-24, and the adder
         * rounds. */
        return (uint16_t)(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000));
    }
    return (uint16_t)(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

/* Rounds to odd, so that a second rounding to fewer bits gives what one rounding would have. */
static float float_of_double_odd(double d) {
    float f = (float)d;
    uint32_t bits = bits_of_float(f);
    if ((double)f == d || isnan(d) || (bits & 1)) return f;
    return float_of_bits(fabs((double)f) > fabs(d) ? bits - 1 : bits + 1);
}

/* Loaders: `n` elements at `s`, whole blocks for the quantised types. */
typedef void (*load_fn)(const unsigned char *restrict s, int64_t n, float *restrict out);

static void load_f32(const unsigned char *restrict s, int64_t n, float *restrict out) {
    memcpy(out, s, (size_t)n * sizeof *out);
}

static void load_bf16(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] = float_of_bits((uint32_t)load_u16(s + 2 * i) << 16);
}

static void load_f16(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (int64_t i = 0; i < n; i++) out[i] = float_of_f16(load_u16(s + 2 * i));
}

static void load_f64(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        double d;
        memcpy(&d, s + 8 * i, sizeof d);
        out[i] = (float)d;
    }
}

static void load_f64_odd(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (int64_t i = 0; i < n; i++) {
        double d;
        memcpy(&d, s + 8 * i, sizeof d);
        out[i] = float_of_double_odd(d);
    }
}

/* f16 scale, 32 signed bytes. */
static void load_q8_0(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (; n > 0; n -= BLOCK, s += 34, out += BLOCK) {
        float scale = float_of_f16(load_u16(s));
        for (int i = 0; i < BLOCK; i++) out[i] = scale * (float)(int8_t)s[2 + i];
    }
}

/* f16 scale, 16 bytes: elements 0 to 15 in the low halves, 16 to 31 in the high ones; 8 is zero. */
static void load_q4_0(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (; n > 0; n -= BLOCK, s += 18, out += BLOCK) {
        float scale = float_of_f16(load_u16(s));
        for (int i = 0; i < BLOCK / 2; i++) {
            out[i] = scale * (float)((s[2 + i] & 15) - 8);
            out[i + BLOCK / 2] = scale * (float)((s[2 + i] >> 4) - 8);
        }
    }
}

/* f16 scale, f16 minimum, 16 bytes as in Q4_0. */
static void load_q4_1(const unsigned char *restrict s, int64_t n, float *restrict out) {
    for (; n > 0; n -= BLOCK, s += 20, out += BLOCK) {
        float scale = float_of_f16(load_u16(s)), minimum = float_of_f16(load_u16(s + 2));
        for (int i = 0; i < BLOCK / 2; i++) {
            float low = scale * (float)(s[4 + i] & 15), high = scale * (float)(s[4 + i] >> 4);
            out[i] = low + minimum;
            out[i + BLOCK / 2] = high + minimum;
        }
    }
}

typedef struct reader {
    const char *type;
    int block, block_bytes;
    load_fn load;
} reader;

static const reader readers[] = {
    {"F32", 1, 4, load_f32},        {"BF16", 1, 2, load_bf16},      {"F16", 1, 2, load_f16},
    {"F64", 1, 8, load_f64},        {"Q8_0", BLOCK, 34, load_q8_0}, {"Q4_0", BLOCK, 18, load_q4_0},
    {"Q4_1", BLOCK, 20, load_q4_1},
};

static void store(const float *x, int64_t n, int32_t dtype, char *y, int64_t at) {
    if (dtype == LG_BF16) {
        uint16_t *out = (uint16_t *)y + at;
        for (int64_t i = 0; i < n; i++) out[i] = bf16_of_float(x[i]);
    } else if (dtype == LG_F16) {
        uint16_t *out = (uint16_t *)y + at;
        for (int64_t i = 0; i < n; i++) out[i] = f16_of_float(x[i]);
    } else {
        double *out = (double *)y + at;
        for (int64_t i = 0; i < n; i++) out[i] = x[i];
    }
}

/* One thread: the loops run at the speed of memory, and a run stays in the first cache. */
static void convert(const lg_file_tensor *t, const reader *r, load_fn load, int64_t n,
                    lg_tensor *y) {
    float x[RUN];
    for (int64_t at = 0; at < n; at += RUN) {
        int64_t count = n - at < RUN ? n - at : RUN;
        const unsigned char *s = (const unsigned char *)t->data + at / r->block * r->block_bytes;
        if (y->dtype == LG_F32) {
            load(s, count, (float *)y->data + at);
        } else {
            load(s, count, x);
            store(x, count, y->dtype, y->data, at);
        }
    }
}

static const char *dtype_name(int32_t dtype) {
    return dtype >= 0 && dtype < LG_NUM_DTYPES ? lg_dtype_name(dtype) : "unknown";
}

bool lg_is_dense(const lg_tensor *t) {
    int64_t stride = 1;
    for (int32_t i = t->ndim - 1; i >= 0; stride *= t->shape[i--])
        if (t->shape[i] > 1 && t->stride[i] != stride) return false;
    return true;
}

lg_status lg_file_read(lg_context *ctx, const lg_file *file, int64_t index, lg_tensor *y) {
    const lg_file_tensor *t = lg_file_tensor_at(file, index);
    if (!t)
        return lg_fail(ctx, LG_EINVAL, "%s: tensor index is %lld, wanted 0 to %lld", file->path,
                       (long long)index, (long long)file->n - 1);
    if (y->device != LG_CPU)
        return lg_fail(ctx, LG_EINVAL,
                       "%s: the tensor to read %s into is on device %d, wanted the CPU", file->path,
                       t->name, (int)y->device);
    int64_t n, wanted;
    if (y->ndim < 0 || y->ndim > LG_MAX_DIMS || !lg_shape_elements(y->shape, y->ndim, &n) ||
        !lg_shape_elements(t->shape, t->ndim, &wanted) || n != wanted || (n > 0 && !lg_is_dense(y)))
        return lg_fail(
            ctx, LG_EINVAL,
            "%s: the tensor to read %s into has another number of elements or is not dense",
            file->path, t->name);
    if (n == 0) return LG_OK;
    if (y->dtype == t->dtype) {
        memcpy(y->data, t->data, (size_t)t->data_bytes);
        return LG_OK;
    }
    const reader *r = NULL;
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        if (strcmp(readers[i].type, t->type) == 0) r = &readers[i];
    bool floating =
        y->dtype == LG_F32 || y->dtype == LG_BF16 || y->dtype == LG_F16 || y->dtype == LG_F64;
    if (!r || !floating)
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "%s: tensor %s is %s, wanted a type that can be read as %s", file->path,
                       t->name, t->type, dtype_name(y->dtype));
    bool odd = t->dtype == LG_F64 && y->dtype != LG_F32;
    convert(t, r, odd ? load_f64_odd : r->load, n, y);
    return LG_OK;
}
