/* The tokenizer on small descriptions: each rule where it can be seen, descriptions that are refused, hostile input.
 * Case names carry the ids of the project's list of known bugs (B67 to B75). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "liger.h"

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

static lg_tokenizer *open_json(const char *json) {
    lg_tokenizer *t;
    if (lg_tokenizer_open(ctx, json, (int64_t)strlen(json), &t) != LG_OK)
        fail_msg("%s", lg_error(ctx));
    return t;
}

static void refuse(const char *json, lg_status wanted, const char *text) {
    lg_tokenizer *t;
    assert_int_equal(lg_tokenizer_open(ctx, json, (int64_t)strlen(json), &t), wanted);
    assert_null(t);
    if (!strstr(lg_error(ctx), text))
        fail_msg("error is '%s', wanted it to have '%s'", lg_error(ctx), text);
}

/* Encodes and writes the ids as "1 2 3". */
static const char *encode(lg_tokenizer *t, const char *text, bool special) {
    static char out[2048];
    int32_t ids[256];
    int64_t n;
    if (lg_tokenizer_encode(ctx, t, text, (int64_t)strlen(text), special, ids, 256, &n) != LG_OK)
        fail_msg("%s", lg_error(ctx));
    assert_true(n <= 256);
    out[0] = 0;
    for (int64_t i = 0; i < n; i++) sprintf(out + strlen(out), i ? " %d" : "%d", ids[i]);
    return out;
}

static const char *decode(lg_tokenizer *t, bool skip_special, int64_t n, const int32_t *ids) {
    static char out[1024];
    int64_t bytes;
    if (lg_tokenizer_decode(ctx, t, ids, n, skip_special, out, sizeof out - 1, &bytes) != LG_OK)
        fail_msg("%s", lg_error(ctx));
    assert_true(bytes < (int64_t)sizeof out);
    out[bytes] = 0;
    return out;
}

#define IDS(...) \
    (int64_t)(sizeof((int32_t[]){__VA_ARGS__}) / 4), (int32_t[]) { __VA_ARGS__ }
#define MODEL(vocab, merges, more) \
    "\"model\":{\"type\":\"BPE\",\"vocab\":{" vocab "},\"merges\":[" merges "]" more "}"
#define BYTES "\"<0xEA>\":0,\"<0xB9>\":1,\"<0xB0>\":2,\"<unk>\":3,\"a\":4"
#define FALLBACK                                                                              \
    "\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteFallback\"},{\"type\":" \
    "\"Fuse\"}]},"
#define BYTE_LEVEL                                                                                 \
    "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"decoder\":{\"type\":" \
    "\"ByteLevel\"},"
#define TOKEN(id, text, more) "{\"id\":" id ",\"content\":\"" text "\"" more "}"

static void b67_bytes_stand_in_for_unknown_characters(void **state) {
    (void)state;
    lg_tokenizer *t = open_json(
        "{" FALLBACK MODEL(BYTES, "", ",\"byte_fallback\":true,\"unk_token\":\"<unk>\"") "}");
    assert_string_equal(encode(t, "\xEA\xB9\xB0", false), "0 1 2");
    assert_string_equal(decode(t, false, IDS(0, 1, 2)), "\xEA\xB9\xB0");
    assert_string_equal(decode(t, false, IDS(0, 1)), "\xEF\xBF\xBD\xEF\xBF\xBD");
    assert_string_equal(decode(t, false, IDS(4, 0, 4)), "a\xEF\xBF\xBD"
                                                        "a");
    assert_string_equal(encode(t, "\xEA", false), "0"); /* no UTF-8: the byte itself */
    assert_string_equal(encode(t,
                               "\xC3\xA9"
                               "a\xFF",
                               false),
                        "3 4 3");
    lg_tokenizer_close(t);
    t = open_json(
        "{" FALLBACK MODEL(BYTES, "", ",\"byte_fallback\":false,\"unk_token\":\"<unk>\"") "}");
    assert_string_equal(encode(t, "\xEA\xB9\xB0", false), "3");
    assert_string_equal(encode(t, "xya", false), "3 3 4");
    lg_tokenizer_close(t);
    t = open_json("{" MODEL(BYTES, "", ",\"fuse_unk\":true,\"unk_token\":\"<unk>\"") "}");
    assert_string_equal(encode(t, "xyaz", false), "3 4 3");
    lg_tokenizer_close(t);
}

