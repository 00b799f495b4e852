/* AdamW's one step by hand. Case names carry the ids of the project's list of known bugs (B86). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "liger.h"
#include "ops.h"

static lg_context *ctx;

static int setup(void **state) {
    (void)state;
    ctx = lg_context_open(LG_CPU);
    return ctx ? 0 : -1;
}

static int teardown(void **state) {
    (void)state;
    lg_context_close(ctx);
    return 0;
}

/* One step of one parameter with betas 0.9 and 0.999; p, m and v are updated. */
static lg_status step(double g, double scale, double eps, double decay, int64_t t, double *p,
                      double *m, double *v) {
    const lg_tensor tg = {&g, {1}, {1}, 1, LG_F64, LG_CPU};
    lg_tensor tp = {p, {1}, {1}, 1, LG_F64, LG_CPU}, tm = tp, tv = tp;
    tm.data = m;
    tv.data = v;
    return lg_adamw(ctx, &tg, scale, 1e-3, 0.9, 0.999, eps, decay, t, &tp, &tm, &tv, NULL);
}

static void epsilon_comes_after_the_bias_correction(void **state) {
    (void)state;
    double p = 0, m = 0, v = 0;
    assert_int_equal(step(0.01, 1, 0.01, 0, 1, &p, &m, &v), LG_OK);
    assert_true(fabs(p + 5e-4) < 1e-15);
    p = m = v = 0;
    assert_int_equal(step(0.01, 1, 0, 0, 1, &p, &m, &v), LG_OK);
    assert_true(fabs(p + 1e-3) < 1e-15);
}

static void decay_acts_on_the_parameter_alone(void **state) {
    (void)state;
    double p = 2, m = 0, v = 0;
    assert_int_equal(step(0, 1, 1e-8, 0.1, 1, &p, &m, &v), LG_OK);
    assert_true(fabs(p - 2 * (1 - 1e-4)) < 1e-15);
    assert_true(m == 0 && v == 0);
}

static void the_gradient_is_scaled_before_the_moments(void **state) {
    (void)state;
    double p = 0, m = 1, v = 4;
    assert_int_equal(step(6, 0.5, 0, 0, 3, &p, &m, &v), LG_OK);
    assert_true(fabs(m - (0.9 + 0.1 * 3)) < 1e-15);
    assert_true(fabs(v - (0.999 * 4 + 0.001 * 9)) < 1e-14);
    const double mhat = m / (1 - pow(0.9, 3)), vhat = v / (1 - pow(0.999, 3));
    assert_true(fabs(p + 1e-3 * mhat / sqrt(vhat)) < 1e-15);
}

static void step_0_is_refused(void **state) {
    (void)state;
    double p = 1, m = 0, v = 0;
    assert_int_equal(step(1, 1, 1e-8, 0, 0, &p, &m, &v), LG_EINVAL);
    assert_non_null(strstr(lg_error(ctx), "step is 0"));
    assert_true(p == 1 && m == 0 && v == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"B86: epsilon comes after the bias correction", epsilon_comes_after_the_bias_correction,
         NULL, NULL, NULL},
        cmocka_unit_test(decay_acts_on_the_parameter_alone),
        cmocka_unit_test(the_gradient_is_scaled_before_the_moments),
        cmocka_unit_test(step_0_is_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
