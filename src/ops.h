/* Every operator: maths, shapes, signature, gradient. This header is the op table: opgen.lua reads it and writes the checked
 * entries, the backends' tables, the FFI declarations, the Lua wrappers' schema, editor stubs and the op reference.
 *
 *   const lg_tensor *x   an input            lg_tensor *y   an output            anything else: an attribute
 *   *: x[*,C] b?[C] -> y[*,C]                the shapes, executed:
 *        upper-case letters bind sizes (N tokens, B batch, C channels, O output channels, H heads, G key/value heads,
 *        D head size, V vocabulary, K tokens of a row or a teacher's channels, U a teacher's vocabulary, S sequences, P
 *        positions); * binds any leading dimensions; S+1 is one more than S
 *        b?      may be NULL (every output of a backward may be: a gradient that is not wanted)
 *        ~x      any strides in the leading dimensions; the last one is always dense. Others are dense throughout
 *        dw+     added to, not overwritten
 *        :i32    a fixed dtype; :acc is f32, or f64 when the shared dtype is f64; :any is any; all others share one dtype,
 *                which where one says :float may be f16
 *        a name on both sides of -> is updated in place
 *        round=true  what the Lua wrapper takes for an attribute that is left out
 *   op_backward          the gradient of op: `d` + a forward name is that tensor's gradient (incoming if const); every other
 *                        name is a forward value or attribute, so it is what must be saved
 *
 * Ops allocate nothing, wait for nothing (but for the heads, linear_*, which on a device wait for the number of the rows that
 * take part unless `kept` tells it) and give the same bits for the same inputs. Rows are treated alone. Sums run in fp32 or
 * better. Dtypes are f32, bf16 and f64 unless an op says otherwise: those on given logits take f16 too.
 */
#ifndef LIGER_OPS_H
#define LIGER_OPS_H

#include "liger.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

/* ---- memory ---- */

/* y = x, converted to y's dtype; bf16 and f16 round to nearest even.
 *: ~x[*]:any -> ~y[*]:any */
lg_status lg_copy(lg_context *ctx, const lg_tensor *x, lg_tensor *y);

/* y = value everywhere.
 *: -> ~y[*]:any */
lg_status lg_fill(lg_context *ctx, double value, lg_tensor *y);

/* y += x.
 *: ~x[*]:any ~y[*]:any -> y */
lg_status lg_accumulate(lg_context *ctx, const lg_tensor *x, lg_tensor *y);

/* y[i] uniform in (0, 1]: word i of the Philox stream (seed, stream) as word * 2^-32 + 2^-33.
 *: -> y[*] */
lg_status lg_random_uniform(lg_context *ctx, int64_t seed, int64_t stream, lg_tensor *y);

/* y[2j], y[2j+1] = mean + std * the Box-Muller pair of uniforms 2j and 2j+1 of the stream (seed, stream), in double.
 *: -> y[*] */
lg_status lg_random_normal(lg_context *ctx, int64_t seed, int64_t stream, double mean, double std,
                           lg_tensor *y);

/* ---- element-wise ---- */

/* y = scale * x + shift.
 *: x[*] -> y[*] */
lg_status lg_affine(lg_context *ctx, const lg_tensor *x, double scale, double shift, lg_tensor *y);
/*: dy[*] -> dx[*] */
lg_status lg_affine_backward(lg_context *ctx, const lg_tensor *dy, double scale, lg_tensor *dx);

/* y = a + b.
 *: a[*] b[*] -> y[*] */
lg_status lg_add(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/*: dy[*] -> da[*] db[*] */
lg_status lg_add_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da, lg_tensor *db);

/* y = a - b.
 *: a[*] b[*] -> y[*] */
lg_status lg_sub(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/*: dy[*] -> da[*] db[*] */
lg_status lg_sub_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *da, lg_tensor *db);

/* y = a b.
 *: a[*] b[*] -> y[*] */
lg_status lg_mul(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/*: dy[*] a[*] b[*] -> da[*] db[*] */
lg_status lg_mul_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                          const lg_tensor *b, lg_tensor *da, lg_tensor *db);

/* y = a / b.
 *: a[*] b[*] -> y[*] */
lg_status lg_div(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/*: dy[*] a[*] b[*] -> da[*] db[*] */
lg_status lg_div_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                          const lg_tensor *b, lg_tensor *da, lg_tensor *db);

/* y = min(a, b); equal values share the gradient by halves. NaN in either gives NaN.
 *: a[*] b[*] -> y[*] */
lg_status lg_minimum(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/*: dy[*] a[*] b[*] -> da[*] db[*] */
lg_status lg_minimum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                              const lg_tensor *b, lg_tensor *da, lg_tensor *db);

/* y = max(a, b); equal values share the gradient by halves. NaN in either gives NaN.
 *: a[*] b[*] -> y[*] */
lg_status lg_maximum(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/*: dy[*] a[*] b[*] -> da[*] db[*] */
lg_status lg_maximum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *a,
                              const lg_tensor *b, lg_tensor *da, lg_tensor *db);

/* y = e^x.
 *: x[*] -> y[*] */
lg_status lg_exp(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[*] y[*] -> dx[*] */
lg_status lg_exp_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y, lg_tensor *dx);

