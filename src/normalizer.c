/* Normalizers: Unicode forms (utf8proc), Replace, Prepend. Each step writes the whole text into
 * its own buffer. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

enum { UNICODE_FORM, REPLACE, PREPEND };

static lg_status read_step(lg_context *ctx, const lg_json *node, const lg_json *type,
                           lg_step *step) {
    static const struct {
        const char *name;
        int options;
    } forms[] = {{"NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE},
                 {"NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
                 {"NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                 {"NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};
    for (int i = 0; i < 4; i++) {
        if (!lg_json_is(type, forms[i].name)) continue;
        step->kind = UNICODE_FORM;
        step->option = forms[i].options;
        return LG_OK;
    }
    if (lg_json_is(type, "Prepend")) {
        step->kind = PREPEND;
        return lg_step_text(ctx, node, "prepend", &step->content);
    }
    if (lg_json_is(type, "Replace")) {
        step->kind = REPLACE;
        LG_TRY(lg_step_text(ctx, node, "content", &step->content));
        return lg_pattern_open(ctx, lg_json_get(node, "pattern"), &step->pattern);
    }
    return lg_step_unknown(ctx, "normalizer", type,
                           "NFC, NFD, NFKC, NFKD, Prepend, Replace, Sequence");
}

lg_status lg_normalizer_open(lg_context *ctx, const lg_json *node, lg_steps *steps) {
    return lg_steps_open(ctx, "normalizer", node, "normalizers", read_step, steps);
}

/* Valid stretches are brought into the form, other bytes stay as they are. */
static lg_status unicode_form(lg_context *ctx, lg_step *step, const char *text, int64_t bytes) {
    for (int64_t from = 0, to = 0; from < bytes; from = to) {
        int n;
        while (to < bytes && (n = lg_utf8_bytes(text + to, bytes - to)) > 0) to += n;
        if (to > from) {
            utf8proc_uint8_t *form;
            utf8proc_ssize_t length = utf8proc_map((const utf8proc_uint8_t *)text + from, to - from,
                                                   &form, (utf8proc_option_t)step->option);
            if (length < 0)
                return lg_fail(ctx, LG_ENOMEM, "tokenizer: normalisation: %s",
                               utf8proc_errmsg(length));
            lg_buffer_append(&step->out, form, length);
            free(form);
        }
        if (to < bytes) lg_buffer_append(&step->out, text + to++, 1);
    }
    return LG_OK;
}

static lg_status replace(lg_context *ctx, lg_step *step, const char *text, int64_t bytes) {
    LG_TRY(lg_pattern_find(ctx, &step->pattern, text, bytes, &step->spans));
    const lg_span *spans = (const lg_span *)step->spans.data;
    int64_t n = step->spans.bytes / (int64_t)sizeof *spans;
    for (int64_t i = 0; i < n; i++) {
        if (spans[i].is_match) {
            lg_buffer_append(&step->out, step->content.data, step->content.bytes);
        } else {
            lg_buffer_append(&step->out, text + spans[i].from, spans[i].to - spans[i].from);
        }
    }
    return LG_OK;
}

static bool is_ascii(const char *text, int64_t bytes) {
    unsigned char all = 0;
    for (int64_t i = 0; i < bytes; i++) all |= (unsigned char)text[i];
    return all < 0x80;
}

lg_status lg_normalize(lg_context *ctx, lg_steps *steps, bool prepend, const char **text,
                       int64_t *bytes) {
    for (int64_t i = 0; i<steps->n && * bytes> 0; i++) {
        lg_step *step = &steps->items[i];
        step->out.bytes = 0;
        if (step->kind == UNICODE_FORM) {
            if (is_ascii(*text, *bytes)) continue;
            LG_TRY(unicode_form(ctx, step, *text, *bytes));
        } else if (step->kind == REPLACE) {
            LG_TRY(replace(ctx, step, *text, *bytes));
        } else {
            if (!prepend) continue;
            lg_buffer_append(&step->out, step->content.data, step->content.bytes);
            lg_buffer_append(&step->out, *text, *bytes);
        }
        if (step->out.failed) {
            step->out.failed = false;
            return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for %lld bytes of text",
                           (long long)*bytes);
        }
        *text = step->out.data;
        *bytes = step->out.bytes;
    }
    return LG_OK;
}
