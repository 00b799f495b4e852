/* Distillation on vocabulary heads, chunk by chunk: the student's logits, the teacher's (from its own head, or made of the
 * log-probabilities of some ids), the losses, and at once the gradient's products, so that no logits are kept. */
#include "divergence.h"
#include "linear_logits.h"

static const double LEAST_REST = 1e-6;

/* An op at work: its heads, what its rows weigh, and where its results go. */
typedef struct distill {
    const char *op;
    lm_head student, teacher;
    const lg_tensor *id, *logp; /* [N, K], in place of a teacher's head */
    divergence d;
    const lg_tensor *target, *weight_hard, *weight_soft; /* [N], the weights or NULL */
    int64_t ignore, kept;
    lg_tensor *hard, *soft, *entropy, *grad_x, *grad_w, *grad_b;
} distill;

/* What a chunk works in; packed rows where not all take part; three rows in double a thread. */
typedef struct distill_room {
    int64_t chunk;
    int threads;
    void *z, *teacher_z, *packed, *teacher_packed;
    double *rows;
} distill_room;

static bool has_gradient(const distill *o) { return o->grad_x || o->grad_w || o->grad_b; }

/* A teacher's row from the log-probabilities of row r: the other columns stand as the student has them, so the known ones are
 * set against the log-sum-exp of these. */
static void fill_teacher(const distill *o, int64_t r, const double *student, double *teacher) {
    const int64_t V = o->d.V, K = o->id->shape[1];
    const int32_t *id = (const int32_t *)o->id->data + r * K;
    double rest = 1, others;
    memcpy(teacher, student, (size_t)V * sizeof *teacher);
    for (int64_t k = 0; k < K; k++) {
        rest -= exp(load(o->logp, r * K + k));
        if (id[k] >= 0 && id[k] < V) teacher[id[k]] = -INFINITY;
    }
    others = divergence_logsumexp(teacher, V, 1);
    const double base =
        others == -INFINITY ? 0 : others - log(rest > LEAST_REST ? rest : LEAST_REST);
    for (int64_t k = 0; k < K; k++)
        if (id[k] >= 0 && id[k] < V) teacher[id[k]] = base + load(o->logp, r * K + k);
}

/* n of row i of a chunk's logits in double. */
static void read_logits(const void *z, int64_t i, int64_t ld, int64_t n, lg_dtype dtype,
                        double *row) {
    const lg_tensor logits = {.data = (void *)z, .dtype = (int32_t)dtype};
    load_doubles(&logits, i * ld, n, row);
}

/* Row i of a chunk is row r of x; its gradient, back through the cap, takes the place of z. */
static void distill_row(const distill *o, const distill_room *room, int64_t i, int64_t r) {
    const int64_t V = o->student.w->shape[0];
    const lg_dtype dtype = logits_dtype(&o->student);
    const int32_t target = ((const int32_t *)o->target->data)[r];
    double *s = room->rows + 3 * thread_index() * o->d.V, *t = s + o->d.V, *dz = t + o->d.V;
    read_logits(room->z, i, V, o->d.V, dtype, s);
    if (o->id)
        fill_teacher(o, r, s, t);
    else
        read_logits(room->teacher_z, i, o->teacher.w->shape[0], o->d.V, dtype, t);
    const row_loss row = divergence_row(&o->d, s, t, target, true, o->entropy != NULL);
    store(o->hard, r, row.hard);
    store(o->soft, r, row.soft);
    if (o->entropy) store(o->entropy, r, row.entropy);
    if (!has_gradient(o)) return;
    divergence_gradient(&o->d, row.state, o->weight_hard ? load(o->weight_hard, r) : 0,
                        o->weight_soft ? load(o->weight_soft, r) : 0, s, t, target, dz);
    lg_tensor logits = {.data = room->z, .dtype = (int32_t)dtype};
    for (int64_t v = 0; v < V; v++)
        store(&logits, i * V + v, v < o->d.V ? dz[v] * head_slope(&o->student, s[v]) : 0);
}

static void clear(lg_tensor *y) {
    if (y) memset(y->data, 0, (size_t)(tensor_numel(y) * lg_dtype_bytes(y->dtype)));
}

static lg_status reserve_head(lg_context *ctx, const lm_head *head, int64_t chunk, bool all,
                              void **z, void **packed) {
    const int64_t V = head->w->shape[0], C = head->x->shape[1];
    LG_TRY(lg_scratch(ctx, chunk * V * lg_dtype_bytes(logits_dtype(head)), z));
    *packed = NULL;
    return all ? LG_OK : lg_scratch(ctx, chunk * C * lg_dtype_bytes(head->x->dtype), packed);
}