/* y = ln x.
 *: x[*] -> y[*] */
lg_status lg_log(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[*] x[*] -> dx[*] */
lg_status lg_log_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x, lg_tensor *dx);

/* y = |x|; the gradient at 0 is 0.
 *: x[*] -> y[*] */
lg_status lg_abs(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[*] x[*] -> dx[*] */
lg_status lg_abs_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x, lg_tensor *dx);

/* y = x^p, p a constant: C's pow.
 *: x[*] -> y[*] */
lg_status lg_power(lg_context *ctx, const lg_tensor *x, double p, lg_tensor *y);
/*: dy[*] x[*] -> dx[*] */
lg_status lg_power_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x, double p,
                            lg_tensor *dx);

/* y = 1 / (1 + e^-x).
 *: x[*] -> y[*] */
lg_status lg_sigmoid(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[*] y[*] -> dx[*] */
lg_status lg_sigmoid_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                              lg_tensor *dx);

/* y = ln(1 / (1 + e^-x)), without overflow at either end.
 *: x[*] -> y[*] */
lg_status lg_log_sigmoid(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[*] x[*] -> dx[*] */
lg_status lg_log_sigmoid_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                  lg_tensor *dx);

/* y = max(x, 0)^2; the gradient at 0 is 0.
 *: x[*] -> y[*] */
lg_status lg_relu_squared(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[*] x[*] -> dx[*] */
lg_status lg_relu_squared_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                   lg_tensor *dx);

/* y = min(max(x, low), high); the bounds themselves pass the gradient. NaN stays NaN.
 *: x[*] -> y[*] */
lg_status lg_clamp(lg_context *ctx, const lg_tensor *x, double low, double high, lg_tensor *y);
/*: dy[*] x[*] -> dx[*] */
lg_status lg_clamp_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x, double low,
                            double high, lg_tensor *dx);

/* y = 1 where a < b, else 0. No gradient.
 *: a[*] b[*] -> y[*] */
lg_status lg_less(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/* y = 1 where a <= b, else 0. No gradient.
 *: a[*] b[*] -> y[*] */
lg_status lg_less_equal(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);
/* y = 1 where a = b, else 0. No gradient.
 *: a[*] b[*] -> y[*] */
lg_status lg_equal(lg_context *ctx, const lg_tensor *a, const lg_tensor *b, lg_tensor *y);

/* y = a where mask is not 0, else b. The other branch is not read: a NaN in it stays out, of the gradient too.
 *: mask[*] a[*] b[*] -> y[*] */
lg_status lg_where(lg_context *ctx, const lg_tensor *mask, const lg_tensor *a, const lg_tensor *b,
                   lg_tensor *y);
/*: dy[*] mask[*] -> da[*] db[*] */
lg_status lg_where_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *mask,
                            lg_tensor *da, lg_tensor *db);

/* ---- reductions and indices ---- */

/* y = sum of all x, in double.
 *: x[*] -> y[] */
lg_status lg_sum(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/*: dy[] -> dx[*] */
lg_status lg_sum_backward(lg_context *ctx, const lg_tensor *dy, lg_tensor *dx);

/* y = sum of x^2, in double: the square of a norm.
 *: x[*] -> y[]:f64 */
lg_status lg_sum_squares(lg_context *ctx, const lg_tensor *x, lg_tensor *y);

/* y[s] = sum of x over [cu_seqlens[s], cu_seqlens[s+1]), in double; 0 for an empty sequence.
 *: x[N] cu_seqlens[S+1]:i32 -> y[S] */
lg_status lg_segment_sum(lg_context *ctx, const lg_tensor *x, const lg_tensor *cu_seqlens,
                         lg_tensor *y);
/*: dy[S] cu_seqlens[S+1]:i32 -> dx[N] */
lg_status lg_segment_sum_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *cu_seqlens,
                                  lg_tensor *dx);

/* y[n] = x[index[n]].
 *: x[S] index[N]:i32 -> y[N] */
lg_status lg_gather(lg_context *ctx, const lg_tensor *x, const lg_tensor *index, lg_tensor *y);
/* dx[s] = sum of dy[n] over index[n] = s, n ascending.
 *: dy[N] index[N]:i32 -> dx[S] */
lg_status lg_gather_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *index,
                             lg_tensor *dx);

/* ---- layers ---- */

/* y[n] = w[ids[n]]. An id outside [0, V) is an error. Row padding_idx of w gets no gradient; -1: every row does.
 *: w[V,C] ids[N]:i32 padding_idx=-1 -> y[N,C] */
lg_status lg_embedding(lg_context *ctx, const lg_tensor *w, const lg_tensor *ids,
                       int64_t padding_idx, lg_tensor *y);
/* dw[v] += sum of dy[n] over ids[n] = v, n ascending, v != padding_idx.
 *: dy[N,C] ids[N]:i32 -> dw+[V,C]:acc */
lg_status lg_embedding_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *ids,
                                int64_t padding_idx, lg_tensor *dw);

/* y = x w^T + b. Each y is one chain of fused multiply-adds over c ascending: a row's bits do not depend on the others.
 *: x[*,C] w[O,C] b?[O] -> y[*,O] */
