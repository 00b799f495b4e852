/* The tokenizer on small descriptions: each rule where it can be seen, descriptions that are
 * refused, hostile input. Case names carry the ids of the project's list of known bugs (B67 to
 * B75). */
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

/* Descriptions are written with ` for ", so that they can be read. */
static char *json_of(const char *text) {
    char *json = strdup(text);
    assert_non_null(json);
    for (char *c = json; *c; c++)
        if (*c == '`') *c = '"';
    return json;
}

static lg_status open_text(const char *text, lg_tokenizer **t) {
    char *json = json_of(text);
    lg_status status = lg_tokenizer_open(ctx, json, (int64_t)strlen(json), t);
    free(json);
    return status;
}

static lg_tokenizer *open_json(const char *text) {
    lg_tokenizer *t;
    if (open_text(text, &t) != LG_OK) fail_msg("%s", lg_error(ctx));
    return t;
}

/* A model of `vocab` and `merges`; `more` goes on in the model, `around` are the description's
 * other members. */
static void describe(char *out, size_t bytes, const char *vocab, const char *merges,
                     const char *more, const char *around) {
    int n = snprintf(out, bytes, "{`model`:{`type`:`BPE`,`vocab`:{%s},`merges`:[%s]%s}%s}", vocab,
                     merges, more, around);
    assert_true(n > 0 && (size_t)n < bytes);
}

static lg_tokenizer *open_model(const char *vocab, const char *merges, const char *more,
                                const char *around) {
    char text[4096];
    describe(text, sizeof text, vocab, merges, more, around);
    return open_json(text);
}

static void refuse(const char *json, lg_status wanted, const char *text) {
    lg_tokenizer *t;
    assert_int_equal(open_text(json, &t), wanted);
    assert_null(t);
    if (!strstr(lg_error(ctx), text))
        fail_msg("error is '%s', wanted it to have '%s'", lg_error(ctx), text);
}

/* A description that is right but for what is given. */
static void refuse_model(const char *vocab, const char *merges, const char *more,
                         const char *around, lg_status wanted, const char *text) {
    char json[2048];
    describe(json, sizeof json, vocab, merges, more, around);
    refuse(json, wanted, text);
}

/* Encodes and writes the ids as "1 2 3". */
static const char *encode(lg_tokenizer *t, const char *text, bool special) {
    static char out[2048];
    int32_t ids[256];
    int64_t n, bytes = (int64_t)strlen(text);
    if (lg_tokenizer_encode(ctx, t, text, bytes, special, ids, 256, &n) != LG_OK)
        fail_msg("%s", lg_error(ctx));
    assert_true(n <= 256);
    out[0] = 0;
    for (int64_t i = 0; i < n; i++) sprintf(out + strlen(out), i ? " %d" : "%d", ids[i]);
    return out;
}

/* Decodes ids written as "1 2 3". */
static const char *decode(lg_tokenizer *t, bool skip_special, const char *list) {
    static char out[1024];
    int32_t ids[64];
    int64_t n = 0, bytes;
    for (char *end; *list; list = end) ids[n++] = (int32_t)strtol(list, &end, 10);
    if (lg_tokenizer_decode(ctx, t, ids, n, skip_special, out, sizeof out - 1, &bytes) != LG_OK)
        fail_msg("%s", lg_error(ctx));
    assert_true(bytes < (int64_t)sizeof out);
    out[bytes] = 0;
    return out;
}

static const char byte_level[] =
    ",`pre_tokenizer`:{`type`:`ByteLevel`,`add_prefix_space`:false},`decoder`:{`type`:`ByteLevel`}";
static const char byte_level_no_regex[] =
    "{`type`:`ByteLevel`,`add_prefix_space`:false,`use_regex`:false}";

