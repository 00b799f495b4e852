/* Checks the CUDA attention kernels against a plain double-precision reference on awkward shapes,
 * then times them.
 *
 *   mkdir -p build/gen/op && luajit src/opgen.lua src/liger.h src/ops.h build/gen
 *   nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --extended-lambda \
 *       --expt-relaxed-constexpr -cudart static -Isrc -Ikernels -Ibuild/gen \
 *       bench/attention.cu kernels/attention*.cu kernels/cache.cu -o build/attention_bench
 *   build/attention_bench [check | time | quick]
 *
 * A check poisons the outputs, runs twice and wants the same bits, then compares every output: the
 * norm of the difference over the norm of the reference, and the largest difference over the
 * largest magnitude. Decode has to give the bits of the forward's last rows. Times are the median
 * of many launches, caches flushed. */
#include <algorithm>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>

#include "common.cuh"
#include "op/attention.h"
#include "op/attention_decode.h"
#include "op/cache_copy.h"
#include "op/cache_write.h"

/* ---- the few functions of the library that the kernels call ---- */

struct lg_context {
    char text[512];
    device_error *error;
    std::vector<void *> scratch;
    std::vector<int64_t> scratch_bytes;
    size_t used;
};

static void need(cudaError_t status, const char *what) {
    if (status == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString(status));
    exit(1);
}
#define NEED(expr) need(expr, #expr)

extern "C" lg_status lg_fail(lg_context *ctx, lg_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(ctx->text, sizeof ctx->text, format, args);
    va_end(args);
    return status;
}
extern "C" lg_status lg_scratch(lg_context *ctx, int64_t bytes, void **data) {
    size_t i = ctx->used++;
    if (i == ctx->scratch.size()) ctx->scratch.push_back(NULL), ctx->scratch_bytes.push_back(-1);
    if (ctx->scratch_bytes[i] < bytes) {
        NEED(cudaFree(ctx->scratch[i]));
        NEED(cudaMalloc(&ctx->scratch[i], bytes + 1));
        NEED(cudaMemset(ctx->scratch[i], 0xff, bytes));
        ctx->scratch_bytes[i] = bytes;
    }
    *data = ctx->scratch[i];
    return LG_OK;
}
extern "C" int64_t lg_dtype_bytes(int32_t dtype) {
    return dtype == LG_F32 || dtype == LG_I32 ? 4 : 2;
}
extern "C" const char *lg_dtype_name(int32_t dtype) {
    return dtype == LG_F32 ? "f32" : dtype == LG_BF16 ? "bf16" : "f16";
}
cudaStream_t cuda_stream(lg_context *) { return 0; }
int cuda_num_sms(lg_context *) { return 132; }
device_error *cuda_error_slot(lg_context *ctx) { return ctx->error; }
lg_status cuda_check(lg_context *ctx, const char *what, cudaError_t status) {
    return status == cudaSuccess
               ? LG_OK
               : lg_fail(ctx, LG_EDEVICE, "%s: %s", what, cudaGetErrorString(status));
}
lg_status cuda_launched(lg_context *ctx, const char *op) {
    return cuda_check(ctx, op, cudaGetLastError());
}

static lg_context context;
static int failures, checks;

static void run(lg_status status) {
    context.used = 0;
    if (status == LG_OK) return;
    printf("failed: %s\n", context.text);
    exit(1);
}

static void expect(bool good, const char *name, const char *what, double a, double b) {
    checks++;
    if (good) return;
    failures++;
    printf("WRONG %-46s %-8s norm %.2e largest %.2e\n", name, what, a, b);
}

/* ---- tensors ---- */

struct array {
    void *data = NULL;
    size_t bytes = 0;
    explicit array(size_t n) : bytes(n) {
        NEED(cudaMalloc(&data, n + 256));
        poison();
    }
    array(const array &) = delete;
    ~array() { cudaFree(data); }
    void poison() { NEED(cudaMemset(data, 0xff, bytes + 256)); }
    std::vector<char> read() const {
        std::vector<char> host(bytes);
        NEED(cudaMemcpy(host.data(), data, bytes, cudaMemcpyDeviceToHost));
        return host;
    }
    bool guard_kept() const { /* what follows the array is still poison */
        unsigned char end[256];
        NEED(cudaMemcpy(end, (char *)data + bytes, 256, cudaMemcpyDeviceToHost));
        for (unsigned char x : end)
            if (x != 0xff) return false;
        return true;
    }
};

static lg_tensor tensor(void *data, int dtype, int64_t a, int64_t b = -1, int64_t c = -1,
                        int64_t s0 = -1, int64_t s1 = -1) {
    lg_tensor t = {};
    t.data = data, t.dtype = dtype;
    t.ndim = b < 0 ? 1 : c < 0 ? 2 : 3;
    int64_t shape[3] = {a, b, c}, dense = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = dense;
        dense *= shape[i];
    }
    if (s0 >= 0) t.stride[0] = s0;
    if (s1 >= 0) t.stride[1] = s1;
    return t;
}

__device__ float uniform(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return (float)((x ^ x >> 31) >> 40) * (1.0f / (1 << 24));
}
template <class T>
__global__ void fill_normal(T *x, int64_t n, uint64_t seed) {
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (int64_t)gridDim.x * blockDim.x) {
        float a = uniform(seed * 1000003 + 2 * i), b = uniform(seed * 1000003 + 2 * i + 1);
        x[i] = from_float<T>(sqrtf(-2 * logf(a + 1e-7f)) * cosf(6.2831853f * b));
    }
}

