/* The inside of a context, for context.c and memory.c only. */
#ifndef LIGER_CONTEXT_H
#define LIGER_CONTEXT_H

#include "internal.h"

/* A block of working memory; an op's scratch is carved from the newest one. */
typedef struct lg_scratch_block {
    struct lg_scratch_block *older;
    char *data;
    int64_t bytes, used;
} lg_scratch_block;

struct lg_context {
    int32_t device_id;
    const struct lg_backend *backend;
    const lg_device *device;
    void *state;
    int64_t threads;
    lg_stats stats;
    lg_scratch_block *scratch;
    bool recording;     /* a graph */
    double timer_start; /* the CPU's */
    char error[1024];
    char description[128];
};

extern const lg_device lg_cpu_device;

#endif
