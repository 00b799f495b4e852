/* The forward of the losses between two rows of 16-bit logits: what divergence_row computes for the
 * ops on logits, with reading, special functions and the exchange of sums overlapped.
 *
 * A cluster of blocks stays on the chip and walks over the rows; a block owns a slice of each.
 * Slices come to a ring in shared memory by bulk copies, so that rows to come arrive while one is
 * worked on. A turn on row r:
 *   A(r + 1)  the next row's maxima
 *   B(r)      e^(x - max) of student and teacher, kept in registers; their sums
 *   exchange  of the maxima of A(r + 1) and the sums of B(r) and C(r - 1): a block stores
 *             its own in all others, whose barrier counts the bytes (a barrier of the cluster would
 *             wait for every load in flight)
 *   C(r)      the loss's sums, from p and q: what is kept, divided by its sum
 * What lies past a row's end is -inf, which adds 0 everywhere. How a row is cut depends on V
 * alone, and the order of sums with it.
 */
#ifndef LIGER_DIVERGENCE_STREAM_CUH
#define LIGER_DIVERGENCE_STREAM_CUH

#include "divergence.cuh"

enum {
    STREAM_ROWS = 3,         /* in shared memory at once */
    STREAM_MOST_BLOCKS = 16, /* of a cluster; more than 8 where the chip has them */
    STREAM_LEAST = 4096      /* shorter rows leave most of a block idle */
};

/* What the blocks of a cluster tell each other in a turn. */
enum { OF_STUDENT = 0, OF_TEACHER };
struct alignas(16) stream_slot {
    float sum[2];  /* of B(r), student and teacher */
    uint32_t max;  /* of A(r + 1): the student's in the lower half, the teacher's in the upper */
    float hard;    /* of B(r), at temperature 1 */
    float loss[2]; /* of C(r - 1) */
    float unused[2];
};

/* The sums of two numbers over a warp: lane 0 has x's, lane 16 y's. Halves of the warp trade numbers
 * first, so that five exchanges do what takes ten. */
__device__ __forceinline__ float stream_sum_warp(float x, float y) {
    const bool upper = threadIdx.x & 16;
    float sum = (upper ? y : x) + __shfl_xor_sync(0xffffffffu, upper ? x : y, 16);
#pragma unroll
    for (int step = 8; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

/* The larger of each half of two words. */
__device__ __forceinline__ uint32_t stream_larger(uint32_t a, uint32_t b, bf16) {
    const __nv_bfloat162 m = __hmax2(reinterpret_cast<const __nv_bfloat162 &>(a),
                                     reinterpret_cast<const __nv_bfloat162 &>(b));
    return reinterpret_cast<const uint32_t &>(m);
}
__device__ __forceinline__ uint32_t stream_larger(uint32_t a, uint32_t b, f16) {
    const __half2 m =
        __hmax2(reinterpret_cast<const __half2 &>(a), reinterpret_cast<const __half2 &>(b));
    return reinterpret_cast<const uint32_t &>(m);
}

template <class T>
__device__ __forceinline__ piece<T> stream_larger(const piece<T> &a, const piece<T> &b) {
    piece<T> m;
#pragma unroll
    for (int i = 0; i < 4; i++) m.word[i] = stream_larger(a.word[i], b.word[i], T());
    return m;
}

/* The largest element of x in the lower half of a word, that of y in the upper one. */
template <class T>
__device__ __forceinline__ uint32_t stream_largest(const piece<T> &x, const piece<T> &y) {
    const uint32_t a = stream_larger(stream_larger(x.word[0], x.word[1], T()),
                                     stream_larger(x.word[2], x.word[3], T()), T()),
                   b = stream_larger(stream_larger(y.word[0], y.word[1], T()),
                                     stream_larger(y.word[2], y.word[3], T()), T());
    return stream_larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), T());
}

/* The bits of -inf. */
static __device__ __forceinline__ uint16_t stream_lowest(bf16) { return 0xff80; }
static __device__ __forceinline__ uint16_t stream_lowest(f16) { return 0xfc00; }

template <class T>
__device__ __forceinline__ uint32_t stream_max_warp(uint32_t max, T) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        max = stream_larger(max, __shfl_xor_sync(0xffffffffu, max, step), T());
    return max;
}

/* A half of a word as a number; the lowest finite one for -inf. */
template <class T>
__device__ __forceinline__ float stream_half(uint32_t word, bool upper, T) {
    const uint16_t bits = (uint16_t)(upper ? word >> 16 : word);
    return fmaxf(to_float(reinterpret_cast<const T &>(bits)), -FLT_MAX);
}

