/* The CUDA half of contexts and memory: opening a device, stream-ordered memory, copies, errors.
 *
 * Memory comes from the device's own pool (cudaMallocAsync) with the release threshold at the top, so that a freed block is
 * reused without a call to the driver. Uploads go through a ring of pinned memory; downloads wait for the stream.
 */
#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.cuh"
#include "state.cuh"

extern "C" const lg_backend lg_cuda_table;

static cuda_state *state_of(lg_context *ctx) { return (cuda_state *)lg_context_state(ctx); }

cudaStream_t cuda_stream(lg_context *ctx) { return state_of(ctx)->stream; }

int cuda_num_sms(lg_context *ctx) { return state_of(ctx)->num_sms; }

device_error *cuda_error_slot(lg_context *ctx, const char *op) {
    cuda_state *s = state_of(ctx);
    int i = 0;
    while (i < NUM_ERRORS - 1 && s->error_op[i] && strcmp(s->error_op[i], op) != 0) i++;
    s->error_op[i] = op;
    return s->error_on_device + i;
}

/* ---- a number on its way to the host ---- */

int64_t *cuda_count_slot(lg_context *ctx) { return state_of(ctx)->count_on_device; }

lg_status cuda_mark_count(lg_context *ctx, const char *op) {
    return cuda_check(ctx, op, cudaEventRecord(state_of(ctx)->counted, cuda_stream(ctx)));
}

lg_status cuda_wait_count(lg_context *ctx, const char *op, int64_t *count) {
    lg_context_stats(ctx)->syncs++;
    LG_TRY(cuda_check(ctx, op, cudaEventSynchronize(state_of(ctx)->counted)));
    *count = *(volatile int64_t *)state_of(ctx)->count;
    return LG_OK;
}

/* ---- errors ---- */

lg_status cuda_check(lg_context *ctx, const char *what, cudaError_t status) {
    if (status == cudaSuccess) return LG_OK;
    cuda_state *s = state_of(ctx);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        return lg_fail(ctx, LG_ENOMEM, "%s: the device has no memory left", what);
    }
    if (s && s->failed) return lg_fail(ctx, LG_EDEVICE, "%s", s->failure);
    /* A failure that does not go away poisons the context: later calls repeat its text. */
    bool sticky = cudaGetLastError() != cudaSuccess && cudaPeekAtLastError() != cudaSuccess;
    lg_status result = lg_fail(ctx, LG_EDEVICE, "%s: the device failed: %s (%s)", what,
                               cudaGetErrorString(status), cudaGetErrorName(status));
    if (s && sticky) {
        s->failed = true;
        snprintf(s->failure, sizeof s->failure, "%s", lg_error(ctx));
    }
    return result;
}

lg_status cuda_launched(lg_context *ctx, const char *op) {
    return cuda_check(ctx, op,
                      cudaPeekAtLastError() == cudaSuccess ? cudaSuccess : cudaGetLastError());
}

/* What kernels note; the index is the element that was wrong. */
static lg_status report_noted(lg_context *ctx) {
    cuda_state *s = state_of(ctx);
    int i = 0;
    while (i < NUM_ERRORS && !s->error[i].code) i++;
    if (i == NUM_ERRORS) return LG_OK;
    const device_error e = s->error[i];
    const char *op = s->error_op[i];
    memset(s->error, 0, NUM_ERRORS * sizeof *s->error);
    static const char *const what[] = {"",      "ids",  "target", "position",  "index",
                                       "plane", "slot", "length", "cu_seqlens"};
    if (e.code == ERROR_LOGIT)
        return lg_fail(ctx, LG_ENUMERIC, "%s: row %lld has NaN, +inf or no finite logit", op,
                       e.index);
    if (e.code == ERROR_TARGET && e.index < 0) /* head.cuh: the number of targets */
        return lg_fail(ctx, LG_EINVAL,
                       "%s: kept is %lld, wanted %lld, the targets that are not ignored", op,
                       e.value, e.limit);
    return lg_fail(ctx, LG_EINVAL, "%s: %s[%lld] is %lld, wanted [%lld, %lld)", op, what[e.code],
                   e.index, e.value, e.low, e.limit);
}

