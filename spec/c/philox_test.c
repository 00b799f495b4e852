/* Philox 4x32-10: the published vectors (Random123's kat_vectors), cuRAND's stream, and the random
 * tensors made of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "liger.h"
#include "ops.h"
#include "philox.h"

static void blocks_are_the_published_ones(void **state) {
    (void)state;
    static const uint32_t known[][10] = {
        /* counter, key, words */
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d,
         0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09,
         0x94fdcceb, 0x5001e420, 0x24126ea1},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        uint32_t out[4];
        philox4x32_10(known[i], known[i] + 4, out);
        assert_memory_equal(out, known[i] + 6, sizeof out);
    }
}

static void streams_are_curands(void **state) {
    (void)state;
    static const struct {
        uint64_t seed, subsequence, offset;
        uint32_t words[9];
    } known[] = {
        {1234,
         0,
         0, /* whole blocks */
         {0x2090b348, 0xda7cf0ab, 0x4401906f, 0xcbca470e, 0x9eeede35, 0x1cbe137c, 0xfa277093,
          0x147edd50, 0x3fc9c8d8}},
        {2713858526667104229,
         652976570154,
         1, /* from within a block; all words of the counter */
         {0x8e4044c9, 0x7de26c32, 0x26d238e5, 0xd15cb189, 0x8a3cf23d, 0x84150583, 0x09ff7489,
          0x0425a39d, 0x942264f1}},
        {933714219081600820,
         386009015239,
         17179869182, /* the low word of the counter overflows */
         {0x36648038, 0xfd02ff8d, 0xe7097614, 0xa863c999, 0xddf30673, 0x36c5f2da, 0xfc6ba152,
          0xb8618f87, 0x2fc3a24f}},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        for (int64_t n = 0; n <= 9; n++) {
            uint32_t words[10];
            memset(words, 0xab, sizeof words);
            lg_philox(known[i].seed, known[i].subsequence, known[i].offset, n, words);
            assert_memory_equal(words, known[i].words, (size_t)n * 4);
            assert_int_equal(words[n], 0xabababab);
        }
    }
}

static void uniforms_lie_above_0_and_below_1(void **state) {
    (void)state;
    assert_true(philox_uniform(0) == 0x1p-33);
    assert_true(philox_uniform(0xffffffff) == 1 - 0x1p-33);
}

static void normals_are_pairs_of_the_uniforms(void **state) {
    (void)state;
    enum { N = 5001 }; /* several pieces, and half a pair */
    static double uniform[N + 1], normal[N];
    lg_context *ctx = lg_context_open(LG_CPU);
    lg_tensor u = {uniform, {N + 1}, {1}, 1, LG_F64, LG_CPU};
    lg_tensor y = {normal, {N}, {1}, 1, LG_F64, LG_CPU};
    for (int64_t threads = 1; threads <= 3; threads++) {
        lg_context_set_threads(ctx, threads);
        assert_int_equal(lg_random_uniform(ctx, 11, -3, &u), LG_OK);
        assert_int_equal(lg_random_normal(ctx, 11, -3, 2, 0.5, &y), LG_OK);
        for (int i = 0; i < N; i++) {
            const double radius = sqrt(-2 * log(uniform[i & ~1]));
            const double angle = 2 * M_PI * uniform[i | 1];
            const double wanted = 2 + 0.5 * radius * (i & 1 ? sin(angle) : cos(angle));
            assert_true(fabs(normal[i] - wanted) < 1e-13);
        }
    }
    lg_context_close(ctx);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_the_published_ones),
        cmocka_unit_test(streams_are_curands),
        cmocka_unit_test(uniforms_lie_above_0_and_below_1),
        cmocka_unit_test(normals_are_pairs_of_the_uniforms),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