/* ---- rows on their way to shared memory ---- */

__device__ __forceinline__ unsigned stream_address(const void *shared) {
    return (unsigned)__cvta_generic_to_shared(shared);
}

/* A barrier that bytes arrive at. */
__device__ __forceinline__ void stream_init(uint64_t *barrier) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(stream_address(barrier)) : "memory");
}
__device__ __forceinline__ void stream_expect(uint64_t *barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(stream_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void stream_wait(uint64_t *barrier, unsigned phase) {
    unsigned done = 0;
    while (!done)
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(stream_address(barrier)), "r"(phase)
                     : "memory");
}
/* Both addresses and the size are multiples of 16. */
__device__ __forceinline__ void stream_copy(void *to, const void *from, unsigned bytes,
                                            uint64_t *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(stream_address(to)),
                 "l"(from), "r"(bytes), "r"(stream_address(barrier))
                 : "memory");
}

/* A slot to the same place in block `rank` of the cluster, whose barrier hears of its 32 bytes. */
__device__ __forceinline__ void stream_tell(const stream_slot *slot, const stream_slot &x,
                                            uint64_t *barrier, int rank) {
    unsigned to, heard;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(to)
                 : "r"(stream_address(slot)), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(heard)
                 : "r"(stream_address(barrier)), "r"(rank));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
                 "f"(x.sum[0]), "f"(x.sum[1]), "f"(__uint_as_float(x.max)), "f"(x.hard), "r"(heard)
                 : "memory");
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(to + 16),
                 "f"(x.loss[0]), "f"(x.loss[1]), "f"(0.0f), "f"(0.0f), "r"(heard)
                 : "memory");
}

/* Elements v to v + 7 of a row, -inf from `end` on. */
template <class T>
__device__ __forceinline__ piece<T> stream_gather(const T *z, int64_t v, int64_t end) {
    float x[8];
#pragma unroll
    for (int e = 0; e < 8; e++) x[e] = v + e < end ? to_float(z[v + e]) : -INFINITY;
    return pack_piece<T>(x);
}

/* ---- the kernel ---- */

/* Adds an element pair's part. p is e^(x - max) of the student, q of the teacher; p and level q are
 * the probabilities times one number. d is log2(q / p). The sums are times that number too (in the
 * forward KL times q's), and in bits but for tvd. */
template <int Kind>
__device__ __forceinline__ void stream_add(float (&sum)[2], float p, float q, float level, float d,
                                           float beta) {
    if constexpr (Kind == PAIR_TVD) {
        const float more = fmaf(-level, q, p);
        sum[0] += fabsf(more);
        if (more != 0) sum[1] += copysignf(p, more);
    }
    if constexpr (Kind == PAIR_FORWARD)
        if (q > 0) sum[0] = fmaf(q, d, sum[0]);
    if constexpr (Kind == PAIR_REVERSE)
        if (p > 0) sum[0] = fmaf(-p, d, sum[0]);
    if constexpr (Kind == PAIR_JSD) {
        /* With l = log2(m / p): beta q log2(q / m) + (1 - beta) p log2(p / m) = beta q d - m l. */
        const float near = fminf(fmaxf(d, -100.0f), 100.0f);
        const float l = pair_log2(fmaf(beta, head_exp2(near) - 1, 1));
        const float of_q = level * q, m = fmaf(beta, of_q - p, p);
        sum[0] += fmaf(-l, m, beta * near * of_q);
        sum[1] = fmaf(-p, l, sum[1]);
    }
}

