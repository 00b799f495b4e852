/* Draws one id a row. A block owns a row z (V): it reads it once for the largest logit, once for
 * the weights w = e^(z - max) and their sum, up to six times more for each cut, and writes an id
 * and z[id] - max - ln(sum of w).
 *
 * The row is walked in segments of SEGMENT ids, a warp a segment, in doubles. A cut leaves a
 * boundary, the last candidate in falling order that it keeps, found by radix select over the
 * logits' bits: exact, without sorting, of equal values the lower id first. The draw adds the
 * segments in id order and walks the one where the running weight reaches u * total.
 *
 * Of fp32 logits a second kernel makes the log-probability by the heads' own reduction (head_row.cuh),
 * so that it is the one that linear_logprob gives, bit for bit.
 */
#include <curand_philox4x32_x.h>

#include "element.cuh"
#include "head_row.cuh"
#include "op/sample.h"

enum {
    THREADS = 1024,
    WARPS = THREADS / 32,
    SEGMENT = 512,
    BINS = 2048,
    MAX_V = 1 << 20,
    MAX_SEGMENTS = MAX_V / SEGMENT
};

/* A weight, at most 1, as a whole number: MAX_V of them fit in 64 bits, and their sum does not
 * depend on the order. */
#define FIXED_ONE 0x1p42f

typedef unsigned long long u64;

struct cuts {
    int top_k; /* 0: off */
    double top_p, min_p;
};

struct shared_state {
    double segment[MAX_SEGMENTS];
    u64 bin[BINS], warp_sum[WARPS];
    u64 found_before, found_at;
    int found_bin, id;
};

template <class T>
struct logits {
    const T *z;
    int V;
};

/* ---- a row ---- */

template <class T>
__device__ __forceinline__ int num_segments(const logits<T> &row) {
    return (row.V + SEGMENT - 1) / SEGMENT;
}

/* f(id, logit) of this lane's part of segment s, ids ascending; past the row's end the logit is
 * -inf. A lane reads single elements, the warp whole lines: the arithmetic outweighs the loads, and
 * rows may start anywhere. */
template <class T, class F>
__device__ __forceinline__ void visit_segment(const logits<T> &row, int s, F f) {
    const int first = s * SEGMENT + threadIdx.x % 32;
    T v[SEGMENT / 32];
#pragma unroll
    for (int k = 0; k < SEGMENT / 32; k++)
        v[k] = first + 32 * k < row.V ? row.z[first + 32 * k] : from_float<T>(-INFINITY);
#pragma unroll
    for (int k = 0; k < SEGMENT / 32; k++) f(first + 32 * k, to_float(v[k]));
}

template <class T, class F>
__device__ __forceinline__ void visit(const logits<T> &row, F f) {
    for (int s = threadIdx.x / 32; s < num_segments(row); s += WARPS) visit_segment(row, s, f);
}

/* ---- running weights ---- */

/* Sums of this lane and those before it. */
template <class V>
__device__ __forceinline__ V warp_scan(V x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const V before = __shfl_up_sync(0xffffffffu, x, step);
        if ((int)threadIdx.x % 32 >= step) x += before;
    }
    return x;
}

/* Sets segment[s] to the sum of its weights; all threads get the total. */
template <class T, class F>
__device__ double weigh(const logits<T> &row, double *segment, F weight) {
    const int lane = threadIdx.x % 32, n = num_segments(row);
    __syncthreads();
    for (int s = threadIdx.x / 32; s < n; s += WARPS) {
        double sum = 0;
        visit_segment(row, s, [&](int id, float z) { sum += weight(id, z); });
        sum = warp_all(sum, Add());
        if (lane == 0) segment[s] = sum;
    }
    __syncthreads();
    double total = 0;
    for (int s = lane; s < n; s += 32) total += segment[s];
    return warp_all(total, Add());
}

/* Where a running sum over w(0), w(1), ... first reaches `target`; else the last place with any
 * weight, which catches what rounding leaves. `running` is moved to the sum before that place. For
 * one warp. */