lg_status lg_linear(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
                    lg_tensor *y);
/* dx = dy w, dw += dy^T x, db += sum of dy over rows.
 *: dy[*,O] x[*,C] w[O,C] -> dx[*,C] dw+[O,C]:acc db+[O]:acc */
lg_status lg_linear_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                             const lg_tensor *w, lg_tensor *dx, lg_tensor *dw, lg_tensor *db);

/* y = f x rstd, rstd = 1 / sqrt(mean of x^2 over C + eps), f = offset + w in fp32, or 1 without w. In bf16 `round` rounds x rstd before
 * the product, as Llama does; else the product alone is rounded, as Gemma does (whose offset is 1).
 *: ~x[*,C] w?[C] offset=0 round=true -> y[*,C] rstd[*]:acc */
lg_status lg_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, double eps,
                      double offset, bool round, lg_tensor *y, lg_tensor *rstd);
/* With g = dy f and xhat = x rstd: dx = rstd (g - xhat mean(g xhat)), dw += sum of dy xhat over rows.
 *: dy[*,C] ~x[*,C] w?[C] rstd[*]:acc -> ~dx[*,C] dw+[C]:acc */
lg_status lg_rms_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                               const lg_tensor *w, const lg_tensor *rstd, double offset,
                               lg_tensor *dx, lg_tensor *dw);

/* s = x + residual, rounded to its dtype, and y, rstd = rms_norm(s), in one pass.
 *: x[*,C] residual[*,C] w?[C] offset=0 round=true -> s[*,C] y[*,C] rstd[*]:acc */
lg_status lg_add_rms_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *residual,
                          const lg_tensor *w, double eps, double offset, bool round, lg_tensor *s,
                          lg_tensor *y, lg_tensor *rstd);
/* dx = dresidual = ds + rms_norm's dx at s; dw as there.
 *: dy[*,C] ds?[*,C] s[*,C] w?[C] rstd[*]:acc -> dx[*,C] dresidual[*,C] dw+[C]:acc */
lg_status lg_add_rms_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *ds,
                                   const lg_tensor *s, const lg_tensor *w, const lg_tensor *rstd,
                                   double offset, lg_tensor *dx, lg_tensor *dresidual,
                                   lg_tensor *dw);

/* y = w xhat + b, xhat = (x - mean) rstd, rstd = 1 / sqrt(mean of (x - mean)^2 + eps), means over C; without w it counts as 1,
 * without b as 0.
 *: ~x[*,C] w?[C] b?[C] -> y[*,C] mean[*]:acc rstd[*]:acc */
lg_status lg_layer_norm(lg_context *ctx, const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
                        double eps, lg_tensor *y, lg_tensor *mean, lg_tensor *rstd);
/* With g = dy w: dx = rstd (g - mean(g) - xhat mean(g xhat)), dw += sum of dy xhat over rows, db += sum of dy.
 *: dy[*,C] ~x[*,C] w?[C] mean[*]:acc rstd[*]:acc -> ~dx[*,C] dw+[C]:acc db+[C]:acc */
lg_status lg_layer_norm_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                 const lg_tensor *w, const lg_tensor *mean, const lg_tensor *rstd,
                                 lg_tensor *dx, lg_tensor *dw, lg_tensor *db);

/* Rotary position embedding. Pair i < R of a head, (a, b) = (x[i], x[i+R]), or interleaved (x[2i], x[2i+1]), turns by the angle of
 * position p = position[n]: (a cos[p,i] - b sin[p,i], b cos[p,i] + a sin[p,i]); dimensions from 2R on pass unchanged. A position
 * outside [0, P) is an error.
 *: ~x[N,H,D] cos[P,R]:acc sin[P,R]:acc position[N]:i32 interleaved=false -> ~y[N,H,D] */
lg_status lg_rope(lg_context *ctx, const lg_tensor *x, const lg_tensor *cos, const lg_tensor *sin,
                  const lg_tensor *position, bool interleaved, lg_tensor *y);
/* The rotation by the opposite angle.
 *: ~dy[N,H,D] cos[P,R]:acc sin[P,R]:acc position[N]:i32 -> ~dx[N,H,D] */
lg_status lg_rope_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *cos,
                           const lg_tensor *sin, const lg_tensor *position, bool interleaved,
                           lg_tensor *dx);

/* Tables for tokens that have M positions each (time, height and width; row and column): y[n,i] = table[position[plane[i],n],i], row n
 * for token n. A position outside [0, P) or a plane outside [0, M) is an error. No gradient.
 *: table[P,R] position[M,N]:i32 plane[R]:i32 -> y[N,R] */
lg_status lg_rope_planes(lg_context *ctx, const lg_tensor *table, const lg_tensor *position,
                         const lg_tensor *plane, lg_tensor *y);

/* Queries or keys: each head's rms_norm with weight w, then half-split rope, without a rounding between.
 *: ~x[N,H,D] w[D] cos[P,R]:acc sin[P,R]:acc position[N]:i32 offset=0 -> ~y[N,H,D] rstd[N,H]:acc */
lg_status lg_qk_norm_rope(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                          const lg_tensor *cos, const lg_tensor *sin, const lg_tensor *position,
                          double eps, double offset, lg_tensor *y, lg_tensor *rstd);
