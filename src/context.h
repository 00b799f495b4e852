/* The inside of a context, for context.c and memory.c only. */
#ifndef LIGER_CONTEXT_H
#define LIGER_CONTEXT_H

#include "liger.h"

/* A block of working memory; an op's scratch is carved from the newest one. */
typedef struct lg_scratch_block {
    struct lg_scratch_block *older;
    int64_t bytes, used;
} lg_scratch_block;

struct lg_context {
    const struct lg_backend *backend;
    int64_t threads;
    lg_stats stats;
    lg_scratch_block *scratch;
    char error[1024];
};

#endif