static void bytes_stand_in_for_unknown_characters(void **state) {
    (void)state;
    const char *vocab = "`<0xEA>`:0,`<0xB9>`:1,`<0xB0>`:2,`<unk>`:3,`a`:4";
    const char *decoder =
        ",`decoder`:{`type`:`Sequence`,`decoders`:[{`type`:`ByteFallback`},{`type`:`Fuse`}]}";
    const char *hangul = "\xEA\xB9\xB0"; /* U+AE70 */
    const char *yes = ",`byte_fallback`:true,`unk_token`:`<unk>`";
    const char *no = ",`byte_fallback`:false,`unk_token`:`<unk>`";
    lg_tokenizer *t = open_model(vocab, "", yes, decoder);
    assert_string_equal(encode(t, hangul, false), "0 1 2");
    assert_string_equal(decode(t, false, "0 1 2"), hangul);
    assert_string_equal(decode(t, false, "0 1"), "\xEF\xBF\xBD\xEF\xBF\xBD");
    assert_string_equal(decode(t, false, "4 0 4"), "a\xEF\xBF\xBD\x61");
    assert_string_equal(encode(t, "\xEA", false), "0"); /* no UTF-8: the byte itself */
    assert_string_equal(encode(t, "\xC3\xA9\x61\xFF", false), "3 4 3");
    lg_tokenizer_close(t);
    t = open_model(vocab, "", no, decoder);
    assert_string_equal(encode(t, hangul, false), "3");
    assert_string_equal(encode(t, "xya", false), "3 3 4");
    lg_tokenizer_close(t);
    t = open_model(vocab, "", ",`fuse_unk`:true,`unk_token`:`<unk>`", "");
    assert_string_equal(encode(t, "xyaz", false), "3 4 3");
    lg_tokenizer_close(t);
}

static void special_tokens_are_one_id_anywhere(void **state) {
    (void)state;
    /* The mark is _, the two letters are U+4F60 U+597D. */
    lg_tokenizer *t = open_model(
        "`_`:0,`\\n`:1,`\xE4\xBD\xA0`:2,`\xE5\xA5\xBD`:3,`_\\n`:4", "", "",
        ",`normalizer`:{`type`:`Sequence`,`normalizers`:[{`type`:`Prepend`,`prepend`:`_`},"
        "{`type`:`Replace`,`pattern`:{`String`:` `},`content`:`_`}]},"
        "`added_tokens`:[{`id`:10,`content`:`<s1>`,`special`:true,`normalized`:true},"
        "{`id`:11,`content`:`<s2>`,`special`:true,`normalized`:true},"
        "{`id`:12,`content`:`x y`,`special`:false,`normalized`:true}]");
    const char *text = "<s1>\n\xE4\xBD\xA0\xE5\xA5\xBD<s2>\n";
    assert_string_equal(encode(t, text, false), "10 0 1 2 3 11 0 1");
    assert_string_equal(encode(t, "<s2><s1>", false), "11 10");
    assert_string_equal(encode(t, "\nx y\n", false), "0 1 12 1");
    assert_int_equal(lg_tokenizer_id(t, "<s2>"), 11);
    assert_int_equal(lg_tokenizer_id(t, "<s"), -1);
    assert_int_equal(lg_tokenizer_vocab(t), 13);
    lg_tokenizer_close(t);
}

static void normal_form_c(void **state) {
    (void)state;
    const char *vocab = "`\xEA\xB0\x81`:0,`\xC3\xA9`:1,`e`:2,`\xCC\x81`:3,`\xE1\x84\x80`:4";
    lg_tokenizer *t = open_model(vocab, "", "", ",`normalizer`:{`type`:`NFC`}");
    /* U+1100 U+1161 U+11A8 is U+AC01; e U+0301 is U+00E9. */
    assert_string_equal(encode(t, "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", false), "0");
    assert_string_equal(encode(t, "e\xCC\x81", false), "1");
    assert_string_equal(encode(t, "\xEA\xB0\x81\xC3\xA9", false), "0 1");
    assert_string_equal(encode(t, "\xFF\x65\xCC\x81\xFF", false), "1"); /* among broken bytes */
    lg_tokenizer_close(t);
    t = open_model(vocab, "", "", ",`normalizer`:null");
    assert_string_equal(encode(t, "e\xCC\x81", false), "2 3");
    lg_tokenizer_close(t);
    t = open_model("`\xE1\x84\x80`:0,`\xE1\x85\xA1`:1,`\xE1\x86\xA8`:2,`e`:3,`\xCC\x81`:4", "", "",
                   ",`normalizer`:null,`decoder`:{`type`:`Fuse`}");
    const char *apart = "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8\x65\xCC\x81";
    assert_string_equal(encode(t, apart, false), "0 1 2 3 4");
    assert_string_equal(decode(t, false, "0 1 2 3 4"), apart);
    lg_tokenizer_close(t);
}