/* dy turned by the opposite angle, then rms_norm's gradient.
 *: ~dy[N,H,D] ~x[N,H,D] w[D] cos[P,R]:acc sin[P,R]:acc position[N]:i32 rstd[N,H]:acc -> ~dx[N,H,D] dw+[D]:acc */
lg_status lg_qk_norm_rope_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *x,
                                   const lg_tensor *w, const lg_tensor *cos, const lg_tensor *sin,
                                   const lg_tensor *position, const lg_tensor *rstd, double offset,
                                   lg_tensor *dx, lg_tensor *dw);

/* y = silu(gate_multiplier gate) up down_multiplier, silu(z) = z sigmoid(z).
 *: ~gate[*] ~up[*] gate_multiplier=1 down_multiplier=1 -> y[*] */
lg_status lg_swiglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up,
                    double gate_multiplier, double down_multiplier, lg_tensor *y);
/*: dy[*] ~gate[*] ~up[*] -> ~dgate[*] ~dup[*] */
lg_status lg_swiglu_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *gate,
                             const lg_tensor *up, double gate_multiplier, double down_multiplier,
                             lg_tensor *dgate, lg_tensor *dup);

/* y = gelu(gate) up, gelu(z) = z Phi(z), Phi the normal distribution; approximate: z (1 + tanh(sqrt(2 / pi) (z + 0.044715 z^3))) / 2.
 *: ~gate[*] ~up[*] approximate=false -> y[*] */
lg_status lg_geglu(lg_context *ctx, const lg_tensor *gate, const lg_tensor *up, bool approximate,
                   lg_tensor *y);
/*: dy[*] ~gate[*] ~up[*] -> ~dgate[*] ~dup[*] */
lg_status lg_geglu_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *gate,
                            const lg_tensor *up, bool approximate, lg_tensor *dgate,
                            lg_tensor *dup);

/* Attention within packed sequences [cu_seqlens[s], cu_seqlens[s+1]); head h reads key/value head h / (H / G):
 *   y[i,h] = sum_j p[j] v[j],  p = softmax_j(s[i,j]),  s[i,j] = softcap tanh(scale q[i,h] . k[j] / softcap),
 * j in the sequence of i, j <= i if causal, and i - j < window. Without the cap where softcap is 0; window 0 is none, another
 * one needs causal. sinks[h] is one more score in the softmax, with no value. lse[i,h] = the log-sum-exp of all these scores.
 *: ~q[N,H,D] ~k[N,G,D] ~v[N,G,D] cu_seqlens[S+1]:i32 sinks?[H] -> y[N,H,D] lse[N,H]:acc */
lg_status lg_attention(lg_context *ctx, const lg_tensor *q, const lg_tensor *k, const lg_tensor *v,
                       const lg_tensor *cu_seqlens, const lg_tensor *sinks, double scale,
                       bool causal, int64_t window, double softcap, lg_tensor *y, lg_tensor *lse);
/* With delta = dy . y: ds = p (dy . v - delta) (1 - (s / softcap)^2), dq = scale sum_j ds k, dk = scale sum_i ds q,
 * dv = sum_i p dy; key/value heads sum over their query heads, h ascending. dsinks -= sum_i exp(sinks - lse) delta.
 *: dy[N,H,D] ~q[N,H,D] ~k[N,G,D] ~v[N,G,D] y[N,H,D] lse[N,H]:acc cu_seqlens[S+1]:i32 sinks?[H] -> ~dq[N,H,D] ~dk[N,G,D] ~dv[N,G,D] dsinks+[H]:acc */
lg_status lg_attention_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *q,
                                const lg_tensor *k, const lg_tensor *v, const lg_tensor *y,
                                const lg_tensor *lse, const lg_tensor *cu_seqlens,
                                const lg_tensor *sinks, double scale, bool causal, int64_t window,
                                double softcap, lg_tensor *dq, lg_tensor *dk, lg_tensor *dv,
                                lg_tensor *dsinks);

/* Puts keys and values into the paged cache: row n goes to slot[n] = page * page size + offset.
 *: ~k[N,G,D] ~v[N,G,D] slot[N]:i32 k_cache[P,G,D] v_cache[P,G,D] -> k_cache v_cache */
lg_status lg_cache_write(lg_context *ctx, const lg_tensor *k, const lg_tensor *v,
                         const lg_tensor *slot, lg_tensor *k_cache, lg_tensor *v_cache);

/* Copies slot from[n] to slot to[n]; no slot may be both.
 *: from[N]:i32 to[N]:i32 k_cache[P,G,D] v_cache[P,G,D] -> k_cache v_cache */
lg_status lg_cache_copy(lg_context *ctx, const lg_tensor *from, const lg_tensor *to,
                        lg_tensor *k_cache, lg_tensor *v_cache);

/* Attention of one new position a sequence over its cached keys and values: position j of row b lies at slot
 * page[b, j / page_size] * page_size + j % page_size, j < length[b]. Bit-equal to the last row of lg_attention over the same keys,
 * causal, with the same sinks, window and softcap.
 *: ~q[B,H,D] k_cache[P,G,D] v_cache[P,G,D] page[B,M]:i32 length[B]:i32 sinks?[H] -> y[B,H,D] */
