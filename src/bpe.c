/* Byte pair encoding as Hugging Face's `tokenizers` does it: a word's characters become symbols,
 * and the pair of the lowest rank is merged until none is left. Pairs wait in a heap and are
 * checked when they leave it, so that a text of n characters costs n log n also where it is one
 * single word. */
#include "bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct lg_bpe_merge {
    int32_t left, right; /* left -1: a free slot */
    int32_t rank, result;
} merge;

enum { CACHE_SLOTS = 1 << 14, CACHE_BYTES = 23, CACHE_IDS = 8 };

typedef struct lg_bpe_word {
    int32_t ids[CACHE_IDS];
    char text[CACHE_BYTES];
    uint8_t bytes; /* 0: a free slot */
    uint8_t n;
} cached_word;

typedef struct symbol {
    int32_t id; /* -1 once it is part of another */
    int32_t previous, next;
} symbol;

typedef struct candidate {
    int32_t rank, position, result;
} candidate;

static const char *text_of(const lg_bpe *bpe, int32_t id) {
    return bpe->text.data + bpe->tokens[id].at;
}

int32_t lg_bpe_find(const lg_bpe *bpe, const char *text, int64_t bytes) {
    uint64_t slot = lg_hash_bytes(text, bytes) & bpe->slot_mask;
    for (; bpe->slots[slot] >= 0; slot = (slot + 1) & bpe->slot_mask) {
        int32_t id = bpe->slots[slot];
        if (bpe->tokens[id].bytes == bytes && !memcmp(text_of(bpe, id), text, (size_t)bytes))
            return id;
    }
    return -1;
}

/* ---- opening ---- */

static lg_status fail_memory(lg_context *ctx) {
    return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for the vocabulary");
}

static uint64_t table_size(int64_t n) {
    uint64_t size = 16;
    while (size < 2 * (uint64_t)n) size *= 2;
    return size;
}

static lg_status read_vocab(lg_context *ctx, const lg_json *vocab, int64_t max_id, lg_bpe *bpe) {
    if (!vocab || vocab->kind != LG_JSON_OBJECT)
        return lg_fail(ctx, LG_EFORMAT,
                       "tokenizer: model.vocab is missing, wanted an object of ids");
    int64_t bytes = 0, id;
    const lg_json *key = vocab + 1;
    for (uint32_t i = 0; i < vocab->count; i++, key += 1 + key[1].size) {
        /* Ids may have gaps, but a table by id must stay in proportion to the file. */
        if (!lg_json_integer(key + 1, &id) || id > 2 * (int64_t)vocab->count + (1 << 20))
            return lg_fail(ctx, LG_EFORMAT,
                           "tokenizer: the id of %.*s is %.*s, wanted a small integer",
                           (int)key->bytes, key->text, (int)(key[1].bytes < 40 ? key[1].bytes : 40),
                           key[1].text);
        if (id > max_id) max_id = id;
        bytes += key->bytes + 1;
    }
    uint64_t size = table_size(vocab->count);
    bpe->num_ids = max_id + 1;
    bpe->slot_mask = size - 1;
    bpe->tokens = malloc((size_t)(bpe->num_ids ? bpe->num_ids : 1) * sizeof *bpe->tokens);
    bpe->slots = malloc(size * sizeof *bpe->slots);
    bpe->text.data = malloc((size_t)bytes + 1);
    if (!bpe->tokens || !bpe->slots || !bpe->text.data) return fail_memory(ctx);
    bpe->text.capacity = bytes + 1;
    memset(bpe->slots, 0xFF, size * sizeof *bpe->slots);
    for (int64_t i = 0; i < bpe->num_ids; i++) bpe->tokens[i].at = -1;
    key = vocab + 1;
    for (uint32_t i = 0; i < vocab->count; i++, key += 1 + key[1].size) {
        lg_json_integer(key + 1, &id);
        if (bpe->tokens[id].at >= 0)
            return lg_fail(ctx, LG_EFORMAT,
                           "tokenizer: id %lld is both %s and %.*s, wanted one token",
                           (long long)id, text_of(bpe, (int32_t)id), (int)key->bytes, key->text);
        bpe->tokens[id] = (lg_token){bpe->text.bytes, key->bytes};
        lg_buffer_append(&bpe->text, key->text, key->bytes);
        lg_buffer_append(&bpe->text, "", 1);
        uint64_t slot = lg_hash_bytes(key->text, key->bytes) & bpe->slot_mask;
        while (bpe->slots[slot] >= 0) slot = (slot + 1) & bpe->slot_mask;
        bpe->slots[slot] = (int32_t)id;
    }
    return LG_OK;
}

