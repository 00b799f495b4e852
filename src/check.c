/* Shape lines executed: letters are bound by the first tensor that has them, later ones must agree. */
#include "check.h"

#include <stdio.h>
#include <string.h>

#include "backend.h"
#include "internal.h"

/* What has been bound so far, and by which tensor, for the text of a refusal. */
typedef struct binding {
    int64_t size[26];
    const char *by[26];
    int lead_ndim; /* -1: `*` is not bound */
    int64_t lead[LG_MAX_DIMS];
    const char *lead_by;
    int shared;
    const char *shared_by;
} binding;

static void write_shape(char *text, size_t room, const lg_tensor *t) {
    size_t at = (size_t)snprintf(text, room, "[");
    for (int i = 0; i < t->ndim && at < room; i++)
        at += (size_t)snprintf(text + at, room - at, i ? ",%lld" : "%lld", (long long)t->shape[i]);
    if (at < room) snprintf(text + at, room - at, "]");
}

static int64_t wanted_size(const lg_dim *d, const binding *b, const int64_t *attrs) {
    if (d->kind == LG_DIM_ATTR) return attrs[(int)d->letter];
    if (d->kind == LG_DIM_NUMBER) return d->plus;
    if (b->by[d->letter - 'A']) return b->size[d->letter - 'A'] + d->plus;
    return -1;
}

/* The wanted shape, with sizes where they are bound and letters where they are not. */
static void write_wanted(char *text, size_t room, const lg_arg *arg, const binding *b,
                         const int64_t *attrs) {
    size_t at = (size_t)snprintf(text, room, "[");
    for (int i = 0; i < arg->ndim && at < room; i++) {
        const lg_dim *d = &arg->dims[i];
        const char *comma = i ? "," : "";
        if (d->kind == LG_DIM_ANY && b->lead_ndim >= 0) {
            for (int j = 0; j < b->lead_ndim && at < room; j++)
                at += (size_t)snprintf(text + at, room - at, j ? ",%lld" : "%lld",
                                       (long long)b->lead[j]);
            continue;
        }
        int64_t size = d->kind == LG_DIM_ANY ? -1 : wanted_size(d, b, attrs);
        if (d->kind == LG_DIM_ANY)
            at += (size_t)snprintf(text + at, room - at, "%s*", comma);
        else if (size >= 0)
            at += (size_t)snprintf(text + at, room - at, "%s%lld", comma, (long long)size);
        else if (d->plus)
            at += (size_t)snprintf(text + at, room - at, "%s%c+%d", comma, d->letter, d->plus);
        else
            at += (size_t)snprintf(text + at, room - at, "%s%c", comma, d->letter);
    }
    if (at < room) snprintf(text + at, room - at, "]");
}

static lg_status refuse_shape(lg_context *ctx, const char *op, const lg_arg *arg,
                              const lg_tensor *t, const binding *b, const int64_t *attrs,
                              const char *because) {
    char got[128], wanted[128];
    write_shape(got, sizeof got, t);
    write_wanted(wanted, sizeof wanted, arg, b, attrs);
    return lg_fail(ctx, LG_EINVAL, "%s: %s is %s, wanted %s%s%s%s", op, arg->name, got, wanted,
                   because ? " (the size is set by " : "", because ? because : "",
                   because ? ")" : "");
}

static lg_status check_shape(lg_context *ctx, const char *op, const lg_arg *arg, const lg_tensor *t,
                             binding *b, const int64_t *attrs) {
    if (t->ndim < 0 || t->ndim > LG_MAX_DIMS)
        return lg_fail(ctx, LG_EINVAL, "%s: %s has %d dimensions, wanted 0 to %d", op, arg->name,
                       t->ndim, LG_MAX_DIMS);
    int any = 0;
    for (int i = 0; i < arg->ndim; i++) any += arg->dims[i].kind == LG_DIM_ANY;
    int lead = t->ndim - (arg->ndim - any);
    if (lead < 0 || (!any && lead)) return refuse_shape(ctx, op, arg, t, b, attrs, NULL);
    for (int i = 0, at = 0; i < arg->ndim; i++) {
        const lg_dim *d = &arg->dims[i];
        if (d->kind == LG_DIM_ANY) {
            if (b->lead_ndim < 0) {
                b->lead_ndim = lead;
                b->lead_by = arg->name;
                memcpy(b->lead, t->shape, sizeof b->lead);
            } else if (b->lead_ndim != lead ||
                       memcmp(b->lead, t->shape, (size_t)lead * sizeof *b->lead)) {
                return refuse_shape(ctx, op, arg, t, b, attrs, b->lead_by);
            }
            at += lead;
            continue;
        }
        int64_t size = t->shape[at++], wanted = wanted_size(d, b, attrs);
        if (d->kind == LG_DIM_LETTER && wanted < 0) {
            if (size < d->plus) return refuse_shape(ctx, op, arg, t, b, attrs, NULL);
            b->size[d->letter - 'A'] = size - d->plus;
            b->by[d->letter - 'A'] = arg->name;
        } else if (size != wanted) {
            return refuse_shape(ctx, op, arg, t, b, attrs,
                                d->kind == LG_DIM_LETTER ? b->by[d->letter - 'A'] : NULL);
        }
    }
    return LG_OK;
}