lg_status lg_attention_decode(lg_context *ctx, const lg_tensor *q, const lg_tensor *k_cache,
                              const lg_tensor *v_cache, const lg_tensor *page,
                              const lg_tensor *length, const lg_tensor *sinks, int64_t page_size,
                              double scale, int64_t window, double softcap, lg_tensor *y);

/* ---- log-probabilities and sampling ---- */

/* z = softcap tanh((x w^T + b) / softcap) / temperature, without the cap when softcap is 0, kept in fp32: the numbers that
 * linear_logprob reduces, bit for bit.
 *: x[N,C] w[V,C] b?[V] -> z[N,V]:acc */
lg_status lg_linear_logits(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                           const lg_tensor *b, double temperature, double softcap, lg_tensor *z);

/* Log-probability of the target under softmax(z), z as in linear_logits, without an [N,V] of logits beyond a chunk:
 *   lse[n] = log sum_v exp z[n,v],  logp[n] = z[n,target[n]] - lse[n],  entropy[n] = lse[n] - sum_v p[n,v] z[n,v].
 * predicted[n] is the smallest index of the largest z. Rows whose target is `ignore` take no part in the product and get 0 in all
 * outputs, -1 in predicted. `z`, when given, keeps the rows that took part, packed at the front, for the backward. A target outside
 * [0, V) is an error.
 * kept: how many targets are not `ignore`, where the caller knows, and any other number is an error; -1: counted, for which the host
 * waits on a device.
 *: x[N,C] w[V,C] b?[V] target[N]:i32 kept=-1 -> logp[N]:acc entropy?[N]:acc lse[N]:acc predicted?[N]:i32 z?[N,V]:acc */
lg_status lg_linear_logprob(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                            const lg_tensor *b, const lg_tensor *target, double temperature,
                            double softcap, int64_t ignore, int64_t kept, lg_tensor *logp,
                            lg_tensor *entropy, lg_tensor *lse, lg_tensor *predicted, lg_tensor *z);
/* dz[n,v] = dlogp[n] ([v = target[n]] - p[n,v]) - dentropy[n] p[n,v] (z[n,v] - lse[n] + entropy[n]), then through the
 * temperature and the cap to dx = dlogits w, dw += dlogits^T x, db += sum of dlogits. Rows that are ignored or whose dlogp and
 * dentropy are exactly 0 are left out of the products; their dx is 0. Which these are the device alone knows: there is no `kept`.
 * `z` is overwritten; without it the logits are recomputed.
 *: dlogp[N]:acc dentropy?[N]:acc x[N,C] w[V,C] b?[V] target[N]:i32 entropy?[N]:acc lse[N]:acc z?[N,V]:acc -> z dx[N,C] dw+[V,C]:acc db+[V]:acc */
lg_status lg_linear_logprob_backward(lg_context *ctx, const lg_tensor *dlogp,
                                     const lg_tensor *dentropy, const lg_tensor *x,
                                     const lg_tensor *w, const lg_tensor *b,
                                     const lg_tensor *target, const lg_tensor *entropy,
                                     const lg_tensor *lse, double temperature, double softcap,
                                     int64_t ignore, lg_tensor *z, lg_tensor *dx, lg_tensor *dw,
                                     lg_tensor *db);

/* Cross entropy of softmax(z), z as in linear_logits at temperature 1, with its gradient made in the same pass. With s =
 * label_smoothing, c = class_weight (1 without), t = target[n] and f = p[n,t], a constant, with token_scaling, else 1:
 *   loss[n] = f ((1 - s) c[t] (lse[n] - z[n,t]) + s / V sum_v c[v] (lse[n] - z[n,v])),  square[n] = f lse[n]^2;
 * grad_x, grad_w and grad_b are the gradients of scale * sum of loss + z_scale * sum of square. predicted[n] is the smallest index of
 * the largest z. Rows whose target is `ignore` get 0, and -1 in predicted. A target outside [0, V) is an error. `kept` is that of
 * linear_logprob.
 *: x[N,C] w[V,C] b?[V] target[N]:i32 class_weight?[V]:acc kept=-1 -> loss[N]:acc square?[N]:acc entropy?[N]:acc predicted?[N]:i32 grad_x?[N,C] grad_w+?[V,C]:acc grad_b+?[V]:acc */
lg_status lg_linear_cross_entropy(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                  const lg_tensor *b, const lg_tensor *target,
                                  const lg_tensor *class_weight, double scale, double z_scale,
                                  double label_smoothing, bool token_scaling, double softcap,
                                  int64_t ignore, int64_t kept, lg_tensor *loss, lg_tensor *square,
                                  lg_tensor *entropy, lg_tensor *predicted, lg_tensor *grad_x,
                                  lg_tensor *grad_w, lg_tensor *grad_b);

/* Log-probabilities of K chosen tokens a row under softmax(z), z = logits / temperature, in one read of the row:
 *   lse[n] = log sum_v exp z[n,v],  logp[n,k] = z[n,target[n,k]] - lse[n],  entropy[n] = lse[n] - sum_v p[n,v] z[n,v].
 * Where a target is `ignore` logp is 0; a row with targets that are all `ignore` is not read and gets 0 in all outputs. K = 0 asks for
 * entropies alone. A target outside [0, V) is an error.
 *: ~logits[*,V]:float target[*,K]:i32 -> logp[*,K]:acc entropy[*]:acc lse[*]:acc */