/* ---- what a device does ---- */

static const char *describe(lg_context *ctx) { return state_of(ctx)->description; }

/* What is wanted in the middle of a recording must not be allocated anew by each replay. */
static void *device_alloc(lg_context *ctx, int64_t bytes) {
    const cuda_state *s = state_of(ctx);
    void *data = NULL;
    if (bytes < 0) return NULL;
    if (cudaMallocAsync(&data, bytes ? (size_t)bytes : 1, s->recording ? s->aside : s->stream) ==
        cudaSuccess)
        return data;
    cudaGetLastError();
    return NULL;
}

static void device_free(lg_context *ctx, void *data) {
    if (cudaFreeAsync(data, cuda_stream(ctx)) != cudaSuccess) cudaGetLastError();
}

/* What the driver has, and what the pool keeps unused. */
static double device_available(lg_context *ctx) {
    size_t free = 0, total = 0;
    uint64_t reserved = 0, used = 0;
    cudaMemPool_t pool;
    int device = 0;
    if (cudaGetDevice(&device) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess ||
        cudaDeviceGetDefaultMemPool(&pool, device) != cudaSuccess ||
        cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &reserved) !=
            cudaSuccess ||
        cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    (void)ctx;
    return (double)free + (double)(reserved - used);
}

/* Through the ring of pinned memory in pieces; a piece is reused once its copy has been done. */
static lg_status device_upload(lg_context *ctx, const void *host, void *data, int64_t bytes) {
    cuda_state *s = state_of(ctx);
    if (s->recording)
        return lg_fail(ctx, LG_EINVAL,
                       "upload: a graph is recorded, and a replay would not see the host's values "
                       "again: make the tensor before");
    for (int64_t at = 0; at < bytes;) {
        int64_t n = bytes - at < STAGING_BYTES ? bytes - at : STAGING_BYTES;
        int i = s->next_staging;
        s->next_staging = (i + 1) % NUM_STAGING;
        LG_TRY(cuda_check(ctx, "upload", cudaEventSynchronize(s->staging_done[i])));
        memcpy(s->staging[i], (const char *)host + at, (size_t)n);
        LG_TRY(cuda_check(ctx, "upload",
                          cudaMemcpyAsync((char *)data + at, s->staging[i], (size_t)n,
                                          cudaMemcpyHostToDevice, s->stream)));
        LG_TRY(cuda_check(ctx, "upload", cudaEventRecord(s->staging_done[i], s->stream)));
        at += n;
    }
    return LG_OK;
}

static lg_status device_sync(lg_context *ctx) {
    LG_TRY(cuda_check(ctx, "sync", cudaStreamSynchronize(cuda_stream(ctx))));
    return report_noted(ctx);
}

static lg_status device_download(lg_context *ctx, const void *data, void *host, int64_t bytes) {
    cuda_state *s = state_of(ctx);
    if (bytes <= STAGING_BYTES) {
        LG_TRY(cuda_check(
            ctx, "download",
            cudaMemcpyAsync(s->landing, data, (size_t)bytes, cudaMemcpyDeviceToHost, s->stream)));
        LG_TRY(device_sync(ctx));
        memcpy(host, s->landing, (size_t)bytes);
        return LG_OK;
    }
    LG_TRY(
        cuda_check(ctx, "download",
                   cudaMemcpyAsync(host, data, (size_t)bytes, cudaMemcpyDeviceToHost, s->stream)));
    return device_sync(ctx);
}

static lg_status timer_start(lg_context *ctx) {
    return cuda_check(ctx, "timer", cudaEventRecord(state_of(ctx)->timer[0], cuda_stream(ctx)));
}

static lg_status timer_stop(lg_context *ctx, double *seconds) {
    cuda_state *s = state_of(ctx);
    float ms = 0;
    LG_TRY(cuda_check(ctx, "timer", cudaEventRecord(s->timer[1], s->stream)));
    LG_TRY(cuda_check(ctx, "timer", cudaEventSynchronize(s->timer[1])));
    LG_TRY(cuda_check(ctx, "timer", cudaEventElapsedTime(&ms, s->timer[0], s->timer[1])));
    *seconds = ms * 1e-3;
    return LG_OK;
}

