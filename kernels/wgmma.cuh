/* Hopper's matrix products (wgmma, sm_90a): four warps multiply 64 rows with a tile of shared
 * memory, asynchronously.
 *
 * Tiles lie as mma.cuh says, at a multiple of 1,024 bytes. Sums and A fragments are in registers
 * as for mma.sync, warp w of the four having rows [16 w, 16 w + 16). Data written by copy_async or
 * by stores is fenced (fence_async, then a barrier) before a product reads it. Registers of a
 * product in flight must not be touched until it has been waited for. */
#ifndef LIGER_WGMMA_CUH
#define LIGER_WGMMA_CUH

#include <initializer_list>

#include "mma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "the products of Hopper need the architecture 90a"
#endif
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WGMMA(...) __VA_ARGS__
#else
#define WGMMA(...) /* other devices never launch these kernels */
#endif

__device__ __forceinline__ void fence_async() {
    WGMMA(asm volatile("fence.proxy.async.shared::cta;" ::: "memory");)
}
/* Before the first product and after registers that products use were written. */
__device__ __forceinline__ void wgmma_fence() {
    WGMMA(asm volatile("wgmma.fence.sync.aligned;" ::: "memory");)
}
__device__ __forceinline__ void wgmma_commit() {
    WGMMA(asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");)
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
    WGMMA(asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");)
}

/* After a wait: keeps the compiler from moving reads of these sums before it. */
template <int Tiles>
__device__ __forceinline__ void wgmma_settled(float (&d)[Tiles][4]) {
#pragma unroll
    for (int n = 0; n < Tiles; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(d[n][e])::"memory");
}

/* A matrix in shared memory, 128-byte swizzle: groups of 8 rows lie 1,024 bytes apart; `panel` is
 * the distance of panels of 64 columns where the rows are the product's k, and unused where they
 * are not. */
__device__ __forceinline__ uint64_t wgmma_matrix(uint32_t address, uint32_t panel) {
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(panel >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

#define WGMMA_SUM(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define WGMMA_SS_64(type)                                                                         \
    asm volatile(                                                                                 \
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type \
        "." type " {"                                                                             \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "       \
        "%32, %33, p, 1, 1, 0, 0; }"                                                              \
        : WGMMA_SUM(d, 0), WGMMA_SUM(d, 1), WGMMA_SUM(d, 2), WGMMA_SUM(d, 3), WGMMA_SUM(d, 4),    \
          WGMMA_SUM(d, 5), WGMMA_SUM(d, 6), WGMMA_SUM(d, 7)                                       \
        : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_RS_64(type)                                                                         \
    asm volatile(                                                                                 \
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." type \
        "." type " {"                                                                             \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                  \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "       \
        "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }"                                                \
        : WGMMA_SUM(d, 0), WGMMA_SUM(d, 1), WGMMA_SUM(d, 2), WGMMA_SUM(d, 3), WGMMA_SUM(d, 4),    \
          WGMMA_SUM(d, 5), WGMMA_SUM(d, 6), WGMMA_SUM(d, 7)                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))
#define WGMMA_SS_128(type)                                                                         \
    asm volatile(                                                                                  \
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type \
        "." type " {"                                                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "         \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "         \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "        \
        "%64, %65, p, 1, 1, 0, 0; }"                                                               \
        : WGMMA_SUM(d, 0), WGMMA_SUM(d, 1), WGMMA_SUM(d, 2), WGMMA_SUM(d, 3), WGMMA_SUM(d, 4),     \
          WGMMA_SUM(d, 5), WGMMA_SUM(d, 6), WGMMA_SUM(d, 7), WGMMA_SUM(d, 8), WGMMA_SUM(d, 9),     \
          WGMMA_SUM(d, 10), WGMMA_SUM(d, 11), WGMMA_SUM(d, 12), WGMMA_SUM(d, 13),                  \
          WGMMA_SUM(d, 14), WGMMA_SUM(d, 15)                                                       \
        : "l"(a), "l"(b), "r"((int)accumulate))
#define WGMMA_RS_128(type)                                                                         \
    asm volatile(                                                                                  \
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." type \
        "." type " {"                                                                              \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                   \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "         \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "         \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "        \
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }"                                                 \
        : WGMMA_SUM(d, 0), WGMMA_SUM(d, 1), WGMMA_SUM(d, 2), WGMMA_SUM(d, 3), WGMMA_SUM(d, 4),     \
          WGMMA_SUM(d, 5), WGMMA_SUM(d, 6), WGMMA_SUM(d, 7), WGMMA_SUM(d, 8), WGMMA_SUM(d, 9),     \
          WGMMA_SUM(d, 10), WGMMA_SUM(d, 11), WGMMA_SUM(d, 12), WGMMA_SUM(d, 13),                  \
          WGMMA_SUM(d, 14), WGMMA_SUM(d, 15)                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1))

/* d (+)= A B^T over 16 columns of both tiles: the k of both runs along the rows. */
__device__ __forceinline__ void wgmma_tiles(float (&d)[8][4], uint64_t a, uint64_t b,
                                            bool accumulate, bf16) {
    WGMMA(WGMMA_SS_64("bf16");)
}
__device__ __forceinline__ void wgmma_tiles(float (&d)[8][4], uint64_t a, uint64_t b,
                                            bool accumulate, f16) {
    WGMMA(WGMMA_SS_64("f16");)
}
__device__ __forceinline__ void wgmma_tiles(float (&d)[16][4], uint64_t a, uint64_t b,
                                            bool accumulate, bf16) {
    WGMMA(WGMMA_SS_128("bf16");)
}
__device__ __forceinline__ void wgmma_tiles(float (&d)[16][4], uint64_t a, uint64_t b,
                                            bool accumulate, f16) {
    WGMMA(WGMMA_SS_128("f16");)
}

/* d += A B, A in registers, B 16 rows of a tile. */
__device__ __forceinline__ void wgmma_rows(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                           bf16) {
    WGMMA(WGMMA_RS_64("bf16");)
}
__device__ __forceinline__ void wgmma_rows(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b,
                                           f16) {
    WGMMA(WGMMA_RS_64("f16");)
}
__device__ __forceinline__ void wgmma_rows(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b,
                                           bf16) {
    WGMMA(WGMMA_RS_128("bf16");)
}
__device__ __forceinline__ void wgmma_rows(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b,
                                           f16) {
    WGMMA(WGMMA_RS_128("f16");)
}

/* c = rows [row, row + 64) of a tile times the rows of another, over D columns; in flight on
 * return, as one group. */
template <class T, int D, int Rows, int Columns>
__device__ __forceinline__ void wgmma_scores(float (&c)[Columns / 8][4], uint32_t rows, int row,
                                             uint32_t columns) {
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        wgmma_tiles(c, wgmma_matrix(rows + row * 128 + k / 4 * (Rows * 128) + k % 4 * 32, 16),
                    wgmma_matrix(columns + k / 4 * (Columns * 128) + k % 4 * 32, 16), k > 0, T());
    wgmma_commit();
}

/* sum += p times a tile's rows; in flight on return, as one group. */
template <class T, int D, int Rows>
__device__ __forceinline__ void wgmma_values(float (&sum)[D / 8][4],
                                             const uint32_t (&p)[Rows / 16][4], uint32_t tile) {
#pragma unroll
    for (int k = 0; k < Rows / 16; k++)
        wgmma_rows(sum, p[k], wgmma_matrix(tile + k * 2048, Rows * 128), T());
    wgmma_commit();
}

/* Whether this build and the device have these products; -DLIGER_PORTABLE builds without. */
static inline bool has_wgmma(void) {
    int device = 0, major = 0, minor = 0;
    bool built = false;
#ifndef LIGER_PORTABLE
    for (int arch : {__CUDA_ARCH_LIST__})
        if (arch == 900) built = true;
#endif
    if (!built || cudaGetDevice(&device) != cudaSuccess) return false;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return major == 9 && minor == 0;
}

#endif