static void b68_special_tokens_are_one_id_anywhere(void **state) {
    (void)state;
    lg_tokenizer *t = open_json(
        "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":"
        "\"\xE2\x96\x81\"},"
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"\xE2\x96\x81\"}]},"
        "\"added_tokens\":[" TOKEN("10", "<s1>", ",\"special\":true,\"normalized\":true") "," TOKEN(
            "11", "<s2>",
            ",\"special\":true,\"normalized\":true") "," TOKEN("12", "x y",
                                                               ",\"special\":false,\"normalized\":"
                                                               "true") "]," MODEL("\"\xE2\x96\x81\""
                                                                                  ":0,\"\\n\":1,"
                                                                                  "\"\xE4\xBD\xA0\""
                                                                                  ":2,"
                                                                                  "\"\xE5\xA5\xBD\""
                                                                                  ":3,"
                                                                                  "\"\xE2\x96\x81\\"
                                                                                  "n\":4",
                                                                                  "", "") "}");
    assert_string_equal(encode(t, "<s1>\n\xE4\xBD\xA0\xE5\xA5\xBD<s2>\n", false),
                        "10 0 1 2 3 11 0 1");
    assert_string_equal(encode(t, "<s2><s1>", false), "11 10");
    assert_string_equal(encode(t, "\nx y\n", false), "0 1 12 1");
    assert_int_equal(lg_tokenizer_id(t, "<s2>"), 11);
    assert_int_equal(lg_tokenizer_id(t, "<s"), -1);
    assert_int_equal(lg_tokenizer_vocab(t), 13);
    lg_tokenizer_close(t);
}

static void b70_normal_form_c(void **state) {
    (void)state;
    const char *vocab = "\"vocab\":{\"\xEA\xB0\x81\":0,\"\xC3\xA9\":1,\"e\":2,\"\xCC\x81\":3,"
                        "\"\xE1\x84\x80\":4},\"merges\":[]";
    char json[512];
    snprintf(json, sizeof json, "{\"normalizer\":{\"type\":\"NFC\"},\"model\":{%s}}", vocab);
    lg_tokenizer *t = open_json(json);
    assert_string_equal(encode(t, "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", false),
                        "0"); /* U+1100 U+1161 U+11A8 */
    assert_string_equal(encode(t, "e\xCC\x81", false), "1");
    assert_string_equal(encode(t, "\xEA\xB0\x81\xC3\xA9", false), "0 1");
    assert_string_equal(encode(t,
                               "\xFF"
                               "e\xCC\x81\xFF",
                               false),
                        "1"); /* bytes that are no text part the text */
    lg_tokenizer_close(t);
    snprintf(json, sizeof json, "{\"normalizer\":null,\"model\":{%s}}", vocab);
    t = open_json(json);
    assert_string_equal(encode(t, "e\xCC\x81", false), "2 3");
    lg_tokenizer_close(t);
}

static void b71_each_model_cuts_in_its_own_way(void **state) {
    (void)state;
    const char *vocab = MODEL("\"What\":0,\"\xC4\xA0is\":1,\"\xC4\xA0\":2,\"333\":3,\"3\":4,\"+\":"
                              "5,\"777\":6,\"?\":7,\"3333\":8",
                              "", ",\"ignore_merges\":true");
    char json[2048];
    snprintf(
        json, sizeof json,
        "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
        "\"pattern\":{\"Regex\":"
        "\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| "
        "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},"
        "\"behavior\":\"Isolated\"},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]},%s}",
        vocab);
    lg_tokenizer *t = open_json(json);
    assert_string_equal(encode(t, "What is 3333+777?", false), "0 1 2 3 4 5 6 7");
    lg_tokenizer_close(t);
    snprintf(json, sizeof json, "{" BYTE_LEVEL "%s}", vocab);
    t = open_json(json);
    assert_string_equal(encode(t, "3333+777", false), "8 5 6");
    lg_tokenizer_close(t);
    snprintf(json, sizeof json,
             "{\"pre_tokenizer\":{\"type\":\"Digits\",\"individual_digits\":true},%s}", vocab);
    t = open_json(json);
    assert_string_equal(encode(t, "333+", false), "4 4 4 5");
    lg_tokenizer_close(t);
}