template <class F>
__device__ int reach(int n, double target, double *running, F w) {
    const int lane = threadIdx.x % 32;
    int last = 0;
    double before_last = *running;
    for (int i0 = 0; i0 < n; i0 += 32) {
        const double x = i0 + lane < n ? w(i0 + lane) : 0, sum = *running + warp_scan(x),
                     before = sum - x;
        const unsigned any = __ballot_sync(0xffffffffu, x > 0),
                       hit = __ballot_sync(0xffffffffu, x > 0 && sum >= target);
        if (any) {
            const int at = hit ? __ffs(hit) - 1 : 31 - __clz(any);
            last = i0 + at;
            before_last = __shfl_sync(0xffffffffu, before, at);
            if (hit) break;
        }
        *running = __shfl_sync(0xffffffffu, sum, 31);
    }
    *running = before_last;
    return last;
}

/* The first id whose running weight reaches `target`, after weigh() with the same weights. All
 * threads get it. */
template <class T, class F>
__device__ int draw(const logits<T> &row, shared_state *shared, double target, F weight) {
    if (threadIdx.x < 32) {
        double running = 0;
        const int s =
            reach(num_segments(row), target, &running, [&](int i) { return shared->segment[i]; });
        const int first = s * SEGMENT, n = row.V - first < SEGMENT ? row.V - first : SEGMENT;
        const int at = reach(n, target, &running, [&](int i) {
            return (double)weight(first + i, to_float(row.z[first + i]));
        });
        if (threadIdx.x == 0) shared->id = first + at;
    }
    __syncthreads();
    return shared->id;
}

/* ---- falling order ---- */

