/* Conversions between dtypes, and copies of strided rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>

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

static void convert(void *x, int32_t from, void *y, int32_t to, int64_t n) {
    const lg_tensor tx = {x, {n}, {1}, 1, from, LG_CPU};
    lg_tensor ty = {y, {n}, {1}, 1, to, LG_CPU};
    assert_int_equal(lg_copy(ctx, &tx, &ty), LG_OK);
}

static void short_floats_survive_the_way_there_and_back(void **state) {
    (void)state;
    static uint16_t x[65536], y[65536];
    static float wide[65536];
    const int32_t dtypes[] = {LG_F16, LG_BF16};
    for (int i = 0; i < 65536; i++) x[i] = (uint16_t)i;
    for (int k = 0; k < 2; k++) {
        convert(x, dtypes[k], wide, LG_F32, 65536);
        convert(wide, LG_F32, y, dtypes[k], 65536);
        for (int i = 0; i < 65536; i++) {
            if (isnan(wide[i])) /* stays a NaN of its sign */
                assert_int_equal(y[i] & x[i] & (k ? 0xff80 : 0xfc00), x[i] & (k ? 0xff80 : 0xfc00));
            else
                assert_int_equal(y[i], x[i]);
        }
    }
}

static void ties_go_to_even_in_one_rounding(void **state) {
    (void)state;
    double x[] = {1 + 0x1p-11, 1 + 3 * 0x1p-11, 1 + 0x1p-11 + 0x1p-40, 65519, 65520,
                  0x1p-25,     3 * 0x1p-25,     -0x1p-25 - 0x1p-60,    -0.0,  1e300};
    const uint16_t f16[] = {0x3c00, 0x3c02, 0x3c01, 0x7bff, 0x7c00, 0, 2, 0x8001, 0x8000, 0x7c00};
    uint16_t y[10];
    convert(x, LG_F64, y, LG_F16, 10);
    for (int i = 0; i < 10; i++) assert_int_equal(y[i], f16[i]);
    double z[] = {1 + 0x1p-8, 1 + 3 * 0x1p-8, 1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-8 - 0x1p-40, 1e300};
    const uint16_t bf16[] = {0x3f80, 0x3f82, 0x3f81, 0x3f80, 0x7f80};
    convert(z, LG_F64, y, LG_BF16, 5);
    for (int i = 0; i < 5; i++) assert_int_equal(y[i], bf16[i]);
}

static void whole_numbers_are_cut_and_bounded(void **state) {
    (void)state;
    double x[] = {1.9, -1.9, NAN, 1e30, -1e30, 300};
    int32_t i32[6];
    int64_t i64[6], big[] = {INT64_MAX, INT64_MIN + 1}, same[2];
    uint8_t u8[6];
    convert(x, LG_F64, i32, LG_I32, 6);
    convert(x, LG_F64, i64, LG_I64, 6);
    convert(x, LG_F64, u8, LG_U8, 6);
    const int64_t wanted[] = {1, -1, 0};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(i32[i], wanted[i]);
        assert_int_equal(i64[i], wanted[i]);
        assert_int_equal(u8[i], i ? 0 : 1);
    }
    assert_true(i32[3] == INT32_MAX && i32[4] == INT32_MIN);
    assert_true(i64[3] == INT64_MAX && i64[4] == INT64_MIN);
    assert_true(u8[3] == 255 && u8[4] == 0 && u8[5] == 255);
    convert(big, LG_I64, same, LG_I64, 2); /* not by way of a double */
    assert_true(same[0] == big[0] && same[1] == big[1]);
}

static void strided_rows_are_found(void **state) {
    (void)state;
    float x[60], y[200];
    for (int i = 0; i < 60; i++) x[i] = (float)i;
    for (int i = 0; i < 200; i++) y[i] = -1;
    /* [3,4,5] read with its first two dimensions exchanged, written with gaps; row 0 of a broadcast
     * one added. */
    const lg_tensor tx = {x, {4, 3, 5}, {5, 20, 1}, 3, LG_F32, LG_CPU};
    lg_tensor ty = {y, {4, 3, 5}, {40, 7, 1}, 3, LG_F32, LG_CPU};
    const lg_tensor one = {x, {4, 3, 5}, {0, 0, 1}, 3, LG_F32, LG_CPU};
    assert_int_equal(lg_copy(ctx, &tx, &ty), LG_OK);
    assert_int_equal(lg_accumulate(ctx, &one, &ty), LG_OK);
    int written = 0;
    for (int a = 0; a < 4; a++) {
        for (int b = 0; b < 3; b++)
            for (int c = 0; c < 5; c++)
                assert_true(y[a * 40 + b * 7 + c] == (float)(b * 20 + a * 5 + c + c));
    }
    for (int i = 0; i < 200; i++) written += y[i] != -1;
    assert_int_equal(written, 60);
    assert_int_equal(lg_fill(ctx, -1, &ty), LG_OK);
    for (int i = 0; i < 200; i++) assert_true(y[i] == -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(short_floats_survive_the_way_there_and_back),
        cmocka_unit_test(ties_go_to_even_in_one_rounding),
        cmocka_unit_test(whole_numbers_are_cut_and_bounded),
        cmocka_unit_test(strided_rows_are_found),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