/* ---- graphs ---- */

/* A recording that an error left open is thrown away. */
static lg_status graph_begin(lg_context *ctx) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(cuda_stream(ctx), &capturing);
    if (capturing != cudaStreamCaptureStatusNone) {
        cudaGraph_t old = NULL;
        cudaStreamEndCapture(cuda_stream(ctx), &old);
        if (old) cudaGraphDestroy(old);
        cudaGetLastError();
    }
    /* Relaxed, for memory may be asked for meanwhile, on the stream aside. */
    LG_TRY(cuda_check(ctx, "graph",
                      cudaStreamBeginCapture(cuda_stream(ctx), cudaStreamCaptureModeRelaxed)));
    state_of(ctx)->recording = true;
    return LG_OK;
}

static lg_status graph_end(lg_context *ctx, void **state) {
    cuda_state *s = state_of(ctx);
    cudaGraph_t graph = NULL;
    s->recording = false;
    LG_TRY(cuda_check(ctx, "graph", cudaStreamEndCapture(s->stream, &graph)));
    LG_TRY(cuda_check(ctx, "graph", cudaStreamSynchronize(s->aside)));
    cudaGraphExec_t executable = NULL;
    cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    LG_TRY(cuda_check(ctx, "graph", status));
    *state = executable;
    return LG_OK;
}

static lg_status graph_launch(lg_context *ctx, void *state) {
    return cuda_check(ctx, "graph", cudaGraphLaunch((cudaGraphExec_t)state, cuda_stream(ctx)));
}

static void graph_free(lg_context *ctx, void *state) {
    cudaStreamSynchronize(cuda_stream(ctx));
    if (cudaGraphExecDestroy((cudaGraphExec_t)state) != cudaSuccess) cudaGetLastError();
}

static void device_close(lg_context *ctx) {
    cuda_state *s = state_of(ctx);
    if (!s) return;
    cudaStreamSynchronize(s->stream);
    cublasLtDestroy(s->cublas);
    for (int i = 0; i < NUM_STAGING; i++) {
        cudaFreeHost(s->staging[i]);
        cudaEventDestroy(s->staging_done[i]);
    }
    cudaEventDestroy(s->timer[0]);
    cudaEventDestroy(s->timer[1]);
    cudaFreeHost(s->landing);
    cudaFreeHost(s->error);
    cudaFreeHost(s->count);
    cudaEventDestroy(s->counted);
    cudaFreeAsync(s->workspace, s->stream);
    cudaStreamDestroy(s->aside);
    cudaStreamDestroy(s->stream);
    free(s);
}

static const lg_device functions = {
    describe,        device_alloc, device_free, device_available, device_upload,
    device_download, device_sync,  timer_start, timer_stop,       graph_begin,
    graph_end,       graph_launch, graph_free,  device_close,
};

/* ---- opening ---- */

__global__ void device_probe() {}