/* THREADS threads with PIECES pieces of 16 bytes of each row. */
template <int Kind, class T, int THREADS, int PIECES>
static __global__ void __launch_bounds__(THREADS, 1)
    divergence_stream(const __grid_constant__ pair_args<T, T, head_plain> a) {
#if __CUDA_ARCH__ >= 900
    constexpr int WARPS = THREADS / 32;
    constexpr bool RATIO = Kind != PAIR_TVD; /* C wants log2(q / p) */
    constexpr bool EARLY = Kind != PAIR_JSD; /* B is the last to read the logits */
    constexpr int AHEAD = EARLY ? STREAM_ROWS : STREAM_ROWS - 1; /* what a turn fetches */
    extern __shared__ float4 memory[]; /* pieces of [STREAM_ROWS][student, teacher][units] */
    __shared__ stream_slot slots[2][STREAM_MOST_BLOCKS];
    __shared__ uint64_t arrived[STREAM_ROWS], heard[2]; /* rows; the slots of a turn */
    /* Of the block's warps, for turns of either parity: one's are read while the next's come. */
    __shared__ float sums[2][4][WARPS], hards[2][WARPS];
    __shared__ uint32_t maxima[2][WARPS];
    const auto cluster = cooperative_groups::this_cluster();
    const int blocks = (int)cluster.num_blocks(), rank = (int)cluster.block_rank();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const head_slice slice = head_slice_of(a.V, 8);
    const int64_t first = blockIdx.x / blocks, step = gridDim.x / blocks;
    const int units = (int)((a.V + 8 * blocks - 1) / (8 * blocks)); /* pieces of a slice */
    const bool finisher = rank == 0 && threadIdx.x == THREADS - 32;
    const bool cool = a.hard && a.scale != 1;
    const float scale2 = a.scale * HEAD_LOG2_E;
    const uint32_t lowest = (uint32_t)stream_lowest(T()) * 0x10001u;
    const auto place = [&](int stage, int row, int unit) {
        return (piece<T> *)memory + ((stage * 2 + row) * units + unit);
    };
    const auto held = [&](int stage, int row, int k) {
        const int unit = k * THREADS + (int)threadIdx.x;
        return unit < units ? *place(stage, row, unit) : piece<T>{lowest, lowest, lowest, lowest};
    };

    const auto target_of = [&](int64_t n) { return a.target && n < a.N ? a.target[n] : 0; };
    const auto takes_part = [&](int64_t n, int32_t t) {
        return n < a.N && (!a.target || pair_target_counts(a, n, t, a.hard != NULL, finisher));
    };
    /* Rows at multiples of 16 bytes are copied in bulk, others by each thread's own. */
    const auto fetch = [&](int64_t n, int stage) {
        const T *s = a.student + a.student_rows.offset(n),
                *t = a.teacher + a.teacher_rows.offset(n);
        if (a.vector) {
            const unsigned bytes = (unsigned)(slice.end - slice.begin) * 2;
            if (threadIdx.x > 0) return;
            stream_expect(&arrived[stage], 2 * bytes);
            if (bytes == 0) return;
            stream_copy(place(stage, 0, 0), s + slice.begin, bytes, &arrived[stage]);
            stream_copy(place(stage, 1, 0), t + slice.begin, bytes, &arrived[stage]);
            return;
        }
#pragma unroll 1
        for (int unit = threadIdx.x; unit < units; unit += THREADS) {
            *place(stage, 0, unit) = stream_gather(s, slice.begin + unit * 8, slice.end);
            *place(stage, 1, unit) = stream_gather(t, slice.begin + unit * 8, slice.end);
        }
    };

    if (threadIdx.x == 0) {
        for (int i = 0; i < STREAM_ROWS; i++) stream_init(&arrived[i]);
        stream_init(&heard[0]), stream_init(&heard[1]);
    }
#pragma unroll 1
    for (int unit = threadIdx.x; unit < units; unit += THREADS) { /* what no copy reaches */
        if (slice.begin + unit * 8 + 8 <= slice.end) continue;
        for (int stage = 0; stage < STREAM_ROWS; stage++)
            *place(stage, 0, unit) = *place(stage, 1, unit) = {lowest, lowest, lowest, lowest};
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    cluster.sync();

    unsigned kept = 0, phases = 0; /* bit i of kept: row n + i step takes part */
#pragma unroll 1
    for (int i = 0; i < AHEAD; i++) {
        const int64_t n = first + i * step;
        if (!takes_part(n, target_of(n))) continue;
        kept |= 1u << i;
        fetch(n, i);
    }
    int32_t target = target_of(first), target_ahead = target_of(first + AHEAD * step);

    /* Of the block's row to come, for the exchange of a turn; -inf where there is none. */
    const auto find_maxima = [&](int turn, int stage, bool any) {
        uint32_t max = lowest;
        if (any) {
            if (a.vector) stream_wait(&arrived[stage], phases >> stage & 1);
            phases ^= 1u << stage;
            piece<T> x[PIECES], y[PIECES];
#pragma unroll
            for (int k = 0; k < PIECES; k++) x[k] = held(stage, 0, k), y[k] = held(stage, 1, k);
            asm volatile("" ::: "memory"); /* all on their way before the first is used */
#pragma unroll
            for (int k = 1; k < PIECES; k++)
                x[0] = stream_larger(x[0], x[k]), y[0] = stream_larger(y[0], y[k]);
            max = stream_largest(x[0], y[0]);
        }
        max = stream_max_warp(max, T());
        if (lane == 0) maxima[turn & 1][warp] = max;
    };
    /* Tells the other blocks this one's sums and maxima, and gives the sums of student and teacher and
     * the maxima of all; the losses' sums wait in the slots. `meanwhile` is for what may be done once
     * all of the block have come. */
    const auto exchange = [&](int turn, float sum, float teacher_sum, float hard, auto meanwhile) {
        const int parity = turn & 1;
        sum = stream_sum_warp(sum, teacher_sum);
        if (lane % 16 == 0) sums[parity][lane / 16][warp] = sum;
        if (cool) {
            hard = warp_reduce(hard, Sum());
            if (lane == 0) hards[parity][warp] = hard;
        }
        __syncthreads();
        if (warp == WARPS - 1) {
            float x = 0;
#pragma unroll
            for (int j = 0; j < WARPS; j += 8) x += sums[parity][lane / 8][j + lane % 8];
#pragma unroll
            for (int step = 4; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
            stream_slot block;
            block.max = stream_max_warp(maxima[parity][lane % WARPS], T());
            block.sum[OF_STUDENT] = __shfl_sync(0xffffffffu, x, 0);
            block.sum[OF_TEACHER] = __shfl_sync(0xffffffffu, x, 8);
            block.loss[0] = __shfl_sync(0xffffffffu, x, 16);
            block.loss[1] = __shfl_sync(0xffffffffu, x, 24);
            block.hard = cool ? warp_reduce(lane < WARPS ? hards[parity][lane] : 0, Sum()) : 0;
            if (lane == 0) stream_expect(&heard[parity], (unsigned)blocks * sizeof(stream_slot));
            if (lane < blocks) stream_tell(&slots[parity][rank], block, &heard[parity], lane);
        }
        meanwhile();
        stream_wait(&heard[parity], turn >> 1 & 1);
        stream_slot all = {{0, 0}, lowest};
#pragma unroll 8
        for (int b = 0; b < blocks; b++) {
            const float4 other = *(const float4 *)&slots[parity][b];
            all.sum[OF_STUDENT] += other.x, all.sum[OF_TEACHER] += other.y;
            all.max = stream_larger(all.max, __float_as_uint(other.z), T());
        }
        return all;
    };

    if (lane % 16 == 0) sums[0][2 + lane / 16][warp] = sums[1][2 + lane / 16][warp] = 0;
    find_maxima(0, 0, kept & 1);
    stream_slot all = exchange(0, 0, 0, 0, [] {});

    pair_state before = {0, 0, 0, 0}; /* the finisher's, of the row before */
    float hard_before = 0, unit = 0;
    bool kept_before = false;
    int stage = 0, turn = 1;
    for (int64_t n = first;; n += step) {
        const bool taken = kept & 1;
        const int next = stage + 1 < STREAM_ROWS ? stage + 1 : 0;
        const float max = stream_half(all.max, false, T()),
                    teacher_max = stream_half(all.max, true, T());
        float chosen = 0; /* the target's logit, on its way */
        if (finisher && taken && a.hard)
            chosen = to_float(a.student[a.student_rows.offset(n) + target]);
        const int32_t target_next = finisher ? target_of(n + step) : 0;

        find_maxima(turn, next, kept & 2);
        /* B: p and q times their sums; one of them and d less the sums' part for KL. */
        float p[PIECES][8], q[PIECES][8];
        float sum = 0, teacher_sum = 0, hard_sum = 0;
        if (taken) {
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                const piece<T> x = held(stage, 0, k), y = held(stage, 1, k);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    const float u = head_exp2((x[e] - max) * scale2),
                                w = head_exp2((y[e] - teacher_max) * scale2);
                    sum += u, teacher_sum += w;
                    p[k][e] = Kind == PAIR_FORWARD ? (y[e] - x[e]) * scale2 : u;
                    q[k][e] = Kind == PAIR_REVERSE ? (y[e] - x[e]) * scale2 : w;
                }
            }
            if (cool)
#pragma unroll 1
                for (int k = 0; k < PIECES; k++) {
                    const piece<T> x = held(stage, 0, k);
#pragma unroll
                    for (int e = 0; e < 8; e++) hard_sum += head_exp(x[e] - max);
                }
        }

        const int64_t ahead = n + AHEAD * step;
        const bool kept_ahead = takes_part(ahead, target_ahead);
        kept |= (unsigned)kept_ahead << AHEAD;
        target_ahead = target_of(ahead + step);
        all = exchange(turn, sum, teacher_sum, hard_sum, [&] {
            if (kept_ahead) fetch(ahead, EARLY ? stage : stage > 0 ? stage - 1 : STREAM_ROWS - 1);
        });

        if (finisher) {
            float loss[2] = {0, 0}, hard = 0;
            for (int b = 0; b < blocks; b++) {
                loss[0] += slots[turn & 1][b].loss[0];
                loss[1] += slots[turn & 1][b].loss[1];
                hard += slots[turn & 1][b].hard;
            }
            if (n > first) {
                const int64_t row = n - step;
                loss[0] *= unit, loss[1] *= unit;
                before.pair = Kind == PAIR_FORWARD ? 0 : Kind == PAIR_REVERSE ? loss[0] : loss[1];
                a.soft[row] = !kept_before ? 0 : Kind == PAIR_TVD ? loss[0] / 2 : loss[0];
                if (a.hard) a.hard[row] = hard_before;
                a.state[row] = before;
            }
            before = {0, 0, 0, 0}, hard_before = 0, unit = 0, kept_before = taken;
            if (taken) {
                const float log_sum = logf(all.sum[OF_STUDENT]);
                unit = (Kind == PAIR_TVD ? 1 : HEAD_LN_2) /
                       all.sum[Kind == PAIR_FORWARD ? OF_TEACHER : OF_STUDENT];
                before.student = fmaf(max, a.scale, log_sum);
                before.teacher = fmaf(teacher_max, a.scale, logf(all.sum[OF_TEACHER]));
                if (a.hard) {
                    const float log_hard = cool ? logf(hard) : log_sum;
                    hard_before = log_hard - (chosen - max);
                    before.hard = max + log_hard;
                }
            }
        }
        if (n >= a.N) break;

        float loss[2] = {0, 0};
        if (taken) {
            const float level = all.sum[OF_STUDENT] / all.sum[OF_TEACHER];
            const float shift = RATIO ? fmaf(max - teacher_max, scale2, log2f(level)) : 0;
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                piece<T> x = {}, y = {};
                if (!EARLY) x = held(stage, 0, k), y = held(stage, 1, k);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    float d = 0;
                    if constexpr (Kind == PAIR_JSD) d = fmaf(y[e] - x[e], scale2, shift);
                    if constexpr (Kind == PAIR_FORWARD) d = p[k][e] + shift;
                    if constexpr (Kind == PAIR_REVERSE) d = q[k][e] + shift;
                    stream_add<Kind>(loss, p[k][e], q[k][e], level, d, a.beta);
                }
            }
        }
        const float of_warp = stream_sum_warp(loss[0], loss[1]);
        if (lane % 16 == 0) sums[(turn + 1) & 1][2 + lane / 16][warp] = of_warp;
        kept >>= 1, stage = next, turn++, target = target_next;
    }
