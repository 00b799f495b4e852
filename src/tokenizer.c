/* The tokenizer: what Hugging Face's tokenizer.json describes, for BPE models.
 *
 * Read are: normalizer, pre_tokenizer and decoder (see normalizer.c, pretokenizer.c and
 * decoder.c for the kinds), model (BPE), post_processor (TemplateProcessing, ByteLevel,
 * Sequence) and added_tokens. A kind that is not known is an error that names it. Left out on
 * purpose: truncation and padding, which are the caller's.
 *
 * Text is first cut at added tokens: special ones and those that are not `normalized` in the
 * text as it is, the others in the normalised text. What lies between is normalised,
 * pre-tokenized and encoded on its own. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

typedef struct added_token {
    const char *text;
    int64_t at, bytes; /* of the text in the tokenizer's `text` */
    int32_t id;
    bool single_word, lstrip, rstrip, is_special;
} added_token;

/* Added tokens in the order of their bytes, so that the tokens with a common beginning are
 * neighbours. */
typedef struct added_set {
    added_token *items;
    int64_t n;
    bool first[256]; /* some token begins with the byte */
} added_set;

struct lg_tokenizer {
    lg_bpe bpe;
    lg_steps normalizer, pretokenizer, decoder;
    lg_buffer text; /* of the added tokens, as they are and normalised */
    const added_token *
        *by_id;              /* NULL where the token is the model's; as many as the model has ids */
    added_set all;           /* as they are written */
    added_set plain, normal; /* looked for before and after normalising */
    lg_buffer prefix, suffix; /* ids that the post-processor adds */
    lg_buffer ids;            /* of the text in work */
    lg_pieces pieces, other;  /* of the ids in work */
};

/* ---- opening ---- */

static lg_status fail_memory(lg_context *ctx) {
    return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for its tokens");
}

static int shown(const lg_json *node) { return node->bytes < 200 ? (int)node->bytes : 200; }

/* Checks added_tokens and finds their largest id, or -1. */
static lg_status check_added(lg_context *ctx, const lg_json *list, const lg_json *vocab,
                             int64_t *max_id) {
    *max_id = -1;
    if (!list || list->kind == LG_JSON_NULL) return LG_OK;
    if (list->kind != LG_JSON_ARRAY)
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: added_tokens is no list, wanted one");
    /* Ids may have gaps, but a table by id must stay in proportion to the file. */
    int64_t limit = 2 * ((int64_t)list->count + (vocab ? vocab->count : 0)) + (1 << 20), id;
    const lg_json *item = list + 1;
    for (uint32_t i = 0; i < list->count; i++, item += item->size) {
        const lg_json *content = lg_json_get(item, "content");
        if (!content || content->kind != LG_JSON_STRING ||
            !lg_json_integer(lg_json_get(item, "id"), &id) || id > limit)
            return lg_fail(ctx, LG_EFORMAT,
                           "tokenizer: added token is %.*s, wanted content and an id up to %lld",
                           shown(item), item->text, (long long)limit);
        if (id > *max_id) *max_id = id;
    }
    return LG_OK;
}