static void b73_a_whole_word_may_come_before_merges(void **state) {
    (void)state;
    lg_tokenizer *t = open_json("{" MODEL("\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abc\":4", "\"a b\"",
                                          ",\"ignore_merges\":true") "}");
    assert_string_equal(encode(t, "abc", false), "4");
    lg_tokenizer_close(t);
    t = open_json("{" MODEL("\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abc\":4", "\"a b\"",
                            ",\"ignore_merges\":false") "}");
    assert_string_equal(encode(t, "abc", false), "3 2");
    lg_tokenizer_close(t);
}

static void b74_merges_are_strings_or_pairs(void **state) {
    (void)state;
#define AB "\"a\":0,\"b\":1,\"ab\":2,\" \":3,\" a\":4"
    lg_tokenizer *t = open_json("{" MODEL(AB, "\"a b\"", "") "}");
    assert_string_equal(encode(t, "ab", false), "2");
    lg_tokenizer_close(t);
    t = open_json("{" MODEL(AB, "[\"a\",\"b\"],[\" \",\"a\"]", "") "}");
    assert_string_equal(encode(t, "ab", false), "2");
    assert_string_equal(encode(t, " a", false), "4");
    assert_string_equal(encode(t, " ab", false), "3 2"); /* the lower rank first */
    lg_tokenizer_close(t);
    refuse("{" MODEL(AB, "\"b a\"", "") "}", LG_EFORMAT, "merge 0: ba is not in the vocabulary");
    refuse("{" MODEL(AB, "\"a z\"", "") "}", LG_EFORMAT, "merge 0: z is not in the vocabulary");
    refuse("{" MODEL(AB, "\"a b c\"", "") "}", LG_EFORMAT, "wanted two texts");
    refuse("{" MODEL(AB, "\"ab\"", "") "}", LG_EFORMAT, "wanted two texts");
    refuse("{" MODEL(AB, "[\"a\"]", "") "}", LG_EFORMAT, "wanted two texts");
}

static void b75_bos_is_added_once(void **state) {
    (void)state;
    lg_tokenizer *t =
        open_json("{\"added_tokens\":[" TOKEN("5", "<s>", ",\"special\":true") "," TOKEN(
            "6", "</s>",
            ",\"special\":true") "],"
                                 "\"post_processor\":{\"type\":\"Sequence\",\"processors\":[{"
                                 "\"type\":\"ByteLevel\"},{\"type\":\"TemplateProcessing\","
                                 "\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},{\"Sequence\":{"
                                 "\"id\":\"A\"}},{\"SpecialToken\":{\"id\":\"</s>\"}}],"
                                 "\"special_tokens\":{\"<s>\":{\"ids\":[5]},\"</"
                                 "s>\":{\"ids\":[6]}}}]}," BYTE_LEVEL MODEL("\"h\":0,\"i\":1", "",
                                                                            "") "}");
    assert_string_equal(encode(t, "hi", true), "5 0 1 6");
    assert_string_equal(encode(t, "hi", false), "0 1");
    assert_string_equal(encode(t, "<s>hi", false), "5 0 1"); /* a rendered chat has its own */
    assert_string_equal(decode(t, true, IDS(5, 0, 1, 6)), "hi");
    assert_string_equal(decode(t, false, IDS(5, 0, 1, 6)), "<s>hi</s>");
    lg_tokenizer_close(t);
}