/* Bits that order as the logits do; -0 and 0 are equal. */
__device__ __forceinline__ uint32_t ordered(float z) {
    const uint32_t bits = __float_as_uint(z + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float unordered(uint32_t key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

/* *sum += x, in shared memory, of whole numbers: 64 bits in two halves, for the hardware adds 32. */
__device__ __forceinline__ void add_to(uint32_t *sum, uint32_t x) { atomicAdd(sum, x); }
__device__ __forceinline__ void add_to(u64 *sum, u64 x) {
    uint32_t *half = (uint32_t *)sum;
    const uint32_t low = (uint32_t)x, before = atomicAdd(&half[0], low);
    const uint32_t high = (uint32_t)(x >> 32) + (before + low < low);
    if (high) atomicAdd(&half[1], high);
}

/* The last key of the shortest prefix in falling order whose weights reach what was wanted. */
template <class W>
struct boundary {
    uint32_t key;
    W before, at; /* weight of the larger keys, and of all candidates with this one */
};

/* `each(f)` calls f(key, weight) for this thread's candidates, whose weights together are at least
 * `want` > 0. Three passes, over 11, 11 and 10 bits; sums of whole numbers, so the order of the
 * atomics does not matter. */
template <class W, class Each>
__device__ boundary<W> select(shared_state *shared, W want, Each each) {
    constexpr int Own = BINS / THREADS;
    W *bin = (W *)shared->bin, *warp_sum = (W *)shared->warp_sum;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    boundary<W> b = {0, 0, 0};
    for (int pass = 0; pass < 3; pass++) {
        const int bits = pass < 2 ? 11 : 10, shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
        __syncthreads();
        for (int i = threadIdx.x; i < BINS; i += THREADS) bin[i] = 0;
        __syncthreads();
        each([&](uint32_t key, W weight) {
            if ((key ^ b.key) >> shift >> bits == 0)
                add_to(&bin[key >> shift & ((1u << bits) - 1)], weight);
        });
        __syncthreads();
        /* A thread owns Own bins; those of larger keys belong to the threads before it. */
        const int top = BINS - 1 - (int)threadIdx.x * Own;
        W sum = 0;
#pragma unroll
        for (int i = 0; i < Own; i++) sum += bin[top - i];
        W running = warp_scan(sum);
        if (lane == 31) warp_sum[warp] = running;
        __syncthreads();
        running += b.before - sum;
        for (int i = 0; i < warp; i++) running += warp_sum[i];
#pragma unroll
        for (int i = 0; i < Own; i++) {
            const W weight = bin[top - i];
            if (running < want && want <= running + weight) {
                shared->found_bin = top - i;
                shared->found_before = running;
                shared->found_at = weight;
            }
            running += weight;
        }
        __syncthreads();
        b.key |= (uint32_t)shared->found_bin << shift;
        b.before = (W)shared->found_before;
        b.at = (W)shared->found_at;
    }
    return b;
}

/* The last candidate that a cut keeps. */
struct candidate {
    float z;
    int id;
};

/* The boundary at the `need`-th of `have` candidates of equal logits z, which stand in id order. */
template <class T>
__device__ candidate among_equals(const logits<T> &row, shared_state *shared, float z, u64 need,
                                  u64 have) {
    if (need >= have) return {z, row.V};
    auto is_equal = [=](int, float x) { return x == z ? 1.0 : 0.0; };
    weigh(row, shared->segment, is_equal);
    return {z, draw(row, shared, (double)need, is_equal)};
}

/* ---- the cuts ---- */

__device__ __forceinline__ u64 fixed(float weight) { return __float2ull_rn(weight * FIXED_ONE); }

/* The boundary of top_k and top_p. `own` is the key of this thread's largest logit: the k-th
 * largest of all those keys is one that k candidates reach, and spares the passes most of the row.
 * `total` is the sum of all weights. Without top_k, top_p passes over weights under half of
 * (1 - top_p) / V: all of them together do not weigh 1 - top_p. */
template <class T, class F>
__device__ candidate cut(const logits<T> &row, shared_state *shared, const cuts &k, uint32_t own,
                         u64 total, F weight) {
    candidate last = {-INFINITY, row.V};
    uint32_t least = 0;
    if (k.top_k) {
        const uint32_t want = (uint32_t)k.top_k;
        if (want <= THREADS)
            least = select<uint32_t>(shared, want, [&](auto f) { f(own, 1u); }).key;
        const boundary<uint32_t> b = select<uint32_t>(shared, want, [&](auto f) {
            visit(row, [&](int, float z) {
                const uint32_t key = ordered(z);
                if (key >= least) f(key, 1u);
            });
        });
        least = b.key;
        last = among_equals(row, shared, unordered(b.key), want - b.before, b.at);
        if (k.top_p >= 1) return last;
        total = 0;
        visit(row, [&](int, float z) { total += ordered(z) > b.key ? fixed(weight(z)) : 0; });
        total = block_all(total, Add(), (u64)0) + (want - b.before) * fixed(weight(last.z));
    }
    const u64 reach_at = (u64)ceil(k.top_p * (double)total);
    const u64 want = reach_at < 1 ? 1 : reach_at > total ? total : reach_at;
    const u64 light = k.top_k ? 0 : (u64)(0.5 * (1 - k.top_p) * (double)total / row.V);
    const boundary<u64> b = select<u64>(shared, want, [&](auto f) {
        visit(row, [&](int, float z) {
            const uint32_t key = ordered(z);
            const u64 w = fixed(weight(z));
            if (key >= least && w > light) f(key, w);
        });
    });
    const float z = unordered(b.key);
    const u64 one = fixed(weight(z));
    return among_equals(row, shared, z, (want - b.before + one - 1) / one, b.at / one);
}

/* ---- the op ---- */

/* Word 4 * position of the Philox stream (seed, sequence), in (0, 1). */
__device__ __forceinline__ double uniform_of(int64_t seed, int64_t sequence, int32_t position) {
    const uint4 counter =
        make_uint4((uint32_t)position, 0, (uint32_t)sequence, (uint32_t)((uint64_t)sequence >> 32));
    const uint2 key = make_uint2((uint32_t)seed, (uint32_t)((uint64_t)seed >> 32));
    return curand_Philox4x32_10(counter, key).x * 0x1p-32 + 0x1p-33;
}

template <class T>
__device__ int sample_row(const logits<T> &row, shared_state *shared, const cuts &k, double u,
                          double *logp) {
    float own = -INFINITY;
    int own_id = 0;
    bool bad = false;
    visit(row, [&](int id, float z) {
        bad |= !(z < INFINITY);
        if (z > own) own = z, own_id = id;
    });
    if (__syncthreads_or(bad)) return -1;
    /* The largest logit, of equal ones the lowest id. */
    const u64 best = block_all((u64)ordered(own) << 32 | (uint32_t)~own_id, Larger(), (u64)0);
    const float max = unordered((uint32_t)(best >> 32));
    if (max == -INFINITY) return -1;
    auto weight = [=](float z) { return expf(z - max); };
    u64 fixed_total = 0;
    double total = weigh(row, shared->segment, [&](int, float z) {
        const float w = weight(z);
        fixed_total += k.top_p < 1 ? fixed(w) : 0;
        return w;
    });
    const double lse = (double)max + log(total);
    int id = (int)~(uint32_t)best;
    if (k.top_k != 1 && k.top_p > 0) {
        candidate last = {-INFINITY, row.V};
        if (k.top_k || k.top_p < 1) {
            fixed_total = block_all(fixed_total, Add(), (u64)0);
            last = cut(row, shared, k, ordered(own), fixed_total, weight);
        }
        const double least = k.min_p > 0 ? (double)max + log(k.min_p) : -INFINITY;
        auto kept = [=](int v, float z) {
            const bool keep = (z > last.z || (z == last.z && v <= last.id)) && z >= least;
            return keep ? weight(z) : 0.0f;
        };
        if (k.top_k || k.top_p < 1 || k.min_p > 0) total = weigh(row, shared->segment, kept);
        id = draw(row, shared, u * total, kept);
    }
    *logp = (double)to_float(row.z[id]) - lse;
    return id;
}

template <class T>
__global__ void __launch_bounds__(THREADS)
    sample_rows(const T *z, int64_t stride, int V, const int64_t *sequence, const int32_t *position,
                int64_t seed, cuts k, int32_t *id, float *logp, device_error *error) {
    __shared__ shared_state shared;
    const int64_t b = blockIdx.x;
    const logits<T> row = {z + b * stride, V};
    if (position[b] < 0 && threadIdx.x == 0)
        note_error(error, ERROR_POSITION, b, position[b], (long long)INT32_MAX + 1);
    double p = NAN;
    const int drawn = sample_row(row, &shared, k, uniform_of(seed, sequence[b], position[b]), &p);
    if (threadIdx.x != 0) return;
    if (drawn < 0) note_error(error, ERROR_LOGIT, b, 0, 0);
    id[b] = drawn < 0 ? 0 : drawn;
    logp[b] = (float)p;
}

/* logp[b] = z[b,id[b]] - lse[b], a cluster a row. */
static __global__ void __launch_bounds__(HEAD_MOST_THREADS)
    sample_logp(const float *z, int64_t stride, int64_t V, bool vector, const int32_t *id,
                float *logp) {
    __shared__ head_room room;
    const int64_t b = blockIdx.x / head_num_slices();
    const float *row = z + b * stride;
    const head_stats s =
        head_merge(head_reduce_thread(row, head_slice_of(V), vector, head_plain(), NULL), &room);
    if (head_slice_index() == 0 && threadIdx.x == 0) logp[b] = (row[id[b]] - s.max) - logf(s.sum);
    head_leave();
}

extern "C" lg_status cuda_sample(lg_context *ctx, const lg_tensor *z, const lg_tensor *sequence,
                                 const lg_tensor *position, int64_t seed, int64_t top_k,
                                 double top_p, double min_p, lg_tensor *id, lg_tensor *logp) {
    if (!(top_p >= 0 && top_p <= 1))
        return lg_fail(ctx, LG_EINVAL, "sample: top_p is %g, wanted [0, 1]", top_p);
    if (!(min_p >= 0 && min_p <= 1))
        return lg_fail(ctx, LG_EINVAL, "sample: min_p is %g, wanted [0, 1]", min_p);
    const int64_t B = z->shape[0], V = z->shape[1];
    if (V > MAX_V)
        return lg_fail(ctx, LG_EUNSUPPORTED, "sample: V is %lld, wanted at most %d on cuda",
                       (long long)V, MAX_V);
    return dispatch_float(ctx, "sample", z->dtype, [&](auto t) {
        using T = decltype(t);
        if (B == 0) return LG_OK;
        const cuts k = {(int)(top_k > 0 && top_k < V ? top_k : 0), top_p, min_p};
        sample_rows<<<(unsigned)B, THREADS, 0, cuda_stream(ctx)>>>(
            (const T *)z->data, z->stride[0], (int)V, (const int64_t *)sequence->data,
            (const int32_t *)position->data, seed, k, (int32_t *)id->data, (float *)logp->data,
            cuda_error_slot(ctx, "sample"));
        LG_TRY(cuda_launched(ctx, "sample"));
        if (z->dtype != LG_F32) return LG_OK;
        return head_launch_rows(ctx, "sample", head_launch_of(V), B, 0, sample_logp,
                                (const float *)z->data, z->stride[0], V,
                                can_vectorise<float>(z->data, z->stride[0]),
                                (const int32_t *)id->data, (float *)logp->data);
    });
}
