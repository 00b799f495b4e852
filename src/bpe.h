/* Byte pair encoding: a vocabulary, its merges, and one word's way through them. Internal to the
 * library. */
#ifndef LIGER_BPE_H
#define LIGER_BPE_H

#include "json.h"

typedef struct lg_token {
    int64_t at; /* in `text`, NUL-terminated; -1 where no token has the id */
    int64_t bytes;
} lg_token;

typedef struct lg_bpe {
    lg_buffer text;
    lg_token *tokens; /* by id */
    int64_t num_ids;
    struct lg_bpe_word *cache; /* short words met before, one a slot */
    int32_t *slots;            /* ids by the hash of their text; -1 is free */
    uint64_t slot_mask;
    struct lg_bpe_merge *merges; /* by the hash of the pair */
    uint64_t merge_mask;
    int32_t byte_ids[256]; /* of <0x00> to <0xFF>, or -1 */
    int32_t char_ids[128]; /* of one-byte texts, or -1 */
    int32_t unk;           /* or -1 */
    bool byte_fallback, fuse_unk, ignore_merges;
    lg_buffer symbols, heap; /* of the word in work */
} lg_bpe;

/* Reads the "model" object of a tokenizer.json; ids up to `max_id` will have room. Close also
 * after a failure. */
lg_status lg_bpe_open(lg_context *ctx, const lg_json *model, int64_t max_id, lg_bpe *bpe);
void lg_bpe_close(lg_bpe *bpe);
/* The id of a text of the model's vocabulary, or -1. */
int32_t lg_bpe_find(const lg_bpe *bpe, const char *text, int64_t bytes);
/* Appends the ids (int32_t) of one word. False when out of memory. */
bool lg_bpe_encode(lg_bpe *bpe, const char *text, int64_t bytes, lg_buffer *ids);

#endif
