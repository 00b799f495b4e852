/* Distillation on vocabulary heads, chunk by chunk: the student's products and the teacher's,
 * divergence_row on the pairs of rows (losses and the student's gradient in one pass), and the
 * gradient's products.
 *
 * linear_distill_fill makes a teacher's row of the log-probabilities of K ids: a block owns row i
 * of a chunk, copies the student's logits, takes the log-sum-exp l of those without a known id, and
 * sets the K against it: known logit = l - log(rest) + logp, rest = 1 - sum of exp(logp).
 */
#include "divergence.cuh"
#include "head.cuh"
#include "op/linear_distill.h"
#include "op/linear_distill_topk.h"

enum { FILL_THREADS = 512 };
static constexpr float LEAST_REST = 1e-6f;

template <class Finish>
static __global__ void __launch_bounds__(FILL_THREADS)
    linear_distill_fill(const float *z, int64_t ld, int64_t V, Finish finish, const int32_t *row,
                        const int32_t *id, const float *logp, int64_t K, float *teacher) {
    __shared__ head_room room;
    const int64_t n = row[blockIdx.x] < 0 ? 0 : row[blockIdx.x];
    const float *row_z = z + blockIdx.x * ld;
    float *to = teacher + blockIdx.x * ld, known = 0;
    id += n * K, logp += n * K;
    for (int64_t v = threadIdx.x * 4; v < V; v += FILL_THREADS * 4) {
        vec<float, 4> x = head_load(row_z, v, V, true);
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = finish(x[e]);
        head_store(to, v, V, true, x);
    }
    __syncthreads();
    for (int64_t k = threadIdx.x; k < K; k += FILL_THREADS) {
        known += head_exp(logp[k]);
        if (id[k] >= 0 && id[k] < V) to[id[k]] = -INFINITY;
    }
    known = block_reduce(known, Sum(), 0); /* waits for all: the row is as it will be read */
    const head_stats s =
        head_merge(head_reduce_thread(to, {0, V}, true, head_plain(), NULL), &room);
    const float base = s.sum > 0 ? s.max + logf(s.sum) - logf(fmaxf(1 - known, LEAST_REST)) : 0;
    for (int64_t k = threadIdx.x; k < K; k += FILL_THREADS)
        if (id[k] >= 0 && id[k] < V) to[id[k]] = base + logp[k];
}

/* ---- the host's side ---- */

/* An op at work. */
struct distill {
    lm_head student, teacher;
    const lg_tensor *id, *logp; /* [N, K] in place of a teacher's head, or NULL */
    int64_t divergence;
    double beta, temperature;
    const lg_tensor *target, *weight_hard, *weight_soft; /* the weights or NULL */
    int64_t ignore, kept;
    lg_tensor *hard, *soft, *entropy, *grad_x, *grad_w, *grad_b;
    float *teacher_logits; /* [chunk, teacher_ld] */
    int64_t teacher_ld;

    bool has_gradient() const { return grad_x || grad_w || grad_b; }
};

/* One piece of scratch for both heads. The teacher's rows are those of the student. */
static lg_status reserve(distill &o) {
    lm_head &student = o.student, &teacher = o.teacher;
    if (!o.id && teacher.chunk < student.chunk) student.chunk = teacher.chunk;
    teacher.chunk = student.chunk;
    const auto place = [&](char *at) {
        at = head_place(student, at, true, o.has_gradient());
        if (!o.id) return head_place(teacher, at, true, false);
        teacher.logits = (float *)at;
        return at + student.chunk * student.logits_ld * 4;
    };
    void *scratch;
    LG_TRY(lg_scratch(student.ctx, place(NULL) - (char *)NULL, &scratch));
    place((char *)scratch);
    teacher.row = student.row, teacher.count = student.count;
    o.teacher_logits = teacher.logits;
    o.teacher_ld = o.id ? student.logits_ld : teacher.logits_ld;
    return LG_OK;
}

/* The teacher's logits of n active rows, and how to finish them. */
static lg_status teacher_logits(const distill &o, int64_t active, int64_t i0, int64_t n) {
    const lm_head &head = o.student;
    const void *x;
    if (!o.id) {
        LG_TRY(head_rows(o.teacher, active, i0, n, false, &x));
        return head_logits(o.teacher, x, n, o.teacher_logits, o.teacher_ld);
    }
    return head_with_finish(head, [&](auto finish) {
        linear_distill_fill<<<(unsigned)n, FILL_THREADS, 0, cuda_stream(head.ctx)>>>(
            head.logits, head.logits_ld, head.V, finish, head.row + i0, (const int32_t *)o.id->data,
            (const float *)o.logp->data, o.id->shape[1], o.teacher_logits);
        return cuda_launched(head.ctx, head.op);
    });
}

static const float *floats(const lg_tensor *t) { return t ? (const float *)t->data : NULL; }

