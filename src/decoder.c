/* Decoders: ByteLevel, ByteFallback, Replace, Fuse, Strip, Metaspace. Each step reads all pieces
 * and writes new ones. */
#include "tokenizer.h"

#include <string.h>

enum { BYTE_LEVEL, BYTE_FALLBACK, REPLACE, FUSE, STRIP, METASPACE };

static const char replacement[] = "\xEF\xBF\xBD"; /* U+FFFD */

static int64_t read_count(const lg_json *node, const char *key) {
    int64_t n;
    return lg_json_integer(lg_json_get(node, key), &n) ? n : 0;
}

static lg_status read_step(lg_context *ctx, const lg_json *node, const lg_json *type,
                           lg_step *step) {
    if (lg_json_is(type, "ByteLevel")) {
        step->kind = BYTE_LEVEL;
    } else if (lg_json_is(type, "ByteFallback")) {
        step->kind = BYTE_FALLBACK;
    } else if (lg_json_is(type, "Fuse")) {
        step->kind = FUSE;
    } else if (lg_json_is(type, "Replace")) {
        step->kind = REPLACE;
        LG_TRY(lg_step_text(ctx, node, "content", &step->content));
        return lg_pattern_open(ctx, lg_json_get(node, "pattern"), &step->pattern);
    } else if (lg_json_is(type, "Strip")) {
        step->kind = STRIP;
        step->start = read_count(node, "start");
        step->stop = read_count(node, "stop");
        return lg_step_text(ctx, node, "content", &step->content);
    } else if (lg_json_is(type, "Metaspace")) {
        step->kind = METASPACE;
        bool never = lg_json_is(lg_json_get(node, "prepend_scheme"), "never");
        step->prefix = lg_step_flag(node, "add_prefix_space", true) && !never;
        LG_TRY(lg_step_text(ctx, node, "replacement", &step->content));
        return lg_pattern_open_literal(ctx, step->content.data, step->content.bytes,
                                       &step->pattern);
    } else {
        return lg_step_unknown(
            ctx, "decoder", type,
            "ByteLevel, ByteFallback, Fuse, Replace, Strip, Metaspace, Sequence");
    }
    return LG_OK;
}

lg_status lg_decoder_open(lg_context *ctx, const lg_json *node, lg_steps *steps) {
    return lg_steps_open(ctx, "decoder", node, "decoders", read_step, steps);
}

void lg_pieces_add(lg_pieces *pieces, const char *text, int64_t bytes, bool is_added) {
    lg_piece piece = {pieces->text.bytes, bytes, is_added};
    lg_buffer_append(&pieces->text, text, bytes);
    lg_buffer_append(&pieces->items, &piece, sizeof piece);
}

/* Bytes at `s` that begin a character but do not finish one: what one U+FFFD stands for. At
 * least 1. */
static int64_t broken_bytes(const char *text, int64_t bytes) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0xC2 || s[0] > 0xF4 || bytes < 2) return 1;
    unsigned char low = s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : 0x80;
    unsigned char high = s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : 0xBF;
    if (s[1] < low || s[1] > high) return 1;
    bool third = s[0] >= 0xF0 && bytes > 2 && (s[2] & 0xC0) == 0x80;
    return third ? 3 : 2;
}

static void append_valid(lg_buffer *out, const char *text, int64_t bytes) {
    for (int64_t from = 0, to = 0; from < bytes; from = to) {
        int n;
        while (to < bytes && (n = lg_utf8_bytes(text + to, bytes - to)) > 0) to += n;
        lg_buffer_append(out, text + from, to - from);
        if (to == bytes) break;
        to += broken_bytes(text + to, bytes - to);
        lg_buffer_append(out, replacement, 3);
    }
}

/* Out of the byte alphabet into bytes; false when a character is not in it. */
static bool append_bytes(lg_buffer *out, const char *text, int64_t bytes) {
    int64_t before = out->bytes;
    for (int64_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)text[i];
        bool two = c >= 0x80 && c < 0xE0 && i + 1 < bytes;
        int byte = lg_char_byte(two ? (c & 31) << 6 | (text[i + 1] & 63) : c < 0x80 ? c : -1);
        if (byte < 0) {
            out->bytes = before;
            return false;
        }
        lg_buffer_append(out, (char[]){(char)byte}, 1);
        i += two ? 2 : 1;
    }
    return true;
}

static void byte_level(lg_step *step, const lg_pieces *from, lg_pieces *to) {
    const lg_piece *pieces = (const lg_piece *)from->items.data;
    int64_t n = from->items.bytes / (int64_t)sizeof *pieces;
    lg_buffer *bytes = &step->out;
    bytes->bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *text = from->text.data + pieces[i].at;
        if (pieces[i].is_added || !append_bytes(bytes, text, pieces[i].bytes))
            lg_buffer_append(bytes, text, pieces[i].bytes);
    }
    append_valid(&to->text, bytes->data, bytes->bytes);
    lg_piece all = {0, to->text.bytes, false};
    lg_buffer_append(&to->items, &all, sizeof all);
}