static void fill(void *data, int dtype, int64_t n, uint64_t seed) {
    if (dtype == LG_F32) fill_normal<<<1024, 256>>>((float *)data, n, seed);
    if (dtype == LG_BF16) fill_normal<<<1024, 256>>>((bf16 *)data, n, seed);
    if (dtype == LG_F16) fill_normal<<<1024, 256>>>((f16 *)data, n, seed);
    NEED(cudaGetLastError());
}

/* ---- the reference: [H, N, N] of probabilities in double ---- */

__device__ double element(const lg_tensor &t, int64_t n, int64_t h, int64_t d) {
    int64_t at = n * t.stride[0] + h * t.stride[1] + d;
    if (t.dtype == LG_F32) return ((const float *)t.data)[at];
    if (t.dtype == LG_BF16) return to_float(((const bf16 *)t.data)[at]);
    return to_float(((const f16 *)t.data)[at]);
}
__device__ double dot(const lg_tensor &a, int64_t n, int64_t h, const lg_tensor &b, int64_t m,
                      int64_t g) {
    double s = 0;
    for (int d = 0; d < a.shape[2]; d++) s += element(a, n, h, d) * element(b, m, g, d);
    return s;
}
struct problem {
    lg_tensor q, k, v, dy;
    const int *sequence; /* of a token */
    const lg_tensor *sinks; /* [H, 1, 1], on the device, or NULL */
    double scale, softcap, *p, *ds, *y, *lse, *dq, *dk, *dv, *dsink; /* [N, H], summed on the host */
    int N, H, G, D, window;
    bool causal;
    __device__ bool sees(int i, int j) const {
        return sequence[i] == sequence[j] && (!causal || j <= i) && (!window || i - j < window);
    }
    __device__ double score(int i, int h, int j, int g, double *slope) const {
        double s = scale * dot(q, i, h, k, j, g), t = softcap != 0 ? tanh(s / softcap) : 0;
        *slope = 1 - t * t;
        return softcap != 0 ? softcap * t : s;
    }
};
__global__ void reference_rows(problem r) { /* a block owns (i, h) */
    int i = blockIdx.x, h = blockIdx.y, g = h / (r.H / r.G);
    double *p = r.p + ((int64_t)h * r.N + i) * r.N, *ds = r.ds + ((int64_t)h * r.N + i) * r.N;
    __shared__ double shared[3];
    double slope, sink = r.sinks ? element(*r.sinks, h, 0, 0) : -INFINITY;
    for (int j = threadIdx.x; j < r.N; j += blockDim.x)
        p[j] = r.sees(i, j) ? r.score(i, h, j, g, &slope) : -INFINITY;
    __syncthreads();
    if (threadIdx.x == 0) {
        double top = sink, sum = 0;
        for (int j = 0; j < r.N; j++) top = fmax(top, p[j]);
        for (int j = 0; j < r.N; j++) sum += r.sees(i, j) ? exp(p[j] - top) : 0;
        sum += exp(sink - top);
        shared[0] = top, shared[1] = sum;
        r.lse[(int64_t)i * r.H + h] = top + log(sum);
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.N; j += blockDim.x) {
        p[j] = r.sees(i, j) ? exp(p[j] - shared[0]) / shared[1] : 0;
        ds[j] = r.sees(i, j) ? dot(r.dy, i, h, r.v, j, g) : 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        shared[2] = 0;
        for (int j = 0; j < r.N; j++) shared[2] += p[j] * ds[j];
        r.dsink[(int64_t)i * r.H + h] = -exp(sink - r.lse[(int64_t)i * r.H + h]) * shared[2];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < r.N; j += blockDim.x) {
        slope = 0;
        if (r.sees(i, j)) r.score(i, h, j, g, &slope);
        ds[j] = slope * p[j] * (ds[j] - shared[2]);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < r.D; d += blockDim.x) {
        double y = 0, dq = 0;
        for (int j = 0; j < r.N; j++)
            if (r.sees(i, j))
                y += p[j] * element(r.v, j, g, d), dq += ds[j] * element(r.k, j, g, d);
        r.y[((int64_t)i * r.H + h) * r.D + d] = y;
        r.dq[((int64_t)i * r.H + h) * r.D + d] = r.scale * dq;
    }
}
__global__ void reference_columns(problem r) { /* a block owns (j, g) */
    int j = blockIdx.x, g = blockIdx.y, group = r.H / r.G;
    for (int d = threadIdx.x; d < r.D; d += blockDim.x) {
        double dk = 0, dv = 0;
        for (int h = g * group; h < (g + 1) * group; h++)
            for (int i = 0; i < r.N; i++)
                if (r.sees(i, j)) {
                    int64_t at = ((int64_t)h * r.N + i) * r.N + j;
                    dk += r.ds[at] * element(r.q, i, h, d), dv += r.p[at] * element(r.dy, i, h, d);
                }
        r.dk[((int64_t)j * r.G + g) * r.D + d] = r.scale * dk;
        r.dv[((int64_t)j * r.G + g) * r.D + d] = dv;
    }
}

/* Sums of squares of difference and reference, largest of both; a NaN makes all of them NaN. One
 * block. */
