/* What the library's own files share: the context's inside, error texts, scratch memory, element access.
 * cpu/ and kernels/ include this and nothing above it. */
#ifndef LIGER_INTERNAL_H
#define LIGER_INTERNAL_H

#include "liger.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fails with a text `thing: what is GOT, wanted WANT`; returns its status, so that `return lg_fail(...)` reads well. */
lg_status lg_fail(lg_context *ctx, lg_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Passes a failure up. */
#define LG_TRY(expr)                                                                                                   \
    do {                                                                                                               \
        lg_status status_ = (expr);                                                                                    \
        if (status_ != LG_OK) return status_;                                                                          \
    } while (0)

/* Working memory of the op that runs, 64-byte aligned, gone when it returns. */
lg_status lg_scratch(lg_context *ctx, int64_t bytes, void **data);
/* Ends an op: all its scratch is free again. */
void lg_scratch_end(lg_context *ctx);

struct lg_backend;
const struct lg_backend *lg_cpu_backend(void);
const struct lg_backend *lg_context_backend(lg_context *ctx);

#ifdef __cplusplus
}
#endif
#endif