static void added_tokens_take_the_longest_and_eat_spaces(void **state) {
    (void)state;
    lg_tokenizer *t =
        open_json("{\"added_tokens\":[" TOKEN("10", "ab", "") "," TOKEN("11", "abab", "") "," TOKEN(
            "12",
            "L", ",\"lstrip\":true") "," TOKEN("13", "R",
                                               ",\"rstrip\":true") "," TOKEN("14", "W",
                                                                             ",\"single_word\":"
                                                                             "true") "]," MODEL("\""
                                                                                                "a"
                                                                                                "\""
                                                                                                ":0"
                                                                                                ","
                                                                                                "\""
                                                                                                " "
                                                                                                "\""
                                                                                                ":1"
                                                                                                ","
                                                                                                "\""
                                                                                                "W"
                                                                                                "\""
                                                                                                ":2"
                                                                                                ","
                                                                                                "\""
                                                                                                "x"
                                                                                                "\""
                                                                                                ":"
                                                                                                "3",
                                                                                                "",
                                                                                                "") "}");
    assert_string_equal(encode(t, "ababa", false), "11 0");
    assert_string_equal(encode(t, "aba", false), "10 0");
    assert_string_equal(encode(t, "a \t L a", false), "0 12 1 0");
    assert_string_equal(encode(t,
                               "a R \xC2\xA0"
                               "a",
                               false),
                        "0 1 13 0");
    assert_string_equal(encode(t, "x R L", false), "3 1 13 12");
    assert_string_equal(encode(t, "W xW Wx W", false), "14 1 3 2 1 2 3 1 14");
    lg_tokenizer_close(t);
}

static void split_behaviors(void **state) {
    (void)state;
    static const struct {
        const char *behavior, *invert, *ids;
    } cases[] = {{"Isolated", "false", "0 2 2 1 2"},     {"Removed", "false", "0 1"},
                 {"Contiguous", "false", "0 4 1 2"},     {"MergedWithPrevious", "false", "5 2 6"},
                 {"MergedWithNext", "false", "0 2 7 2"}, {"Removed", "true", "2 2 2"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[1024];
        snprintf(json, sizeof json,
                 "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"-\"},"
                 "\"behavior\":\"%s\",\"invert\":%s}," MODEL(
                     "\"a\":0,\"b\":1,\"-\":2,\"--\":4,\"a-\":5,\"b-\":6,\"-b\":7", "",
                     ",\"ignore_merges\":true") "}",
                 cases[i].behavior, cases[i].invert);
        lg_tokenizer *t = open_json(json);
        assert_string_equal(encode(t, "a--b-", false), cases[i].ids);
        lg_tokenizer_close(t);
    }
}

static void metaspace(void **state) {
    (void)state;
    static const struct {
        const char *scheme, *ids, *text;
    } cases[] = {
        {"always", "0 9 0", " a b"}, {"first", "0 9 1", " a b"}, {"never", "1 9 1", "a b"}};
    for (int i = 0; i < 3; i++) {
        char json[1024];
        snprintf(
            json, sizeof json,
            "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":"
            "\"%s\"},"
            "\"decoder\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_scheme\":\"%s\"},"
            "\"added_tokens\":[" TOKEN("9", "<s>", "") "]," MODEL("\"_a\":0,\"a\":1,\"_b\":2", "",
                                                                  ",\"ignore_merges\":true") "}",
            cases[i].scheme, cases[i].scheme);
        lg_tokenizer *t = open_json(json);
        assert_string_equal(encode(t, "a<s>a", false), cases[i].ids);
        assert_string_equal(decode(t, false, IDS(0, 2)), i == 2 ? " a b" : "a b");
        lg_tokenizer_close(t);
    }
}

static void what_is_not_known_is_named(void **state) {
    (void)state;
#define OK MODEL("\"a\":0", "", "")
    refuse("{\"model\":{\"type\":\"Unigram\",\"vocab\":[]}}", LG_EUNSUPPORTED,
           "model is Unigram, wanted BPE");
    refuse("{\"normalizer\":{\"type\":\"Magic\"}," OK "}", LG_EUNSUPPORTED, "normalizer is Magic");
    refuse("{\"pre_tokenizer\":{\"type\":\"Magic\"}," OK "}", LG_EUNSUPPORTED,
           "pre_tokenizer is Magic");
    refuse("{\"decoder\":{\"type\":\"Magic\"}," OK "}", LG_EUNSUPPORTED, "decoder is Magic");
    refuse("{\"post_processor\":{\"type\":\"Magic\"}," OK "}", LG_EUNSUPPORTED,
           "post_processor is Magic");
    refuse("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":"
           "\"Isolated\"}," OK "}",
           LG_EFORMAT, "wanted a regular expression");
    refuse("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"},\"behavior\":"
           "\"Isolated\"}," OK "}",
           LG_EUNSUPPORTED, "class intersection");
    refuse("{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"x\"},\"behavior\":"
           "\"Up\"}," OK "}",
           LG_EUNSUPPORTED, "behavior of Split is Up");
    refuse("{" MODEL("\"a\":0", "", ",\"end_of_word_suffix\":\"</w>\"") "}", LG_EUNSUPPORTED,
           "end_of_word_suffix");
    refuse("{" MODEL("\"a\":0,\"b\":0", "", "") "}", LG_EFORMAT, "id 0 is both a and b");
    refuse("{" MODEL("\"a\":99999999999", "", "") "}", LG_EFORMAT, "wanted a small integer");
    refuse("{" MODEL("\"a\":0", "", ",\"unk_token\":\"<unk>\"") "}", LG_EFORMAT,
           "unk_token is <unk>");
    refuse("{\"added_tokens\":[{\"id\":2000000000,\"content\":\"x\"}]," OK "}", LG_EFORMAT,
           "added token");
    refuse("{}", LG_EFORMAT, "model is missing");
    refuse("", LG_EFORMAT, "JSON at byte 0");
    refuse("[", LG_EFORMAT, "the end");
}

