/* formats/kv.c - GGUF metadata entries: key (u64 length, bytes), u32 value type, value.
 *
 * Every length and count is compared with the bytes that are left before it is used, by division rather than by
 * multiplication, so nothing can wrap and nothing is allocated on the word of a file.
 */
#include "formats/kv.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "formats/cursor_internal.h"
#include "formats/name_index.h"

enum { ENTRY_BYTES_MIN = 8 + 4 + 1 };   /* an empty key (refused with its own message) and a value of one byte */

typedef struct {
    spk_cursor  cursor;
    const char *where;
    uint64_t    index, count;    /* of the entry being parsed */
    spk_text    key;             /* empty until it is known */
    spk_error  *err;
} parser;

__attribute__((format(printf, 3, 4)))
static spk_status bad(const parser *p, spk_status status, const char *format, ...) {
    char text[256];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    int key_bytes = p->key.size_bytes < 80 ? (int)p->key.size_bytes : 80;
    return spk_fail(p->err, status, "%s: metadata entry %" PRIu64 " of %" PRIu64 "%s%.*s%s: %s", p->where, p->index + 1,
                    p->count, key_bytes ? " '" : "", key_bytes, key_bytes ? p->key.bytes : "", key_bytes ? "'" : "",
                    text);
}

/* A u64 length and that many bytes. */
static spk_status parse_text(parser *p, const char *what, spk_text *out) {
    uint64_t size_bytes;
    if (!spk_cursor_take(&p->cursor, &size_bytes, sizeof size_bytes))
        return bad(p, SPK_E_CORRUPT, "the data ends inside the length of %s: truncated", what);
    if (size_bytes > spk_cursor_left(&p->cursor))
        return bad(p, SPK_E_CORRUPT, "%s has length %" PRIu64 ", but only %" PRIu64 " bytes are left", what, size_bytes,
                   spk_cursor_left(&p->cursor));
    *out = (spk_text){ (const char *)spk_cursor_here(&p->cursor), size_bytes };
    p->cursor.at += size_bytes;
    return SPK_OK;
}

/* 0 for string, array and what is no type. */
static uint32_t width_bytes(uint32_t type) {
    static const uint8_t widths[] = {
        [SPK_KV_U8] = 1,  [SPK_KV_I8] = 1,  [SPK_KV_U16] = 2, [SPK_KV_I16] = 2,  [SPK_KV_U32] = 4, [SPK_KV_I32] = 4,
        [SPK_KV_F32] = 4, [SPK_KV_BOOL] = 1, [SPK_KV_U64] = 8, [SPK_KV_I64] = 8, [SPK_KV_F64] = 8,
    };
    return type < sizeof widths ? widths[type] : 0;
}

static spk_status parse_array_head(parser *p, spk_kv *kv) {
    if (!spk_cursor_take(&p->cursor, &kv->element_type, sizeof kv->element_type) ||
        !spk_cursor_take(&p->cursor, &kv->count, sizeof kv->count))
        return bad(p, SPK_E_CORRUPT, "the data ends inside the head of an array: truncated");
    if (kv->element_type == SPK_KV_ARRAY)
        return bad(p, SPK_E_CORRUPT, "array of arrays; expected scalars or strings as elements");
    if (kv->element_type > SPK_KV_F64)
        return bad(p, SPK_E_CORRUPT, "array of unknown element type %" PRIu32 ", expected 0..%d", kv->element_type,
                   (int)SPK_KV_F64);
    if (kv->count > SPK_KV_ARRAY_COUNT_MAX)
        return bad(p, SPK_E_LIMIT, "array of %" PRIu64 " elements, at most %" PRIu64 " are accepted", kv->count,
                   SPK_KV_ARRAY_COUNT_MAX);
    return SPK_OK;
}