__global__ void compare(lg_tensor got, const double *wanted, int64_t rows, double *result) {
    __shared__ double part[256][4];
    double x[4] = {0, 0, 0, 0};
    int64_t D = got.shape[2];
    for (int64_t i = threadIdx.x; i < rows * D; i += 256) {
        int64_t row = i / D, n = row / got.shape[1], h = row % got.shape[1];
        double w = wanted[i], e = element(got, n, h, i % D) - w;
        x[0] += e * e, x[1] += w * w;
        if (!(fabs(e) <= x[2])) x[2] = fabs(e);
        if (!(fabs(w) <= x[3])) x[3] = fabs(w);
    }
    for (int e = 0; e < 4; e++) part[threadIdx.x][e] = x[e];
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int t = 1; t < 256; t++) {
            x[0] += part[t][0], x[1] += part[t][1];
            for (int e = 2; e < 4; e++)
                if (!(part[t][e] <= x[e])) x[e] = part[t][e];
        }
        for (int e = 0; e < 4; e++) result[e] = x[e];
    }
}

static double worst[3][2]; /* by dtype: forward, backward */

static void check_tensor(const char *name, const char *what, const lg_tensor &got,
                         const double *wanted, double bound, double *worst_norm) {
    static array result(32);
    compare<<<1, 256>>>(got, wanted, got.shape[0] * got.shape[1], (double *)result.data);
    double x[4];
    NEED(cudaMemcpy(x, result.data, 32, cudaMemcpyDeviceToHost));
    double norm = x[1] > 0 ? sqrt(x[0] / x[1]) : sqrt(x[0]),
           largest = x[3] > 0 ? x[2] / x[3] : x[2];
    expect(norm <= bound && largest <= 3 * bound, name, what, norm, largest);
    if (norm > *worst_norm) *worst_norm = norm;
}

/* ---- checks ---- */

struct shape {
    std::vector<int> lengths;
    int H, G, D;
    bool causal;
    int layout; /* 0 dense, 1 views of one fused matrix, 2 the same at an odd offset */
    double scale;
    int window;
    double softcap;
    bool sinks;
};

static const double FORWARD[3] = {2e-6, 6e-3, 1e-3},
                    BACKWARD[3] = {2e-5, 1e-2, 2e-3}; /* by dtype */