static void each_model_cuts_in_its_own_way(void **state) {
    (void)state;
    /* \xC4\xA0 is the space of the byte alphabet. */
    const char *vocab = "`What`:0,`\xC4\xA0is`:1,`\xC4\xA0`:2,`333`:3,`3`:4,`+`:5,`777`:6,`?`:7,"
                        "`3333`:8";
    const char *whole = ",`ignore_merges`:true";
    char llama3[1024];
    snprintf(llama3, sizeof llama3,
             ",`pre_tokenizer`:{`type`:`Sequence`,`pretokenizers`:[{`type`:`Split`,`pattern`:"
             "{`Regex`:`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|"
             "\\\\p{N}{1,3}| ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|"
             "\\\\s+(?!\\\\S)|\\\\s+`},`behavior`:`Isolated`},%s]}",
             byte_level_no_regex);
    lg_tokenizer *t = open_model(vocab, "", whole, llama3);
    assert_string_equal(encode(t, "What is 3333+777?", false), "0 1 2 3 4 5 6 7");
    lg_tokenizer_close(t);
    t = open_model(vocab, "", whole, byte_level);
    assert_string_equal(encode(t, "3333+777", false), "8 5 6");
    lg_tokenizer_close(t);
    const char *digits = ",`pre_tokenizer`:{`type`:`Digits`,`individual_digits`:true}";
    t = open_model(vocab, "", whole, digits);
    assert_string_equal(encode(t, "333+", false), "4 4 4 5");
    lg_tokenizer_close(t);
}

static void a_whole_word_may_come_before_merges(void **state) {
    (void)state;
    const char *vocab = "`a`:0,`b`:1,`c`:2,`ab`:3,`abc`:4";
    lg_tokenizer *t = open_model(vocab, "`a b`", ",`ignore_merges`:true", "");
    assert_string_equal(encode(t, "abc", false), "4");
    lg_tokenizer_close(t);
    t = open_model(vocab, "`a b`", ",`ignore_merges`:false", "");
    assert_string_equal(encode(t, "abc", false), "3 2");
    lg_tokenizer_close(t);
}

static void merges_are_strings_or_pairs(void **state) {
    (void)state;
    const char *vocab = "`a`:0,`b`:1,`ab`:2,` `:3,` a`:4";
    lg_tokenizer *t = open_model(vocab, "`a b`", "", "");
    assert_string_equal(encode(t, "ab", false), "2");
    lg_tokenizer_close(t);
    t = open_model(vocab, "[`a`,`b`],[` `,`a`]", "", "");
    assert_string_equal(encode(t, "ab", false), "2");
    assert_string_equal(encode(t, " a", false), "4");
    assert_string_equal(encode(t, " ab", false), "3 2"); /* the lower rank first */
    lg_tokenizer_close(t);
    refuse_model(vocab, "`b a`", "", "", LG_EFORMAT, "merge 0: ba is not in the vocabulary");
    refuse_model(vocab, "`a z`", "", "", LG_EFORMAT, "merge 0: z is not in the vocabulary");
    refuse_model(vocab, "`a b c`", "", "", LG_EFORMAT, "wanted two texts");
    refuse_model(vocab, "`ab`", "", "", LG_EFORMAT, "wanted two texts");
    refuse_model(vocab, "[`a`]", "", "", LG_EFORMAT, "wanted two texts");
}