static void padded_ids_decode_to_nothing(void **state) {
    (void)state;
    lg_tokenizer *t = open_json("{" BYTE_LEVEL MODEL("\"a\":0,\"\xC3\xA9\":2", "", "") "}");
    assert_string_equal(decode(t, false, IDS(0, 1, 7, 2000000000, 0)), "aa");
    assert_string_equal(decode(t, false, IDS(0, 2, 0)), "a\xEF\xBF\xBD"
                                                        "a"); /* the character of byte 0xE9 */
    int64_t bytes;
    assert_int_equal(lg_tokenizer_decode(ctx, t, (int32_t[]){-1}, 1, false, NULL, 0, &bytes),
                     LG_EINVAL);
    assert_null(lg_tokenizer_token(t, 1, NULL));
    assert_null(lg_tokenizer_token(t, -1, NULL));
    assert_string_equal(lg_tokenizer_token(t, 0, &bytes), "a");
    assert_int_equal(lg_tokenizer_decode(ctx, t, (int32_t[]){0, 0}, 2, false, NULL, 0, &bytes),
                     LG_OK);
    assert_int_equal(bytes, 2);
    int64_t n;
    int32_t one[1];
    assert_int_equal(lg_tokenizer_encode(ctx, t, "aaa", 3, false, one, 1, &n), LG_OK);
    assert_int_equal(n, 3);
    lg_tokenizer_close(t);
}

/* ---- hostile ---- */

static uint32_t next_random(uint32_t *seed) {
    return *seed = *seed * 1664525u + 1013904223u, *seed >> 8;
}

/* A byte-level vocabulary of all bytes, with every kind of step around it. */
static lg_tokenizer *open_all_bytes(void) {
    static char json[16384];
    char *at =
        json +
        sprintf(json,
                "{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\","
                "\"pretokenizers\":[{\"type\":\"Digits\"},{\"type\":\"ByteLevel\",\"add_prefix_"
                "space\":false}]},"
                "\"added_tokens\":[" TOKEN(
                    "256", "<s>",
                    ",\"lstrip\":true,\"rstrip\":true") "],"
                                                        "\"decoder\":{\"type\":\"ByteLevel\"},"
                                                        "\"model\":{\"merges\":[],\"vocab\":{");
    for (int i = 0, k = 0; i < 256; i++) {
        bool printable = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i != 0xAD);
        at +=
            sprintf(at, "%s\"\\u%04x\":%d", i ? "," : "", (unsigned)(printable ? i : 256 + k++), i);
    }
    strcpy(at, "}}}");
    return open_json(json);
}