static lg_status fill_state(lg_context *ctx, cuda_state *s, int32_t device) {
    cudaDeviceProp prop;
    LG_TRY(cuda_check(ctx, "cuda", cudaGetDeviceProperties(&prop, device)));
    if (prop.major < 8)
        return lg_fail(ctx, LG_EDEVICE,
                       "cuda: device %d is %s of compute capability %d.%d, wanted 8.0 or newer",
                       device, prop.name, prop.major, prop.minor);
    s->num_sms = prop.multiProcessorCount;
    s->compute = prop.major * 10 + prop.minor;
    snprintf(s->description, sizeof s->description, "%.100s, %.1f GiB", prop.name,
             (double)prop.totalGlobalMem / (1 << 30));
    LG_TRY(cuda_check(ctx, "cuda", cudaSetDevice(device)));
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, device_probe) != cudaSuccess) {
        cudaGetLastError();
        return lg_fail(ctx, LG_EDEVICE,
                       "cuda: libliger_cuda.so has no code for %.100s (%d.%d): configure with "
                       "-DLIGER_CUDA_ARCHITECTURES=%d%d",
                       prop.name, prop.major, prop.minor, prop.major, prop.minor);
    }
    LG_TRY(cuda_check(ctx, "cuda", cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking)));
    LG_TRY(cuda_check(ctx, "cuda", cudaStreamCreateWithFlags(&s->aside, cudaStreamNonBlocking)));
    cudaMemPool_t pool;
    uint64_t keep = UINT64_MAX;
    LG_TRY(cuda_check(ctx, "cuda", cudaDeviceGetDefaultMemPool(&pool, device)));
    LG_TRY(cuda_check(ctx, "cuda",
                      cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep)));
    for (int i = 0; i < NUM_STAGING; i++) {
        LG_TRY(cuda_check(ctx, "cuda", cudaMallocHost(&s->staging[i], STAGING_BYTES)));
        LG_TRY(cuda_check(ctx, "cuda",
                          cudaEventCreateWithFlags(&s->staging_done[i], cudaEventDisableTiming)));
    }
    LG_TRY(cuda_check(ctx, "cuda", cudaEventCreate(&s->timer[0])));
    LG_TRY(cuda_check(ctx, "cuda", cudaEventCreate(&s->timer[1])));
    LG_TRY(cuda_check(ctx, "cuda", cudaMallocHost(&s->landing, STAGING_BYTES)));
    LG_TRY(cuda_check(
        ctx, "cuda",
        cudaHostAlloc((void **)&s->error, NUM_ERRORS * sizeof *s->error, cudaHostAllocMapped)));
    memset(s->error, 0, NUM_ERRORS * sizeof *s->error);
    LG_TRY(cuda_check(ctx, "cuda",
                      cudaHostGetDevicePointer((void **)&s->error_on_device, s->error, 0)));
    LG_TRY(cuda_check(ctx, "cuda",
                      cudaHostAlloc((void **)&s->count, sizeof *s->count, cudaHostAllocMapped)));
    LG_TRY(cuda_check(ctx, "cuda",
                      cudaHostGetDevicePointer((void **)&s->count_on_device, s->count, 0)));
    LG_TRY(cuda_check(ctx, "cuda", cudaEventCreateWithFlags(&s->counted, cudaEventDisableTiming)));
    LG_TRY(cuda_check(ctx, "cuda", cudaMallocAsync(&s->workspace, WORKSPACE_BYTES, s->stream)));
    if (cublasLtCreate(&s->cublas) != CUBLAS_STATUS_SUCCESS)
        return lg_fail(ctx, LG_EDEVICE, "cuda: cuBLASLt does not start");
    return LG_OK;
}

extern "C" __attribute__((visibility("default"))) lg_status
lg_cuda_open(lg_context *ctx, int32_t device, const struct lg_backend **backend,
             const lg_device **device_functions, void **state) {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver) {
        int driver = 0, runtime = 0;
        cudaDriverGetVersion(&driver);
        cudaRuntimeGetVersion(&runtime);
        if (driver == 0) return lg_fail(ctx, LG_EDEVICE, "cuda: there is no NVIDIA driver");
        return lg_fail(ctx, LG_EDEVICE, "cuda: the driver knows CUDA %d.%d, wanted %d.%d or newer",
                       driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    }
    if (status != cudaSuccess && status != cudaErrorNoDevice)
        return lg_fail(ctx, LG_EDEVICE, "cuda: %s (%s)", cudaGetErrorString(status),
                       cudaGetErrorName(status));
    if (device < 0 || device >= count)
        return lg_fail(ctx, LG_EDEVICE, "cuda: device is %d, wanted one of %d", device, count);
    cuda_state *s = (cuda_state *)calloc(1, sizeof *s);
    if (!s) return lg_fail(ctx, LG_ENOMEM, "cuda: no memory");
    lg_status result = fill_state(ctx, s, device);
    if (result != LG_OK) {
        free(s);
        return result;
    }
    *backend = &lg_cuda_table;
    *device_functions = &functions;
    *state = s;
    return LG_OK;
}
