/* Reductions of a row, by a cluster of 1 to 8 blocks that each own a slice of it: max m, s = sum
 * of exp(z - m), w = sum of exp(z - m) (z - m); lse = m + ln s, entropy = ln s - w / s. Threads
 * keep a running maximum for 16 elements at a time; threads, warps and blocks are merged by
 * fixed butterflies. The order depends on V alone: not on alignment, nor on which kernel
 * reduces.
 */
#ifndef LIGER_HEAD_ROW_CUH
#define LIGER_HEAD_ROW_CUH

#include <cooperative_groups.h>

#include "common.cuh"

enum {
    HEAD_STEP = 16, /* elements of a row that a thread takes at a time */
    HEAD_MOST_THREADS = 512,
};

/* ---- from products to z and back ---- */

struct head_plain {
    __device__ __forceinline__ float operator()(float z) const { return z; }
    __device__ __forceinline__ float slope(float) const { return 1; }
    static constexpr bool changes = false;
};

/* z = cap tanh(a / cap) / temperature; no cap when it is 0. */
struct head_capped {
    float cap, temperature;
    __device__ __forceinline__ float operator()(float a) const {
        const float z = cap != 0 ? cap * tanhf(a / cap) : a;
        return temperature != 1 ? z / temperature : z;
    }
    /* dz / da, given z. */
    __device__ __forceinline__ float slope(float z) const {
        const float t = cap != 0 ? z * (temperature / cap) : 0;
        return (1 - t * t) * (1 / temperature);
    }
    static constexpr bool changes = true;
};

/* ---- reductions ---- */

static constexpr float HEAD_LOG2_E = 1.4426950408889634f, HEAD_LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float head_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float head_exp(float x) { return head_exp2(x * HEAD_LOG2_E); }

/* The maximum starts at the lowest finite number, so that -inf logits give exp(-inf) = 0. */
struct head_stats {
    float max, sum, weighted;
    int argmax; /* the smallest index of max */

    static __device__ __forceinline__ head_stats none() { return {-FLT_MAX, 0, 0, 0}; }

    /* To a maximum that is no smaller. */
    __device__ __forceinline__ void rise(float to) {
        const float d = fminf(to - max, 1e30f), c = head_exp(-d);
        weighted = (weighted - d * sum) * c;
        sum *= c;
        max = to;
    }
};

/* All lanes get the statistics of all. */
__device__ __forceinline__ head_stats head_merge_warp(head_stats s) {
    const float max = warp_reduce(s.max, Max());
    if (s.max != max) s.argmax = INT_MAX;
    s.rise(max);
    s.sum = warp_reduce(s.sum, Sum());
    s.weighted = warp_reduce(s.weighted, Sum());
    s.argmax = __reduce_min_sync(0xffffffffu, s.argmax);
    return s;
}

/* Elements v to v + 3 of a row that ends at `end`. */
__device__ __forceinline__ vec<float, 4> head_load(const float *z, int64_t v, int64_t end,
                                                   bool vector) {
    if (vector && v + 4 <= end) return *(const vec<float, 4> *)(z + v);
    vec<float, 4> x;
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = v + e < end ? z[v + e] : -INFINITY;
    return x;
}

/* N vectors from v on, `stride` elements apart; all at once where the row goes on past them. */
template <int N>
__device__ __forceinline__ void head_load_step(const float *z, int64_t v, int64_t stride,
                                               int64_t end, bool vector, vec<float, 4> (&x)[N]) {
    if (vector && v + (N - 1) * stride + 4 <= end) {
#pragma unroll
        for (int u = 0; u < N; u++) x[u] = *(const vec<float, 4> *)(z + v + u * stride);
    } else {
#pragma unroll
        for (int u = 0; u < N; u++) x[u] = head_load(z, v + u * stride, end, vector);
    }
}

/* Zeros in what of v to v + 3 lies past the row's end. */
template <class T>
__device__ __forceinline__ void head_cut(vec<T, 4> &x, int64_t v, int64_t end) {
    if (v + 4 <= end) return;
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (v + e >= end) x[e] = from_float<T>(0);
}

