/* Drawing ids: the cuts' exact rules, ties, what is refused, and that a row does not depend on its
 * batch. Case names carry the ids of the project's list of known bugs (B78, B80 to B84). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "liger.h"
#include "ops.h"
#include "philox.h"

enum { MOST = 4000 };

typedef struct cuts {
    int64_t top_k;
    double top_p, min_p;
} cuts;

static const cuts none = {0, 1, 0};

static lg_context *ctx;
static int64_t sequence[MOST];
static int32_t position[MOST], id[MOST];
static double logp[MOST];

static int setup(void **state) {
    (void)state;
    ctx = lg_context_open(LG_CPU);
    for (int b = 0; b < MOST; b++) {
        sequence[b] = b;
        position[b] = b % 7;
    }
    return ctx ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    lg_context_close(ctx);
    return 0;
}

/* Draws B times from one row (stride 0) or from B rows of V. */
static lg_status draw(const double *z, int64_t B, int64_t V, int64_t stride, cuts k) {
    lg_tensor tz = {(void *)(uintptr_t)z, {B, V}, {stride, 1}, 2, LG_F64, LG_CPU};
    lg_tensor ts = {sequence, {B}, {1}, 1, LG_I64, LG_CPU};
    lg_tensor tp = {position, {B}, {1}, 1, LG_I32, LG_CPU};
    lg_tensor ti = {id, {B}, {1}, 1, LG_I32, LG_CPU};
    lg_tensor tl = {logp, {B}, {1}, 1, LG_F64, LG_CPU};
    return lg_sample(ctx, &tz, &ts, &tp, 99, k.top_k, k.top_p, k.min_p, &ti, &tl);
}

/* The ids that MOST draws from a row of at most 8 give, as bits. */
static int drawn(const double *z, int64_t V, cuts k) {
    assert_int_equal(draw(z, MOST, V, 0, k), LG_OK);
    int bits = 0;
    for (int b = 0; b < MOST; b++) {
        assert_in_range(id[b], 0, V - 1);
        bits |= 1 << id[b];
    }
    return bits;
}

static const double rising[] = {1, 2, 3};

static void top_p_keeps_the_shortest_prefix_that_reaches_it(void **state) {
    (void)state;
    assert_int_equal(drawn(rising, 3, (cuts){0, 0, 0}), 4);
    assert_int_equal(drawn(rising, 3, (cuts){0, 1e-9, 0}), 4);
    assert_int_equal(drawn(rising, 3, (cuts){0, 0.7, 0}), 6);
    assert_int_equal(drawn(rising, 3, (cuts){0, 1, 0}), 7);
    const double even[8] = {0};
    assert_int_equal(drawn(even, 8, (cuts){0, 0.5, 0}), 15); /* reached exactly */
    assert_int_equal(drawn(even, 8, (cuts){0, 0.501, 0}), 31);
    assert_int_equal(drawn(even, 8, (cuts){4, 0.5, 0}), 3); /* of what top_k left */
}

static void top_k_below_1_or_above_the_row_keeps_all(void **state) {
    (void)state;
    assert_int_equal(drawn(rising, 3, (cuts){0, 1, 0}), 7);
    assert_int_equal(drawn(rising, 3, (cuts){-1, 1, 0}), 7);
    assert_int_equal(drawn(rising, 3, (cuts){2, 1, 0}), 6);
    assert_int_equal(drawn(rising, 3, (cuts){5, 1, 0}), 7);
}

static void min_p_is_a_share_of_the_largest(void **state) {
    (void)state;
    assert_int_equal(drawn(rising, 3, (cuts){0, 1, 0.3}), 6); /* e^-1 = 0.37, e^-2 = 0.14 */
    assert_int_equal(drawn(rising, 3, (cuts){0, 1, 1}), 4);
}

static void top_k_1_is_argmax(void **state) {
    (void)state;
    const double z[] = {1, 3, 3};
    assert_int_equal(drawn(z, 3, (cuts){1, 0.9, 0}), 2);
    assert_true(fabs(logp[0] - (3 - log(exp(1) + 2 * exp(3)))) < 1e-14); /* under all of the row */
}

static void exactly_k_are_kept_of_ties(void **state) {
    (void)state;
    const double z[] = {2, 1, 1, 0};
    assert_int_equal(drawn(z, 4, (cuts){2, 1, 0}), 3);
    int32_t in_batch[MOST];
    memcpy(in_batch, id, sizeof in_batch);
    for (int b = 0; b < 100; b++) {
        const int64_t s = sequence[0];
        const int32_t p = position[0];
        sequence[0] = sequence[b];
        position[0] = position[b];
        assert_int_equal(draw(z, 1, 4, 4, (cuts){2, 1, 0}), LG_OK);
        assert_int_equal(id[0], in_batch[b]);
        sequence[0] = s;
        position[0] = p;
    }
}

