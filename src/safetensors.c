/* safetensors: 8 bytes of header length (little endian), a JSON header, then the data.
 * Everything in the header is checked before it is used: 8 + header + the largest end offset is
 * the file's size, tensors neither overlap nor leave holes, and each span is what its shape and
 * dtype need.
 *
 * Writing goes to `path.tmp-PID` in the same folder, is synced and renamed, so a reader sees the
 * old file or the new one. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Known element types; those without an lg_dtype are listed, and their spans checked, but not
 * read. */
static const struct element {
    const char *name;
    int32_t dtype;
    int bits;
} elements[] = {
    {"F32", LG_F32, 32}, {"BF16", LG_BF16, 16}, {"F16", LG_F16, 16}, {"F64", LG_F64, 64},
    {"I32", LG_I32, 32}, {"I64", LG_I64, 64},   {"U8", LG_U8, 8},    {"BOOL", -1, 8},
    {"I8", -1, 8},       {"F8_E5M2", -1, 8},    {"F8_E4M3", -1, 8},  {"F8_E8M0", -1, 8},
    {"I16", -1, 16},     {"U16", -1, 16},       {"U32", -1, 32},     {"U64", -1, 64},
    {"C64", -1, 64},     {"F4", -1, 4},         {"F6_E2M3", -1, 6},  {"F6_E3M2", -1, 6},
};

enum { NUM_ELEMENTS = sizeof elements / sizeof *elements };

static int shown(const lg_json *node) { return node->bytes < 200 ? (int)node->bytes : 200; }

static lg_status fail_tensor(lg_context *ctx, const lg_file *file, const lg_json *name,
                             const char *what, const lg_json *got, const char *wanted) {
    return lg_fail(ctx, LG_EFORMAT, "%s: tensor %.*s: %s is %.*s, wanted %s", file->path,
                   shown(name), name->text, what, got ? shown(got) : 7, got ? got->text : "missing",
                   wanted);
}

static lg_status read_shape(lg_context *ctx, const lg_file *file, const lg_json *name,
                            const lg_json *shape, lg_file_tensor *t, int64_t *n) {
    if (!shape || shape->kind != LG_JSON_ARRAY)
        return fail_tensor(ctx, file, name, "shape", shape, "a list of sizes");
    if (shape->count > 8) {
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "%s: tensor %.*s: shape has %u dimensions, wanted at most 8", file->path,
                       shown(name), name->text, shape->count);
    }
    t->ndim = (int32_t)shape->count;
    for (int32_t i = 0; i < t->ndim; i++)
        if (!lg_json_integer(shape + 1 + i, &t->shape[i]))
            return fail_tensor(ctx, file, name, "shape", shape, "a list of sizes");
    if (!lg_shape_elements(t->shape, t->ndim, n))
        return fail_tensor(ctx, file, name, "shape", shape, "a product below 2^63");
    return LG_OK;
}

static lg_status read_span(lg_context *ctx, const lg_file *file, const lg_json *name,
                           const lg_json *span, int64_t data_bytes, int64_t *begin, int64_t *end) {
    const char *wanted = "[begin, end]";
    if (!span || span->kind != LG_JSON_ARRAY || span->count != 2 ||
        !lg_json_integer(span + 1, begin) || !lg_json_integer(span + 2, end))
        return fail_tensor(ctx, file, name, "data_offsets", span, wanted);
    if (*begin > *end) return fail_tensor(ctx, file, name, "data_offsets", span, "begin <= end");
    if (*end > data_bytes) {
        return lg_fail(
            ctx, LG_EFORMAT,
            "%s: tensor %.*s: data ends at %lld, wanted at most %lld (the file is cut short)",
            file->path, shown(name), name->text, (long long)*end, (long long)data_bytes);
    }
    return LG_OK;
}