/* The losses of n active rows, and the gradient of their logits. */
template <class O, class Finish>
static lg_status distill_rows(const distill &o, Finish finish, Finish teacher_finish, int64_t i0,
                              int64_t n) {
    const lm_head &head = o.student;
    pair_args<float, O, Finish> a = {};
    a.student = head.logits, a.teacher = o.teacher_logits;
    a.student_rows = pair_rows_of(head.logits_ld), a.teacher_rows = pair_rows_of(o.teacher_ld);
    a.gradient_rows = pair_rows_of(head.dlogits_ld);
    a.finish = finish, a.teacher_finish = teacher_finish;
    a.N = n, a.V = head.classes, a.columns = head.V;
    a.scale = (float)(1 / o.temperature), a.beta = (float)o.beta;
    a.row = head.row + i0, a.target = (const int32_t *)o.target->data, a.ignore = o.ignore;
    a.vector = a.gradient_vector = true;
    a.hard = (float *)o.hard->data, a.soft = (float *)o.soft->data;
    a.entropy = o.entropy ? (float *)o.entropy->data : NULL;
    a.weight_hard = floats(o.weight_hard), a.weight_soft = floats(o.weight_soft);
    a.gradient = o.has_gradient() ? (O *)head.dlogits : NULL;
    a.error = cuda_error_slot(head.ctx, head.op);
    return pair_with_kind(o.divergence, o.beta, [&](auto kind) {
        return pair_launch_rows<kind.value>(head.ctx, head.op, n, a);
    });
}

static lg_status run(distill &o) {
    lm_head &head = o.student;
    LG_TRY(pair_check(head.ctx, head.op, o.divergence, o.beta, o.temperature));
    LG_TRY(head_check_kept(head.ctx, head.op, o.kept, head.N));
    return dispatch_computed(head.ctx, head.op, head.x->dtype, [&](auto type) {
        using O = decltype(type);
        int64_t active;
        if (head.N == 0) return LG_OK;
        LG_TRY(reserve(o));
        LG_TRY(head_find_rows(head, o.target, o.ignore, NULL, NULL, o.kept));
        LG_TRY(head_bias(head));
        if (!o.id) LG_TRY(head_bias(o.teacher));
        LG_TRY(head_clear(head, o.hard, 0));
        LG_TRY(head_clear(head, o.soft, 0));
        LG_TRY(head_clear(head, o.entropy, 0));
        LG_TRY(head_wait_rows(head, o.kept, &active));
        if (active < head.N) LG_TRY(head_clear(head, o.grad_x, 0));
        return head_for_chunks(head, active, [&](int64_t i0, int64_t n, const void *x_rows) {
            LG_TRY(head_logits(head, x_rows, n, head.logits, head.logits_ld));
            LG_TRY(teacher_logits(o, active, i0, n));
            /* A cap of 0 is none. */
            if (head.softcap == 0 && o.teacher.softcap == 0)
                LG_TRY(distill_rows<O>(o, head_plain(), head_plain(), i0, n));
            else
                LG_TRY(distill_rows<O>(o, head_capped{head.softcap, 1},
                                       head_capped{o.teacher.softcap, 1}, i0, n));
            if (!o.has_gradient()) return LG_OK;
            return head_products(head, active, i0, n, x_rows, o.grad_x, o.grad_w, o.grad_b);
        });
    });
}

extern "C" lg_status cuda_linear_distill(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                         const lg_tensor *b, const lg_tensor *teacher_x,
                                         const lg_tensor *teacher_w, const lg_tensor *teacher_b,
                                         const lg_tensor *target, const lg_tensor *weight_hard,
                                         const lg_tensor *weight_soft, int64_t divergence,
                                         double beta, double temperature, double softcap,
                                         double teacher_softcap, int64_t ignore, int64_t kept,
                                         lg_tensor *hard, lg_tensor *soft, lg_tensor *entropy,
                                         lg_tensor *grad_x, lg_tensor *grad_w, lg_tensor *grad_b) {
    const char *op = "linear_distill";
    distill o = {head_of(ctx, op, x, w, b, 1, softcap),
                 head_of(ctx, op, teacher_x, teacher_w, teacher_b, 1, teacher_softcap),
                 NULL,
                 NULL,
                 divergence,
                 beta,
                 temperature,
                 target,
                 weight_hard,
                 weight_soft,
                 ignore,
                 kept,
                 hard,
                 soft,
                 entropy,
                 grad_x,
                 grad_w,
                 grad_b};
    if (o.teacher.V < o.student.V) o.student.classes = o.teacher.V;
    return run(o);
}

extern "C" lg_status cuda_linear_distill_topk(
    lg_context *ctx, const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
    const lg_tensor *teacher_id, const lg_tensor *teacher_logp, const lg_tensor *target,
    const lg_tensor *weight_hard, const lg_tensor *weight_soft, int64_t divergence, double beta,
    double temperature, double softcap, int64_t ignore, int64_t kept, lg_tensor *hard,
    lg_tensor *soft, lg_tensor *entropy, lg_tensor *grad_x, lg_tensor *grad_w, lg_tensor *grad_b) {
    distill o = {head_of(ctx, "linear_distill_topk", x, w, b, 1, softcap),
                 {},
                 teacher_id,
                 teacher_logp,
                 divergence,
                 beta,
                 temperature,
                 target,
                 weight_hard,
                 weight_soft,
                 ignore,
                 kept,
                 hard,
                 soft,
                 entropy,
                 grad_x,
                 grad_w,
                 grad_b};
    return run(o);
}