lg_status lg_logprob(lg_context *ctx, const lg_tensor *logits, const lg_tensor *target,
                     double temperature, int64_t ignore, lg_tensor *logp, lg_tensor *entropy,
                     lg_tensor *lse);
/* dz[n,v] = sum_k dlogp[n,k] ([v = target[n,k]] - p[n,v]) - dentropy[n] p[n,v] (z[n,v] - lse[n] + entropy[n]), over the targets that
 * are not `ignore`; dlogits = dz / temperature. A row whose dlogp and dentropy are all exactly 0 is not read: its gradient is 0.
 *: dlogp[*,K]:acc dentropy?[*]:acc ~logits[*,V]:float target[*,K]:i32 entropy[*]:acc lse[*]:acc -> ~dlogits[*,V] */
lg_status lg_logprob_backward(lg_context *ctx, const lg_tensor *dlogp, const lg_tensor *dentropy,
                              const lg_tensor *logits, const lg_tensor *target,
                              const lg_tensor *entropy, const lg_tensor *lse, double temperature,
                              int64_t ignore, lg_tensor *dlogits);

/* Cross entropy of softmax(z), z = softcap tanh(logits / softcap), the logits themselves when softcap is 0. With s = label_smoothing,
 * c = class_weight (1 without) and t = target[n]:
 *   lse[n] = log sum_v exp z[n,v],  loss[n] = (1 - s) c[t] (lse[n] - z[n,t]) + s / V sum_v c[v] (lse[n] - z[n,v]),
 * weight[n] = c[t], and predicted[n] is the smallest index of the largest z. A row whose target is `ignore` is not read: it gets 0, and
 * -1 in predicted. A target outside [0, V) is an error.
 *: ~logits[*,V]:float target[*]:i32 class_weight?[V]:acc -> loss[*]:acc lse[*]:acc weight[*]:acc predicted[*]:i32 */
lg_status lg_cross_entropy(lg_context *ctx, const lg_tensor *logits, const lg_tensor *target,
                           const lg_tensor *class_weight, double label_smoothing, double softcap,
                           int64_t ignore, lg_tensor *loss, lg_tensor *lse, lg_tensor *weight,
                           lg_tensor *predicted);
/* dz[n,v] = dloss[n] (p[n,v] ((1 - s) c[t] + s / V sum of c) - (1 - s) c[t] [v = t] - s / V c[v]) + dlse[n] p[n,v], then through the
 * cap. A row that is ignored or whose dloss and dlse are exactly 0 is not read: its gradient is 0.
 *: dloss[*]:acc dlse?[*]:acc ~logits[*,V]:float target[*]:i32 class_weight?[V]:acc lse[*]:acc -> ~dlogits[*,V] */
lg_status lg_cross_entropy_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *dlse,
                                    const lg_tensor *logits, const lg_tensor *target,
                                    const lg_tensor *class_weight, const lg_tensor *lse,
                                    double label_smoothing, double softcap, int64_t ignore,
                                    lg_tensor *dlogits);

/* y = softmax(x) over the last dimension.
 *: ~x[*,V]:float -> y[*,V] */
lg_status lg_softmax(lg_context *ctx, const lg_tensor *x, lg_tensor *y);
/* dx = y (dy - sum_v dy y).
 *: dy[*,V] y[*,V]:float -> ~dx[*,V] */
lg_status lg_softmax_backward(lg_context *ctx, const lg_tensor *dy, const lg_tensor *y,
                              lg_tensor *dx);

/* Draws one id a row from softmax(z) and gives its log-probability under the whole softmax(z), by linear_logprob's reduction.
 * Candidates: the top_k largest (0: all), then the shortest prefix by falling probability that reaches top_p (renormalised over
 * the first cut; at least one), then those with at least min_p times the largest probability; of equal values the lower id comes first. The
 * draw takes one uniform u, word 4 * position[b] of the Philox stream (seed, sequence[b]): the first candidate in id order
 * whose running probability reaches u. top_k 1 is argmax. NaN, +inf or no finite logit is an error.
 *: ~z[B,V] sequence[B]:i64 position[B]:i32 -> id[B]:i32 logp[B]:acc */
lg_status lg_sample(lg_context *ctx, const lg_tensor *z, const lg_tensor *sequence,
                    const lg_tensor *position, int64_t seed, int64_t top_k, double top_p,
                    double min_p, lg_tensor *id, lg_tensor *logp);

/* ---- distillation: student against teacher logits, row by row ----
 *
 * p and q are the softmaxes of student / temperature and teacher / temperature over the first min(V, U) columns, those that
 * both have; 0 log 0 is 0. No gradient goes to the teacher, to columns past these, or to rows whose target is `ignore`: their
 * outputs are 0. `saved` is what a row keeps for its backward. */