/* One member of the header. `t->name` is set by the caller. */
static lg_status read_tensor(lg_context *ctx, const lg_file *file, const lg_json *name,
                             const char *data, int64_t data_bytes, lg_file_tensor *t) {
    const lg_json *entry = name + 1, *type = lg_json_get(entry, "dtype");
    if (entry->kind != LG_JSON_OBJECT)
        return fail_tensor(ctx, file, name, "entry", entry, "an object");
    if (!type || type->kind != LG_JSON_STRING)
        return fail_tensor(ctx, file, name, "dtype", type, "a string");
    const struct element *element = NULL;
    for (int i = 0; i < NUM_ELEMENTS; i++)
        if (lg_json_is(type, elements[i].name)) element = &elements[i];
    int64_t n, begin, end, bits = 0;
    LG_TRY(read_shape(ctx, file, name, lg_json_get(entry, "shape"), t, &n));
    LG_TRY(
        read_span(ctx, file, name, lg_json_get(entry, "data_offsets"), data_bytes, &begin, &end));
    if (element &&
        (__builtin_mul_overflow(n, element->bits, &bits) || bits % 8 || bits / 8 != end - begin)) {
        return lg_fail(ctx, LG_EFORMAT,
                       "%s: tensor %.*s: data is %lld bytes, wanted %lld elements of %d bits",
                       file->path, shown(name), name->text, (long long)(end - begin), (long long)n,
                       element->bits);
    }
    t->dtype = element ? element->dtype : -1;
    t->type = element ? element->name : "a type that is not known";
    t->data = data + begin;
    t->data_bytes = end - begin;
    return LG_OK;
}

/* The spans, in order, must follow each other from the first byte of the data to the last of the
 * file. */
static lg_status check_cover(lg_context *ctx, const lg_file *file, const char *data) {
    const lg_file_tensor **order = malloc((size_t)(file->n ? file->n : 1) * sizeof *order);
    if (!order)
        return lg_fail(ctx, LG_ENOMEM, "%s: no memory to check %lld tensors", file->path,
                       (long long)file->n);
    for (int64_t i = 0; i < file->n; i++) order[i] = &file->tensors[i];
    qsort(order, (size_t)file->n, sizeof *order, lg_file_by_place);
    const char *at = data;
    lg_status status = LG_OK;
    for (int64_t i = 0; i < file->n && status == LG_OK; i++) {
        const char *begin = order[i]->data;
        if (begin != at) {
            status =
                lg_fail(ctx, LG_EFORMAT, "%s: tensor %s: data begins at %lld, wanted %lld (%s)",
                        file->path, order[i]->name, (long long)(begin - data),
                        (long long)(at - data), begin < at ? "tensors overlap" : "a hole");
        }
        at = begin + order[i]->data_bytes;
    }
    free(order);
    if (status == LG_OK && at != file->map + file->bytes) {
        status = lg_fail(ctx, LG_EFORMAT,
                         "%s: file is %lld bytes, wanted %lld: 8, the header and the data",
                         file->path, (long long)file->bytes, (long long)(at - file->map));
    }
    return status;
}

static lg_status check_metadata(lg_context *ctx, const char *path, const lg_json *metadata) {
    bool strings = metadata->kind == LG_JSON_OBJECT;
    for (uint32_t i = 0; strings && i < metadata->count; i++)
        strings = metadata[2 + 2 * i].kind == LG_JSON_STRING;
    if (!strings)
        return lg_fail(ctx, LG_EFORMAT, "%s: __metadata__ is %.*s, wanted an object of strings",
                       path, shown(metadata), metadata->text);
    return LG_OK;
}

