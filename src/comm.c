/* Processes that train together, over Open MPI. Its library is opened at run time, so that a machine without it, and a
 * start as one process, need nothing of it.
 *
 * A sum is made in pieces: each process gets one slice of the piece from all others, adds them in their order, and sends the
 * sum to all. Data on a device goes through the device's own pinned memory, a piece at a time.
 */
#include "comm.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "file.h"
#include "internal.h"

/* ---- Open MPI's interface, as its versions 3 to 5 have it: handles are pointers ---- */

enum { MPI_SUCCESS = 0, MPI_THREAD_FUNNELED = 1 };

typedef void *MPI_Comm;
typedef void *MPI_Datatype;

typedef struct mpi {
    int (*Init_thread)(int *argc, char ***argv, int required, int *provided);
    int (*Finalize)(void);
    int (*Abort)(MPI_Comm, int);
    int (*Comm_rank)(MPI_Comm, int *);
    int (*Comm_size)(MPI_Comm, int *);
    int (*Allgather)(const void *, int, MPI_Datatype, void *, int, MPI_Datatype, MPI_Comm);
    int (*Allgatherv)(const void *, int, MPI_Datatype, void *, const int *, const int *,
                      MPI_Datatype, MPI_Comm);
    int (*Alltoallv)(const void *, const int *, const int *, MPI_Datatype, void *, const int *,
                     const int *, MPI_Datatype, MPI_Comm);
    MPI_Comm world;
    MPI_Datatype byte;
} mpi;

static const struct {
    const char *name;
    size_t place;
} symbols[] = {
    {"MPI_Init_thread", offsetof(mpi, Init_thread)},
    {"MPI_Finalize", offsetof(mpi, Finalize)},
    {"MPI_Abort", offsetof(mpi, Abort)},
    {"MPI_Comm_rank", offsetof(mpi, Comm_rank)},
    {"MPI_Comm_size", offsetof(mpi, Comm_size)},
    {"MPI_Allgather", offsetof(mpi, Allgather)},
    {"MPI_Allgatherv", offsetof(mpi, Allgatherv)},
    {"MPI_Alltoallv", offsetof(mpi, Alltoallv)},
    {"ompi_mpi_comm_world", offsetof(mpi, world)},
    {"ompi_mpi_byte", offsetof(mpi, byte)},
};

/* ---- opening and closing ---- */

enum {
    PIECE_BYTES = 4 << 20, /* of a sum; a device copies as much through pinned memory at once */
    NUM_HEADS = 2,         /* kind and size of a call */
};

/* The inside of an lg_comm. */
typedef struct inside {
    mpi mpi;
    int64_t *heads;     /* [size, NUM_HEADS] */
    int *count, *start; /* [2 size] each, bytes: of what is sent and of what comes */
    char *piece;        /* PIECE_BYTES, then as many from the others and a slice's rounding */
    char *gathered;
} inside;

static lg_status load(lg_context *ctx, mpi *m) {
    /* Open MPI's plugins look for its symbols among the program's. */
    void *library = dlopen("libmpi.so.40", RTLD_NOW | RTLD_GLOBAL);
    if (!library)
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "ranks: cannot open Open MPI: %s; Debian's is libopenmpi3", dlerror());
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (!symbol)
            return lg_fail(ctx, LG_EUNSUPPORTED, "ranks: libmpi.so.40 has no %s, wanted Open MPI's",
                           symbols[i].name);
        memcpy((char *)m + symbols[i].place, &symbol, sizeof symbol);
    }
    return LG_OK;
}

static void release(lg_comm *comm) {
    inside *in = comm->state;
    if (in) {
        free(in->heads);
        free(in->count);
        free(in->start);
        free(in->piece);
        free(in->gathered);
    }
    free(in);
    free(comm);
}

static lg_status check(lg_context *ctx, int code, const char *what) {
    if (code == MPI_SUCCESS) return LG_OK;
    return lg_fail(ctx, LG_EIO, "ranks: %s failed, MPI's error %d", what, code);
}

static lg_status join(lg_context *ctx, lg_comm *comm) {
    inside *in = comm->state;
    int provided, rank, size;
    LG_TRY(load(ctx, &in->mpi));
    LG_TRY(check(ctx, in->mpi.Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided),
                 "joining the processes"));
    LG_TRY(check(ctx, in->mpi.Comm_rank(in->mpi.world, &rank), "asking for the rank"));
    LG_TRY(check(ctx, in->mpi.Comm_size(in->mpi.world, &size), "asking for the size"));
    comm->rank = rank;
    comm->size = size;
    in->heads = calloc((size_t)size, NUM_HEADS * sizeof *in->heads);
    in->count = calloc((size_t)size, 2 * sizeof *in->count);
    in->start = calloc((size_t)size, 2 * sizeof *in->start);
    /* Slices of a piece are of whole numbers: the largest may be one above the mean. */
    in->piece = malloc(2 * (size_t)PIECE_BYTES + (size_t)size * sizeof(double));
    if (!in->heads || !in->count || !in->start || !in->piece)
        return lg_fail(ctx, LG_ENOMEM, "ranks: no memory for their buffers");
    return LG_OK;
}

