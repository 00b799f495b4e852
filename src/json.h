/* A strict JSON reader (RFC 8259) for file headers and tokenizer descriptions: one flat array of
 * nodes in the order of the text, so that a document of 150,000 strings costs a few allocations.
 * Internal to the library. */
#ifndef LIGER_JSON_H
#define LIGER_JSON_H

#include "internal.h"

enum lg_json_kind {
    LG_JSON_NULL,
    LG_JSON_FALSE,
    LG_JSON_TRUE,
    LG_JSON_NUMBER,
    LG_JSON_STRING,
    LG_JSON_ARRAY,
    LG_JSON_OBJECT
};

/* A container's children follow it; an object's are key, value, key, value. */
typedef struct lg_json {
    const char *text; /* a string's bytes, unescaped (may hold NUL); else its source text */
    uint32_t bytes;   /* of `text` */
    uint32_t count;   /* children: elements of an array, members of an object */
    uint32_t size;    /* nodes with all children: `node + node->size` is the next sibling */
    uint32_t kind;
} lg_json;

typedef struct lg_json_document {
    lg_json *root;
    char *strings; /* the strings that had escapes */
} lg_json_document;

/* Reads the whole of `text`, which must outlive the document. `what` begins the error texts.
 * Refused: anything after the value, text that is no UTF-8, lone surrogates, more than 64
 * levels, the same key twice in one object, 2 GiB and more. */
lg_status lg_json_parse(lg_context *ctx, const char *what, const char *text, int64_t bytes,
                        lg_json_document *document);
void lg_json_free(lg_json_document *document);

/* The member `key` of an object, or NULL: no such member, or `object` is NULL or no object. */
const lg_json *lg_json_get(const lg_json *object, const char *key);
bool lg_json_is(const lg_json *node, const char *string);
/* A non-negative integer written as digits only; false when it is anything else or passes
 * INT64_MAX. */
bool lg_json_integer(const lg_json *node, int64_t *value);

/* Bytes of the UTF-8 character at `text` (1 to 4), or 0 when it is not valid: surrogates and
 * overlong forms are not. */
int lg_utf8_bytes(const char *text, int64_t bytes);
uint64_t lg_hash_bytes(const void *data, int64_t bytes);

/* A growing byte buffer; `failed` stays set after an allocation failed, and later appends do
 * nothing. */
typedef struct lg_buffer {
    char *data;
    int64_t bytes;
    int64_t capacity;
    bool failed;
} lg_buffer;

void lg_buffer_append(lg_buffer *buffer, const void *data, int64_t bytes);
void lg_buffer_free(lg_buffer *buffer);
/* Appends a JSON string with its quotes; a byte that is no valid UTF-8 becomes \u00XX. */
void lg_buffer_json_string(lg_buffer *buffer, const char *text, int64_t bytes);

#endif