static lg_status read_header(lg_context *ctx, lg_file *file, const lg_json *header,
                             const char *data) {
    if (header->kind != LG_JSON_OBJECT)
        return lg_fail(ctx, LG_EFORMAT, "%s: header is %.*s, wanted a JSON object", file->path,
                       shown(header), header->text);
    const lg_json *member = header + 1;
    int64_t names_bytes = 0;
    for (uint32_t i = 0; i < header->count; i++, member += 1 + member[1].size)
        names_bytes += member->bytes + 1;
    file->tensors = calloc(header->count ? header->count : 1, sizeof *file->tensors);
    file->text.data = malloc((size_t)(names_bytes ? names_bytes : 1));
    if (!file->tensors || !file->text.data)
        return lg_fail(ctx, LG_ENOMEM, "%s: no memory for %u tensors", file->path, header->count);
    file->text.capacity = names_bytes;
    member = header + 1;
    for (uint32_t i = 0; i < header->count; i++, member += 1 + member[1].size) {
        if (lg_json_is(member, "__metadata__")) {
            LG_TRY(check_metadata(ctx, file->path, member + 1));
            lg_buffer_append(&file->metadata, member[1].text, member[1].bytes);
            continue;
        }
        if (memchr(member->text, 0, member->bytes))
            return lg_fail(ctx, LG_EFORMAT, "%s: tensor name %s has a NUL, wanted none", file->path,
                           member->text);
        lg_file_tensor *t = &file->tensors[file->n++];
        t->name = file->text.data + file->text.bytes;
        lg_buffer_append(&file->text, member->text, member->bytes);
        lg_buffer_append(&file->text, "", 1);
        LG_TRY(read_tensor(ctx, file, member, data, file->map + file->bytes - data, t));
    }
    if (!file->metadata.data) lg_buffer_append(&file->metadata, "{}", 2);
    lg_buffer_append(&file->metadata, "", 1);
    if (file->metadata.failed)
        return lg_fail(ctx, LG_ENOMEM, "%s: no memory for the metadata", file->path);
    return check_cover(ctx, file, data);
}

lg_status lg_safetensors_read(lg_context *ctx, lg_file *file) {
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; i--) header_bytes = header_bytes << 8 | (unsigned char)file->map[i];
    if (header_bytes > (uint64_t)file->bytes - 8) {
        return lg_fail(
            ctx, LG_EFORMAT,
            "%s: header length is %llu, wanted at most %lld (no safetensors file, or cut short)",
            file->path, (unsigned long long)header_bytes, (long long)file->bytes - 8);
    }
    lg_json_document document;
    LG_TRY(lg_json_parse(ctx, file->path, file->map + 8, (int64_t)header_bytes, &document));
    lg_status status = read_header(ctx, file, document.root, file->map + 8 + header_bytes);
    lg_json_free(&document);
    return status;
}

/* ---- writing ---- */

static lg_status write_all(lg_context *ctx, const char *path, int fd, const void *data,
                           int64_t bytes) {
    const char *at = data;
    while (bytes > 0) {
        ssize_t done = write(fd, at, (size_t)(bytes < 1 << 30 ? bytes : 1 << 30));
        if (done < 0 && errno == EINTR) continue;
        if (done < 0)
            return lg_fail(ctx, LG_EIO, "%s: cannot be written: %s", path, strerror(errno));
        at += done;
        bytes -= done;
    }
    return LG_OK;
}

static lg_status check_tensor(lg_context *ctx, const char *path, const char *name,
                              const lg_tensor *t, int64_t *bytes) {
    if (strcmp(name, "__metadata__") == 0)
        return lg_fail(ctx, LG_EINVAL, "%s: a tensor's name is __metadata__, wanted another", path);
    if (t->dtype < 0 || t->dtype >= LG_NUM_DTYPES || t->ndim < 0 || t->ndim > LG_MAX_DIMS ||
        (t->device != LG_CPU && t->device != lg_context_device(ctx)))
        return lg_fail(ctx, LG_EINVAL,
                       "%s: tensor %s has dtype %d, %d dimensions, device %d, wanted one of the CPU"
                       " or of this device",
                       path, name, (int)t->dtype, (int)t->ndim, (int)t->device);
    int64_t n;
    if (!lg_shape_elements(t->shape, t->ndim, &n) ||
        __builtin_mul_overflow(n, lg_dtype_bytes(t->dtype), bytes))
        return lg_fail(ctx, LG_EINVAL, "%s: tensor %s has a shape past 2^63 bytes, wanted less",
                       path, name);
    int64_t stride = 1;
    for (int32_t i = t->ndim - 1; i >= 0 && n > 0; stride *= t->shape[i--])
        if (t->shape[i] != 1 && t->stride[i] != stride)
            return lg_fail(ctx, LG_EINVAL,
                           "%s: tensor %s has stride %lld in dimension %d, wanted %lld (dense)",
                           path, name, (long long)t->stride[i], (int)i, (long long)stride);
    if (n > 0 && !t->data)
        return lg_fail(ctx, LG_EINVAL, "%s: tensor %s has no data, wanted some", path, name);
    return LG_OK;
}

