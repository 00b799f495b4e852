/* Chains of steps: what normalizer, pre_tokenizer and decoder of a tokenizer.json have in
 * common. */
#include "tokenizer.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_STEPS = 32 }; /* pre-tokenizers nest their calls */

static lg_status add_step(lg_context *ctx, const char *what, const lg_json *node,
                          const char *list_key, lg_step_read read, lg_steps *steps);

static lg_status add_sequence(lg_context *ctx, const char *what, const lg_json *list,
                              const char *list_key, lg_step_read read, lg_steps *steps) {
    if (!list || list->kind != LG_JSON_ARRAY)
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: %s: Sequence has no list %s, wanted one", what,
                       list_key);
    const lg_json *item = list + 1;
    for (uint32_t i = 0; i < list->count; i++, item += item->size)
        LG_TRY(add_step(ctx, what, item, list_key, read, steps));
    return LG_OK;
}

static lg_status add_step(lg_context *ctx, const char *what, const lg_json *node,
                          const char *list_key, lg_step_read read, lg_steps *steps) {
    const lg_json *type = lg_json_get(node, "type");
    if (!type || type->kind != LG_JSON_STRING)
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: %s is %.*s, wanted an object with a type", what,
                       (int)(node->bytes < 200 ? node->bytes : 200), node->text);
    if (lg_json_is(type, "Sequence"))
        return add_sequence(ctx, what, lg_json_get(node, list_key), list_key, read, steps);
    if (steps->n == MAX_STEPS)
        return lg_fail(ctx, LG_EUNSUPPORTED, "tokenizer: %s has more than %d steps, wanted fewer",
                       what, MAX_STEPS);
    lg_step *grown = realloc(steps->items, (size_t)(steps->n + 1) * sizeof *grown);
    if (!grown) return lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for its %s", what);
    steps->items = grown;
    steps->items[steps->n] = (lg_step){0};
    return read(ctx, node, type, &steps->items[steps->n++]);
}

lg_status lg_steps_open(lg_context *ctx, const char *what, const lg_json *node,
                        const char *list_key, lg_step_read read, lg_steps *steps) {
    if (!node || node->kind == LG_JSON_NULL) return LG_OK;
    return add_step(ctx, what, node, list_key, read, steps);
}

void lg_steps_close(lg_steps *steps) {
    for (int64_t i = 0; i < steps->n; i++) {
        lg_step *s = &steps->items[i];
        lg_pattern_close(&s->pattern);
        lg_buffer_free(&s->content);
        lg_buffer_free(&s->spans);
        lg_buffer_free(&s->out);
        lg_buffer_free(&s->joined);
    }
    free(steps->items);
}

lg_status lg_step_unknown(lg_context *ctx, const char *what, const lg_json *type,
                          const char *wanted) {
    return lg_fail(ctx, LG_EUNSUPPORTED, "tokenizer: %s is %.*s, wanted one of %s", what,
                   (int)(type->bytes < 100 ? type->bytes : 100), type->text, wanted);
}

lg_status lg_step_text(lg_context *ctx, const lg_json *node, const char *key, lg_buffer *text) {
    const lg_json *member = lg_json_get(node, key);
    if (!member || member->kind != LG_JSON_STRING)
        return lg_fail(ctx, LG_EFORMAT, "tokenizer: %s of %.*s is no string, wanted one", key,
                       (int)(node->bytes < 200 ? node->bytes : 200), node->text);
    lg_buffer_append(text, member->text, member->bytes);
    return text->failed ? lg_fail(ctx, LG_ENOMEM, "tokenizer: no memory for %s", key) : LG_OK;
}

bool lg_step_flag(const lg_json *node, const char *key, bool otherwise) {
    const lg_json *member = lg_json_get(node, key);
    if (!member || member->kind == LG_JSON_NULL) return otherwise;
    return member->kind == LG_JSON_TRUE;
}
