/* The inside of a CUDA context, for device.cu and gemm.cu only. */
#ifndef LIGER_STATE_CUH
#define LIGER_STATE_CUH

#include <cublasLt.h>

#include "common.cuh"
#include "gemm.cuh"

enum { NUM_ERRORS = 64 };                   /* ops that may note one */
enum { NUM_PLANS = 512, PLAN_PROBES = 16 }; /* of gemm.cu's table */

/* The algorithm that a class of products runs. */
typedef struct gemm_plan {
    gemm_problem problem;
    cublasLtMatmulAlgo_t algo;
    bool used;
} gemm_plan;

enum { NUM_STAGING = 4, STAGING_BYTES = 1 << 22, WORKSPACE_BYTES = 32 << 20 };

typedef struct cuda_state {
    cudaStream_t stream;
    cudaStream_t aside; /* where memory comes from while `stream` is recorded */
    bool recording;
    cublasLtHandle_t cublas;
    void *workspace;            /* cuBLASLt's, WORKSPACE_BYTES */
    void *staging[NUM_STAGING]; /* pinned, for uploads */
    cudaEvent_t staging_done[NUM_STAGING];
    int next_staging;
    cudaEvent_t timer[2];
    void *landing;                         /* pinned, for downloads */
    device_error *error, *error_on_device; /* [NUM_ERRORS], one an op */
    const char *error_op[NUM_ERRORS];
    int64_t *count,
        *count_on_device; /* mapped: a number that the host waits for, see cuda_wait_count */
    cudaEvent_t counted;
    gemm_plan plans[NUM_PLANS];
    int num_sms, compute; /* compute capability, 90 for Hopper */
    bool failed;
    char failure[512];
    char description[128];
} cuda_state;

#endif