static uint64_t pair_hash(int32_t left, int32_t right) {
    uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    return key * 0x9E3779B97F4A7C15u >> 29;
}

/* The slot of a pair: its own, or the free one where it goes. */
static merge *find_merge(const lg_bpe *bpe, int32_t left, int32_t right) {
    uint64_t slot = pair_hash(left, right) & bpe->merge_mask;
    while (bpe->merges[slot].left >= 0 &&
           (bpe->merges[slot].left != left || bpe->merges[slot].right != right))
        slot = (slot + 1) & bpe->merge_mask;
    return &bpe->merges[slot];
}

/* The two texts of a merge: a pair, or one string with a single space between them. */
static bool split_merge(const lg_json *node, lg_json *left, lg_json *right) {
    if (node->kind == LG_JSON_ARRAY && node->count == 2 && node[1].kind == LG_JSON_STRING &&
        node[2].kind == LG_JSON_STRING) {
        *left = node[1];
        *right = node[2];
        return true;
    }
    const char *space = node->kind == LG_JSON_STRING ? memchr(node->text, ' ', node->bytes) : NULL;
    if (!space) return false;
    left->text = node->text;
    left->bytes = (uint32_t)(space - node->text);
    right->text = space + 1;
    right->bytes = node->bytes - left->bytes - 1;
    return !memchr(right->text, ' ', right->bytes);
}

static lg_status read_merge(lg_context *ctx, const lg_json *node, int32_t rank, lg_buffer *joined,
                            lg_bpe *bpe) {
    lg_json left = {0}, right = {0};
    if (!split_merge(node, &left, &right))
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: merge %d is %.*s, wanted two texts", rank,
                       (int)(node->bytes < 200 ? node->bytes : 200), node->text);
    int32_t a = lg_bpe_find(bpe, left.text, left.bytes),
            b = lg_bpe_find(bpe, right.text, right.bytes);
    joined->bytes = 0;
    lg_buffer_append(joined, left.text, left.bytes);
    lg_buffer_append(joined, right.text, right.bytes);
    if (joined->failed) return fail_memory(ctx);
    int32_t result = lg_bpe_find(bpe, joined->data ? joined->data : "", joined->bytes);
    if (a < 0 || b < 0 || result < 0) {
        const char *part = a < 0 ? left.text : b < 0 ? right.text : joined->data;
        int64_t bytes = a < 0 ? left.bytes : b < 0 ? right.bytes : joined->bytes;
        return lg_fail(ctx, LG_EFORMAT,
                       "tokenizer: merge %d: %.*s is not in the vocabulary, wanted it there", rank,
                       (int)(bytes < 200 ? bytes : 200), part ? part : "");
    }
    *find_merge(bpe, a, b) = (merge){a, b, rank, result};
    return LG_OK;
}

static lg_status read_merges(lg_context *ctx, const lg_json *merges, lg_bpe *bpe) {
    if (!merges || merges->kind != LG_JSON_ARRAY)
        return lg_fail(ctx, LG_EFORMAT,
                       "tokenizer: model.merges is missing, wanted a list of pairs");
    uint64_t size = table_size(merges->count);
    bpe->merge_mask = size - 1;
    bpe->merges = malloc(size * sizeof *bpe->merges);
    if (!bpe->merges) return fail_memory(ctx);
    for (uint64_t i = 0; i < size; i++) bpe->merges[i].left = -1;
    lg_buffer joined = {0};
    lg_status status = LG_OK;
    const lg_json *node = merges + 1;
    for (uint32_t i = 0; i < merges->count && status == LG_OK; i++, node += node->size)
        status = read_merge(ctx, node, (int32_t)i, &joined, bpe);
    lg_buffer_free(&joined);
    return status;
}

static bool is_set(const lg_json *model, const char *key) {
    const lg_json *flag = lg_json_get(model, key);
    return flag && flag->kind == LG_JSON_TRUE;
}

