/* What the library's own files share: the context's inside, error texts, scratch memory, element access.
 * cpu/ and kernels/ include this and nothing above it. */
#ifndef LIGER_INTERNAL_H
#define LIGER_INTERNAL_H

#include "liger.h"

/* libliger_cuda.so calls these too. */
#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* Fails with a text `thing: what is GOT, wanted WANT`; returns its status, so that `return lg_fail(...)` reads well. */
lg_status lg_fail(lg_context *ctx, lg_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Passes a failure up. */
#define LG_TRY(expr)                          \
    do {                                      \
        lg_status status_ = (expr);           \
        if (status_ != LG_OK) return status_; \
    } while (0)

/* Working memory of the op that runs, on the device and aligned like a block, gone when it returns. */
lg_status lg_scratch(lg_context *ctx, int64_t bytes, void **data);
/* Ends an op: all its scratch is free again. */
void lg_scratch_end(lg_context *ctx);

/* A part of an op gives back what it took since the mark. */
typedef struct lg_scratch_mark {
    void *block;
    int64_t used;
} lg_scratch_mark;

lg_scratch_mark lg_scratch_save(lg_context *ctx);
void lg_scratch_restore(lg_context *ctx, lg_scratch_mark mark);

struct lg_backend;
const struct lg_backend *lg_cpu_backend(void);
const struct lg_backend *lg_context_backend(lg_context *ctx);

/* What a kind of device does for a context besides operators. `state` is the device's own. */
typedef struct lg_device {
    const char *(*describe)(lg_context *ctx);
    /* NULL when there is no memory. */
    void *(*alloc)(lg_context *ctx, int64_t bytes);
    void (*free)(lg_context *ctx, void *data);
    double (*available)(lg_context *ctx);
    lg_status (*upload)(lg_context *ctx, const void *host, void *data, int64_t bytes);
    lg_status (*download)(lg_context *ctx, const void *data, void *host, int64_t bytes);
    lg_status (*sync)(lg_context *ctx);
    lg_status (*timer_start)(lg_context *ctx);
    lg_status (*timer_stop)(lg_context *ctx, double *seconds);
    /* NULL where the device cannot record. */
    lg_status (*graph_begin)(lg_context *ctx);
    lg_status (*graph_end)(lg_context *ctx, void **state);
    lg_status (*graph_launch)(lg_context *ctx, void *state);
    void (*graph_free)(lg_context *ctx, void *state);
    void (*close)(lg_context *ctx);
} lg_device;

void *lg_context_state(lg_context *ctx);

/* The entry of libliger_cuda.so: opens a device, or fails with a text. */
typedef lg_status lg_open_device(lg_context *ctx, int32_t device, const struct lg_backend **backend,
                                 const lg_device **functions, void **state);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