template <class T>
__device__ __forceinline__ void head_store(T *z, int64_t v, int64_t end, bool vector, vec<T, 4> x) {
    if (vector && v + 4 <= end) {
        *(vec<T, 4> *)(z + v) = x;
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        if (v + e < end) z[v + e] = x[e];
}

/* A row's part that a block owns: elements [begin, end). */
struct head_slice {
    int64_t begin, end;
};

/* One thread's share of a slice. `kept`, unless NULL, gets the finished logits. */
template <class Finish>
__device__ __forceinline__ head_stats head_reduce_thread(const float *z, head_slice slice,
                                                         bool vector, Finish finish, float *kept) {
    head_stats s = head_stats::none();
    for (int64_t v0 = slice.begin + threadIdx.x * 4; v0 < slice.end;
         v0 += (int64_t)blockDim.x * HEAD_STEP) {
        vec<float, 4> x[HEAD_STEP / 4];
        float max = -FLT_MAX;
        head_load_step(z, v0, (int64_t)blockDim.x * 4, slice.end, vector, x);
#pragma unroll
        for (int u = 0; u < HEAD_STEP / 4; u++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                /* What lies past the row's end stays -inf: a cap would give it a share. */
                if (Finish::changes && v0 + (int64_t)u * blockDim.x * 4 + e < slice.end)
                    x[u][e] = finish(x[u][e]);
                max = fmaxf(max, x[u][e]);
            }
            if (Finish::changes && kept)
                head_store(kept, v0 + (int64_t)u * blockDim.x * 4, slice.end, vector, x[u]);
        }
        if (max > s.max) {
            s.rise(max);
#pragma unroll
            for (int i = HEAD_STEP - 1; i >= 0; i--)
                if (x[i / 4][i % 4] == max)
                    s.argmax = (int)(v0 + (int64_t)(i / 4) * blockDim.x * 4 + i % 4);
        }
#pragma unroll
        for (int i = 0; i < HEAD_STEP; i++) {
            const float t = x[i / 4][i % 4] - s.max, p = head_exp(t);
            s.sum += p;
            s.weighted = fmaf(p, fmaxf(t, -200.0f), s.weighted); /* keeps 0 * -inf out */
        }
    }
    return s;
}

/* What the blocks of a cluster share of a row. */
template <class Stats>
struct head_room_of {
    Stats warp[32], block;
};
using head_room = head_room_of<head_stats>;

__device__ __forceinline__ int head_num_slices() {
#if __CUDA_ARCH__ >= 900
    return (int)cooperative_groups::this_cluster().num_blocks();
#else
    return 1;
#endif
}

__device__ __forceinline__ int head_slice_index() {
#if __CUDA_ARCH__ >= 900
    return (int)cooperative_groups::this_cluster().block_rank();
#else
    return 0;
#endif
}

/* Slices start at multiples of `unit` elements: 16 bytes or more. */
__device__ __forceinline__ head_slice head_slice_of(int64_t V, int unit = 4) {
    const int64_t units = (int64_t)unit * head_num_slices(), size = (V + units - 1) / units * unit;
    const int64_t begin = head_slice_index() * size, end = begin + size;
    return {begin < V ? begin : V, end < V ? end : V};
}

/* The statistics of the row, for every thread of the cluster. A block must call head_leave
 * before it ends or merges again: others still read its part. */
template <class Stats>
__device__ __forceinline__ Stats head_merge(Stats s, head_room_of<Stats> *room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    s = head_merge_warp(s);
    if (lane == 0) room->warp[warp] = s;
    __syncthreads();
    s = head_merge_warp(lane < warps ? room->warp[lane] : Stats::none());
#if __CUDA_ARCH__ >= 900
    auto cluster = cooperative_groups::this_cluster();
    const int blocks = head_num_slices();
    if (blocks > 1) {
        if (threadIdx.x == 0) room->block = s;
        cluster.sync();
        s = head_merge_warp(lane < blocks ? *cluster.map_shared_rank(&room->block, lane)
                                          : Stats::none());
        cluster.barrier_arrive();
    }
#endif
    return s;
}

__device__ __forceinline__ void head_leave() {
#if __CUDA_ARCH__ >= 900
    if (head_num_slices() > 1) cooperative_groups::this_cluster().barrier_wait();
#endif
}

/* How a row is reduced: blocks and threads of the cluster. */
struct head_launch {
    int slices, threads;
};

static inline bool head_has_clusters() {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    return major >= 9;
}

/* A slice has up to 64 Ki elements of up to 512 threads, a function of V alone on a chip with
 * clusters. */
static inline head_launch head_launch_of(int64_t V) {
    if (V <= 2048) return {1, 128};
    if (V <= 16384) return {1, 256};
    if (!head_has_clusters()) return {1, 512};
    return {V <= 32768 ? 2 : V <= 65536 ? 4 : 8, 512};
}

/* Launches a kernel with a cluster of blocks for each of n rows. */
template <class... Formal, class... Actual>
static lg_status head_launch_rows(lg_context *ctx, const char *op, head_launch shape, int64_t n,
                                  size_t shared_bytes, void (*kernel)(Formal...), Actual... args) {
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)shape.slices;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(n * shape.slices));
    config.blockDim = dim3((unsigned)shape.threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = cuda_stream(ctx);
    config.attrs = &cluster;
    config.numAttrs = shape.slices > 1;
    return cuda_check(ctx, op, cudaLaunchKernelEx(&config, kernel, args...));
}

static inline lg_status head_check_temperature(lg_context *ctx, const char *op,
                                               double temperature) {
    if (temperature > 0) return LG_OK;
    return lg_fail(ctx, LG_EINVAL, "%s: temperature is %g, wanted above 0", op, temperature);
}

#endif
