/* The JSON reader: one pass without recursion. Every error names the byte where it is. */
#include "json.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

int lg_utf8_bytes(const char *text, int64_t bytes) {
    const unsigned char *s = (const unsigned char *)text;
    if (bytes < 1) return 0;
    if (s[0] < 0x80) return 1;
    if (s[0] < 0xC2 || s[0] > 0xF4) return 0;
    int n = s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : 4;
    if (bytes < n) return 0;
    unsigned char low = s[0] == 0xE0 ? 0xA0 : s[0] == 0xF0 ? 0x90 : 0x80;
    unsigned char high = s[0] == 0xED ? 0x9F : s[0] == 0xF4 ? 0x8F : 0xBF;
    if (s[1] < low || s[1] > high) return 0;
    for (int i = 2; i < n; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    return n;
}

/* FNV-1a, with a last mix because tables use the low bits. */
uint64_t lg_hash_bytes(const void *data, int64_t bytes) {
    const unsigned char *s = data;
    uint64_t h = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < bytes; i++) h = (h ^ s[i]) * 0x100000001b3u;
    return (h ^ (h >> 32)) * 0x9E3779B97F4A7C15u >> 16;
}

void lg_buffer_append(lg_buffer *buffer, const void *data, int64_t bytes) {
    if (buffer->failed || bytes <= 0) return;
    if (bytes > buffer->capacity - buffer->bytes) {
        int64_t capacity = buffer->capacity + buffer->capacity / 2;
        if (capacity < buffer->bytes + bytes) capacity = buffer->bytes + bytes;
        if (capacity < 64) capacity = 64;
        char *grown = realloc(buffer->data, (size_t)capacity);
        if (!grown) {
            buffer->failed = true;
            return;
        }
        buffer->data = grown;
        buffer->capacity = capacity;
    }
    memcpy(buffer->data + buffer->bytes, data, (size_t)bytes);
    buffer->bytes += bytes;
}

void lg_buffer_free(lg_buffer *buffer) {
    free(buffer->data);
    *buffer = (lg_buffer){0};
}

