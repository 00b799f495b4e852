/* The one checker of shapes, dtypes and strides: what the generated entries call before a backend. */
#ifndef LIGER_CHECK_H
#define LIGER_CHECK_H

#include "liger.h"

typedef enum lg_dim_kind { LG_DIM_LETTER = 0, LG_DIM_ANY, LG_DIM_ATTR, LG_DIM_NUMBER } lg_dim_kind;

typedef struct lg_dim {
    uint8_t kind;
    char letter; /* the letter, or the index of the attribute */
    int16_t plus;
} lg_dim;

typedef enum lg_dtype_rule {
    LG_DTYPE_SHARED, /* one of f32, bf16, f64, the same for all */
    LG_DTYPE_FLOAT,  /* the same, or f16 */
    LG_DTYPE_ACC,    /* f64 when the shared dtype is f64, else f32 */
    LG_DTYPE_ANY,
    LG_DTYPE_F32,
    LG_DTYPE_F64,
    LG_DTYPE_I32,
    LG_DTYPE_I64,
    LG_DTYPE_U8,
} lg_dtype_rule;

/* One tensor of a shape line. */
typedef struct lg_arg {
    const char *name;
    lg_dtype_rule dtype;
    bool optional, strided;
    int ndim; /* number of entries in dims, `*` among them */
    lg_dim dims[6];
} lg_arg;

/* Checks `n` tensors against a shape line; the failure's text names op, tensor, what is there and what is wanted. */
lg_status lg_check(lg_context *ctx, const char *op, const lg_arg *args, int n,
                   const lg_tensor *const *tensors, const int64_t *attrs);
lg_status lg_check_missing(lg_context *ctx, const char *op);

#endif