/* Fields that change the result and are not done here must be null, empty or zero. */
static lg_status check_fields(lg_context *ctx, const lg_json *model) {
    const lg_json *type = lg_json_get(model, "type");
    if (type && !lg_json_is(type, "BPE"))
        return lg_fail(ctx, LG_EUNSUPPORTED, "tokenizer: model is %.*s, wanted BPE",
                       (int)type->bytes, type->text);
    static const char *const fields[] = {"dropout", "continuing_subword_prefix",
                                         "end_of_word_suffix"};
    for (int i = 0; i < 3; i++) {
        const lg_json *field = lg_json_get(model, fields[i]);
        bool empty = !field || field->kind == LG_JSON_NULL || lg_json_is(field, "") ||
                     (field->kind == LG_JSON_NUMBER && strtod(field->text, NULL) == 0);
        if (!empty)
            return lg_fail(ctx, LG_EUNSUPPORTED, "tokenizer: model.%s is %.*s, wanted none",
                           fields[i], (int)(field->bytes < 40 ? field->bytes : 40), field->text);
    }
    return LG_OK;
}

lg_status lg_bpe_open(lg_context *ctx, const lg_json *model, int64_t max_id, lg_bpe *bpe) {
    *bpe = (lg_bpe){.unk = -1};
    if (!model || model->kind != LG_JSON_OBJECT)
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: model is missing, wanted an object");
    LG_TRY(check_fields(ctx, model));
    LG_TRY(read_vocab(ctx, lg_json_get(model, "vocab"), max_id, bpe));
    LG_TRY(read_merges(ctx, lg_json_get(model, "merges"), bpe));
    bpe->byte_fallback = is_set(model, "byte_fallback");
    bpe->fuse_unk = is_set(model, "fuse_unk");
    bpe->ignore_merges = is_set(model, "ignore_merges");
    const lg_json *unk = lg_json_get(model, "unk_token");
    if (unk && unk->kind == LG_JSON_STRING) {
        bpe->unk = lg_bpe_find(bpe, unk->text, unk->bytes);
        if (bpe->unk < 0)
            return lg_fail(ctx, LG_EFORMAT,
                           "tokenizer: model.unk_token is %.*s, wanted a token of the vocabulary",
                           (int)unk->bytes, unk->text);
    }
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", i);
        bpe->byte_ids[i] = lg_bpe_find(bpe, name, 6);
        if (i < 128) bpe->char_ids[i] = lg_bpe_find(bpe, (char[]){(char)i}, 1);
    }
    bpe->cache = calloc(CACHE_SLOTS, sizeof *bpe->cache);
    return bpe->cache ? LG_OK : fail_memory(ctx);
}

void lg_bpe_close(lg_bpe *bpe) {
    lg_buffer_free(&bpe->text);
    lg_buffer_free(&bpe->symbols);
    lg_buffer_free(&bpe->heap);
    free(bpe->tokens);
    free(bpe->slots);
    free(bpe->merges);
    free(bpe->cache);
}

/* ---- encoding ---- */

static void add_symbol(lg_bpe *bpe, int32_t id) {
    int32_t n = (int32_t)(bpe->symbols.bytes / (int64_t)sizeof(symbol));
    symbol s = {id, n - 1, n + 1};
    lg_buffer_append(&bpe->symbols, &s, sizeof s);
}

/* Bytes of the character at `text`; one that is no valid UTF-8 is a character of its own. */
static int char_bytes(const char *text, int64_t bytes) {
    int n = lg_utf8_bytes(text, bytes);
    return n ? n : 1;
}

static bool add_bytes(lg_bpe *bpe, const char *text, int n) {
    for (int i = 0; i < n; i++)
        if (bpe->byte_ids[(unsigned char)text[i]] < 0) return false;
    for (int i = 0; i < n; i++) add_symbol(bpe, bpe->byte_ids[(unsigned char)text[i]]);
    return true;
}

/* A character that is no token becomes its bytes' tokens, or unk (a run of them one unk if
 * fused), or nothing. */
static void make_symbols(lg_bpe *bpe, const char *text, int64_t bytes) {
    bpe->symbols.bytes = 0;
    bool after_unk = false;
    for (int64_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)text[i];
        int n = c < 0x80 ? 1 : char_bytes(text + i, bytes - i);
        int32_t id = c < 0x80 ? bpe->char_ids[c] : lg_bpe_find(bpe, text + i, n);
        if (id >= 0) {
            add_symbol(bpe, id);
            after_unk = false;
        } else if (bpe->byte_fallback && add_bytes(bpe, text + i, n)) {
            after_unk = false;
        } else if (bpe->unk >= 0 && !(after_unk && bpe->fuse_unk)) {
            add_symbol(bpe, bpe->unk);
            after_unk = true;
        }
        i += n;
    }
}

