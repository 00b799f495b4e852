/* Patterns of a tokenizer description: a literal text, or a regular expression with Unicode
 * classes (PCRE2, JIT).
 *
 * The expressions were written for Oniguruma. What differs is met here: \s must not match
 * U+180E, and a class intersection (&&), which PCRE2 reads as two literals, is refused. Bytes
 * that are no UTF-8 are matched as the control character 0x1A. Both stand-ins go into a copy
 * that is only matched, never encoded. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer.h"

#include <pcre2.h>
#include <string.h>

lg_status lg_pattern_open_regex(lg_context *ctx, const char *regex, int64_t bytes,
                                lg_pattern *pattern) {
    if (memmem(regex, (size_t)bytes, "&&", 2))
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "tokenizer: pattern %.*s has &&, wanted no class intersection",
                       (int)(bytes < 200 ? bytes : 200), regex);
    int code;
    PCRE2_SIZE at;
    pattern->regex =
        pcre2_compile((PCRE2_SPTR)regex, (size_t)bytes, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    if (!pattern->regex) {
        PCRE2_UCHAR text[128];
        pcre2_get_error_message(code, text, sizeof text);
        return lg_fail(ctx, LG_EFORMAT,
                       "tokenizer: pattern %.*s: %s at %lld, wanted a regular expression",
                       (int)(bytes < 200 ? bytes : 200), regex, (const char *)text, (long long)at);
    }
    pcre2_jit_compile(pattern->regex, PCRE2_JIT_COMPLETE); /* without it the interpreter runs */
    pattern->matches = pcre2_match_data_create(1, NULL);
    pattern->limits = pcre2_match_context_create(NULL);
    pattern->stack = pcre2_jit_stack_create(32 << 10, 8 << 20, NULL);
    if (!pattern->matches || !pattern->limits || !pattern->stack)
        return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for a pattern");
    pcre2_jit_stack_assign(pattern->limits, NULL, pattern->stack);
    return LG_OK;
}

lg_status lg_pattern_open_literal(lg_context *ctx, const char *text, int64_t bytes,
                                  lg_pattern *pattern) {
    if (bytes == 0)
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: a pattern is empty, wanted some text");
    lg_buffer_append(&pattern->literal, text, bytes);
    return pattern->literal.failed ? lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for a pattern")
                                   : LG_OK;
}

lg_status lg_pattern_open(lg_context *ctx, const lg_json *node, lg_pattern *pattern) {
    const lg_json *regex = lg_json_get(node, "Regex"), *text = lg_json_get(node, "String");
    if (regex && regex->kind == LG_JSON_STRING)
        return lg_pattern_open_regex(ctx, regex->text, regex->bytes, pattern);
    if (text && text->kind == LG_JSON_STRING)
        return lg_pattern_open_literal(ctx, text->text, text->bytes, pattern);
    return lg_fail(ctx, LG_EFORMAT,
                   "tokenizer: a pattern is %.*s, wanted {\"String\": text} or {\"Regex\": text}",
                   node ? (int)(node->bytes < 200 ? node->bytes : 200) : 7,
                   node ? node->text : "missing");
}

void lg_pattern_close(lg_pattern *pattern) {
    pcre2_code_free(pattern->regex);
    pcre2_match_data_free(pattern->matches);
    pcre2_match_context_free(pattern->limits);
    pcre2_jit_stack_free(pattern->stack);
    lg_buffer_free(&pattern->literal);
    lg_buffer_free(&pattern->shadow);
}

static void add_span(lg_buffer *spans, int64_t from, int64_t to, bool is_match) {
    if (from < to) lg_buffer_append(spans, &(lg_span){from, to, is_match}, sizeof(lg_span));
}

static void find_literal(const lg_buffer *literal, const char *text, int64_t bytes,
                         lg_buffer *spans) {
    int64_t from = 0;
    const char *found;
    while ((found = memmem(text + from, (size_t)(bytes - from), literal->data,
                           (size_t)literal->bytes))) {
        add_span(spans, from, found - text, false);
        from = found - text + literal->bytes;
        add_span(spans, found - text, from, true);
    }
    add_span(spans, from, bytes, false);
}

/* The text itself, or a copy of the same length with the stand-ins. */
static const char *matchable(lg_pattern *pattern, const char *text, int64_t bytes) {
    lg_buffer *shadow = &pattern->shadow;
    shadow->bytes = 0;
    bool copied = false;
    for (int64_t i = 0; i < bytes;) {
        if ((unsigned char)text[i] < 0x80) {
            i++;
            continue;
        }
        int n = lg_utf8_bytes(text + i, bytes - i);
        bool separator = n == 3 && !memcmp(text + i, "\xE1\xA0\x8E", 3);
        if (n == 0 || separator) {
            if (!copied) lg_buffer_append(shadow, text, bytes);
            if (shadow->failed) return NULL;
            copied = true;
            memcpy(shadow->data + i, n == 0 ? "\x1A" : "\xE2\x80\x8B", n == 0 ? 1 : 3);
        }
        i += n ? n : 1;
    }
    return copied ? shadow->data : text;
}

static lg_status find_regex(lg_context *ctx, lg_pattern *pattern, const char *text, int64_t bytes,
                            lg_buffer *spans) {
    const char *subject = matchable(pattern, text, bytes);
    if (!subject) return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for a text");
    int64_t last = 0, at = 0; /* the end of the last match, and where to look on */
    while (at <= bytes) {
        int found = pcre2_match(pattern->regex, (PCRE2_SPTR)subject, (size_t)bytes, (size_t)at,
                                PCRE2_NO_UTF_CHECK, pattern->matches, pattern->limits);
        if (found == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its state on the heap */
            found =
                pcre2_match(pattern->regex, (PCRE2_SPTR)subject, (size_t)bytes, (size_t)at,
                            PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, pattern->matches, pattern->limits);
        if (found == PCRE2_ERROR_NOMATCH) break;
        if (found < 0) {
            PCRE2_UCHAR message[128];
            pcre2_get_error_message(found, message, sizeof message);
            return lg_fail(ctx, LG_EFORMAT,
                           "tokenizer: a pattern fails at byte %lld: %s, wanted a match or none",
                           (long long)at, (const char *)message);
        }
        const PCRE2_SIZE *ends = pcre2_get_ovector_pointer(pattern->matches);
        int64_t from = (int64_t)ends[0], to = (int64_t)ends[1];
        if (to <= from ||
            from < last) { /* empty, or moved back by \K: go on behind the next character */
            if (at >= bytes) break;
            at += lg_utf8_bytes(subject + at, bytes - at);
            continue;
        }
        add_span(spans, last, from, false);
        add_span(spans, from, to, true);
        last = at = to;
    }
    add_span(spans, last, bytes, false);
    return LG_OK;
}

lg_status lg_pattern_find(lg_context *ctx, lg_pattern *pattern, const char *text, int64_t bytes,
                          lg_buffer *spans) {
    spans->bytes = 0;
    if (pattern->regex) {
        LG_TRY(find_regex(ctx, pattern, text, bytes, spans));
    } else {
        find_literal(&pattern->literal, text, bytes, spans);
    }
    if (!spans->failed) return LG_OK;
    spans->failed = false;
    return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for %lld bytes of text", (long long)bytes);
}