static int hex_digit(char c) {
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte that a text <0xEA> stands for, or -1. */
static int byte_of_token(const char *text, int64_t bytes) {
    if (bytes != 6 || memcmp(text, "<0x", 3) || text[5] != '>') return -1;
    int high = hex_digit(text[3]), low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : high << 4 | low;
}

/* A run of byte tokens is text if it is valid as a whole, else one U+FFFD a byte. */
static void end_run(lg_buffer *run, lg_pieces *to) {
    int64_t at = 0;
    int n;
    while (at < run->bytes && (n = lg_utf8_bytes(run->data + at, run->bytes - at)) > 0) at += n;
    if (run->bytes > 0 && at == run->bytes) {
        lg_pieces_add(to, run->data, run->bytes, false);
    } else {
        for (int64_t i = 0; i < run->bytes; i++) lg_pieces_add(to, replacement, 3, false);
    }
    run->bytes = 0;
}

static void byte_fallback(lg_step *step, const lg_pieces *from, lg_pieces *to) {
    const lg_piece *pieces = (const lg_piece *)from->items.data;
    int64_t n = from->items.bytes / (int64_t)sizeof *pieces;
    step->out.bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *text = from->text.data + pieces[i].at;
        int byte = byte_of_token(text, pieces[i].bytes);
        if (byte >= 0) {
            lg_buffer_append(&step->out, (char[]){(char)byte}, 1);
        } else {
            end_run(&step->out, to);
            lg_pieces_add(to, text, pieces[i].bytes, pieces[i].is_added);
        }
    }
    end_run(&step->out, to);
}

static lg_status replace(lg_context *ctx, lg_step *step, const char *content, int64_t content_bytes,
                         const char *text, int64_t bytes, lg_pieces *to) {
    LG_TRY(lg_pattern_find(ctx, &step->pattern, text, bytes, &step->spans));
    const lg_span *spans = (const lg_span *)step->spans.data;
    int64_t n = step->spans.bytes / (int64_t)sizeof *spans;
    for (int64_t i = 0; i < n; i++) {
        if (spans[i].is_match) {
            lg_buffer_append(&to->text, content, content_bytes);
        } else {
            lg_buffer_append(&to->text, text + spans[i].from, spans[i].to - spans[i].from);
        }
    }
    return LG_OK;
}

static void strip(const lg_step *step, const char *text, int64_t bytes, lg_buffer *out) {
    const lg_buffer *c = &step->content;
    for (int64_t i = 0; i < step->start && c->bytes > 0 && bytes >= c->bytes; i++) {
        if (memcmp(text, c->data, (size_t)c->bytes)) break;
        text += c->bytes;
        bytes -= c->bytes;
    }
    for (int64_t i = 0; i < step->stop && c->bytes > 0 && bytes >= c->bytes; i++) {
        if (memcmp(text + bytes - c->bytes, c->data, (size_t)c->bytes)) break;
        bytes -= c->bytes;
    }
    lg_buffer_append(out, text, bytes);
}

/* Steps that keep the pieces apart. */
static lg_status each_piece(lg_context *ctx, lg_step *step, const lg_pieces *from, lg_pieces *to) {
    const lg_piece *pieces = (const lg_piece *)from->items.data;
    int64_t n = from->items.bytes / (int64_t)sizeof *pieces;
    for (int64_t i = 0; i < n; i++) {
        const char *text = from->text.data + pieces[i].at;
        lg_piece piece = {to->text.bytes, 0, pieces[i].is_added};
        if (step->kind == STRIP) {
            strip(step, text, pieces[i].bytes, &to->text);
        } else if (step->kind == REPLACE) {
            LG_TRY(replace(ctx, step, step->content.data, step->content.bytes, text,
                           pieces[i].bytes, to));
        } else { /* the first piece's marks are those that encoding put there */
            LG_TRY(
                replace(ctx, step, " ", step->prefix && i == 0 ? 0 : 1, text, pieces[i].bytes, to));
        }
        piece.bytes = to->text.bytes - piece.at;
        lg_buffer_append(&to->items, &piece, sizeof piece);
    }
    return LG_OK;
}

static void fuse(const lg_pieces *from, lg_pieces *to) {
    lg_pieces_add(to, from->text.data, from->text.bytes, false);
}

lg_status lg_decode(lg_context *ctx, lg_steps *steps, lg_pieces *pieces, lg_pieces *other) {
    for (int64_t i = 0; i < steps->n; i++) {
        lg_step *step = &steps->items[i];
        other->text.bytes = other->items.bytes = 0;
        switch (step->kind) {
        case BYTE_LEVEL: byte_level(step, pieces, other); break;
        case BYTE_FALLBACK: byte_fallback(step, pieces, other); break;
        case FUSE: fuse(pieces, other); break;
        default: LG_TRY(each_piece(ctx, step, pieces, other));
        }
        bool failed = other->text.failed || other->items.failed || step->out.failed;
        if (failed) {
            other->text.failed = other->items.failed = step->out.failed = false;
            return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory to decode %lld bytes",
                           (long long)pieces->text.bytes);
        }
        lg_pieces swapped = *pieces;
        *pieces = *other;
        *other = swapped;
    }
    return LG_OK;
}
