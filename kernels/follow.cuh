/* Chains of short kernels. On sm_90 a follower is set up while the kernel before it runs and waits
 * for its results by itself (programmatic dependent launch): about 1.5 us less a link on an H200.
 * Elsewhere a follower is an ordinary launch.
 */
#ifndef LIGER_FOLLOW_CUH
#define LIGER_FOLLOW_CUH

#include "common.cuh"

/* At the start of every kernel of a chain: lets the next one be set up, then waits until all that
 * the one before has written is there. */
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
}

/* Launches a kernel that begins with `follow` after another one. */
template <class... Params, class... Args>
static lg_status launch_follower(lg_context *ctx, const char *op, dim3 grid, dim3 block,
                                 void (*kernel)(Params...), Args... args) {
    int device, major = 0;
    LG_TRY(cuda_check(ctx, op, cudaGetDevice(&device)));
    LG_TRY(cuda_check(ctx, op,
                      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)));
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = cuda_stream(ctx);
    config.attrs = &early;
    config.numAttrs = major >= 9 ? 1 : 0;
    return cuda_check(ctx, op, cudaLaunchKernelEx(&config, kernel, (Params)args...));
}

#endif
