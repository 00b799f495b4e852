/* The parts of a tokenizer around its BPE: patterns, and the chains of steps that a
 * tokenizer.json lists (normalizer, pre_tokenizer, decoder). Internal to the library. */
#ifndef LIGER_TOKENIZER_H
#define LIGER_TOKENIZER_H

#include "bpe.h"

/* ---- pattern.c ---- */

typedef struct lg_pattern {
    void *regex; /* compiled by PCRE2, or NULL: `literal` */
    void *matches, *limits, *stack;
    lg_buffer literal;
    lg_buffer shadow;
} lg_pattern;

typedef struct lg_span {
    int64_t from, to;
    bool is_match;
} lg_span;

/* {"String": text} or {"Regex": text}. */
lg_status lg_pattern_open(lg_context *ctx, const lg_json *node, lg_pattern *pattern);
lg_status lg_pattern_open_regex(lg_context *ctx, const char *regex, int64_t bytes,
                                lg_pattern *pattern);
lg_status lg_pattern_open_literal(lg_context *ctx, const char *text, int64_t bytes,
                                  lg_pattern *pattern);
void lg_pattern_close(lg_pattern *pattern);
/* Fills `spans` (lg_span) with the matches and what lies between them: together they cover the
 * text. None is empty. */
lg_status lg_pattern_find(lg_context *ctx, lg_pattern *pattern, const char *text, int64_t bytes,
                          lg_buffer *spans);

/* ---- step.c ---- */

typedef struct lg_step {
    int kind; /* of the chain's own enum */
    lg_pattern pattern;
    lg_buffer content; /* Replace, Prepend, Strip, Metaspace: the text */
    int option;        /* Split: behavior; Unicode form: utf8proc's; Metaspace: when to prepend */
    bool invert, prefix, split;
    int64_t start, stop; /* Strip: characters at either end */
    lg_buffer spans, out, joined;
} lg_step;

typedef struct lg_steps {
    lg_step *items;
    int64_t n;
} lg_steps;

/* Reads one step, `type` being its kind; false: the kind is not known. */
typedef lg_status (*lg_step_read)(lg_context *ctx, const lg_json *node, const lg_json *type,
                                  lg_step *step);

/* A chain: null, one step, or a Sequence under `list_key`, also nested. `what` names the chain
 * in errors. */
lg_status lg_steps_open(lg_context *ctx, const char *what, const lg_json *node,
                        const char *list_key, lg_step_read read, lg_steps *steps);
void lg_steps_close(lg_steps *steps);
/* What a step reader says of a kind that it does not have. */
lg_status lg_step_unknown(lg_context *ctx, const char *what, const lg_json *type,
                          const char *wanted);
/* A string member of a step. */
lg_status lg_step_text(lg_context *ctx, const lg_json *node, const char *key, lg_buffer *text);
bool lg_step_flag(const lg_json *node, const char *key, bool otherwise);

/* ---- normalizer.c, pretokenizer.c, decoder.c ---- */

lg_status lg_normalizer_open(lg_context *ctx, const lg_json *node, lg_steps *steps);
/* *text and *bytes become the normalised text, which lives until the next call. `prepend` false
 * leaves Prepend out. */
lg_status lg_normalize(lg_context *ctx, lg_steps *steps, bool prepend, const char **text,
                       int64_t *bytes);

lg_status lg_pretokenizer_open(lg_context *ctx, const lg_json *node, lg_steps *steps);
/* Cuts the text into words from step `index` on, and appends each word's ids. `at_start`: the
 * text begins the input. */
lg_status lg_pretokenize(lg_context *ctx, lg_steps *steps, int64_t index, const char *text,
                         int64_t bytes, bool at_start, lg_bpe *bpe, lg_buffer *ids);

/* Tokens on their way to text: pieces of `text`. */
typedef struct lg_piece {
    int64_t at, bytes;
    bool is_added; /* the text of an added token, which is never in the byte alphabet */
} lg_piece;

typedef struct lg_pieces {
    lg_buffer text, items; /* items: lg_piece */
} lg_pieces;

void lg_pieces_add(lg_pieces *pieces, const char *text, int64_t bytes, bool is_added);
lg_status lg_decoder_open(lg_context *ctx, const lg_json *node, lg_steps *steps);
/* Runs the chain; the result is in `pieces`, `other` is working room. */
lg_status lg_decode(lg_context *ctx, lg_steps *steps, lg_pieces *pieces, lg_pieces *other);

/* ---- the byte alphabet of GPT-2: a printable character for each byte ---- */

static inline int lg_byte_char(unsigned char byte) {
    if (byte < 0x21) return 0x100 + byte;
    if (byte >= 0x7F && byte <= 0xA0) return 0x121 + (byte - 0x7F);
    return byte == 0xAD ? 0x143 : byte;
}

/* The byte of a character, or -1. */
static inline int lg_char_byte(int code) {
    if (code >= 0x100 && code <= 0x120) return code - 0x100;
    if (code >= 0x121 && code <= 0x142) return code - 0x121 + 0x7F;
    if (code == 0x143) return 0xAD;
    bool printable = (code >= 0x21 && code <= 0x7E) || (code >= 0xA1 && code <= 0xFF);
    return printable && code != 0xAD ? code : -1;
}

#endif