static void bos_is_added_once(void **state) {
    (void)state;
    char around[1024];
    snprintf(around, sizeof around,
             "%s,`added_tokens`:[{`id`:5,`content`:`<s>`,`special`:true},"
             "{`id`:6,`content`:`</s>`,`special`:true}],"
             "`post_processor`:{`type`:`Sequence`,`processors`:[{`type`:`ByteLevel`},"
             "{`type`:`TemplateProcessing`,`single`:[{`SpecialToken`:{`id`:`<s>`}},"
             "{`Sequence`:{`id`:`A`}},{`SpecialToken`:{`id`:`</s>`}}],"
             "`special_tokens`:{`<s>`:{`ids`:[5]},`</s>`:{`ids`:[6]}}}]}",
             byte_level);
    lg_tokenizer *t = open_model("`h`:0,`i`:1", "", "", around);
    assert_string_equal(encode(t, "hi", true), "5 0 1 6");
    assert_string_equal(encode(t, "hi", false), "0 1");
    assert_string_equal(encode(t, "<s>hi", false), "5 0 1"); /* a rendered chat has its own */
    assert_string_equal(decode(t, true, "5 0 1 6"), "hi");
    assert_string_equal(decode(t, false, "5 0 1 6"), "<s>hi</s>");
    lg_tokenizer_close(t);
}

static void added_tokens_take_the_longest_and_eat_spaces(void **state) {
    (void)state;
    lg_tokenizer *t = open_model("`a`:0,` `:1,`W`:2,`x`:3", "", "",
                                 ",`added_tokens`:[{`id`:10,`content`:`ab`},"
                                 "{`id`:11,`content`:`abab`},"
                                 "{`id`:12,`content`:`L`,`lstrip`:true},"
                                 "{`id`:13,`content`:`R`,`rstrip`:true},"
                                 "{`id`:14,`content`:`W`,`single_word`:true}]");
    assert_string_equal(encode(t, "ababa", false), "11 0");
    assert_string_equal(encode(t, "aba", false), "10 0");
    assert_string_equal(encode(t, "a \t L a", false), "0 12 1 0");
    assert_string_equal(encode(t, "a R \xC2\xA0\x61", false), "0 1 13 0");
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
        char around[256];
        snprintf(around, sizeof around,
                 ",`pre_tokenizer`:{`type`:`Split`,`pattern`:{`String`:`-`},`behavior`:`%s`,"
                 "`invert`:%s}",
                 cases[i].behavior, cases[i].invert);
        lg_tokenizer *t = open_model("`a`:0,`b`:1,`-`:2,`--`:4,`a-`:5,`b-`:6,`-b`:7", "",
                                     ",`ignore_merges`:true", around);
        assert_string_equal(encode(t, "a--b-", false), cases[i].ids);
        lg_tokenizer_close(t);
    }
}

static void metaspace(void **state) {
    (void)state;
    static const struct {
        const char *scheme, *ids, *text;
    } cases[] = {{"always", "0 9 0", "a b"}, {"first", "0 9 1", "a b"}, {"never", "1 9 1", " a b"}};
    for (int i = 0; i < 3; i++) {
        char around[512];
        snprintf(around, sizeof around,
                 ",`pre_tokenizer`:{`type`:`Metaspace`,`replacement`:`_`,`prepend_scheme`:`%s`},"
                 "`decoder`:{`type`:`Metaspace`,`replacement`:`_`,`prepend_scheme`:`%s`},"
                 "`added_tokens`:[{`id`:9,`content`:`<s>`}]",
                 cases[i].scheme, cases[i].scheme);
        lg_tokenizer *t = open_model("`_a`:0,`a`:1,`_b`:2", "", ",`ignore_merges`:true", around);
        assert_string_equal(encode(t, "a<s>a", false), cases[i].ids);
        assert_string_equal(decode(t, false, "0 2"), cases[i].text);
        lg_tokenizer_close(t);
    }
}