static int by_text(const void *a, const void *b) {
    const added_token *x = a, *y = b;
    int64_t n = x->bytes < y->bytes ? x->bytes : y->bytes;
    int order = memcmp(x->text, y->text, (size_t)n);
    return order ? order : x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Ends the reading of a set: `text` will not move any more. */
static void close_set(added_set *set, const char *text) {
    for (int64_t i = 0; i < set->n; i++) {
        set->items[i].text = text + set->items[i].at;
        set->first[(unsigned char)set->items[i].text[0]] = true;
    }
    if (set->n) qsort(set->items, (size_t)set->n, sizeof *set->items, by_text);
}

static lg_status read_added(lg_context *ctx, const lg_json *item, lg_tokenizer *t) {
    const lg_json *content = lg_json_get(item, "content");
    if (content->bytes == 0) return LG_OK;
    int64_t id;
    lg_json_integer(lg_json_get(item, "id"), &id);
    added_token token = {.at = t->text.bytes,
                         .bytes = content->bytes,
                         .id = (int32_t)id,
                         .single_word = lg_step_flag(item, "single_word", false),
                         .lstrip = lg_step_flag(item, "lstrip", false),
                         .rstrip = lg_step_flag(item, "rstrip", false),
                         .is_special = lg_step_flag(item, "special", false)};
    lg_buffer_append(&t->text, content->text, content->bytes);
    lg_buffer_append(&t->text, "", 1);
    t->all.items[t->all.n++] = token;
    if (token.is_special || !lg_step_flag(item, "normalized", true)) {
        t->plain.items[t->plain.n++] = token;
        return LG_OK;
    }
    /* As it looks in normalised text; a prepended mark belongs to a text's beginning, not to the
     * token. */
    const char *text = content->text;
    int64_t bytes = content->bytes;
    LG_TRY(lg_normalize(ctx, &t->normalizer, false, &text, &bytes));
    if (bytes == 0) return LG_OK;
    token.at = t->text.bytes;
    token.bytes = bytes;
    lg_buffer_append(&t->text, text, bytes);
    t->normal.items[t->normal.n++] = token;
    return LG_OK;
}

static lg_status read_added_list(lg_context *ctx, const lg_json *list, lg_tokenizer *t) {
    t->by_id = calloc((size_t)t->bpe.num_ids + 1, sizeof *t->by_id);
    if (!t->by_id) return fail_memory(ctx);
    if (!list || list->kind != LG_JSON_ARRAY || list->count == 0) return LG_OK;
    added_set *sets[] = {&t->all, &t->plain, &t->normal};
    for (int i = 0; i < 3; i++) {
        sets[i]->items = malloc(list->count * sizeof *sets[i]->items);
        if (!sets[i]->items) return fail_memory(ctx);
    }
    const lg_json *item = list + 1;
    for (uint32_t i = 0; i < list->count; i++, item += item->size) LG_TRY(read_added(ctx, item, t));
    if (t->text.failed) return fail_memory(ctx);
    for (int i = 0; i < 3; i++) close_set(sets[i], t->text.data);
    for (int64_t i = 0; i < t->all.n; i++) t->by_id[t->all.items[i].id] = &t->all.items[i];
    return LG_OK;
}

/* ---- the post-processor: ids before and behind the text ---- */

static lg_status add_template_ids(lg_context *ctx, const lg_json *node, const lg_json *special,
                                  lg_buffer *ids) {
    const lg_json *name = lg_json_get(special, "id"), *token = NULL;
    const lg_json *tokens = lg_json_get(node, "special_tokens");
    if (name && name->kind == LG_JSON_STRING && tokens && tokens->kind == LG_JSON_OBJECT) {
        const lg_json *member = tokens + 1;
        for (uint32_t i = 0; i < tokens->count && !token; i++, member += 1 + member[1].size)
            if (member->bytes == name->bytes && !memcmp(member->text, name->text, name->bytes))
                token = member + 1;
    }
    const lg_json *list = lg_json_get(token, "ids");
    if (!list || list->kind != LG_JSON_ARRAY)
        return lg_fail(ctx, LG_EFORMAT,
                       "tokenizer: post_processor has no ids for %.*s, wanted them", shown(special),
                       special->text);
    const lg_json *item = list + 1;
    for (uint32_t i = 0; i < list->count; i++, item += item->size) {
        int64_t id;
        if (!lg_json_integer(item, &id) || id > INT32_MAX)
            return lg_fail(ctx, LG_EFORMAT,
                           "tokenizer: an id of the post_processor is %.*s, wanted a token's id",
                           shown(item), item->text);
        lg_buffer_append(ids, &(int32_t){(int32_t)id}, sizeof(int32_t));
    }
    return LG_OK;
}

/* "single": special tokens around the sequence A. A later processor stands outside of an earlier
 * one. */
static lg_status read_template(lg_context *ctx, const lg_json *node, lg_tokenizer *t) {
    const lg_json *single = lg_json_get(node, "single");
    if (!single || single->kind != LG_JSON_ARRAY)
        return lg_fail(ctx, LG_EFORMAT,
                       "tokenizer: TemplateProcessing has no list single, wanted one");
    lg_buffer prefix = {0};
    bool behind = false;
    lg_status status = LG_OK;
    const lg_json *item = single + 1;
    for (uint32_t i = 0; i < single->count && status == LG_OK; i++, item += item->size) {
        const lg_json *special = lg_json_get(item, "SpecialToken"),
                      *sequence = lg_json_get(item, "Sequence");
        if (special) {
            status = add_template_ids(ctx, node, special, behind ? &t->suffix : &prefix);
        } else if (sequence && !behind) {
            behind = true;
        } else {
            status = lg_fail(
                ctx, LG_EFORMAT,
                "tokenizer: TemplateProcessing has %.*s, wanted special tokens around one text",
                shown(item), item->text);
        }
    }
    lg_buffer_append(&prefix, t->prefix.data, t->prefix.bytes);
    lg_buffer_free(&t->prefix);
    t->prefix = prefix;
    if (status == LG_OK && !behind)
        status =
            lg_fail(ctx, LG_EFORMAT, "tokenizer: TemplateProcessing has no Sequence, wanted one");
    return status == LG_OK && (t->prefix.failed || t->suffix.failed) ? fail_memory(ctx) : status;
}

static lg_status read_post_processor(lg_context *ctx, const lg_json *node, lg_tokenizer *t) {
    if (!node || node->kind == LG_JSON_NULL) return LG_OK;
    const lg_json *type = lg_json_get(node, "type");
    if (lg_json_is(type, "ByteLevel")) return LG_OK; /* trims offsets only */
    if (lg_json_is(type, "TemplateProcessing")) return read_template(ctx, node, t);
    const lg_json *list = lg_json_get(node, "processors");
    if (!lg_json_is(type, "Sequence") || !list || list->kind != LG_JSON_ARRAY)
        return lg_step_unknown(ctx, "post_processor", type ? type : node,
                               "TemplateProcessing, ByteLevel, Sequence");
    const lg_json *item = list + 1;
    for (uint32_t i = 0; i < list->count; i++, item += item->size)
        LG_TRY(read_post_processor(ctx, item, t));
    return LG_OK;
}

static lg_status read_description(lg_context *ctx, const lg_json *root, lg_tokenizer *t) {
    const lg_json *model = lg_json_get(root, "model"), *added = lg_json_get(root, "added_tokens");
    int64_t max_id;
    LG_TRY(check_added(ctx, added, lg_json_get(model, "vocab"), &max_id));
    LG_TRY(lg_bpe_open(ctx, model, max_id, &t->bpe));
    LG_TRY(lg_normalizer_open(ctx, lg_json_get(root, "normalizer"), &t->normalizer));
    LG_TRY(lg_pretokenizer_open(ctx, lg_json_get(root, "pre_tokenizer"), &t->pretokenizer));
    LG_TRY(lg_decoder_open(ctx, lg_json_get(root, "decoder"), &t->decoder));
    LG_TRY(read_added_list(ctx, added, t));
    return read_post_processor(ctx, lg_json_get(root, "post_processor"), t);
}

lg_status lg_tokenizer_open(lg_context *ctx, const char *json, int64_t bytes,
                            lg_tokenizer **tokenizer) {
    *tokenizer = NULL;
    if (!json) return lg_fail(ctx, LG_EINVAL, "tokenizer: description is NULL, wanted a text");
    lg_tokenizer *t = calloc(1, sizeof *t);
    if (!t) return fail_memory(ctx);
    lg_json_document document;
    lg_status status = lg_json_parse(ctx, "tokenizer", json, bytes, &document);
    if (status == LG_OK) {
        status = read_description(ctx, document.root, t);
        lg_json_free(&document);
    }
    if (status != LG_OK) {
        lg_tokenizer_close(t);
        return status;
    }
    *tokenizer = t;
    return LG_OK;
}

void lg_tokenizer_close(lg_tokenizer *t) {
    if (!t) return;
    lg_bpe_close(&t->bpe);
    lg_steps_close(&t->normalizer);
    lg_steps_close(&t->pretokenizer);
    lg_steps_close(&t->decoder);
    lg_buffer *buffers[] = {&t->text,        &t->prefix,       &t->suffix,     &t->ids,
                            &t->pieces.text, &t->pieces.items, &t->other.text, &t->other.items};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) lg_buffer_free(buffers[i]);
    free(t->by_id);
    free(t->all.items);
    free(t->plain.items);
    free(t->normal.items);
    free(t);
}