static spk_status parse_elements(parser *p, const spk_kv *kv) {
    bool     is_string = kv->element_type == SPK_KV_STRING;
    uint32_t width = is_string ? (uint32_t)sizeof(uint64_t) : width_bytes(kv->element_type);
    uint64_t left = spk_cursor_left(&p->cursor);
    if (kv->count > left / width)
        return bad(p, SPK_E_CORRUPT, "value of %" PRIu64 " elements of %s%" PRIu32 " bytes, but only %" PRIu64
                   " bytes are left", kv->count, is_string ? "at least " : "", width, left);
    if (is_string) {
        for (uint64_t i = 0; i < kv->count; i++) {
            spk_text text;
            SPK_TRY(parse_text(p, kv->type == SPK_KV_ARRAY ? "a string of the array" : "the string", &text));
        }
        return SPK_OK;
    }
    if (kv->element_type == SPK_KV_BOOL)
        for (uint64_t i = 0; i < kv->count; i++)
            if (kv->value[i] > 1)
                return bad(p, SPK_E_CORRUPT, "boolean with value %u, expected 0 or 1", kv->value[i]);
    p->cursor.at += kv->count * width;
    return SPK_OK;
}

static spk_status parse_entry(parser *p, spk_kv *kv) {
    spk_text key;
    p->key = (spk_text){ NULL, 0 };
    kv->entry = spk_cursor_here(&p->cursor);
    SPK_TRY(parse_text(p, "the key", &key));
    if (key.size_bytes == 0) return bad(p, SPK_E_CORRUPT, "empty key");
    if (key.size_bytes > SPK_KV_KEY_BYTES_MAX)
        return bad(p, SPK_E_LIMIT, "key of %" PRIu64 " bytes, at most %d are accepted", key.size_bytes,
                   (int)SPK_KV_KEY_BYTES_MAX);
    kv->key = p->key = key;
    if (!spk_cursor_take(&p->cursor, &kv->type, sizeof kv->type))
        return bad(p, SPK_E_CORRUPT, "the data ends inside the value type: truncated");
    if (kv->type > SPK_KV_F64)
        return bad(p, SPK_E_CORRUPT, "unknown value type %" PRIu32 ", expected 0..%d", kv->type, (int)SPK_KV_F64);
    kv->element_type = kv->type;
    kv->count = 1;
    if (kv->type == SPK_KV_ARRAY) SPK_TRY(parse_array_head(p, kv));
    kv->value = spk_cursor_here(&p->cursor);
    SPK_TRY(parse_elements(p, kv));
    kv->value_bytes = (uint64_t)(spk_cursor_here(&p->cursor) - kv->value);
    kv->entry_bytes = (uint64_t)(spk_cursor_here(&p->cursor) - kv->entry);
    return SPK_OK;
}

static spk_text key_of(const void *items, uint64_t index) { return ((const spk_kv *)items)[index].key; }