static void append_integer(lg_buffer *buffer, int64_t value) {
    char digits[24];
    int n = sizeof digits;
    do {
        digits[--n] = (char)('0' + value % 10);
        value /= 10;
    } while (value);
    lg_buffer_append(buffer, digits + n, (int64_t)sizeof digits - n);
}

static void append_text(lg_buffer *buffer, const char *text) {
    lg_buffer_append(buffer, text, (int64_t)strlen(text));
}

/* The header with its length in front, padded with spaces to a multiple of 8. */
static lg_status make_header(lg_context *ctx, const char *path, const char *const *names,
                             const lg_tensor *const *tensors, int64_t n, const char *metadata,
                             lg_buffer *header) {
    static const char *const dtypes[LG_NUM_DTYPES] = {
        [LG_F32] = "F32", [LG_BF16] = "BF16", [LG_F16] = "F16", [LG_F64] = "F64",
        [LG_I32] = "I32", [LG_I64] = "I64",   [LG_U8] = "U8"};
    append_text(header, "01234567{");
    if (metadata) {
        append_text(header, "\"__metadata__\":");
        append_text(header, metadata);
    }
    int64_t offset = 0, bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        const lg_tensor *t = tensors[i];
        LG_TRY(check_tensor(ctx, path, names[i], t, &bytes));
        if (i > 0 || metadata) append_text(header, ",");
        lg_buffer_json_string(header, names[i], (int64_t)strlen(names[i]));
        append_text(header, ":{\"dtype\":\"");
        append_text(header, dtypes[t->dtype]);
        append_text(header, "\",\"shape\":[");
        for (int32_t d = 0; d < t->ndim; d++) {
            if (d > 0) append_text(header, ",");
            append_integer(header, t->shape[d]);
        }
        append_text(header, "],\"data_offsets\":[");
        append_integer(header, offset);
        append_text(header, ",");
        if (__builtin_add_overflow(offset, bytes, &offset))
            return lg_fail(ctx, LG_EINVAL, "%s: the tensors pass 2^63 bytes, wanted less", path);
        append_integer(header, offset);
        append_text(header, "]}");
    }
    append_text(header, "}");
    while (header->bytes % 8 && !header->failed) append_text(header, " ");
    if (header->failed) return lg_fail(ctx, LG_ENOMEM, "%s: no memory for the header", path);
    for (int i = 0; i < 8; i++) header->data[i] = (char)((uint64_t)(header->bytes - 8) >> 8 * i);
    return LG_OK;
}

static lg_status check_metadata_text(lg_context *ctx, const char *path, const char *metadata) {
    lg_json_document document;
    LG_TRY(lg_json_parse(ctx, path, metadata, (int64_t)strlen(metadata), &document));
    lg_status status = check_metadata(ctx, path, document.root);
    lg_json_free(&document);
    return status;
}

/* The finished header is read again: that refuses a name that comes twice. */
static lg_status check_header(lg_context *ctx, const char *path, const lg_buffer *header) {
    lg_json_document document;
    LG_TRY(lg_json_parse(ctx, path, header->data + 8, header->bytes - 8, &document));
    lg_json_free(&document);
    return LG_OK;
}

static lg_status sync_folder(lg_context *ctx, const char *path) {
    const char *slash = strrchr(path, '/');
    char *folder = slash ? strndup(path, slash == path ? 1 : (size_t)(slash - path)) : strdup(".");
    if (!folder) return lg_fail(ctx, LG_ENOMEM, "%s: no memory to sync its folder", path);
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(folder);
    /* Some file systems cannot sync a folder (EINVAL); the rename itself has been done. */
    bool failed = fd < 0 || (fsync(fd) != 0 && errno != EINVAL);
    int error = errno;
    if (fd >= 0) close(fd);
    if (failed)
        return lg_fail(ctx, LG_EIO, "%s: its folder cannot be synced: %s", path, strerror(error));
    return LG_OK;
}

