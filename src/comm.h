/* Processes that train together. LuaJIT reads this text too, as it does liger.h.
 *
 * Every function but lg_comm_fail is called by all processes in the same order; one that finds the others at another call
 * fails with a text instead of waiting for ever.
 */
#ifndef LIGER_COMM_H
#define LIGER_COMM_H

#include "liger.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

typedef struct lg_comm {
    int32_t rank; /* from 0 */
    int32_t size;
    int32_t failure; /* exit status of this process, once it failed */
    void *state;
} lg_comm;

/* Opens Open MPI's library and joins the processes that mpirun or srun started with this one. On failure *comm is NULL.
 * There is one of them at a time. */
lg_status lg_comm_open(lg_context *ctx, lg_comm **comm);
/* Leaves, once all have come to it; after lg_comm_fail it ends all processes at once instead. Never fails: it is a
 * finalizer. */
void lg_comm_close(lg_comm *comm);
/* Notes that process `rank` is about to end with `status`; `comm` may be NULL, where none is open yet. Processes other than
 * 0 wait for what mpirun takes to end them if 0 failed too: what all fail at is said once. */
void lg_comm_fail(lg_comm *comm, int32_t rank, int32_t status);

/* The bytes of all processes end to end, in their order; each gives as many as it likes. *all lives until the next call,
 * num_bytes [size] is how many came from each. */
lg_status lg_comm_gather(lg_context *ctx, lg_comm *comm, const void *data, int64_t bytes,
                         const char **all, int64_t *num_bytes);
/* Each of n tensors <- sum of all processes' tensors in its place: dense ones on any device, all f32, f64 or i64. Added in
 * the order of the processes, f32 in double: the same bits in each of them, and each time. */
lg_status lg_comm_sum(lg_context *ctx, lg_comm *comm, lg_tensor *const *tensors, int64_t n);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