/* ---- encoding ---- */

static bool is_space(int32_t code) {
    if (code >= 9 && code <= 13) return true;
    utf8proc_category_t c = utf8proc_category(code);
    return code == 0x85 || c == UTF8PROC_CATEGORY_ZS || c == UTF8PROC_CATEGORY_ZL ||
           c == UTF8PROC_CATEGORY_ZP;
}

static bool is_word(int32_t code) {
    utf8proc_category_t c = utf8proc_category(code);
    return (c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_NL) || c == UTF8PROC_CATEGORY_PC;
}

/* The character that begins at `at`; its bytes, or 0 at the end and where there is none. */
static int char_at(const char *text, int64_t bytes, int64_t at, int32_t *code) {
    int n = lg_utf8_bytes(text + at, bytes - at);
    if (n) utf8proc_iterate((const utf8proc_uint8_t *)text + at, n, code);
    return n;
}

/* The character that ends at `at`. */
static int char_before(const char *text, int64_t at, int32_t *code) {
    for (int n = 1; n <= 4 && n <= at; n++)
        if (lg_utf8_bytes(text + at - n, n) == n) return char_at(text, at, at - n, code);
    return 0;
}

/* The longest added token that the text has at `at`. Each byte narrows the neighbours that still
 * agree. */
static const added_token *token_at(const added_set *set, const char *text, int64_t bytes,
                                   int64_t at) {
    const added_token *found = NULL;
    int64_t low = 0, high = set->n;
    for (int64_t k = 0; low < high; k++) {
        /* The shortest of the neighbours comes first; equal texts (two ids) stand together. */
        while (low < high && set->items[low].bytes == k) found = &set->items[low++];
        if (at + k >= bytes) break;
        unsigned char c = (unsigned char)text[at + k];
        int64_t from = low, to = high;
        while (from < to) { /* the first whose byte is not less */
            int64_t middle = (from + to) / 2;
            if ((unsigned char)set->items[middle].text[k] < c) {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        low = from;
        to = high;
        while (from < to) { /* the first whose byte is more */
            int64_t middle = (from + to) / 2;
            if ((unsigned char)set->items[middle].text[k] <= c) {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        high = from;
    }
    return found;
}

static bool stands_alone(const char *text, int64_t bytes, int64_t from, int64_t to) {
    int32_t code;
    if (char_before(text, from, &code) && is_word(code)) return false;
    return !(char_at(text, bytes, to, &code) && is_word(code));
}

/* Finds the next added token from *from on, whose span (with the spaces it eats) becomes [*from,
 * *to). */
static const added_token *next_token(const added_set *set, const char *text, int64_t bytes,
                                     int64_t *from, int64_t *to) {
    int64_t start = *from;
    for (int64_t at = start; at < bytes; at++) {
        if (!set->first[(unsigned char)text[at]]) continue;
        const added_token *token = token_at(set, text, bytes, at);
        if (!token) continue;
        int64_t end = at + token->bytes;
        if (token->single_word && !stands_alone(text, bytes, at, end)) {
            at = end - 1;
            continue;
        }
        int32_t code;
        int n;
        while (token->lstrip && at > start && (n = char_before(text, at, &code)) && is_space(code))
            at -= n;
        while (token->rstrip && (n = char_at(text, bytes, end, &code)) && is_space(code)) end += n;
        *from = at > start ? at : start;
        *to = end;
        return token;
    }
    return NULL;
}

static lg_status encode_pieces(lg_context *ctx, lg_tokenizer *t, bool normalised, const char *text,
                               int64_t bytes, bool at_start);

/* Text without added tokens: still to be normalised, or ready for the pre-tokenizer. */
static lg_status encode_text(lg_context *ctx, lg_tokenizer *t, bool normalised, const char *text,
                             int64_t bytes, bool at_start) {
    if (bytes == 0) return LG_OK;
    if (normalised)
        return lg_pretokenize(ctx, &t->pretokenizer, 0, text, bytes, at_start, &t->bpe, &t->ids);
    LG_TRY(lg_normalize(ctx, &t->normalizer, true, &text, &bytes));
    return encode_pieces(ctx, t, true, text, bytes, at_start);
}

static lg_status encode_pieces(lg_context *ctx, lg_tokenizer *t, bool normalised, const char *text,
                               int64_t bytes, bool at_start) {
    const added_set *set = normalised ? &t->normal : &t->plain;
    int64_t last = 0, from = 0, to = 0;
    const added_token *token;
    while (set->n && (token = next_token(set, text, bytes, &from, &to))) {
        LG_TRY(encode_text(ctx, t, normalised, text + last, from - last, at_start && last == 0));
        lg_buffer_append(&t->ids, &token->id, sizeof token->id);
        last = from = to;
    }
    return encode_text(ctx, t, normalised, text + last, bytes - last, at_start && last == 0);
}

lg_status lg_tokenizer_encode(lg_context *ctx, lg_tokenizer *t, const char *text, int64_t bytes,
                              bool special, int32_t *ids, int64_t capacity, int64_t *n) {
    *n = 0;
    if (bytes < 0 || bytes > 1 << 30)
        return lg_fail(ctx, LG_EINVAL, "tokenizer: text is %lld bytes, wanted at most 1 GiB",
                       (long long)bytes);
    t->ids.bytes = 0;
    if (special) lg_buffer_append(&t->ids, t->prefix.data, t->prefix.bytes);
    LG_TRY(encode_pieces(ctx, t, false, text, bytes, true));
    if (special) lg_buffer_append(&t->ids, t->suffix.data, t->suffix.bytes);
    if (t->ids.failed) {
        t->ids.failed = false;
        return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory to encode %lld bytes",
                       (long long)bytes);
    }
    *n = t->ids.bytes / (int64_t)sizeof *ids;
    int64_t room = *n < capacity ? *n : capacity;
    if (room > 0) memcpy(ids, t->ids.data, (size_t)room * sizeof *ids);
    return LG_OK;
}

/* ---- decoding ---- */

const char *lg_tokenizer_token(const lg_tokenizer *t, int32_t id, int64_t *bytes) {
    if (id < 0 || id >= t->bpe.num_ids) return NULL;
    const added_token *added = t->by_id[id];
    if (!added && t->bpe.tokens[id].at < 0) return NULL;
    if (bytes) *bytes = added ? added->bytes : t->bpe.tokens[id].bytes;
    return added ? added->text : t->bpe.text.data + t->bpe.tokens[id].at;
}

lg_status lg_tokenizer_decode(lg_context *ctx, lg_tokenizer *t, const int32_t *ids, int64_t n,
                              bool skip_special, char *text, int64_t capacity, int64_t *bytes) {
    *bytes = 0;
    t->pieces.text.bytes = t->pieces.items.bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] < 0)
            return lg_fail(ctx, LG_EINVAL, "tokenizer: id %lld is %d, wanted 0 or more",
                           (long long)i, (int)ids[i]);
        int64_t token_bytes;
        const char *token = lg_tokenizer_token(t, ids[i], &token_bytes);
        if (!token) continue;
        const added_token *added = t->by_id[ids[i]];
        if (skip_special && added && added->is_special) continue;
        if (t->decoder.n == 0 && t->pieces.items.bytes > 0)
            lg_pieces_add(&t->pieces, " ", 1, false);
        lg_pieces_add(&t->pieces, token, token_bytes, added != NULL);
    }
    if (t->pieces.text.failed || t->pieces.items.failed) {
        t->pieces.text.failed = t->pieces.items.failed = false;
        return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory to decode %lld ids", (long long)n);
    }
    LG_TRY(lg_decode(ctx, &t->decoder, &t->pieces, &t->other));
    *bytes = t->pieces.text.bytes;
    int64_t room = *bytes < capacity ? *bytes : capacity;
    if (room > 0) memcpy(text, t->pieces.text.data, (size_t)room);
    return LG_OK;
}

int64_t lg_tokenizer_vocab(const lg_tokenizer *t) { return t->bpe.num_ids; }

int32_t lg_tokenizer_id(const lg_tokenizer *t, const char *token) {
    if (!token) return -1;
    int64_t bytes = (int64_t)strlen(token);
    const added_token *added = token_at(&t->all, token, bytes, 0);
    return added && added->bytes == bytes ? added->id : lg_bpe_find(&t->bpe, token, bytes);
}