static void what_is_not_known_is_named(void **state) {
    (void)state;
    static const char *const chains[] = {"normalizer", "pre_tokenizer", "decoder",
                                         "post_processor"};
    for (int i = 0; i < 4; i++) {
        char around[64], text[64];
        snprintf(around, sizeof around, ",`%s`:{`type`:`Magic`}", chains[i]);
        snprintf(text, sizeof text, "%s is Magic", chains[i]);
        refuse_model("`a`:0", "", "", around, LG_EUNSUPPORTED, text);
    }
    static const struct {
        const char *pattern, *behavior, *text;
        lg_status status;
    } splits[] = {{"`Regex`:`(`", "Isolated", "wanted a regular expression", LG_EFORMAT},
                  {"`Regex`:`[a&&b]`", "Isolated", "class intersection", LG_EUNSUPPORTED},
                  {"`String`:``", "Isolated", "a pattern is empty", LG_EFORMAT},
                  {"`Glob`:`*`", "Isolated", "a pattern is", LG_EFORMAT},
                  {"`String`:`x`", "Up", "behavior of Split is Up", LG_EUNSUPPORTED}};
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        char around[256];
        snprintf(around, sizeof around,
                 ",`pre_tokenizer`:{`type`:`Split`,`pattern`:{%s},`behavior`:`%s`}",
                 splits[i].pattern, splits[i].behavior);
        refuse_model("`a`:0", "", "", around, splits[i].status, splits[i].text);
    }
    refuse("{`model`:{`type`:`Unigram`,`vocab`:[]}}", LG_EUNSUPPORTED, "model is Unigram");
    refuse_model("`a`:0", "", ",`end_of_word_suffix`:`</w>`", "", LG_EUNSUPPORTED,
                 "end_of_word_suffix");
    refuse_model("`a`:0,`b`:0", "", "", "", LG_EFORMAT, "id 0 is both a and b");
    refuse_model("`a`:99999999999", "", "", "", LG_EFORMAT, "wanted a small integer");
    refuse_model("`a`:0", "", ",`unk_token`:`<unk>`", "", LG_EFORMAT, "unk_token is <unk>");
    refuse_model("`a`:0", "", "", ",`added_tokens`:[{`id`:2000000000,`content`:`x`}]", LG_EFORMAT,
                 "added token");
    refuse("{}", LG_EFORMAT, "model is missing");
    refuse("", LG_EFORMAT, "JSON at byte 0");
    refuse("[", LG_EFORMAT, "the end");
}

static void a_chain_is_not_endless(void **state) {
    (void)state;
    char around[4096] = ",`pre_tokenizer`:{`type`:`Sequence`,`pretokenizers`:[";
    for (int i = 0; i < 40; i++) strcat(around, i ? ",{`type`:`Digits`}" : "{`type`:`Digits`}");
    strcat(around, "]}");
    refuse_model("`a`:0", "", "", around, LG_EUNSUPPORTED, "more than 32 steps");
}

static void padded_ids_decode_to_nothing(void **state) {
    (void)state;
    lg_tokenizer *t = open_model("`a`:0,`\xC3\xA9`:2", "", "", byte_level);
    assert_string_equal(decode(t, false, "0 1 7 2000000000 0"), "aa");
    /* U+00E9 is the character of byte 0xE9. */
    assert_string_equal(decode(t, false, "0 2 0"), "a\xEF\xBF\xBD\x61");
    int64_t n, bytes;
    int32_t bad = -1, two[2] = {0, 0};
    assert_int_equal(lg_tokenizer_decode(ctx, t, &bad, 1, false, NULL, 0, &bytes), LG_EINVAL);
    assert_null(lg_tokenizer_token(t, 1, NULL));
    assert_null(lg_tokenizer_token(t, -1, NULL));
    assert_string_equal(lg_tokenizer_token(t, 0, &bytes), "a");
    assert_int_equal(lg_tokenizer_decode(ctx, t, two, 2, false, NULL, 0, &bytes), LG_OK);
    assert_int_equal(bytes, 2);
    assert_int_equal(lg_tokenizer_encode(ctx, t, "aaa", 3, false, two, 1, &n), LG_OK);
    assert_int_equal(n, 3);
    lg_tokenizer_close(t);
}

/* ---- hostile ---- */

static uint32_t next_random(uint32_t *seed) {
    return *seed = *seed * 1664525u + 1013904223u, *seed >> 8;
}