static void any_bytes_are_encoded_as_they_are(void **state) {
    (void)state;
    lg_tokenizer *t = open_all_bytes();
    for (int i = 1; i < 256; i++) {
        char text[2] = {(char)i, 0}, wanted[16];
        snprintf(wanted, sizeof wanted, "%d", i);
        assert_string_equal(encode(t, text, false), wanted);
    }
    uint32_t seed = 1;
    for (int round = 0; round < 2000; round++) {
        static const unsigned char pool[] = {0,    ' ',  'a',  '<',  's',  '>',  '1',
                                             '\n', 0x80, 0xBF, 0xC3, 0xA9, 0xE1, 0xA0,
                                             0x8E, 0xED, 0xF0, 0x9F, 0xF4, 0xFF};
        char text[64], back[512];
        int32_t ids[256];
        int64_t n, bytes, length = next_random(&seed) % 64;
        for (int64_t i = 0; i < length; i++) text[i] = (char)pool[next_random(&seed) % sizeof pool];
        assert_int_equal(lg_tokenizer_encode(ctx, t, text, length, true, ids, 256, &n), LG_OK);
        assert_true(n <= length);
        assert_int_equal(lg_tokenizer_decode(ctx, t, ids, n, false, back, sizeof back, &bytes),
                         LG_OK);
    }
    lg_tokenizer_close(t);
}

static void long_texts_without_a_space(void **state) {
    (void)state;
    lg_tokenizer *t = open_all_bytes();
    int64_t bytes = 1 << 20, n;
    char *text = malloc((size_t)bytes);
    memset(text, 'a', (size_t)bytes);
    assert_int_equal(lg_tokenizer_encode(ctx, t, text, bytes, false, NULL, 0, &n), LG_OK);
    assert_int_equal(n, bytes);
    memset(text, ' ', (size_t)bytes);
    assert_int_equal(lg_tokenizer_encode(ctx, t, text, bytes, false, NULL, 0, &n), LG_OK);
    assert_int_equal(n, bytes);
    free(text);
    lg_tokenizer_close(t);
}

static void broken_descriptions_are_read_or_refused(void **state) {
    (void)state;
    static const char json[] =
        "{\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true}],"
        "\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},\"content\":\"_\"},"
        "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\s+\"},\"behavior\":"
        "\"Isolated\"},"
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
        "\"<s>\"}},"
        "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[3]}}},"
        "\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":1,\"stop\":0},"
        "\"model\":{\"type\":\"BPE\",\"unk_token\":\"a\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},"
        "\"merges\":[\"a b\"]}}";
    char bad[sizeof json];
    lg_tokenizer *t;
    for (int64_t n = 0; n < (int64_t)sizeof json - 1; n++)
        assert_int_not_equal(lg_tokenizer_open(ctx, json, n, &t), LG_OK);
    for (size_t at = 0; at < sizeof json - 1; at++) {
        for (int bit = 0; bit < 8; bit++) {
            memcpy(bad, json, sizeof json);
            bad[at] ^= (char)(1 << bit);
            if (lg_tokenizer_open(ctx, bad, sizeof json - 1, &t) != LG_OK) continue;
            int32_t ids[64];
            char text[64];
            int64_t n, bytes;
            assert_int_equal(lg_tokenizer_encode(ctx, t, "<s>ab a\xFF<s>", 12, true, ids, 64, &n),
                             LG_OK);
            lg_tokenizer_decode(ctx, t, ids, n < 64 ? n : 64, false, text, sizeof text, &bytes);
            lg_tokenizer_close(t);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(b67_bytes_stand_in_for_unknown_characters),
        cmocka_unit_test(b68_special_tokens_are_one_id_anywhere),
        cmocka_unit_test(b70_normal_form_c),
        cmocka_unit_test(b71_each_model_cuts_in_its_own_way),
        cmocka_unit_test(b73_a_whole_word_may_come_before_merges),
        cmocka_unit_test(b74_merges_are_strings_or_pairs),
        cmocka_unit_test(b75_bos_is_added_once),
        cmocka_unit_test(added_tokens_take_the_longest_and_eat_spaces),
        cmocka_unit_test(split_behaviors),
        cmocka_unit_test(metaspace),
        cmocka_unit_test(what_is_not_known_is_named),
        cmocka_unit_test(padded_ids_decode_to_nothing),
        cmocka_unit_test(any_bytes_are_encoded_as_they_are),
        cmocka_unit_test(long_texts_without_a_space),
        cmocka_unit_test(broken_descriptions_are_read_or_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