lg_status lg_comm_open(lg_context *ctx, lg_comm **comm) {
    *comm = NULL;
    lg_comm *opened = calloc(1, sizeof *opened);
    if (opened) opened->state = calloc(1, sizeof(inside));
    if (!opened || !opened->state) {
        free(opened);
        return lg_fail(ctx, LG_ENOMEM, "ranks: no memory for their buffers");
    }
    lg_status status = join(ctx, opened);
    if (status != LG_OK) {
        release(opened);
        return status;
    }
    *comm = opened;
    return LG_OK;
}

void lg_comm_close(lg_comm *comm) {
    if (!comm) return;
    const inside *in = comm->state;
    if (comm->failure)
        in->mpi.Abort(in->mpi.world, comm->failure);
    else
        in->mpi.Finalize();
    release(comm);
}

void lg_comm_fail(lg_comm *comm, int32_t rank, int32_t status) {
    const struct timespec wait = {.tv_sec = 1, .tv_nsec = 500000000}; /* mpirun takes a second */
    if (comm) comm->failure = status;
    if (rank != 0) nanosleep(&wait, NULL);
}

/* ---- calls ---- */

enum { GATHER = 0, SUM = 1 }; /* + the dtype */

/* Tells all processes what this one is about to do, and that it is what they do. Fills in->heads. */
static lg_status agree(lg_context *ctx, lg_comm *comm, int64_t kind, int64_t n) {
    inside *in = comm->state;
    const int64_t head[NUM_HEADS] = {kind, n};
    LG_TRY(check(ctx,
                 in->mpi.Allgather(head, sizeof head, in->mpi.byte, in->heads, sizeof head,
                                   in->mpi.byte, in->mpi.world),
                 "an exchange"));
    for (int r = 1; r < comm->size; r++) {
        const int64_t *other = in->heads + r * NUM_HEADS;
        if (other[0] == in->heads[0] && (kind == GATHER || other[1] == in->heads[1])) continue;
        return lg_fail(ctx, LG_EINVAL,
                       "ranks: process %d is at a %s of %lld, wanted a %s of %lld as in process 0: "
                       "all must do the same",
                       r, other[0] ? "sum" : "gather", (long long)other[1],
                       in->heads[0] ? "sum" : "gather", (long long)in->heads[1]);
    }
    return LG_OK;
}

lg_status lg_comm_gather(lg_context *ctx, lg_comm *comm, const void *data, int64_t bytes,
                         const char **all, int64_t *num_bytes) {
    inside *in = comm->state;
    int64_t total = 0;
    LG_TRY(agree(ctx, comm, GATHER, bytes));
    for (int r = 0; r < comm->size; r++) {
        num_bytes[r] = in->heads[r * NUM_HEADS + 1];
        total += num_bytes[r];
    }
    if (total > INT32_MAX)
        return lg_fail(ctx, LG_EINVAL, "ranks: a gather of %lld bytes, wanted at most %d",
                       (long long)total, INT32_MAX);
    for (int r = 0, start = 0; r < comm->size; r++) {
        in->count[r] = (int)num_bytes[r];
        in->start[r] = start;
        start += in->count[r];
    }
    free(in->gathered);
    in->gathered = malloc(total ? (size_t)total : 1);
    if (!in->gathered)
        return lg_fail(ctx, LG_ENOMEM, "ranks: no memory for a gather of %lld bytes",
                       (long long)total);
    *all = in->gathered;
    return check(ctx,
                 in->mpi.Allgatherv(data, (int)bytes, in->mpi.byte, in->gathered, in->count,
                                    in->start, in->mpi.byte, in->mpi.world),
                 "a gather");
}

/* y[0..n) <- sums of part r of x, [size, n], in the order of r. */
static void add_slices(int32_t dtype, int size, int64_t n, const void *x, void *y) {
    if (dtype == LG_F32) {
        const float *part = x;
        float *sum = y;
        for (int64_t i = 0; i < n; i++) {
            double s = part[i];
            for (int r = 1; r < size; r++) s += part[r * n + i];
            sum[i] = (float)s;
        }
    } else if (dtype == LG_F64) {
        const double *part = x;
        double *sum = y;
        for (int64_t i = 0; i < n; i++) {
            double s = part[i];
            for (int r = 1; r < size; r++) s += part[r * n + i];
            sum[i] = s;
        }
    } else {
        const uint64_t *part = x; /* wraps */
        uint64_t *sum = y;
        for (int64_t i = 0; i < n; i++) {
            uint64_t s = part[i];
            for (int r = 1; r < size; r++) s += part[r * n + i];
            sum[i] = s;
        }
    }
}

