/* Tensor-core pieces: 16-bit tiles in shared memory, their copies, fragments and products
 * (mma.sync, sm_80 and newer).
 *
 * A tile of R rows lies as panels of 64 columns: [panel][row][64] with the 16-byte chunk c of a
 * row at c ^ (row & 7), which is both free of bank conflicts for ldmatrix and the 128-byte swizzle
 * of wgmma. Tiles are zero outside of their source. */
#ifndef LIGER_MMA_CUH
#define LIGER_MMA_CUH

#include "common.cuh"

/* ---- shared memory ---- */

__device__ __forceinline__ uint32_t shared_address(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

template <int Rows>
__device__ __forceinline__ uint32_t tile_at(int row, int chunk) {
    return (uint32_t)((chunk >> 3) * (Rows * 128) + row * 128 + (((chunk ^ row) & 7) << 4));
}

/* 16 bytes, or zeros where `valid` is false: then `from` is not read. */
__device__ __forceinline__ void copy_async(uint32_t to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

/* Eight elements of which the first `n` exist, one by one. */
template <class T>
__device__ __forceinline__ void copy_elements(uint32_t to, const T *from, int n) {
    uint32_t word[4] = {};
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (e < n) word[e / 2] |= (uint32_t) * (const uint16_t *)(from + e) << e % 2 * 16;
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

/* Fills a tile of Rows rows and D columns with rows of d elements, `valid` of them, the rest
 * zeros. `thread` of Threads shares the work; rows that are not aligned to 16 bytes go element by
 * element and are there on return. */
template <int D, int Rows, int Threads, class T>
__device__ __forceinline__ void load_tile(uint32_t tile, int thread, const T *rows, int64_t stride,
                                          int valid, int d, bool aligned) {
    constexpr int chunks = D / 8, pass = Threads / chunks;
    if (!aligned) {
#pragma unroll 1
        for (int at = thread; at < chunks * Rows; at += Threads) {
            int r = at / chunks, c = at % chunks;
            copy_elements(tile + tile_at<Rows>(r, c), rows + r * stride + c * 8,
                          r < valid ? d - c * 8 : 0);
        }
    } else if constexpr (Threads % chunks == 0 && pass % 8 == 0) {
        /* A thread's rows are a multiple of 8 apart: their chunks lie in one column of the
         * swizzle. */
        int r = thread / chunks, c = thread % chunks;
        const T *from = rows + r * stride + c * 8;
        uint32_t to = tile + tile_at<Rows>(r, c);
        if (c * 8 >= d) valid = 0;
#pragma unroll
        for (int i = 0; i < (Rows + pass - 1) / pass; i++) {
            if (Rows % pass != 0 && r + i * pass >= Rows) break;
            copy_async(to + i * pass * 128, from, r + i * pass < valid);
            from += pass * stride;
        }
    } else {
#pragma unroll 4
        for (int at = thread; at < chunks * Rows; at += Threads) {
            int r = at / chunks, c = at % chunks;
            copy_async(tile + tile_at<Rows>(r, c), rows + r * stride + c * 8,
                       r < valid && c * 8 < d);
        }
    }
}

/* ---- fragments and products: m16n8k16 ---- */

__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* A: rows [row, row + 16) by columns [16 k, 16 k + 16) of a tile. */
template <int Rows>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, int row, int k, int lane) {
    load_matrices(a, tile + tile_at<Rows>(row + (lane & 15), 2 * k + (lane >> 4)));
}
/* B = tile^T: columns n are the tile's rows [row, row + 16), k its columns [16 k, 16 k + 16): two
 * fragments. */
template <int Rows>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, int row, int k, int lane) {
    load_matrices(
        b, tile + tile_at<Rows>(row + (lane & 7) + ((lane >> 4) << 3), 2 * k + ((lane >> 3) & 1)));
}
/* B = tile: k is its rows [row, row + 16), n its columns [16 n, 16 n + 16): two fragments. */
template <int Rows>
__device__ __forceinline__ void load_b_rows(uint32_t (&b)[4], uint32_t tile, int row, int n,
                                            int lane) {
    load_matrices_transposed(b, tile + tile_at<Rows>(row + (lane & 15), 2 * n + (lane >> 4)));
}

__device__ __forceinline__ void product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t pack(float low, float high, bf16) {
    __nv_bfloat162 x = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&x;
}
__device__ __forceinline__ uint32_t pack(float low, float high, f16) {
    __half2 x = __floats2half2_rn(low, high);
    return *(uint32_t *)&x;
}

/* The fragments of two neighbouring accumulators as the A of the next product. */
template <class T>
__device__ __forceinline__ void accumulators_as_a(uint32_t (&a)[4], const float (&c0)[4],
                                                  const float (&c1)[4]) {
    a[0] = pack(c0[0], c0[1], T());
    a[1] = pack(c0[2], c0[3], T());
    a[2] = pack(c1[0], c1[1], T());
    a[3] = pack(c1[2], c1[3], T());
}

/* A warp writes 16 rows of accumulators, times factor[half], through its own rows [row, row + 16)
 * of a tile that nobody else reads any more. `target(r)` is where row r of the 16 goes, or NULL. */
template <class T, int Tiles, int Rows, class F>
__device__ __forceinline__ void store_rows(const float (&c)[Tiles][4], const float (&factor)[2],
                                           uint32_t tile, int row, int d, bool aligned, int lane,
                                           F target) {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < Tiles; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            asm volatile(
                "st.shared.b32 [%0], %1;" ::"r"(tile + tile_at<Rows>(row + lane / 4 + 8 * half, n) +
                                                lane % 4 * 4),
                "r"(pack(c[n][2 * half] * factor[half], c[n][2 * half + 1] * factor[half], T()))
                : "memory");
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Tiles / 2; i++) {
        int at = lane + 32 * i, r = at / Tiles, chunk = at % Tiles;
        T *to = target(r);
        vec<T, 8> x;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(((uint32_t *)&x)[0]), "=r"(((uint32_t *)&x)[1]),
                       "=r"(((uint32_t *)&x)[2]), "=r"(((uint32_t *)&x)[3])
                     : "r"(tile + tile_at<Rows>(row + r, chunk))
                     : "memory");
        if (!to || chunk * 8 >= d) continue;
        if (aligned) {
            *(vec<T, 8> *)(to + chunk * 8) = x;
        } else {
#pragma unroll
            for (int e = 0; e < 8; e++)
                if (chunk * 8 + e < d) to[chunk * 8 + e] = x[e];
        }
    }
}

#endif