/* ce[n] = -log softmax(student[n])[target[n]], at temperature 1; tvd[n] = 1/2 sum_v |p - q|, with sign(0) = 0 in its
 * gradient. A target outside [0, min(V, U)) is an error.
 *: ~student[N,V]:float ~teacher[N,U] target[N]:i32 -> ce[N]:acc tvd[N]:acc saved[N,4]:acc */
lg_status lg_ce_tvd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                    const lg_tensor *target, double temperature, int64_t ignore, lg_tensor *ce,
                    lg_tensor *tvd, lg_tensor *saved);
/* With sigma = sum_v p sign(p - q): dstudent = dce (softmax(student) - [v = target]) + dtvd p (sign(p - q) - sigma) / (2
 * temperature).
 *: dce?[N]:acc dtvd?[N]:acc ~student[N,V]:float ~teacher[N,U] target[N]:i32 saved[N,4]:acc -> ~dstudent[N,V] */
lg_status lg_ce_tvd_backward(lg_context *ctx, const lg_tensor *dce, const lg_tensor *dtvd,
                             const lg_tensor *student, const lg_tensor *teacher,
                             const lg_tensor *target, const lg_tensor *saved, double temperature,
                             int64_t ignore, lg_tensor *dstudent);

/* loss[n] = 1/2 sum_v |p - q|.
 *: ~student[N,V]:float ~teacher[N,U] target?[N]:i32 -> loss[N]:acc saved[N,4]:acc */
lg_status lg_tvd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                 const lg_tensor *target, double temperature, int64_t ignore, lg_tensor *loss,
                 lg_tensor *saved);
/*: dloss[N]:acc ~student[N,V]:float ~teacher[N,U] target?[N]:i32 saved[N,4]:acc -> ~dstudent[N,V] */
lg_status lg_tvd_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                          const lg_tensor *teacher, const lg_tensor *target, const lg_tensor *saved,
                          double temperature, int64_t ignore, lg_tensor *dstudent);

/* loss[n] = beta KL(q || m) + (1 - beta) KL(p || m), m = (1 - beta) p + beta q (Agarwal et al. 2024, equation 1); beta 0 is
 * KL(q || p), beta 1 KL(p || q), infinite where the second has no probability and the first has.
 *: ~student[N,V]:float ~teacher[N,U] target?[N]:i32 -> loss[N]:acc saved[N,4]:acc */
lg_status lg_jsd(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                 const lg_tensor *target, double beta, double temperature, int64_t ignore,
                 lg_tensor *loss, lg_tensor *saved);
/* dstudent = dloss (1 - beta) p (log(p / m) - KL(p || m)) / temperature; at the ends p - q and p (log(p / q) - KL(p || q)).
 *: dloss[N]:acc ~student[N,V]:float ~teacher[N,U] target?[N]:i32 saved[N,4]:acc -> ~dstudent[N,V] */
lg_status lg_jsd_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                          const lg_tensor *teacher, const lg_tensor *target, const lg_tensor *saved,
                          double beta, double temperature, int64_t ignore, lg_tensor *dstudent);

/* loss[n] = 1 - a . b / (|a| |b|), a and b the logits over the temperature, norms of at least 1e-8; columns where either is
 * -inf take no part.
 *: ~student[N,V]:float ~teacher[N,U] target?[N]:i32 -> loss[N]:acc saved[N,4]:acc */
lg_status lg_cosine(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                    const lg_tensor *target, double temperature, int64_t ignore, lg_tensor *loss,
                    lg_tensor *saved);
/*: dloss[N]:acc ~student[N,V]:float ~teacher[N,U] target?[N]:i32 saved[N,4]:acc -> ~dstudent[N,V] */
lg_status lg_cosine_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                             const lg_tensor *teacher, const lg_tensor *target,
                             const lg_tensor *saved, double temperature, int64_t ignore,
                             lg_tensor *dstudent);

/* The jsd of log-probabilities, p = e^student and q = e^teacher, which its gradient takes as free numbers: with respect to
 * student, (1 - beta) p log(p / m); at the ends -q and p (log(p / q) + 1).
 *: ~student[N,V] ~teacher[N,V] target?[N]:i32 -> loss[N]:acc */
lg_status lg_jsd_logp(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                      const lg_tensor *target, double beta, int64_t ignore, lg_tensor *loss);
/*: dloss[N]:acc ~student[N,V] ~teacher[N,V] target?[N]:i32 -> ~dstudent[N,V] */
lg_status lg_jsd_logp_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                               const lg_tensor *teacher, const lg_tensor *target, double beta,
                               int64_t ignore, lg_tensor *dstudent);

/* loss[n] = sum_v q (log q - student), student log-probabilities, q the teacher's probabilities (log q at least log 1e-10), or
 * e^teacher with log_target. dstudent = -dloss q.
 *: ~student[N,V] ~teacher[N,V] target?[N]:i32 -> loss[N]:acc */
lg_status lg_kl_logp(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                     const lg_tensor *target, bool log_target, int64_t ignore, lg_tensor *loss);
/*: dloss[N]:acc ~student[N,V] ~teacher[N,V] target?[N]:i32 -> ~dstudent[N,V] */
lg_status lg_kl_logp_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                              const lg_tensor *teacher, const lg_tensor *target, bool log_target,
                              int64_t ignore, lg_tensor *dstudent);