static void check_decode(const char *name, const shape &s, int dtype, const lg_tensor &q,
                         const lg_tensor &k, const lg_tensor &v, const lg_tensor &y,
                         const lg_tensor *sinks, uint64_t seed) {
    int page_size = (int[]){1, 3, 16, 64, 128}[seed % 5], most = 1,
        width = (int)lg_dtype_bytes(dtype);
    std::vector<int> rows, length;
    int first = 0;
    for (int n : s.lengths) {
        if (n > 0) rows.push_back(first + n - 1), length.push_back(n), most = std::max(most, n);
        first += n;
    }
    int B = (int)rows.size(), M = (most + page_size - 1) / page_size + (int)(seed % 3),
        P = (B * M + 1) * page_size;
    if (B == 0) return;
    std::vector<int> page(B * M), slot(first);
    for (int b = 0; b < B; b++)
        for (int m = 0; m < M; m++) page[b * M + m] = (M - 1 - m) * B + b;
    for (int b = 0; b < B; b++)
        for (int j = 0; j < length[b]; j++)
            slot[rows[b] - length[b] + 1 + j] =
                page[b * M + j / page_size] * page_size + j % page_size;
    array k_cache((size_t)P * s.G * s.D * width), v_cache((size_t)P * s.G * s.D * width),
        page_d(page.size() * 4), slot_d(slot.size() * 4), length_d(length.size() * 4),
        q_rows((size_t)B * s.H * s.D * width), out((size_t)B * s.H * s.D * width),
        wanted((size_t)B * s.H * s.D * width);
    NEED(cudaMemcpy(page_d.data, page.data(), page.size() * 4, cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(slot_d.data, slot.data(), slot.size() * 4, cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(length_d.data, length.data(), length.size() * 4, cudaMemcpyHostToDevice));
    for (int b = 0; b < B; b++) {
        NEED(cudaMemcpy2D((char *)q_rows.data + (size_t)b * s.H * s.D * width, s.D * width,
                          (char *)q.data + rows[b] * q.stride[0] * width, q.stride[1] * width,
                          s.D * width, s.H, cudaMemcpyDeviceToDevice));
        NEED(cudaMemcpy((char *)wanted.data + (size_t)b * s.H * s.D * width,
                        (char *)y.data + (size_t)rows[b] * s.H * s.D * width, s.H * s.D * width,
                        cudaMemcpyDeviceToDevice));
    }
    lg_tensor kc = tensor(k_cache.data, dtype, P, s.G, s.D),
              vc = tensor(v_cache.data, dtype, P, s.G, s.D),
              page_t = tensor(page_d.data, LG_I32, B, M),
              slot_t = tensor(slot_d.data, LG_I32, first),
              length_t = tensor(length_d.data, LG_I32, B),
              q_t = tensor(q_rows.data, dtype, B, s.H, s.D),
              out_t = tensor(out.data, dtype, B, s.H, s.D);
    run(cuda_cache_write(&context, &k, &v, &slot_t, &kc, &vc));
    run(cuda_attention_decode(&context, &q_t, &kc, &vc, &page_t, &length_t, sinks, page_size,
                              s.scale, s.window, s.softcap, &out_t));
    NEED(cudaDeviceSynchronize());
    auto a = out.read(), b = wanted.read();
    int different = 0;
    for (size_t i = 0; i < a.size(); i += width) different += memcmp(&a[i], &b[i], width) != 0;
    expect(different == 0, name, "decode", different, (double)a.size() / width);
    expect(out.guard_kept() && k_cache.guard_kept() && v_cache.guard_kept(), name, "guards", 0, 0);
}

static void check_sinks(const char *name, const array &got, const array &wanted, int N, int H,
                        double bound) {
    std::vector<float> dsinks(H);
    std::vector<double> parts((size_t)N * H);
    NEED(cudaMemcpy(dsinks.data(), got.data, H * 4, cudaMemcpyDeviceToHost));
    NEED(cudaMemcpy(parts.data(), wanted.data, parts.size() * 8, cudaMemcpyDeviceToHost));
    for (int h = 0; h < H; h++) {
        double sum = 0, size = 0; /* what cancels keeps its rounding */
        for (int i = 0; i < N; i++) {
            sum += parts[(size_t)i * H + h];
            size += fabs(parts[(size_t)i * H + h]);
        }
        expect(fabs(dsinks[h] - sum) <= bound * size, name, "dsinks", dsinks[h], sum);
    }
}

static void check(const shape &s, int dtype, uint64_t seed) {
    int N = 0, S = (int)s.lengths.size(), width = (int)lg_dtype_bytes(dtype);
    std::vector<int> cu(1, 0), sequence;
    for (int i = 0; i < S; i++) {
        N += s.lengths[i];
        cu.push_back(N);
        sequence.resize(N, i);
    }
    char name[128];
    snprintf(name, sizeof name, "%s S%d N%d first%d H%d G%d D%d %s layout%d window%d cap%g%s",
             lg_dtype_name(dtype), S, N, S ? s.lengths[0] : 0, s.H, s.G, s.D,
             s.causal ? "causal" : "full", s.layout, s.window, s.softcap, s.sinks ? " sinks" : "");
    int heads = s.H + 2 * s.G, offset = s.layout == 2 ? 1 : 0;
    int64_t pitch = (int64_t)heads * s.D + (s.layout == 2 ? 3 : 0), dense = (int64_t)N * s.H * s.D;
    array fused(((size_t)N * pitch + 8) * width), grads(((size_t)N * pitch + 8) * width),
        dy(dense * width), y(dense * width), lse((size_t)N * s.H * 4), cu_d(cu.size() * 4),
        seq_d(N * 4), sinks_d(s.H * width), dsinks(s.H * 4);
    NEED(cudaMemcpy(cu_d.data, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
    if (N) NEED(cudaMemcpy(seq_d.data, sequence.data(), N * 4, cudaMemcpyHostToDevice));
    fill(fused.data, dtype, (int64_t)N * pitch + 8, seed);
    fill(dy.data, dtype, dense, seed + 1);
    fill(sinks_d.data, dtype, s.H, seed + 2);
    lg_tensor sinks_t = tensor(sinks_d.data, dtype, s.H),
              dsinks_t = tensor(dsinks.data, LG_F32, s.H);
    const lg_tensor *sinks = s.sinks ? &sinks_t : NULL;
    auto view = [&](array &a, int head, int count) {
        if (s.layout == 0)
            return tensor((char *)a.data + (size_t)N * head * s.D * width, dtype, N, count, s.D);
        return tensor((char *)a.data + (offset + head * s.D) * width, dtype, N, count, s.D, pitch,
                      s.D);
    };
    lg_tensor q = view(fused, 0, s.H), k = view(fused, s.H, s.G), v = view(fused, s.H + s.G, s.G);
    lg_tensor dq = view(grads, 0, s.H), dk = view(grads, s.H, s.G),
              dv = view(grads, s.H + s.G, s.G);
    lg_tensor y_t = tensor(y.data, dtype, N, s.H, s.D), dy_t = tensor(dy.data, dtype, N, s.H, s.D),
              lse_t = tensor(lse.data, LG_F32, N, s.H), cu_t = tensor(cu_d.data, LG_I32, S + 1);
    std::vector<char> bits[4];
    auto backward = [&](lg_tensor *a, lg_tensor *b, lg_tensor *c) {
        NEED(cudaMemset(dsinks.data, 0, s.H * 4));
        run(cuda_attention_backward(&context, &dy_t, &q, &k, &v, &y_t, &lse_t, &cu_t, sinks,
                                    s.scale, s.causal, s.window, s.softcap, a, b, c, &dsinks_t));
    };
    for (int round = 0; round < 2; round++) {
        y.poison(), lse.poison(), grads.poison();
        for (size_t i = 0; i < context.scratch.size(); i++)
            NEED(cudaMemset(context.scratch[i], 0xff, context.scratch_bytes[i]));
        run(cuda_attention(&context, &q, &k, &v, &cu_t, sinks, s.scale, s.causal, s.window,
                           s.softcap, &y_t, &lse_t));
        backward(&dq, &dk, &dv);
        NEED(cudaDeviceSynchronize());
        std::vector<char> now[4] = {y.read(), lse.read(), grads.read(), dsinks.read()};
        for (int i = 0; i < 4; i++) {
            if (round) expect(now[i] == bits[i], name, "bits", i, 0);
            bits[i] = now[i];
        }
    }
    expect(y.guard_kept() && lse.guard_kept() && grads.guard_kept() && dsinks.guard_kept(), name,
           "guards", 0, 0);
    /* A gradient alone has the bits that it has beside the others. */
    for (int only = 0; only < 3; only++) {
        grads.poison();
        backward(only == 0 ? &dq : NULL, only == 1 ? &dk : NULL, only == 2 ? &dv : NULL);
        auto now = grads.read();
        lg_tensor &t = only == 0 ? dq : only == 1 ? dk : dv;
        size_t first = (char *)t.data - (char *)grads.data, wrong = 0;
        for (size_t i = 0; i < now.size(); i++) {
            size_t at = i - first, row = at / (t.stride[0] * width),
                   column = at % (t.stride[0] * width);
            bool mine = i >= first && row < (size_t)N && column < (size_t)t.shape[1] * s.D * width;
            wrong += now[i] != (mine ? bits[2][i] : (char)0xff);
        }
        expect(wrong == 0, name, "alone", only, (double)wrong);
    }
    if (N == 0) return;
    backward(&dq, &dk, &dv);
    array p((size_t)s.H * N * N * 8), ds((size_t)s.H * N * N * 8), ry(dense * 8),
        rlse((size_t)N * s.H * 8), rdq(dense * 8), rdk((size_t)N * s.G * s.D * 8),
        rdv((size_t)N * s.G * s.D * 8), rdsink((size_t)N * s.H * 8), sinks_on_device(sizeof(lg_tensor));
    lg_tensor sinks_rows = tensor(sinks_d.data, dtype, s.H, 1, 1);
    NEED(cudaMemcpy(sinks_on_device.data, &sinks_rows, sizeof sinks_rows, cudaMemcpyHostToDevice));
    problem r = {q,
                 k,
                 v,
                 dy_t,
                 (int *)seq_d.data,
                 sinks ? (lg_tensor *)sinks_on_device.data : NULL,
                 s.scale,
                 s.softcap,
                 (double *)p.data,
                 (double *)ds.data,
                 (double *)ry.data,
                 (double *)rlse.data,
                 (double *)rdq.data,
                 (double *)rdk.data,
                 (double *)rdv.data,
                 (double *)rdsink.data,
                 N,
                 s.H,
                 s.G,
                 s.D,
                 s.window,
                 s.causal};
    reference_rows<<<dim3(N, s.H), 128>>>(r);
    reference_columns<<<dim3(N, s.G), 128>>>(r);
    NEED(cudaGetLastError());
    double *w = worst[dtype];
    check_tensor(name, "y", y_t, r.y, FORWARD[dtype], &w[0]);
    double ignored = 0;
    check_tensor(name, "lse", tensor(lse.data, LG_F32, N, s.H, 1), r.lse,
                 dtype == LG_F32 ? 2e-6 : 1e-5, &ignored);
    check_tensor(name, "dq", dq, r.dq, BACKWARD[dtype], &w[1]);
    check_tensor(name, "dk", dk, r.dk, BACKWARD[dtype], &w[1]);
    check_tensor(name, "dv", dv, r.dv, BACKWARD[dtype], &w[1]);
    if (sinks) check_sinks(name, dsinks, rdsink, N, s.H, BACKWARD[dtype]);
    if (s.causal || s.window == 0) check_decode(name, s, dtype, q, k, v, y_t, sinks, seed);
}

/* Sequences that do not rise to N: noted, and nothing is read beyond the tensors. */
static void check_sequence_errors() {
    int bad[4][4] = {{0, 3, 9, 8}, {0, 5, 3, 8}, {1, 2, 3, 8}, {0, 2, 4, 6}};
    long long wanted[4][4] = {{2, 9, 3, 9}, {2, 3, 5, 9}, {0, 1, 0, 1}, {3, 6, 8, 9}};
    array q(8 * 2 * 16 * 2), y(8 * 2 * 16 * 2), lse(64), cu(16);
    fill(q.data, LG_BF16, 256, 1);
    lg_tensor q_t = tensor(q.data, LG_BF16, 8, 2, 16), y_t = tensor(y.data, LG_BF16, 8, 2, 16),
              lse_t = tensor(lse.data, LG_F32, 8, 2), cu_t = tensor(cu.data, LG_I32, 4);
    for (int i = 0; i < 4; i++) {
        NEED(cudaMemcpy(cu.data, bad[i], 16, cudaMemcpyHostToDevice));
        run(cuda_attention(&context, &q_t, &q_t, &q_t, &cu_t, NULL, 0.25, true, 0, 0, &y_t,
                           &lse_t));
        NEED(cudaDeviceSynchronize());
        const device_error &e = *context.error;
        expect(e.code == ERROR_SEQUENCE && e.index == wanted[i][0] && e.value == wanted[i][1] &&
                   e.low == wanted[i][2] && e.limit == wanted[i][3],
               "errors", "sequence", (double)e.index, (double)e.value);
        memset(context.error, 0, sizeof *context.error);
    }
}

static void check_errors() {
    int bad_length[3] = {0, 5, 9}, pages[6] = {0, 1, 2, 3, 99, 1}, bad_slot[3] = {2, 70, 1};
    array q(3 * 2 * 16 * 2), cache(64 * 16 * 2), page(24), length(12), out(3 * 2 * 16 * 2),
        slot(12), k(3 * 16 * 2);
    fill(q.data, LG_BF16, 96, 1);
    fill(cache.data, LG_BF16, 1024, 2);
    fill(k.data, LG_BF16, 48, 3);
    NEED(cudaMemcpy(page.data, pages, 24, cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(length.data, bad_length, 12, cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(slot.data, bad_slot, 12, cudaMemcpyHostToDevice));
    lg_tensor q_t = tensor(q.data, LG_BF16, 3, 2, 16),
              cache_t = tensor(cache.data, LG_BF16, 64, 1, 16),
              page_t = tensor(page.data, LG_I32, 3, 2), length_t = tensor(length.data, LG_I32, 3),
              out_t = tensor(out.data, LG_BF16, 3, 2, 16), slot_t = tensor(slot.data, LG_I32, 3),
              k_t = tensor(k.data, LG_BF16, 3, 1, 16);
    run(cuda_attention_decode(&context, &q_t, &cache_t, &cache_t, &page_t, &length_t, NULL, 4, 0.25,
                              0, 0, &out_t));
    NEED(cudaDeviceSynchronize());
    expect(context.error->code == ERROR_LENGTH || context.error->code == ERROR_SLOT, "errors",
           "length", context.error->code, (double)context.error->index);
    memset(context.error, 0, sizeof *context.error);
    run(cuda_cache_write(&context, &k_t, &k_t, &slot_t, &cache_t, &cache_t));
    NEED(cudaDeviceSynchronize());
    expect(context.error->code == ERROR_SLOT && context.error->index == 1 &&
               context.error->value == 70,
           "errors", "slot", context.error->code, (double)context.error->index);
    memset(context.error, 0, sizeof *context.error);
    /* Copies: rows 2 and 1 were just written from rows 0 and 2 of k. */
    int from[2] = {2, 1}, to[2] = {40, 63};
    NEED(cudaMemcpy(page.data, from, 8, cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(length.data, to, 8, cudaMemcpyHostToDevice));
    lg_tensor from_t = tensor(page.data, LG_I32, 2), to_t = tensor(length.data, LG_I32, 2);
    run(cuda_cache_copy(&context, &from_t, &to_t, &cache_t, &cache_t));
    auto c = cache.read(), x = k.read();
    expect(!memcmp(&c[40 * 32], &x[0], 32) && !memcmp(&c[63 * 32], &x[64], 32) &&
               context.error->code == 0,
           "copy", "rows", 0, 0);
}

static void check_all(bool quick) {
    double eighth = 0.125;
    std::vector<shape> shapes = {
        {{}, 2, 1, 8, true, 0, eighth},        /* no sequence */
        {{0, 0}, 2, 1, 8, true, 0, eighth},    /* only empty ones */
        {{1}, 1, 1, 8, true, 0, 0.3},          /* one token */
        {{5, 0, 3}, 4, 2, 8, true, 1, 0.3},    /* grouped heads, an empty sequence */
        {{5, 3}, 2, 2, 8, false, 0, 0.3},      /* not causal */
        {{18, 17}, 3, 1, 20, true, 0, 0.2},    /* rows not of 16 bytes */
        {{150, 3}, 2, 1, 64, true, 1, eighth}, /* two tiles of queries */
        {{270}, 3, 3, 48, false, 0, 0.14},     /* keys in several tiles */
        {{40}, 1, 1, 256, true, 0, 0.06},      /* the widest head */
        {{1, 1, 1, 2, 64, 65, 63, 128, 129, 127},
         4,
         4,
         128,
         true,
         1,
         0.09}, /* about the sizes of tiles */
        {{1, 1, 1, 2, 64, 65, 63, 128, 129, 127}, 4, 2, 128, false, 1, 0.09},
        {{300, 0, 0, 211}, 6, 2, 64, true, 1, -eighth}, /* a negative scale */
        {{77, 200}, 4, 1, 128, true, 2, 0.09},          /* odd addresses */
        {{33, 130}, 34, 2, 32, true, 1, 0.2},           /* more than 16 heads a group */
        {{90, 31}, 2, 2, 16, false, 0, 0},              /* all keys alike */
        {{9, 4}, 4, 2, 8, true, 0, 0.3, 5, 0, true},    /* a window within a tile, sinks */
        {{150, 3}, 2, 1, 64, true, 1, eighth, 1},       /* each sees itself alone */
        {{150, 300}, 2, 1, 64, true, 1, eighth, 64},    /* the size of a tile */
        {{300, 60}, 4, 2, 128, true, 1, 0.3, 100, 3, true}, /* all options */
        {{270}, 3, 3, 48, false, 0, 0.14, 0, 2, true},      /* a cap and sinks without causal */
        {{300, 0, 211}, 6, 2, 64, true, 1, -0.5, 130, 1.5}, /* a negative scale under a cap */
        {{77, 200}, 4, 1, 128, true, 2, 0.09, 77, 0, true}, /* odd addresses */
        {{33, 130}, 34, 2, 32, true, 1, 0.2, 50, 0, true},  /* more than 16 heads a group */
        {{90, 31}, 2, 2, 16, true, 0, 0, 7, 5, true},       /* all keys alike */
        {{200}, 2, 1, 96, true, 1, 20, 30, 1},              /* scores far beyond the cap */
    };
    std::vector<shape> more = {
        {{513, 700, 2}, 8, 2, 128, true, 1, 0.088},
        {{513, 700, 2}, 4, 4, 128, false, 1, 0.088},
        {{513, 700, 2}, 8, 8, 64, true, 1, eighth},
        {{513, 700, 2}, 9, 3, 64, false, 0, eighth},
        {{600, 333}, 4, 2, 80, true, 1, 0.11},
        {{600, 333}, 4, 4, 96, false, 1, 0.1},
        {{600, 333}, 4, 2, 256, true, 1, 0.0625},
        {{600, 333}, 2, 1, 200, false, 2, 0.07},
        {{600, 333}, 4, 2, 16, true, 1, 0.25},
        {{600, 333}, 2, 1, 132, true, 0, 0.09},
        {{1500}, 2, 1, 128, true, 1, 0.5},
        {{1500}, 2, 2, 64, false, 1, 0.5},
        {std::vector<int>(300, 3), 2, 1, 64, true, 1, eighth},
        {{513, 700, 2}, 8, 2, 128, true, 1, 0.088, 200},
        {{513, 700, 2}, 8, 2, 128, true, 1, 0.5, 0, 5, true},
        {{513, 700, 2}, 8, 8, 64, true, 1, eighth, 128, 0, true},
        {{600, 333}, 4, 2, 80, true, 1, 0.11, 129, 2, true},
        {{600, 333}, 4, 4, 96, true, 1, 0.1, 127},
        {{600, 333}, 4, 2, 256, true, 1, 0.0625, 65, 1, true},
        {{600, 333}, 2, 1, 200, true, 2, 0.07, 300, 0, true},
        {{600, 333}, 4, 2, 16, true, 1, 0.25, 3},
        {{1500}, 2, 1, 128, true, 1, 0.5, 1000, 30, true},
    };
    if (!quick) shapes.insert(shapes.end(), more.begin(), more.end());
    uint64_t seed = 1;
    for (auto &s : shapes)
        for (int dtype : {LG_F32, LG_BF16, LG_F16}) check(s, dtype, seed += 7);
    expect(context.error->code == 0, "all", "noted", context.error->code, 0);
    check_errors();
    check_sequence_errors();
    printf("%d checks, %d wrong; worst norms: f32 %.1e %.1e, bf16 %.1e %.1e, f16 %.1e %.1e "
           "(forward, backward)\n",
           checks, failures, worst[0][0], worst[0][1], worst[1][0], worst[1][1], worst[2][0],
           worst[2][1]);
}

/* ---- times ---- */

static array *flush_buffer;

template <class F>
static double median_us(F f, int times) {
    cudaEvent_t a, b;
    NEED(cudaEventCreate(&a));
    NEED(cudaEventCreate(&b));
    std::vector<float> ms(times);
    for (int i = -2; i < times; i++) {
        NEED(cudaMemsetAsync(flush_buffer->data, i, flush_buffer->bytes));
        NEED(cudaEventRecord(a));
        f();
        NEED(cudaEventRecord(b));
        NEED(cudaEventSynchronize(b));
        if (i >= 0) NEED(cudaEventElapsedTime(&ms[i], a, b));
    }
    cudaEventDestroy(a), cudaEventDestroy(b);
    std::sort(ms.begin(), ms.end());
    return ms[times / 2] * 1e3;
}

static void time_training(int dtype, int S, int T, int H, int G, int D, bool causal, int times,
                          int window = 0, double softcap = 0, bool with_sinks = false) {
    int N = S * T, heads = H + 2 * G, width = (int)lg_dtype_bytes(dtype);
    int64_t pitch = (int64_t)heads * D, dense = (int64_t)N * H * D;
    array fused(N * pitch * width), grads(N * pitch * width), dy(dense * width), y(dense * width),
        lse((size_t)N * H * 4), cu_d((S + 1) * 4), sinks_d(H * width), dsinks(H * 4);
    std::vector<int> cu(S + 1);
    for (int i = 0; i <= S; i++) cu[i] = i * T;
    NEED(cudaMemcpy(cu_d.data, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
    fill(fused.data, dtype, N * pitch, 5);
    fill(dy.data, dtype, dense, 6);
    fill(sinks_d.data, dtype, H, 7);
    lg_tensor sinks_t = tensor(sinks_d.data, dtype, H), dsinks_t = tensor(dsinks.data, LG_F32, H),
              *sinks = with_sinks ? &sinks_t : NULL;
    auto view = [&](array &a, int head, int count) {
        return tensor((char *)a.data + head * D * width, dtype, N, count, D, pitch, D);
    };
    lg_tensor q = view(fused, 0, H), k = view(fused, H, G), v = view(fused, H + G, G);
    lg_tensor dq = view(grads, 0, H), dk = view(grads, H, G), dv = view(grads, H + G, G);
    lg_tensor y_t = tensor(y.data, dtype, N, H, D), dy_t = tensor(dy.data, dtype, N, H, D),
              lse_t = tensor(lse.data, LG_F32, N, H), cu_t = tensor(cu_d.data, LG_I32, S + 1);
    double seen = window ? window : T; /* keys, of a late query */
    double pairs = (double)S * (causal ? seen * (T - 0.5 * (seen - 1)) : (double)T * T),
           flops = 4 * pairs * H * D, scale = 1 / sqrt(D);
    double forward = median_us(
        [&] {
            run(cuda_attention(&context, &q, &k, &v, &cu_t, sinks, scale, causal, window, softcap,
                               &y_t, &lse_t));
        },
        times);
    auto backward_of = [&](lg_tensor *a, lg_tensor *b, lg_tensor *c) {
        return median_us(
            [&] {
                run(cuda_attention_backward(&context, &dy_t, &q, &k, &v, &y_t, &lse_t, &cu_t, sinks,
                                            scale, causal, window, softcap, a, b, c, &dsinks_t));
            },
            times);
    };
    double backward = backward_of(&dq, &dk, &dv), only_dq = backward_of(&dq, NULL, NULL);
    char what[64];
    snprintf(what, sizeof what, "%s%s", causal ? "causal" : "full", with_sinks ? " sinks" : "");
    if (window) snprintf(what + strlen(what), 16, " window %d", window);
    if (softcap != 0) snprintf(what + strlen(what), 16, " cap %g", softcap);
    printf("%-4s %2d x %5d H%-2d G%-2d D%-3d %-6s forward %9.1f us %6.1f TFLOP/s   backward %9.1f "
           "us %6.1f TFLOP/s (dq %.0f us)\n",
           lg_dtype_name(dtype), S, T, H, G, D, what, forward, flops / forward * 1e-6, backward,
           2.5 * flops / backward * 1e-6, only_dq);
}

static void time_decode(int B, int length, int H, int G, int D, int page_size, int spare,
                        double copy, int window = 0) {
    int M = (length + page_size - 1) / page_size * spare, P = B * (M / spare) * page_size;
    array k((size_t)P * G * D * 2), v((size_t)P * G * D * 2), q((size_t)B * H * D * 2),
        y((size_t)B * H * D * 2), page_d((size_t)B * M * 4), length_d(B * 4);
    std::vector<int> page(B * M), lengths(B, length);
    for (int b = 0; b < B; b++)
        for (int m = 0; m < M; m++)
            page[b * M + m] = (int)(((int64_t)(m % (M / spare)) * B + b) * 7919 % (P / page_size));
    NEED(cudaMemcpy(page_d.data, page.data(), page.size() * 4, cudaMemcpyHostToDevice));
    NEED(cudaMemcpy(length_d.data, lengths.data(), B * 4, cudaMemcpyHostToDevice));
    fill(k.data, LG_BF16, (int64_t)P * G * D, 1);
    fill(v.data, LG_BF16, (int64_t)P * G * D, 2);
    fill(q.data, LG_BF16, (int64_t)B * H * D, 3);
    lg_tensor k_t = tensor(k.data, LG_BF16, P, G, D), v_t = tensor(v.data, LG_BF16, P, G, D),
              q_t = tensor(q.data, LG_BF16, B, H, D), y_t = tensor(y.data, LG_BF16, B, H, D),
              page_t = tensor(page_d.data, LG_I32, B, M),
              length_t = tensor(length_d.data, LG_I32, B);
    double us = median_us(
        [&] {
            run(cuda_attention_decode(&context, &q_t, &k_t, &v_t, &page_t, &length_t, NULL,
                                      page_size, 0.088, window, 0, &y_t));
        },
        20);
    double bytes = 4.0 * B * (window ? window : length) * G * D;
    printf("decode bf16 B%-3d length %5d window %5d (room %6d) H%-2d G%-2d D%-3d %8.1f us %5.2f TB/s  %3.0f%% "
           "of copy\n",
           B, length, window, M * page_size, H, G, D, us, bytes / us * 1e-6,
           bytes / us * 1e-6 / copy * 100);
}

static void time_all() {
    array a((size_t)1 << 30), b((size_t)1 << 30);
    double copy_us =
        median_us([&] { cudaMemcpyAsync(a.data, b.data, a.bytes, cudaMemcpyDeviceToDevice); }, 10);
    double copy = 2.0 * a.bytes / copy_us * 1e-6;
    printf("copy %.2f TB/s\n", copy);
    for (int causal = 0; causal < 2; causal++) {
        time_training(LG_BF16, 1, 8192, 16, 16, 128, causal, 15);
        time_training(LG_BF16, 4, 4096, 32, 8, 128, causal, 15);
        time_training(LG_BF16, 4, 4096, 32, 8, 64, causal, 15);
        time_training(LG_BF16, 2, 4096, 16, 16, 256, causal, 7);
    }
    time_training(LG_BF16, 32, 512, 16, 8, 128, true, 15);
    time_training(LG_BF16, 2, 4096, 32, 32, 80, true, 7);
    time_training(LG_BF16, 1, 8192, 16, 16, 128, true, 15, 8192 - 1);
    time_training(LG_BF16, 4, 4096, 32, 8, 128, true, 15, 512);
    time_training(LG_BF16, 4, 4096, 32, 8, 128, true, 15, 0, 50);
    time_training(LG_BF16, 4, 4096, 64, 8, 64, true, 15, 128, 0, true);
    time_training(LG_BF16, 2, 4096, 16, 8, 256, true, 7, 1024, 50);
    time_training(LG_F16, 1, 8192, 16, 16, 128, true, 7);
    time_training(LG_F32, 1, 2048, 9, 3, 64, true, 7);
    time_training(LG_F32, 1, 4096, 16, 8, 128, true, 5);
    for (int B : {1, 8, 64}) time_decode(B, 4096, 32, 8, 128, 16, 1, copy);
    time_decode(64, 1024, 16, 8, 128, 64, 8, copy);
    time_decode(256, 512, 9, 3, 64, 16, 1, copy);
    time_decode(1, 32768, 32, 8, 128, 64, 1, copy);
    time_decode(64, 4096, 32, 8, 128, 16, 1, copy, 512);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "all";
    NEED(cudaHostAlloc((void **)&context.error, sizeof *context.error, cudaHostAllocMapped));
    memset(context.error, 0, sizeof *context.error);
    static array flush((size_t)192 << 20);
    flush_buffer = &flush;
    if (strcmp(what, "time")) check_all(!strcmp(what, "quick"));
    if (!strcmp(what, "time") || !strcmp(what, "all")) time_all();
    return failures != 0;
}