static bool is_shared(const lg_arg *arg) {
    return arg->dtype == LG_DTYPE_SHARED || arg->dtype == LG_DTYPE_FLOAT;
}

/* Weights and activations in f16 are for files: but for ops on given logits, only copy reads it. */
static bool is_computed(const lg_arg *arg, int dtype) {
    return dtype == LG_F32 || dtype == LG_BF16 || dtype == LG_F64 ||
           (dtype == LG_F16 && arg->dtype == LG_DTYPE_FLOAT);
}

static lg_status check_dtype(lg_context *ctx, const char *op, const lg_arg *arg, const lg_tensor *t,
                             binding *b) {
    static const int fixed[] = {-1, -1, -1, -1, LG_F32, LG_F64, LG_I32, LG_I64, LG_U8};
    int wanted = fixed[arg->dtype];
    if (t->dtype < 0 || t->dtype >= LG_NUM_DTYPES)
        return lg_fail(ctx, LG_EINVAL, "%s: %s has dtype %d, which is none", op, arg->name,
                       t->dtype);
    if (arg->dtype == LG_DTYPE_ANY) return LG_OK;
    if (is_shared(arg)) {
        if (!is_computed(arg, t->dtype))
            return lg_fail(ctx, LG_EINVAL, "%s: %s is %s, wanted f32, bf16%s or f64", op, arg->name,
                           lg_dtype_name(t->dtype), arg->dtype == LG_DTYPE_FLOAT ? ", f16" : "");
        if (b->shared < 0) {
            b->shared = t->dtype;
            b->shared_by = arg->name;
        }
        wanted = b->shared;
    }
    if (arg->dtype == LG_DTYPE_ACC) wanted = b->shared == LG_F64 ? LG_F64 : LG_F32;
    if (t->dtype != wanted)
        return lg_fail(ctx, LG_EINVAL, "%s: %s is %s, wanted %s%s%s%s", op, arg->name,
                       lg_dtype_name(t->dtype), lg_dtype_name(wanted), is_shared(arg) ? " as " : "",
                       is_shared(arg) ? b->shared_by : "", "");
    return LG_OK;
}

static lg_status check_layout(lg_context *ctx, const char *op, const lg_arg *arg,
                              const lg_tensor *t) {
    int64_t dense = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] > 1 && t->stride[i] != dense && (i == t->ndim - 1 || !arg->strided))
            return lg_fail(
                ctx, LG_EINVAL,
                "%s: %s has stride %lld in dimension %d, wanted %lld: make it contiguous", op,
                arg->name, (long long)t->stride[i], i + 1, (long long)dense);
        dense *= t->shape[i];
    }
    if (dense > 0 && !t->data) return lg_fail(ctx, LG_EINVAL, "%s: %s has no data", op, arg->name);
    return LG_OK;
}

lg_status lg_check(lg_context *ctx, const char *op, const lg_arg *args, int n,
                   const lg_tensor *const *tensors, const int64_t *attrs) {
    binding b = {.lead_ndim = -1, .shared = -1};
    /* Shared dtypes first: an :acc tensor may stand before the tensor that decides. */
    for (int i = 0; i < n; i++)
        if (tensors[i] && is_shared(&args[i]))
            LG_TRY(check_dtype(ctx, op, &args[i], tensors[i], &b));
    for (int i = 0; i < n; i++) {
        const lg_tensor *t = tensors[i];
        if (!t && args[i].optional) continue;
        if (!t) return lg_fail(ctx, LG_EINVAL, "%s: %s is missing", op, args[i].name);
        LG_TRY(check_dtype(ctx, op, &args[i], t, &b));
        LG_TRY(check_shape(ctx, op, &args[i], t, &b, attrs));
        LG_TRY(check_layout(ctx, op, &args[i], t));
    }
    return LG_OK;
}

lg_status lg_check_missing(lg_context *ctx, const char *op) {
    return lg_fail(ctx, LG_EUNSUPPORTED, "%s: no %s implementation", op,
                   lg_context_backend(ctx)->name);
}