/* loss[n] = 1/2 sum_v |student - teacher|, both probabilities. dstudent = dloss sign(student - teacher) / 2.
 *: ~student[N,V] ~teacher[N,V] target?[N]:i32 -> loss[N]:acc */
lg_status lg_tvd_prob(lg_context *ctx, const lg_tensor *student, const lg_tensor *teacher,
                      const lg_tensor *target, int64_t ignore, lg_tensor *loss);
/*: dloss[N]:acc ~student[N,V] ~teacher[N,V] target?[N]:i32 -> ~dstudent[N,V] */
lg_status lg_tvd_prob_backward(lg_context *ctx, const lg_tensor *dloss, const lg_tensor *student,
                               const lg_tensor *teacher, const lg_tensor *target, int64_t ignore,
                               lg_tensor *dstudent);

/* A student's head against a teacher's, with the gradient made in the same pass and no logits beyond a chunk: hard[n] the cross
 * entropy at temperature 1, soft[n] one of the losses above (divergence: LG_TVD, LG_JSD or LG_COSINE), entropy[n] that of p.
 * Logits are softcap tanh((x w^T + b) / softcap), without the cap when it is 0. grad_x, grad_w and grad_b are the gradients of
 * sum of weight_hard[n] hard[n] + weight_soft[n] soft[n]; without a weight its term has none. Rows whose target is `ignore` take
 * no part in the products and get 0 in all outputs. `kept` is that of linear_logprob.
 *: x[N,C] w[V,C] b?[V] teacher_x[N,K] teacher_w[U,K] teacher_b?[U] target[N]:i32 weight_hard?[N]:acc weight_soft?[N]:acc kept=-1 -> hard[N]:acc soft[N]:acc entropy?[N]:acc grad_x?[N,C] grad_w+?[V,C]:acc grad_b+?[V]:acc */
lg_status lg_linear_distill(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                            const lg_tensor *b, const lg_tensor *teacher_x,
                            const lg_tensor *teacher_w, const lg_tensor *teacher_b,
                            const lg_tensor *target, const lg_tensor *weight_hard,
                            const lg_tensor *weight_soft, int64_t divergence, double beta,
                            double temperature, double softcap, double teacher_softcap,
                            int64_t ignore, int64_t kept, lg_tensor *hard, lg_tensor *soft,
                            lg_tensor *entropy, lg_tensor *grad_x, lg_tensor *grad_w,
                            lg_tensor *grad_b);

/* The same against a teacher of whom some ids and their log-probabilities at temperature 1 are known, K of each row and distinct;
 * an id outside [0, V) is none. The probability that they lack, at least 1e-6, is the teacher's of all other columns, in
 * proportion to the student's own: a divergence at temperature 1 sees these as one class.
 *: x[N,C] w[V,C] b?[V] teacher_id[N,K]:i32 teacher_logp[N,K]:acc target[N]:i32 weight_hard?[N]:acc weight_soft?[N]:acc kept=-1 -> hard[N]:acc soft[N]:acc entropy?[N]:acc grad_x?[N,C] grad_w+?[V,C]:acc grad_b+?[V]:acc */
lg_status lg_linear_distill_topk(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                 const lg_tensor *b, const lg_tensor *teacher_id,
                                 const lg_tensor *teacher_logp, const lg_tensor *target,
                                 const lg_tensor *weight_hard, const lg_tensor *weight_soft,
                                 int64_t divergence, double beta, double temperature,
                                 double softcap, int64_t ignore, int64_t kept, lg_tensor *hard,
                                 lg_tensor *soft, lg_tensor *entropy, lg_tensor *grad_x,
                                 lg_tensor *grad_w, lg_tensor *grad_b);

/* ---- optimiser ---- */

/* AdamW (Loshchilov and Hutter 2019, algorithm 2) with g' = grad_scale g: p *= 1 - lr weight_decay, m and v move by 1 - beta,
 * p -= lr mhat / (sqrt(vhat) + eps); step counts from 1. With low, p must be bf16 and the two hold an fp32 weight: p the nearest
 * bf16, halves away from 0, and low, a signed 16-bit number in a bf16's room, what its bits lack: (p's bits << 16) + low.
 *: g[*]:acc p[*] m[*]:acc v[*]:acc low?[*] -> p m v low */
lg_status lg_adamw(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr, double beta1,
                   double beta2, double eps, double weight_decay, int64_t step, lg_tensor *p,
                   lg_tensor *m, lg_tensor *v, lg_tensor *low);

/* adamw with p, m and v in bf16, rounded stochastically from fp32: up in magnitude with the probability that is the share of
 * the step between the neighbours, so that updates far below half a step add up in the mean. Element i has words 2i and 2i+1 of
 * the Philox stream (seed, stream): the low half of the first for p, its high half for m, the low half of the second for v.
 * In f32 and f64 it is adamw.
 *: g[*]:acc p[*] m[*] v[*] -> p m v */
lg_status lg_adamw_stochastic(lg_context *ctx, const lg_tensor *g, double grad_scale, double lr,
                              double beta1, double beta2, double eps, double weight_decay,
                              int64_t step, int64_t seed, int64_t stream, lg_tensor *p,
                              lg_tensor *m, lg_tensor *v);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
