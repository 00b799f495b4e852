/* Row reductions of logits. exp(z - max) is summed in fp32 over blocks of 1024 and the blocks in
 * double; with t = z - max and s = sum exp t, lse = max + ln s and the entropy is ln s - sum(t
 * exp t) / s. */
#include "logsoftmax.h"

#include "vec.h"

double row_logsumexp_f32(const float *z, int64_t V, double *entropy) {
    const float max = max_f32(z, V);
    double sum = 0, weighted = 0;
    for (int64_t v0 = 0; v0 < V; v0 += VEC_BLOCK) {
        const int64_t n = V - v0 < VEC_BLOCK ? V - v0 : VEC_BLOCK;
        f32x16 s[4] = {{0}}, w[4] = {{0}};
        for (int64_t v = 0; v < n; v += 4 * VEC_LANES)
            for (int u = 0; u < 4; u++) {
                if (v + u * VEC_LANES >= n) break;
                f32x16 t = load16_at(z + v0, v + u * VEC_LANES, n, -INFINITY) - max;
                const f32x16 p = exp16_negative(t);
                s[u] += p;
                /* The bound keeps 0 * -inf out; p is 0 there. */
                if (entropy) w[u] += p * max16(splat16(-200.0f), t);
            }
        sum += sum4(s);
        weighted += sum4(w);
    }
    const double log_sum = log(sum);
    if (entropy) *entropy = log_sum - weighted / sum;
    return (double)max + log_sum;
}

double row_logsumexp_f64(const double *z, int64_t V, double *entropy) {
    double max = -INFINITY, sum = 0, weighted = 0;
    for (int64_t v = 0; v < V; v++) max = z[v] > max ? z[v] : max;
    for (int64_t v = 0; v < V; v++) {
        double p = exp(z[v] - max);
        sum += p;
        if (p > 0) weighted += p * (z[v] - max);
    }
    const double log_sum = log(sum);
    if (entropy) *entropy = log_sum - weighted / sum;
    return max + log_sum;
}