/* Through the host's memory, in pieces. */
static lg_status write_from_device(lg_context *ctx, const char *path, int fd, const lg_tensor *t,
                                   int64_t count) {
    enum { PIECE_BYTES = 1 << 26 };
    int64_t size = lg_dtype_bytes(t->dtype), most = PIECE_BYTES / size;
    lg_tensor piece = {.ndim = 1, .stride = {1}, .dtype = t->dtype, .device = t->device};
    void *host = malloc((size_t)((count < most ? count : most) * size));
    if (!host) return lg_fail(ctx, LG_ENOMEM, "%s: no memory to write from the device", path);
    lg_status status = LG_OK;
    for (int64_t at = 0; at < count && status == LG_OK; at += most) {
        piece.data = (char *)t->data + at * size;
        piece.shape[0] = count - at < most ? count - at : most;
        status = lg_download(ctx, &piece, host);
        if (status == LG_OK) status = write_all(ctx, path, fd, host, piece.shape[0] * size);
    }
    free(host);
    return status;
}

static lg_status write_tensor(lg_context *ctx, const char *path, int fd, const lg_tensor *t) {
    int64_t count = 0;
    lg_shape_elements(t->shape, t->ndim, &count);
    if (t->device != LG_CPU && count > 0) return write_from_device(ctx, path, fd, t, count);
    return write_all(ctx, path, fd, t->data, count * lg_dtype_bytes(t->dtype));
}

static lg_status write_temporary(lg_context *ctx, const char *path, const char *temporary,
                                 const lg_buffer *header, const lg_tensor *const *tensors,
                                 int64_t n) {
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return lg_fail(ctx, LG_EIO, "%s: cannot be created: %s", temporary, strerror(errno));
    lg_status status = write_all(ctx, path, fd, header->data, header->bytes);
    for (int64_t i = 0; i < n && status == LG_OK; i++)
        status = write_tensor(ctx, path, fd, tensors[i]);
    if (status == LG_OK && fsync(fd) != 0)
        status = lg_fail(ctx, LG_EIO, "%s: cannot be synced: %s", path, strerror(errno));
    if (close(fd) != 0 && status == LG_OK)
        status = lg_fail(ctx, LG_EIO, "%s: cannot be closed: %s", path, strerror(errno));
    if (status == LG_OK && rename(temporary, path) != 0)
        status =
            lg_fail(ctx, LG_EIO, "%s: cannot be renamed into place: %s", path, strerror(errno));
    if (status != LG_OK) unlink(temporary);
    return status;
}

lg_status lg_safetensors_write(lg_context *ctx, const char *path, const char *const *names,
                               const lg_tensor *const *tensors, int64_t n, const char *metadata) {
    if (!path) return lg_fail(ctx, LG_EINVAL, "safetensors: path is NULL, wanted a text");
    if (metadata) LG_TRY(check_metadata_text(ctx, path, metadata));
    lg_buffer header = {0}, temporary = {0};
    lg_status status = make_header(ctx, path, names, tensors, n, metadata, &header);
    if (status == LG_OK) status = check_header(ctx, path, &header);
    if (status == LG_OK) {
        append_text(&temporary, path);
        append_text(&temporary, ".tmp-");
        append_integer(&temporary, getpid());
        lg_buffer_append(&temporary, "", 1);
        status = temporary.failed ? lg_fail(ctx, LG_ENOMEM, "%s: no memory for its name", path)
                                  : write_temporary(ctx, path, temporary.data, &header, tensors, n);
    }
    if (status == LG_OK) status = sync_folder(ctx, path);
    lg_buffer_free(&header);
    lg_buffer_free(&temporary);
    return status;
}