static bool before(const candidate *a, const candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static void push(lg_bpe *bpe, candidate c) {
    lg_buffer_append(&bpe->heap, &c, sizeof c);
    if (bpe->heap.failed) return;
    candidate *heap = (candidate *)bpe->heap.data;
    int64_t i = bpe->heap.bytes / (int64_t)sizeof c - 1;
    for (; i > 0 && before(&c, &heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = c;
}

static candidate pop(lg_bpe *bpe) {
    candidate *heap = (candidate *)bpe->heap.data, top = heap[0];
    bpe->heap.bytes -= (int64_t)sizeof top;
    int64_t n = bpe->heap.bytes / (int64_t)sizeof top, i = 0, child;
    candidate last = heap[n];
    while ((child = 2 * i + 1) < n) {
        if (child + 1 < n && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

static void push_pair(lg_bpe *bpe, const symbol *symbols, int32_t left, int32_t right) {
    const merge *m = find_merge(bpe, symbols[left].id, symbols[right].id);
    if (m->left >= 0) push(bpe, (candidate){m->rank, left, m->result});
}

/* Merges in place; the ids of what is left are those >= 0. */
static void merge_symbols(lg_bpe *bpe, int32_t n) {
    symbol *symbols = (symbol *)bpe->symbols.data;
    bpe->heap.bytes = 0;
    for (int32_t i = 0; i + 1 < n; i++) push_pair(bpe, symbols, i, i + 1);
    while (bpe->heap.bytes > 0 && !bpe->heap.failed) {
        candidate c = pop(bpe);
        symbol *left = &symbols[c.position];
        if (left->id < 0 || left->next >= n) continue;
        symbol *right = &symbols[left->next];
        const merge *m = find_merge(bpe, left->id, right->id);
        if (m->left < 0 || m->result != c.result) continue; /* one of the two has changed since */
        left->id = c.result;
        right->id = -1;
        left->next = right->next;
        if (left->next < n) symbols[left->next].previous = c.position;
        if (left->previous >= 0) push_pair(bpe, symbols, left->previous, c.position);
        if (left->next < n) push_pair(bpe, symbols, c.position, left->next);
    }
}

static void encode_word(lg_bpe *bpe, const char *text, int64_t bytes, lg_buffer *ids) {
    int32_t whole = bpe->ignore_merges ? lg_bpe_find(bpe, text, bytes) : -1;
    if (whole >= 0) {
        lg_buffer_append(ids, &whole, sizeof whole);
        return;
    }
    make_symbols(bpe, text, bytes);
    int32_t n = (int32_t)(bpe->symbols.bytes / (int64_t)sizeof(symbol));
    if (bpe->symbols.failed) return;
    merge_symbols(bpe, n);
    const symbol *symbols = (const symbol *)bpe->symbols.data;
    for (int32_t i = 0; i < n; i++)
        if (symbols[i].id >= 0) lg_buffer_append(ids, &symbols[i].id, sizeof symbols[i].id);
}

bool lg_bpe_encode(lg_bpe *bpe, const char *text, int64_t bytes, lg_buffer *ids) {
    cached_word *word = NULL;
    if (bytes > 0 && bytes <= CACHE_BYTES) {
        word = &bpe->cache[lg_hash_bytes(text, bytes) % CACHE_SLOTS];
        if (word->bytes == bytes && !memcmp(word->text, text, (size_t)bytes)) {
            lg_buffer_append(ids, word->ids, word->n * (int64_t)sizeof *word->ids);
            return !ids->failed;
        }
    }
    int64_t from = ids->bytes;
    encode_word(bpe, text, bytes, ids);
    if (bpe->symbols.failed || bpe->heap.failed || ids->failed) {
        bpe->symbols.failed = bpe->heap.failed = false;
        return false;
    }
    int64_t n = (ids->bytes - from) / (int64_t)sizeof(int32_t);
    if (word && n <= CACHE_IDS) {
        memcpy(word->text, text, (size_t)bytes);
        if (n > 0) memcpy(word->ids, ids->data + from, (size_t)n * sizeof(int32_t));
        word->bytes = (uint8_t)bytes;
        word->n = (uint8_t)n;
    }
    return true;
}