void lg_buffer_json_string(lg_buffer *buffer, const char *text, int64_t bytes) {
    static const char hex[] = "0123456789abcdef";
    lg_buffer_append(buffer, "\"", 1);
    int64_t from = 0; /* start of what needs no escape */
    for (int64_t i = 0; i < bytes;) {
        unsigned char c = (unsigned char)text[i];
        int n = lg_utf8_bytes(text + i, bytes - i);
        if (n && c >= 0x20 && c != '"' && c != '\\') {
            i += n;
            continue;
        }
        lg_buffer_append(buffer, text + from, i - from);
        if (c == '"' || c == '\\') {
            lg_buffer_append(buffer, (char[]){'\\', (char)c}, 2);
        } else {
            lg_buffer_append(buffer, (char[]){'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]}, 6);
        }
        from = ++i;
    }
    lg_buffer_append(buffer, text + from, bytes - from);
    lg_buffer_append(buffer, "\"", 1);
}

typedef struct parser {
    lg_context *ctx;
    const char *what;
    const char *text, *at, *end;
    lg_json *nodes;
    int64_t n, capacity;
    char *strings, *free_string;
    /* The open containers, outermost first, as node indices. */
    uint32_t open[MAX_DEPTH];
    int depth;
} parser;

static lg_status fail_at(const parser *p, const char *got, const char *wanted) {
    return lg_fail(p->ctx, LG_EFORMAT, "%s: JSON at byte %lld is %s, wanted %s", p->what,
                   (long long)(p->at - p->text), got, wanted);
}

static lg_status fail_here(const parser *p, const char *wanted) {
    if (p->at >= p->end) return fail_at(p, "the end", wanted);
    unsigned char c = (unsigned char)*p->at;
    char got[16] = "' '";
    static const char hex[] = "0123456789ABCDEF";
    if (c > 0x20 && c < 0x7F) {
        got[1] = (char)c;
    } else {
        memcpy(got, (char[]){'b', 'y', 't', 'e', ' ', '0', 'x', hex[c >> 4], hex[c & 15], 0}, 10);
    }
    return fail_at(p, got, wanted);
}

static lg_status add_node(parser *p, uint32_t kind, const char *text, lg_json **node) {
    if (p->n == p->capacity) {
        int64_t capacity = p->capacity + p->capacity / 2 + 16;
        lg_json *grown = realloc(p->nodes, (size_t)capacity * sizeof *grown);
        if (!grown)
            return lg_fail(p->ctx, LG_ENOMEM, "%s: no memory for %lld JSON values", p->what,
                           (long long)capacity);
        p->nodes = grown;
        p->capacity = capacity;
    }
    *node = &p->nodes[p->n++];
    **node = (lg_json){.text = text, .kind = kind, .size = 1};
    return LG_OK;
}

static void skip_space(parser *p) {
    while (p->at < p->end && (*p->at == ' ' || *p->at == '\n' || *p->at == '\r' || *p->at == '\t'))
        p->at++;
}

static bool read_hex4(parser *p, uint32_t *code) {
    if (p->end - p->at < 4) return false;
    *code = 0;
    for (int i = 0; i < 4; i++) {
        char c = p->at[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return false;
        *code = *code * 16 + (uint32_t)digit;
    }
    p->at += 4;
    return true;
}

/* After a backslash: writes the character to `out`. An escape is never shorter than its UTF-8. */
static lg_status read_escape(parser *p, char **out) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const char *found = p->at < p->end && *p->at ? strchr(from, *p->at) : NULL;
    if (found) {
        *(*out)++ = to[found - from];
        p->at++;
        return LG_OK;
    }
    if (p->at >= p->end || *p->at != 'u') return fail_here(p, "an escape");
    p->at++;
    uint32_t code, low;
    if (!read_hex4(p, &code)) return fail_here(p, "four hexadecimal digits");
    if (code >= 0xD800 && code < 0xE000) {
        bool paired = code < 0xDC00 && p->end - p->at >= 2 && p->at[0] == '\\' && p->at[1] == 'u';
        if (paired) p->at += 2;
        paired = paired && read_hex4(p, &low) && low >= 0xDC00 && low < 0xE000;
        if (!paired) return fail_at(p, "a lone surrogate", "a pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    char *s = *out;
    if (code < 0x80) {
        *s++ = (char)code;
    } else if (code < 0x800) {
        *s++ = (char)(0xC0 | code >> 6);
        *s++ = (char)(0x80 | (code & 63));
    } else if (code < 0x10000) {
        *s++ = (char)(0xE0 | code >> 12);
        *s++ = (char)(0x80 | (code >> 6 & 63));
        *s++ = (char)(0x80 | (code & 63));
    } else {
        *s++ = (char)(0xF0 | code >> 18);
        *s++ = (char)(0x80 | (code >> 12 & 63));
        *s++ = (char)(0x80 | (code >> 6 & 63));
        *s++ = (char)(0x80 | (code & 63));
    }
    *out = s;
    return LG_OK;
}

static lg_status read_string(parser *p) {
    lg_json *node = NULL;
    LG_TRY(add_node(p, LG_JSON_STRING, ++p->at, &node));
    char *out = NULL; /* set at the first escape: the string is then copied */
    const char *from = p->at;
    for (;;) {
        if (p->at >= p->end) return fail_here(p, "the string's closing quote");
        unsigned char c = (unsigned char)*p->at;
        if (c == '"') break;
        if (c == '\\') {
            if (!p->strings) {
                p->strings = p->free_string = malloc((size_t)(p->end - from));
                if (!p->strings)
                    return lg_fail(p->ctx, LG_ENOMEM, "%s: no memory for JSON strings", p->what);
            }
            if (!out) {
                node->text = out = p->free_string;
            }
            memcpy(out, from, (size_t)(p->at - from));
            out += p->at++ - from;
            LG_TRY(read_escape(p, &out));
            from = p->at;
            continue;
        }
        if (c < 0x20) return fail_here(p, "no control character in a string");
        int n = c < 0x80 ? 1 : lg_utf8_bytes(p->at, p->end - p->at);
        if (n == 0) return fail_here(p, "UTF-8");
        p->at += n;
    }
    if (out) {
        memcpy(out, from, (size_t)(p->at - from));
        out += p->at - from;
        p->free_string = out;
        node->bytes = (uint32_t)(out - node->text);
    } else {
        node->bytes = (uint32_t)(p->at - from);
    }
    p->at++;
    return LG_OK;
}

static bool skip_digits(parser *p) {
    const char *from = p->at;
    while (p->at < p->end && *p->at >= '0' && *p->at <= '9') p->at++;
    return p->at > from;
}

static lg_status read_number(parser *p) {
    lg_json *node = NULL;
    LG_TRY(add_node(p, LG_JSON_NUMBER, p->at, &node));
    if (*p->at == '-') p->at++;
    if (p->at < p->end && *p->at == '0') {
        p->at++;
    } else if (!skip_digits(p)) {
        return fail_here(p, "a digit");
    }
    if (p->at < p->end && *p->at == '.') {
        p->at++;
        if (!skip_digits(p)) return fail_here(p, "a digit");
    }
    if (p->at < p->end && (*p->at == 'e' || *p->at == 'E')) {
        p->at++;
        if (p->at < p->end && (*p->at == '+' || *p->at == '-')) p->at++;
        if (!skip_digits(p)) return fail_here(p, "a digit");
    }
    node->bytes = (uint32_t)(p->at - node->text);
    return LG_OK;
}

static lg_status read_word(parser *p) {
    static const struct {
        const char *text;
        size_t bytes;
        uint32_t kind;
    } words[] = {{"null", 4, LG_JSON_NULL}, {"false", 5, LG_JSON_FALSE}, {"true", 4, LG_JSON_TRUE}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if ((size_t)(p->end - p->at) < words[i].bytes ||
            memcmp(p->at, words[i].text, words[i].bytes))
            continue;
        lg_json *node = NULL;
        LG_TRY(add_node(p, words[i].kind, p->at, &node));
        node->bytes = (uint32_t)words[i].bytes;
        p->at += words[i].bytes;
        return LG_OK;
    }
    return fail_here(p, "a value");
}

/* Reads a scalar, or opens a container. */
static lg_status read_value(parser *p) {
    skip_space(p);
    if (p->at >= p->end) return fail_here(p, "a value");
    char c = *p->at;
    if (c == '"') return read_string(p);
    if (c == '-' || (c >= '0' && c <= '9')) return read_number(p);
    if (c != '{' && c != '[') return read_word(p);
    if (p->depth == MAX_DEPTH) return fail_at(p, "more than 64 levels deep", "at most 64");
    lg_json *node = NULL;
    p->open[p->depth++] = (uint32_t)p->n;
    LG_TRY(add_node(p, c == '{' ? LG_JSON_OBJECT : LG_JSON_ARRAY, p->at++, &node));
    return LG_OK;
}

static lg_status check_keys(parser *p, const lg_json *object) {
    uint32_t slots = 16;
    while (slots < 2 * object->count) slots *= 2;
    const lg_json **table = calloc(slots, sizeof *table);
    if (!table) return lg_fail(p->ctx, LG_ENOMEM, "%s: no memory to check JSON keys", p->what);
    const lg_json *key = object + 1;
    for (uint32_t i = 0; i < object->count; i++, key += 1 + key[1].size) {
        uint32_t slot = (uint32_t)lg_hash_bytes(key->text, key->bytes) & (slots - 1);
        for (; table[slot]; slot = (slot + 1) & (slots - 1)) {
            if (table[slot]->bytes != key->bytes ||
                memcmp(table[slot]->text, key->text, key->bytes))
                continue;
            free(table);
            return lg_fail(p->ctx, LG_EFORMAT, "%s: duplicate key %.*s, wanted each key once",
                           p->what, (int)(key->bytes < 200 ? key->bytes : 200), key->text);
        }
        table[slot] = key;
    }
    free(table);
    return LG_OK;
}

static lg_status close_container(parser *p) {
    lg_json *node = &p->nodes[p->open[--p->depth]];
    p->at++;
    node->bytes = (uint32_t)(p->at - node->text);
    node->size = (uint32_t)(&p->nodes[p->n] - node);
    if (node->kind == LG_JSON_OBJECT && node->count > 1) LG_TRY(check_keys(p, node));
    return LG_OK;
}

static lg_status parse(parser *p) {
    LG_TRY(read_value(p));
    while (p->depth > 0) {
        lg_json *node = &p->nodes[p->open[p->depth - 1]];
        bool object = node->kind == LG_JSON_OBJECT;
        skip_space(p);
        if (p->at < p->end && *p->at == (object ? '}' : ']')) {
            LG_TRY(close_container(p));
            continue;
        }
        if (node->count > 0) {
            if (p->at >= p->end || *p->at != ',')
                return fail_here(p, object ? "',' or '}'" : "',' or ']'");
            p->at++;
            skip_space(p);
        }
        node->count++;
        if (object) {
            if (p->at >= p->end || *p->at != '"') return fail_here(p, "a key");
            LG_TRY(read_string(p));
            skip_space(p);
            if (p->at >= p->end || *p->at != ':') return fail_here(p, "':'");
            p->at++;
        }
        LG_TRY(read_value(p));
    }
    skip_space(p);
    if (p->at < p->end) return fail_here(p, "the end");
    return LG_OK;
}

lg_status lg_json_parse(lg_context *ctx, const char *what, const char *text, int64_t bytes,
                        lg_json_document *document) {
    *document = (lg_json_document){0};
    if (bytes < 0 || bytes > INT32_MAX)
        return lg_fail(ctx, LG_EFORMAT, "%s: JSON is %lld bytes, wanted less than 2 GiB", what,
                       (long long)bytes);
    parser p = {.ctx = ctx, .what = what, .text = text, .at = text, .end = text + bytes};
    lg_status status = parse(&p);
    *document = (lg_json_document){.root = p.nodes, .strings = p.strings};
    if (status != LG_OK) lg_json_free(document);
    return status;
}

void lg_json_free(lg_json_document *document) {
    free(document->root);
    free(document->strings);
    *document = (lg_json_document){0};
}

bool lg_json_is(const lg_json *node, const char *string) {
    return node && node->kind == LG_JSON_STRING && node->bytes == strlen(string) &&
           !memcmp(node->text, string, node->bytes);
}

const lg_json *lg_json_get(const lg_json *object, const char *key) {
    if (!object || object->kind != LG_JSON_OBJECT) return NULL;
    const lg_json *member = object + 1;
    for (uint32_t i = 0; i < object->count; i++, member += 1 + member[1].size)
        if (lg_json_is(member, key)) return member + 1;
    return NULL;
}

bool lg_json_integer(const lg_json *node, int64_t *value) {
    if (!node || node->kind != LG_JSON_NUMBER) return false;
    uint64_t n = 0;
    for (uint32_t i = 0; i < node->bytes; i++) {
        char c = node->text[i];
        if (c < '0' || c > '9' || n > (INT64_MAX - (uint64_t)(c - '0')) / 10) return false;
        n = n * 10 + (uint64_t)(c - '0');
    }
    *value = (int64_t)n;
    return true;
}