static void rows_without_a_distribution_are_refused(void **state) {
    (void)state;
    static const struct {
        double row[3];
        const char *text;
    } bad[] = {
        {{0, NAN, 1}, "z[2,1] is nan"},
        {{0, INFINITY, 1}, "z[2,1] is inf"},
        {{NAN, NAN, NAN}, "z[2,0] is nan"},
        {{-INFINITY, -INFINITY, -INFINITY}, "z[2] has no finite logit"},
    };
    const cuts cases[] = {none, {1, 1, 0}, {2, 0.5, 0.1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        for (size_t k = 0; k < 3; k++) {
            double z[4 * 3] = {0};
            memcpy(z + 2 * 3, bad[i].row, sizeof bad[i].row);
            id[0] = -5;
            assert_int_equal(draw(z, 4, 3, 3, cases[k]), LG_ENUMERIC);
            assert_non_null(strstr(lg_error(ctx), bad[i].text));
            assert_int_equal(id[0], -5);
        }
    }
}

static void candidates_without_weight_are_never_drawn(void **state) {
    (void)state;
    const double z[] = {-INFINITY, 0, -INFINITY, -800};
    assert_int_equal(drawn(z, 4, none), 2);
    assert_int_equal(drawn(z, 4, (cuts){3, 0.999, 0}), 2);
    /* The least and the greatest number that there is. */
    static const struct {
        int64_t sequence;
        uint32_t word;
    } ends[] = {{7235522753, 0}, {250870197, UINT32_MAX}};
    enum { V = 50777218 }; /* what f32 holds as 50777216 */
    float *flat = calloc(V + 2, sizeof *flat);
    assert_non_null(flat);
    flat[0] = flat[V + 1] = -INFINITY;
    const int64_t s = sequence[0];
    for (int i = 0; i < 2; i++) {
        uint32_t word;
        lg_philox(99, (uint64_t)ends[i].sequence, 0, 1, &word);
        assert_int_equal(word, ends[i].word);
        sequence[0] = ends[i].sequence;
        assert_int_equal(draw(z, 1, 3, 3, none), LG_OK);
        assert_int_equal(id[0], 1);
        float p;
        lg_tensor tz = {flat, {1, V + 2}, {V + 2, 1}, 2, LG_F32, LG_CPU};
        lg_tensor ts = {sequence, {1}, {1}, 1, LG_I64, LG_CPU};
        lg_tensor tp = {position, {1}, {1}, 1, LG_I32, LG_CPU};
        lg_tensor ti = {id, {1}, {1}, 1, LG_I32, LG_CPU};
        lg_tensor tl = {&p, {1}, {1}, 1, LG_F32, LG_CPU};
        assert_int_equal(lg_sample(ctx, &tz, &ts, &tp, 99, 0, 1, 0, &ti, &tl), LG_OK);
        assert_int_equal(id[0], i ? V : 1);
    }
    sequence[0] = s;
    free(flat);
}

/* Against the definition, with sums in another order, in rows of several blocks. */
static void draws_follow_the_running_probability(void **state) {
    (void)state;
    enum { B = 200, V = 1000 };
    static double z[B * V];
    lg_tensor t = {z, {B, V}, {V, 1}, 2, LG_F64, LG_CPU};
    assert_int_equal(lg_random_normal(ctx, 1, 1, 0, 3, &t), LG_OK);
    assert_int_equal(draw(z, B, V, V, none), LG_OK);
    for (int b = 0; b < B; b++) {
        double total = 0, running = 0;
        for (int v = 0; v < V; v++) total += exp(z[b * V + v]);
        uint32_t word;
        lg_philox(99, (uint64_t)sequence[b], 4 * (uint64_t)position[b], 1, &word);
        int v = -1;
        while (running < philox_uniform(word) * total) running += exp(z[b * V + ++v]);
        assert_int_equal(id[b], v);
        assert_true(fabs(logp[b] - (z[b * V + v] - log(total))) < 1e-13);
    }
}

static void attributes_out_of_range_are_refused(void **state) {
    (void)state;
    const cuts bad[] = {{0, 1.5, 0}, {0, -0.1, 0}, {0, NAN, 0}, {0, 1, 1.5}, {0, 1, -1}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(draw(rising, 1, 3, 3, bad[i]), LG_EINVAL);
        assert_non_null(strstr(lg_error(ctx), i < 3 ? "top_p is" : "min_p is"));
    }
    position[0] = -1;
    assert_int_equal(draw(rising, 1, 3, 3, none), LG_EINVAL);
    assert_non_null(strstr(lg_error(ctx), "position[0] is -1"));
    position[0] = 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"B78: top p keeps the shortest prefix that reaches it",
         top_p_keeps_the_shortest_prefix_that_reaches_it, NULL, NULL, NULL},
        {"B80: top k below 1 or above the row keeps all", top_k_below_1_or_above_the_row_keeps_all,
         NULL, NULL, NULL},
        cmocka_unit_test(min_p_is_a_share_of_the_largest),
        {"B81: top k 1 is argmax", top_k_1_is_argmax, NULL, NULL, NULL},
        {"B82: exactly k are kept of ties", exactly_k_are_kept_of_ties, NULL, NULL, NULL},
        {"B83: rows without a distribution are refused", rows_without_a_distribution_are_refused,
         NULL, NULL, NULL},
        {"B84: candidates without weight are never drawn",
         candidates_without_weight_are_never_drawn, NULL, NULL, NULL},
        cmocka_unit_test(draws_follow_the_running_probability),
        cmocka_unit_test(attributes_out_of_range_are_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