static lg_status reserve(lg_context *ctx, const distill *o, bool all, distill_room *room) {
    void *rows;
    room->chunk = head_chunk_rows(&o->student);
    if (!o->id && head_chunk_rows(&o->teacher) < room->chunk)
        room->chunk = head_chunk_rows(&o->teacher);
    room->threads = op_threads(ctx, room->chunk * o->d.V, ROW_GRAIN / 4);
    LG_TRY(reserve_head(ctx, &o->student, room->chunk, all, &room->z, &room->packed));
    if (!o->id)
        LG_TRY(reserve_head(ctx, &o->teacher, room->chunk, all, &room->teacher_z,
                            &room->teacher_packed));
    LG_TRY(lg_scratch(ctx, 3 * room->threads * o->d.V * (int64_t)sizeof(double), &rows));
    room->rows = rows;
    return LG_OK;
}

static lg_status run(lg_context *ctx, const distill *o) {
    const int64_t N = o->student.x->shape[0];
    int32_t *row;
    int64_t kept = o->kept;
    distill_room room;
    LG_TRY(divergence_check(ctx, o->op, o->d.kind, o->d.beta, o->d.temperature));
    LG_TRY(head_kept_rows(ctx, o->op, o->target, o->d.V, o->ignore, &row, &kept));
    clear(o->hard), clear(o->soft), clear(o->entropy);
    if (kept < N) clear(o->grad_x);
    if (kept == 0) return LG_OK;
    LG_TRY(reserve(ctx, o, kept == N, &room));
    for (int64_t i0 = 0; i0 < kept; i0 += room.chunk) {
        const int64_t n = kept - i0 < room.chunk ? kept - i0 : room.chunk;
        const void *x_rows = head_gather(&o->student, row + i0, n, room.packed);
        LG_TRY(head_logits(ctx, &o->student, x_rows, n, room.z));
        if (!o->id)
            LG_TRY(head_logits(ctx, &o->teacher,
                               head_gather(&o->teacher, row + i0, n, room.teacher_packed), n,
                               room.teacher_z));
#pragma omp parallel for num_threads(room.threads) if (room.threads > 1)
        for (int64_t i = 0; i < n; i++) distill_row(o, &room, i, row[i0 + i]);
        if (has_gradient(o))
            LG_TRY(head_products(ctx, &o->student, room.z, x_rows, row + i0, n, room.packed,
                                 o->grad_x, o->grad_w, o->grad_b));
    }
    return LG_OK;
}

/* Without the teacher. */
static distill distill_of(const lg_tensor *x, const lg_tensor *w, const lg_tensor *b,
                          double softcap, int64_t kind, double beta, double temperature) {
    return (distill){
        .student = {x, w, b, 1.0, softcap},
        .d = {(lg_divergence)kind, beta, temperature, w->shape[0],
              x->dtype == LG_F64 ? LG_F64 : LG_F32},
    };
}

lg_status cpu_linear_distill(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                             const lg_tensor *b, const lg_tensor *teacher_x,
                             const lg_tensor *teacher_w, const lg_tensor *teacher_b,
                             const lg_tensor *target, const lg_tensor *weight_hard,
                             const lg_tensor *weight_soft, int64_t kind, double beta,
                             double temperature, double softcap, double teacher_softcap,
                             int64_t ignore, int64_t kept, lg_tensor *hard, lg_tensor *soft,
                             lg_tensor *entropy, lg_tensor *grad_x, lg_tensor *grad_w,
                             lg_tensor *grad_b) {
    distill o = distill_of(x, w, b, softcap, kind, beta, temperature);
    o.op = "linear_distill";
    o.teacher = (lm_head){teacher_x, teacher_w, teacher_b, 1.0, teacher_softcap};
    if (teacher_w->shape[0] < o.d.V) o.d.V = teacher_w->shape[0];
    o.target = target, o.weight_hard = weight_hard, o.weight_soft = weight_soft;
    o.ignore = ignore, o.kept = kept;
    o.hard = hard, o.soft = soft, o.entropy = entropy;
    o.grad_x = grad_x, o.grad_w = grad_w, o.grad_b = grad_b;
    return run(ctx, &o);
}

lg_status cpu_linear_distill_topk(lg_context *ctx, const lg_tensor *x, const lg_tensor *w,
                                  const lg_tensor *b, const lg_tensor *teacher_id,
                                  const lg_tensor *teacher_logp, const lg_tensor *target,
                                  const lg_tensor *weight_hard, const lg_tensor *weight_soft,
                                  int64_t kind, double beta, double temperature, double softcap,
                                  int64_t ignore, int64_t kept, lg_tensor *hard, lg_tensor *soft,
                                  lg_tensor *entropy, lg_tensor *grad_x, lg_tensor *grad_w,
                                  lg_tensor *grad_b) {
    distill o = distill_of(x, w, b, softcap, kind, beta, temperature);
    o.op = "linear_distill_topk";
    o.id = teacher_id, o.logp = teacher_logp;
    o.target = target, o.weight_hard = weight_hard, o.weight_soft = weight_soft;
    o.ignore = ignore, o.kept = kept;
    o.hard = hard, o.soft = soft, o.entropy = entropy;
    o.grad_x = grad_x, o.grad_w = grad_w, o.grad_b = grad_b;
    return run(ctx, &o);
}