/* A byte-level vocabulary of all bytes, with several kinds of steps around it. */
static lg_tokenizer *open_all_bytes(void) {
    static char vocab[8192], text[16384];
    char *at = vocab;
    for (int i = 0, k = 0; i < 256; i++) {
        bool printable = (i >= 0x21 && i <= 0x7E) || (i >= 0xA1 && i != 0xAD);
        unsigned code = (unsigned)(printable ? i : 256 + k++);
        at += sprintf(at, "%s`\\u%04x`:%d", i ? "," : "", code, i);
    }
    describe(text, sizeof text, vocab, "", "",
             ",`normalizer`:{`type`:`NFC`},`pre_tokenizer`:{`type`:`Sequence`,`pretokenizers`:["
             "{`type`:`Digits`},{`type`:`ByteLevel`,`add_prefix_space`:false}]},"
             "`added_tokens`:[{`id`:256,`content`:`<s>`,`lstrip`:true,`rstrip`:true}],"
             "`decoder`:{`type`:`ByteLevel`}");
    return open_json(text);
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
    char *json = json_of(
        "{`added_tokens`:[{`id`:3,`content`:`<s>`,`special`:true}],"
        "`normalizer`:{`type`:`Replace`,`pattern`:{`String`:` `},`content`:`_`},"
        "`pre_tokenizer`:{`type`:`Split`,`pattern`:{`Regex`:`\\\\s+`},`behavior`:`Isolated`},"
        "`post_processor`:{`type`:`TemplateProcessing`,`single`:[{`SpecialToken`:{`id`:`<s>`}},"
        "{`Sequence`:{`id`:`A`}}],`special_tokens`:{`<s>`:{`ids`:[3]}}},"
        "`decoder`:{`type`:`Strip`,`content`:` `,`start`:1,`stop`:0},"
        "`model`:{`type`:`BPE`,`unk_token`:`a`,`vocab`:{`a`:0,`b`:1,`ab`:2},`merges`:[`a b`]}}");
    int64_t bytes = (int64_t)strlen(json);
    lg_tokenizer *t;
    for (int64_t n = 0; n < bytes; n++)
        assert_int_not_equal(lg_tokenizer_open(ctx, json, n, &t), LG_OK);
    for (int64_t at = 0; at < bytes; at++) {
        for (int bit = 0; bit < 8; bit++) {
            json[at] ^= (char)(1 << bit);
            lg_status status = lg_tokenizer_open(ctx, json, bytes, &t);
            json[at] ^= (char)(1 << bit);
            if (status != LG_OK) continue;
            int32_t ids[64];
            char text[64];
            int64_t n, length;
            status = lg_tokenizer_encode(ctx, t, "<s>ab a\xFF<s>", 11, true, ids, 64, &n);
            assert_int_equal(status, LG_OK);
            lg_tokenizer_decode(ctx, t, ids, n < 64 ? n : 64, false, text, sizeof text, &length);
            lg_tokenizer_close(t);
        }
    }
    free(json);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        {"B67: bytes stand in for unknown characters", bytes_stand_in_for_unknown_characters, NULL,
         NULL, NULL},
        {"B68: special tokens are one id anywhere", special_tokens_are_one_id_anywhere, NULL, NULL,
         NULL},
        {"B70: normal form c", normal_form_c, NULL, NULL, NULL},
        {"B71: each model cuts in its own way", each_model_cuts_in_its_own_way, NULL, NULL, NULL},
        {"B73: a whole word may come before merges", a_whole_word_may_come_before_merges, NULL,
         NULL, NULL},
        {"B74: merges are strings or pairs", merges_are_strings_or_pairs, NULL, NULL, NULL},
        {"B75: bos is added once", bos_is_added_once, NULL, NULL, NULL},
        cmocka_unit_test(added_tokens_take_the_longest_and_eat_spaces),
        cmocka_unit_test(split_behaviors),
        cmocka_unit_test(metaspace),
        cmocka_unit_test(what_is_not_known_is_named),
        cmocka_unit_test(a_chain_is_not_endless),
        cmocka_unit_test(padded_ids_decode_to_nothing),
        cmocka_unit_test(any_bytes_are_encoded_as_they_are),
        cmocka_unit_test(long_texts_without_a_space),
        cmocka_unit_test(broken_descriptions_are_read_or_refused),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