spk_status spk_kv_parse(const uint8_t *bytes, uint64_t size_bytes, uint64_t count, const char *where, spk_kv_set *out,
                        uint64_t *used_bytes, spk_error *err) {
    parser p = { .cursor = { bytes, size_bytes, 0 }, .where = where, .count = count, .err = err };
    if (count > SPK_KV_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " metadata entries, at most %d are accepted", where, count,
                        (int)SPK_KV_COUNT_MAX);
    if (count > size_bytes / ENTRY_BYTES_MIN)
        return spk_fail(err, SPK_E_CORRUPT, "%s: %" PRIu64 " metadata entries need at least %" PRIu64
                        " bytes, but only %" PRIu64 " are left: truncated", where, count, count * ENTRY_BYTES_MIN,
                        size_bytes);

    spk_kv_set set = { .count = count };
    set.items = calloc(count + 1, sizeof *set.items);    /* + 1: never a request for nothing */
    if (set.items == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for the metadata", where);
    spk_status status = SPK_OK;
    for (p.index = 0; p.index < count && status == SPK_OK; p.index++) status = parse_entry(&p, &set.items[p.index]);
    if (status != SPK_OK) goto out;

    uint64_t duplicate;
    status = spk_name_index_build(set.items, count, key_of, where, &set.slots, &set.slot_count, &duplicate, err);
    if (status == SPK_OK && duplicate != SPK_NAME_NONE) {
        p.index = duplicate;
        p.key = set.items[duplicate].key;
        status = bad(&p, SPK_E_CORRUPT, "duplicate key; expected each key once");
    }
out:
    if (status != SPK_OK) {
        spk_kv_free(&set);
        return status;
    }
    *out = set;
    *used_bytes = p.cursor.at;
    return SPK_OK;
}

void spk_kv_free(spk_kv_set *set) {
    free(set->items);
    free(set->slots);
    *set = (spk_kv_set){ 0 };
}

const spk_kv *spk_kv_find(const spk_kv_set *set, const char *key) {
    uint64_t index = spk_name_index_find(set->slots, set->slot_count, set->items, key_of,
                                         (spk_text){ key, strlen(key) });
    return index == SPK_NAME_NONE ? NULL : &set->items[index];
}

bool spk_text_equal(spk_text a, const char *b) {
    return a.size_bytes == strlen(b) && memcmp(a.bytes, b, a.size_bytes) == 0;
}

/* An integer of any width as two's complement bits; false for what is no integer. */
static bool load_integer(const spk_kv *kv, uint64_t index, uint64_t *bits, bool *is_negative) {
    if (kv == NULL || index >= kv->count) return false;
    uint32_t width = width_bytes(kv->element_type);
    uint64_t raw = 0;
    if (width == 0) return false;
    memcpy(&raw, kv->value + index * width, width);
    int64_t value;
    switch (kv->element_type) {
    case SPK_KV_U8: case SPK_KV_U16: case SPK_KV_U32: case SPK_KV_U64:
        *bits = raw;
        *is_negative = false;
        return true;
    case SPK_KV_I8:  value = (int8_t)raw;  break;
    case SPK_KV_I16: value = (int16_t)raw; break;
    case SPK_KV_I32: value = (int32_t)raw; break;
    case SPK_KV_I64: value = (int64_t)raw; break;
    default:         return false;
    }
    *bits = (uint64_t)value;
    *is_negative = value < 0;
    return true;
}

bool spk_kv_u64(const spk_kv *kv, uint64_t index, uint64_t *out) {
    uint64_t bits;
    bool     is_negative;
    if (!load_integer(kv, index, &bits, &is_negative) || is_negative) return false;
    *out = bits;
    return true;
}

bool spk_kv_scalar_u64(const spk_kv *kv, uint64_t *out) {
    return kv != NULL && kv->type != SPK_KV_ARRAY && spk_kv_u64(kv, 0, out);
}

bool spk_kv_f64(const spk_kv *kv, uint64_t index, double *out) {
    uint64_t bits;
    bool     is_negative;
    if (load_integer(kv, index, &bits, &is_negative)) {
        *out = is_negative ? (double)(int64_t)bits : (double)bits;
        return true;
    }
    if (kv == NULL || index >= kv->count) return false;
    if (kv->element_type == SPK_KV_F32) {
        float value;
        memcpy(&value, kv->value + index * sizeof value, sizeof value);
        *out = (double)value;
        return true;
    }
    if (kv->element_type != SPK_KV_F64) return false;
    memcpy(out, kv->value + index * sizeof *out, sizeof *out);
    return true;
}

bool spk_kv_bool(const spk_kv *kv, bool *out) {
    if (kv == NULL || kv->type != SPK_KV_BOOL) return false;
    *out = kv->value[0] != 0;
    return true;
}

/* The string at `at`, which parsing has checked; returns the byte after it. */
static const uint8_t *load_text(const uint8_t *at, spk_text *out) {
    memcpy(&out->size_bytes, at, sizeof out->size_bytes);
    out->bytes = (const char *)at + sizeof out->size_bytes;
    return at + sizeof out->size_bytes + out->size_bytes;
}

bool spk_kv_text(const spk_kv *kv, spk_text *out) {
    if (kv == NULL || kv->type != SPK_KV_STRING) return false;
    load_text(kv->value, out);
    return true;
}

bool spk_kv_next_text(const spk_kv *kv, const uint8_t **cursor, spk_text *out) {
    if (kv == NULL || kv->type != SPK_KV_ARRAY || kv->element_type != SPK_KV_STRING) return false;
    if (*cursor == NULL) *cursor = kv->value;
    if (*cursor == kv->value + kv->value_bytes) return false;
    *cursor = load_text(*cursor, out);
    return true;
}