#endif
}

/* ---- the host's side ---- */

/* A launch on rows in clusters of `blocks`; *done stays false where the chip has none. */
template <int Kind, class T, int THREADS, int PIECES>
static lg_status stream_launch_of(lg_context *ctx, const char *op, int blocks, bool *done,
                                  const pair_args<T, T, head_plain> &args) {
    const auto kernel = divergence_stream<Kind, T, THREADS, PIECES>;
    const int bytes = (int)(STREAM_ROWS * 2 * ((args.V + 8 * blocks - 1) / (8 * blocks)) * 16);
    int clusters = 0;
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)blocks;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = cuda_stream(ctx);
    config.attrs = &cluster;
    config.numAttrs = 1;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ||
        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) || clusters == 0) {
        cudaGetLastError();
        return LG_OK;
    }
    const int64_t n = args.N < clusters ? args.N : clusters;
    config.gridDim = dim3((unsigned)(n * blocks));
    *done = true;
    return cuda_check(ctx, op, cudaLaunchKernelEx(&config, kernel, args));
}

/* 4 or 5 pieces a thread are what registers hold of p and q, MOST elements what shared memory holds
 * of a slice. */
template <int Kind, class T>
static lg_status stream_launch_rows(lg_context *ctx, const char *op, bool *done,
                                    const pair_args<T, T, head_plain> &args) {
    constexpr int THREADS = 512, FOUR = 4 * THREADS * 8;
    constexpr int64_t MOST = 224 * 1024 / (STREAM_ROWS * 2 * sizeof(T)) / 8 * 8;
    static_assert(MOST > FOUR && MOST <= 5 * THREADS * 8, "a slice of 4 or 5 pieces");
    int blocks = 1;
    while (blocks < 8 && args.V > FOUR * blocks) blocks *= 2;
    if (args.V > MOST * blocks) blocks *= 2;
    if (args.V <= STREAM_LEAST || args.V > MOST * blocks) return LG_OK;
    if (args.V <= FOUR * blocks)
        return stream_launch_of<Kind, T, THREADS, 4>(ctx, op, blocks, done, args);
    return stream_launch_of<Kind, T, THREADS, 5>(ctx, op, blocks, done, args);
}

#endif
