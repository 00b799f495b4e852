/* 16 bytes of a tensor, kept as four words: elements of 16 bits that live across a branch or a
 * reduction would take a register each, and half as many threads would fit.
 */
#ifndef LIGER_PIECE_CUH
#define LIGER_PIECE_CUH

#include "common.cuh"

template <class T>
struct piece {
    static constexpr int N = 16 / sizeof(T);
    uint32_t word[4];

    __device__ __forceinline__ T at(int e) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(word[e]);
        const uint16_t bits = (uint16_t)(word[e / 2] >> e % 2 * 16);
        return reinterpret_cast<const T &>(bits);
    }
    __device__ __forceinline__ float operator[](int e) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(word[e]);
        return to_float(at(e));
    }
};

template <>
__device__ __forceinline__ float piece<bf16>::operator[](int e) const {
    return __uint_as_float(e % 2 ? word[e / 2] & 0xffff0000u : word[e / 2] << 16);
}

/* Two values rounded to T, in one word. */
__device__ __forceinline__ uint32_t pack_pair(float a, float b, bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);
    return reinterpret_cast<const uint32_t &>(pair);
}
__device__ __forceinline__ uint32_t pack_pair(float a, float b, f16) {
    const __half2 pair = __floats2half2_rn(a, b);
    return reinterpret_cast<const uint32_t &>(pair);
}

template <class T>
__device__ __forceinline__ piece<T> pack_piece(const float *x) {
    piece<T> p;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4)
            p.word[i] = __float_as_uint(x[i]);
        else
            p.word[i] = pack_pair(x[2 * i], x[2 * i + 1], T());
    }
    return p;
}

/* `count` of the elements at x, then zeros: in one access if `aligned` and all are there. */
template <class T>
__device__ __forceinline__ piece<T> load_piece(const T *x, int64_t count, bool aligned) {
    piece<T> p = {};
    if (aligned && count >= p.N) {
        const uint4 words = *(const uint4 *)x;
        p.word[0] = words.x, p.word[1] = words.y, p.word[2] = words.z, p.word[3] = words.w;
    } else if (count > 0) {
#pragma unroll
        for (int e = 0; e < p.N; e++) {
            if (e >= count) continue;
            if constexpr (sizeof(T) == 4)
                p.word[e] = __float_as_uint(x[e]);
            else
                p.word[e / 2] |= (uint32_t)((const uint16_t *)x)[e] << e % 2 * 16;
        }
    }
    return p;
}

template <class T>
__device__ __forceinline__ void store_piece(T *y, const piece<T> &p, int64_t count, bool aligned) {
    if (aligned && count >= p.N) {
        *(uint4 *)y = make_uint4(p.word[0], p.word[1], p.word[2], p.word[3]);
    } else if (count > 0) {
#pragma unroll
        for (int e = 0; e < p.N; e++)
            if (e < count) y[e] = p.at(e);
    }
}

/* What was unpacked before is unpacked again after, not kept. */
template <class T>
__device__ __forceinline__ void repack(piece<T> &p) {
    asm volatile("" : "+r"(p.word[0]), "+r"(p.word[1]), "+r"(p.word[2]), "+r"(p.word[3]));
}

#endif