/* Sums n numbers in place, at most PIECE_BYTES. */
static lg_status sum_piece(lg_context *ctx, lg_comm *comm, int32_t dtype, int64_t n, char *y) {
    inside *in = comm->state;
    const int size = comm->size, rank = comm->rank, item = (int)lg_dtype_bytes(dtype);
    int *sent = in->count, *came = in->count + size, *from = in->start, *to = in->start + size;
    char *slices = in->piece + PIECE_BYTES;
    const int64_t own = n * (rank + 1) / size - n * rank / size;
    for (int r = 0; r < size; r++) {
        const int64_t first = n * r / size;
        from[r] = (int)first * item;
        sent[r] = (int)(n * (r + 1) / size - first) * item;
        came[r] = (int)own * item;
        to[r] = r * came[r];
    }
    LG_TRY(check(ctx,
                 in->mpi.Alltoallv(y, sent, from, in->mpi.byte, slices, came, to, in->mpi.byte,
                                   in->mpi.world),
                 "a sum"));
    add_slices(dtype, size, own, slices, slices);
    return check(ctx,
                 in->mpi.Allgatherv(slices, (int)own * item, in->mpi.byte, y, sent, from,
                                    in->mpi.byte, in->mpi.world),
                 "a sum");
}

static int64_t num_elements(const lg_tensor *t) {
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++) n *= t->shape[d];
    return n;
}

/* Where a walk through the numbers of the tensors stands. */
typedef struct place {
    int64_t tensor, at;
} place;

/* Copies up to `most` numbers from there on to the piece, or back; how many. */
static lg_status copy_piece(lg_context *ctx, lg_tensor *const *tensors, int64_t n, place *p,
                            int64_t most, char *piece, bool back, int64_t *copied) {
    const int64_t item = lg_dtype_bytes(tensors[0]->dtype);
    for (*copied = 0; p->tensor < n && *copied < most;) {
        const lg_tensor *t = tensors[p->tensor];
        const int64_t left = num_elements(t) - p->at, room = most - *copied;
        const int64_t count = left < room ? left : room;
        char *host = piece + *copied * item;
        lg_tensor part = {(char *)t->data + p->at * item, {count}, {1}, 1, t->dtype, t->device};
        if (count && t->device == LG_CPU)
            memcpy(back ? part.data : host, back ? host : part.data, (size_t)(count * item));
        else if (count)
            LG_TRY(back ? lg_upload(ctx, host, &part) : lg_download(ctx, &part, host));
        *copied += count;
        p->at += count;
        if (count == left) *p = (place){p->tensor + 1, 0};
    }
    return LG_OK;
}

lg_status lg_comm_sum(lg_context *ctx, lg_comm *comm, lg_tensor *const *tensors, int64_t n) {
    inside *in = comm->state;
    int64_t total = 0, count;
    for (int64_t i = 0; i < n; i++) {
        const int32_t dtype = tensors[i]->dtype;
        if (dtype != LG_F32 && dtype != LG_F64 && dtype != LG_I64)
            return lg_fail(ctx, LG_EINVAL, "ranks: sum is of %s, wanted f32, f64 or i64",
                           lg_dtype_name(dtype));
        if (dtype != tensors[0]->dtype)
            return lg_fail(ctx, LG_EINVAL, "ranks: sum is of %s and %s, wanted one dtype",
                           lg_dtype_name(tensors[0]->dtype), lg_dtype_name(dtype));
        if (!lg_is_dense(tensors[i]))
            return lg_fail(ctx, LG_EINVAL, "ranks: sum is of a strided tensor, wanted a dense one");
        total += num_elements(tensors[i]);
    }
    if (n == 0) return LG_OK;
    const int32_t dtype = tensors[0]->dtype;
    const int64_t most = PIECE_BYTES / lg_dtype_bytes(dtype);
    LG_TRY(agree(ctx, comm, SUM + dtype, total));
    for (place from = {0, 0}; from.tensor < n;) {
        place to = from;
        LG_TRY(copy_piece(ctx, tensors, n, &from, most, in->piece, false, &count));
        LG_TRY(sum_piece(ctx, comm, dtype, count, in->piece));
        LG_TRY(copy_piece(ctx, tensors, n, &to, most, in->piece, true, &count));
    }
    return LG_OK;
}
