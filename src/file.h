/* What the file formats share: a mapped file with its directory. Internal to the library. */
#ifndef LIGER_FILE_H
#define LIGER_FILE_H

#include "json.h"

struct lg_file {
    char *path;
    const char *map; /* the whole file, read only */
    int64_t bytes;
    lg_file_tensor *tensors;
    int64_t n;
    lg_buffer text; /* what the directory's names point into */
    lg_buffer metadata;
};

/* Fill the directory from the mapped bytes; on failure the caller closes the file. */
lg_status lg_safetensors_read(lg_context *ctx, lg_file *file);
lg_status lg_gguf_read(lg_context *ctx, lg_file *file);

/* Elements of a shape; false when a dimension is negative or the product passes INT64_MAX. */
bool lg_shape_elements(const int64_t *shape, int32_t ndim, int64_t *n);
/* Whether a tensor's elements lie end to end. */
bool lg_is_dense(const lg_tensor *t);

/* For qsort: pointers to directory entries, by where their data begins, then by size. */
int lg_file_by_place(const void *a, const void *b);

#endif
