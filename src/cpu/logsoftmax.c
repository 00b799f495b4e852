/* Row reductions of logits. exp(z - max) is summed in fp32 over blocks of 256 and the blocks in double; with t = z - max and
 * s = sum exp t, lse = max + ln s and the entropy is ln s - sum(t exp t) / s. */
#include "logsoftmax.h"

#include "vec.h"

double row_logsumexp_f32(const float *z, int64_t V, double *entropy) {
    const float max = max_f32(z, V);
    double sum = 0, weighted = 0;
    for (int64_t v0 = 0; v0 < V; v0 += VEC_BLOCK) {
        float t[VEC_BLOCK], p[VEC_BLOCK];
        const int64_t n = V - v0 < VEC_BLOCK ? V - v0 : VEC_BLOCK;
        for (int64_t i = 0; i < n; i++) p[i] = exp_f32(z[v0 + i] - max);
        sum += sum_block_f32(p, n);
        if (!entropy) continue;
        /* The bound keeps 0 * -inf out; the probability is 0 there. */
        for (int64_t i = 0; i < n; i++) {
            t[i] = z[v0 + i] - max;
            t[i] = t[i] < -200.0f ? -200.0f : t[i];
        }
        weighted += dot_block_f32(t, p, n);
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
