/* Pre-tokenizers: Split, ByteLevel, Digits, Metaspace. A step cuts its text and hands each part
 * to the next step; behind the last one a part is a word. */
#include "tokenizer.h"

#include <string.h>

enum { SPLIT, BYTE_LEVEL, METASPACE };
enum { REMOVED, ISOLATED, CONTIGUOUS, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT };
enum { PREPEND_ALWAYS, PREPEND_FIRST, PREPEND_NEVER };

static const char gpt2[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* The place of a string member in `names`; -1: another string; `otherwise` when there is no such
 * member. */
static int member_of(const lg_json *node, const char *key, const char *const *names, int n,
                     int otherwise) {
    const lg_json *member = lg_json_get(node, key);
    for (int i = 0; member && i < n; i++)
        if (lg_json_is(member, names[i])) return i;
    return member ? -1 : otherwise;
}

static lg_status read_split(lg_context *ctx, const lg_json *node, lg_step *step) {
    static const char *const behaviors[] = {"Removed", "Isolated", "Contiguous",
                                            "MergedWithPrevious", "MergedWithNext"};
    step->kind = SPLIT;
    step->option = member_of(node, "behavior", behaviors, 5, -1);
    step->invert = lg_step_flag(node, "invert", false);
    if (step->option < 0) {
        const lg_json *got = lg_json_get(node, "behavior");
        return lg_fail(ctx, LG_EUNSUPPORTED,
                       "tokenizer: behavior of Split is %.*s, wanted one of Removed, Isolated, "
                       "Contiguous, MergedWithPrevious, MergedWithNext",
                       got ? (int)(got->bytes < 100 ? got->bytes : 100) : 7,
                       got ? got->text : "missing");
    }
    return lg_pattern_open(ctx, lg_json_get(node, "pattern"), &step->pattern);
}

static lg_status read_metaspace(lg_context *ctx, const lg_json *node, lg_step *step) {
    static const char *const schemes[] = {"always", "first", "never"};
    step->kind = METASPACE;
    bool prefix = lg_step_flag(node, "add_prefix_space", true); /* the older spelling */
    step->option =
        member_of(node, "prepend_scheme", schemes, 3, prefix ? PREPEND_ALWAYS : PREPEND_NEVER);
    step->split = lg_step_flag(node, "split", true);
    if (step->option < 0)
        return lg_fail(
            ctx, LG_EUNSUPPORTED,
            "tokenizer: prepend_scheme of Metaspace is another, wanted always, first or never");
    LG_TRY(lg_step_text(ctx, node, "replacement", &step->content));
    return lg_pattern_open_literal(ctx, step->content.data, step->content.bytes, &step->pattern);
}

static lg_status read_step(lg_context *ctx, const lg_json *node, const lg_json *type,
                           lg_step *step) {
    if (lg_json_is(type, "Split")) return read_split(ctx, node, step);
    if (lg_json_is(type, "Metaspace")) return read_metaspace(ctx, node, step);
    if (lg_json_is(type, "Digits")) {
        step->kind = SPLIT;
        step->option = lg_step_flag(node, "individual_digits", false) ? ISOLATED : CONTIGUOUS;
        return lg_pattern_open_regex(ctx, "\\p{N}", 5, &step->pattern);
    }
    if (lg_json_is(type, "ByteLevel")) {
        step->kind = BYTE_LEVEL;
        step->prefix = lg_step_flag(node, "add_prefix_space", true);
        step->split = lg_step_flag(node, "use_regex", true);
        return step->split ? lg_pattern_open_regex(ctx, gpt2, sizeof gpt2 - 1, &step->pattern)
                           : LG_OK;
    }
    return lg_step_unknown(ctx, "pre_tokenizer", type,
                           "Split, ByteLevel, Digits, Metaspace, Sequence");
}

lg_status lg_pretokenizer_open(lg_context *ctx, const lg_json *node, lg_steps *steps) {
    return lg_steps_open(ctx, "pre_tokenizer", node, "pretokenizers", read_step, steps);
}

/* Where a text is cut and what follows: the arguments that every cut hands on. */
typedef struct target {
    lg_context *ctx;
    lg_steps *steps;
    int64_t index;
    bool at_start;
    lg_bpe *bpe;
    lg_buffer *ids;
} target;

static lg_status hand_on(const target *t, const char *text, int64_t from, int64_t to) {
    if (from == to) return LG_OK;
    return lg_pretokenize(t->ctx, t->steps, t->index + 1, text + from, to - from,
                          t->at_start && from == 0, t->bpe, t->ids);
}

/* Joins neighbouring spans in place as `behavior` says; returns how many are left. Joined spans
 * are not matches. */
static int64_t join_spans(lg_span *spans, int64_t n, int behavior) {
    int64_t left = 0;
    bool joins;
    if (behavior == MERGED_WITH_NEXT) {
        int64_t to = n; /* from the end, filling from the end */
        bool next_is_match = false;
        for (int64_t i = n - 1; i >= 0; i--) {
            joins = spans[i].is_match && !next_is_match && to < n;
            next_is_match = spans[i].is_match;
            if (joins) {
                spans[to].from = spans[i].from;
            } else {
                spans[--to] = spans[i];
            }
        }
        memmove(spans, spans + to, (size_t)(n - to) * sizeof *spans);
        return n - to;
    }
    bool previous_is_match = false;
    for (int64_t i = 0; i < n; i++) {
        bool is_match = spans[i].is_match;
        joins = left > 0 && (behavior == CONTIGUOUS ? is_match == previous_is_match
                                                    : is_match && !previous_is_match);
        previous_is_match = is_match;
        if (joins) {
            spans[left - 1].to = spans[i].to;
        } else {
            spans[left++] = spans[i];
        }
    }
    return left;
}

static lg_status cut(const target *t, lg_step *step, int behavior, const char *text,
                     int64_t bytes) {
    LG_TRY(lg_pattern_find(t->ctx, &step->pattern, text, bytes, &step->spans));
    lg_span *spans = (lg_span *)step->spans.data;
    int64_t n = step->spans.bytes / (int64_t)sizeof *spans;
    for (int64_t i = 0; step->invert && i < n; i++) spans[i].is_match = !spans[i].is_match;
    if (behavior != ISOLATED && behavior != REMOVED) n = join_spans(spans, n, behavior);
    for (int64_t i = 0; i < n; i++)
        if (behavior != REMOVED || !spans[i].is_match)
            LG_TRY(hand_on(t, text, spans[i].from, spans[i].to));
    return LG_OK;
}

static lg_status fail_memory(lg_context *ctx, int64_t bytes) {
    return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for %lld bytes of text", (long long)bytes);
}

/* One word into the byte alphabet. */
static lg_status hand_on_bytes(const target *t, lg_step *step, const char *text, int64_t from,
                               int64_t to) {
    step->out.bytes = 0;
    for (int64_t i = from; i < to; i++) {
        int code = lg_byte_char((unsigned char)text[i]);
        char utf8[2] = {(char)(0xC0 | code >> 6), (char)(0x80 | (code & 63))};
        if (code < 0x80) {
            lg_buffer_append(&step->out, &text[i], 1);
        } else {
            lg_buffer_append(&step->out, utf8, 2);
        }
    }
    if (step->out.failed) {
        step->out.failed = false;
        return fail_memory(t->ctx, to - from);
    }
    target next = *t;
    next.at_start = t->at_start && from == 0;
    return hand_on(&next, step->out.data, 0, step->out.bytes);
}

static lg_status byte_level(const target *t, lg_step *step, const char *text, int64_t bytes) {
    if (step->prefix && text[0] != ' ') {
        step->joined.bytes = 0;
        lg_buffer_append(&step->joined, " ", 1);
        lg_buffer_append(&step->joined, text, bytes);
        if (step->joined.failed) {
            step->joined.failed = false;
            return fail_memory(t->ctx, bytes);
        }
        text = step->joined.data;
        bytes = step->joined.bytes;
    }
    if (!step->split) return hand_on_bytes(t, step, text, 0, bytes);
    LG_TRY(lg_pattern_find(t->ctx, &step->pattern, text, bytes, &step->spans));
    const lg_span *spans = (const lg_span *)step->spans.data;
    int64_t n = step->spans.bytes / (int64_t)sizeof *spans;
    for (int64_t i = 0; i < n; i++)
        LG_TRY(hand_on_bytes(t, step, text, spans[i].from, spans[i].to));
    return LG_OK;
}

/* Spaces become the mark, one stands in front, and a word begins at each mark. */
static lg_status metaspace(const target *t, lg_step *step, const char *text, int64_t bytes) {
    const lg_buffer *mark = &step->content;
    bool marked =
        text[0] == ' ' || (bytes >= mark->bytes && !memcmp(text, mark->data, (size_t)mark->bytes));
    bool prepend = !marked && (step->option == PREPEND_ALWAYS ||
                               (step->option == PREPEND_FIRST && t->at_start));
    step->out.bytes = 0;
    if (prepend) lg_buffer_append(&step->out, mark->data, mark->bytes);
    for (int64_t i = 0; i < bytes; i++) {
        if (text[i] == ' ') {
            lg_buffer_append(&step->out, mark->data, mark->bytes);
        } else {
            lg_buffer_append(&step->out, text + i, 1);
        }
    }
    if (step->out.failed) {
        step->out.failed = false;
        return fail_memory(t->ctx, bytes);
    }
    if (!step->split) return hand_on(t, step->out.data, 0, step->out.bytes);
    return cut(t, step, MERGED_WITH_NEXT, step->out.data, step->out.bytes);
}

lg_status lg_pretokenize(lg_context *ctx, lg_steps *steps, int64_t index, const char *text,
                         int64_t bytes, bool at_start, lg_bpe *bpe, lg_buffer *ids) {
    if (bytes == 0) return LG_OK;
    if (index == steps->n)
        return lg_bpe_encode(bpe, text, bytes, ids) ? LG_OK : fail_memory(ctx, bytes);
    lg_step *step = &steps->items[index];
    target t = {ctx, steps, index, at_start, bpe, ids};
    if (step->kind == SPLIT) return cut(&t, step, step->option, text, bytes);
    return step->kind == BYTE_LEVEL ? byte_level(&t, step, text, bytes)
                                    : metaspace(&t, step, text, bytes);
}
