/* formats/plain.c - see plain.h. */
#include "formats/plain.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "formats/utf8.h"

enum { UNIT_SIZE = 16 };                 /* room for one character as it is shown: "\u{10ffff}", "\udb40\udc41" */

bool spk_is_plain(uint32_t code) {
    static const struct { uint32_t first, last; } others[] = {
        { 0x0000, 0x001F },   { 0x007F, 0x009F },   { 0x00AD, 0x00AD },   { 0x034F, 0x034F },   { 0x061C, 0x061C },
        { 0x115F, 0x1160 },   { 0x17B4, 0x17B5 },   { 0x180B, 0x180F },   { 0x200B, 0x200F },   { 0x2028, 0x202E },
        { 0x2060, 0x206F },   { 0x3164, 0x3164 },   { 0xFDD0, 0xFDEF },   { 0xFEFF, 0xFEFF },   { 0xFFA0, 0xFFA0 },
        { 0xFFF0, 0xFFFB },   { 0x1BCA0, 0x1BCA3 }, { 0x1D173, 0x1D17A }, { 0xE0000, 0xE0FFF },
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (code >= others[i].first && code <= others[i].last) return false;
    return (code & 0xFFFE) != 0xFFFE;
}

/* The first character of text[0..size), size >= 1, as it is shown, into out; returns how many bytes it has. */
static size_t take(const char *text, size_t size, char out[UNIT_SIZE], size_t *out_size) {
    size_t wanted;
    uint32_t code;
    size_t count = spk_utf8_decode((const unsigned char *)text, size, &wanted, &code);
    int length;
    if (count != wanted) {
        count = 1;
        length = snprintf(out, UNIT_SIZE, "\\x%02x", (unsigned)(unsigned char)*text);
    } else if (!spk_is_plain(code)) {
        length = snprintf(out, UNIT_SIZE, "\\u{%x}", (unsigned)code);
    } else {
        memcpy(out, text, count);
        length = (int)count;
    }
    *out_size = (size_t)length;
    return count;
}

void spk_plain_into(const char *text, size_t head_bytes, char *out, size_t out_size) {
    assert(out_size >= UNIT_SIZE && head_bytes + UNIT_SIZE <= out_size);
    char unit[UNIT_SIZE];
    size_t size = strlen(text), total = 0, unit_size, used = 0, passed = 0, at = 0;
    while (at < size) {
        at += take(text + at, size - at, unit, &unit_size);
        total += unit_size;
    }
    bool is_whole = total < out_size;
    size_t tail_bytes = 0;
    for (at = 0; at < size;) {
        at += take(text + at, size - at, unit, &unit_size);
        if (!is_whole && tail_bytes == 0 && used + unit_size > head_bytes) {
            memcpy(out + used, "...", 3);
            used += 3;
            tail_bytes = out_size - 1 - used;
        }
        if (tail_bytes == 0 || total - passed <= tail_bytes) {
            memcpy(out + used, unit, unit_size);
            used += unit_size;
        }
        passed += unit_size;
    }
    out[used] = '\0';
}

spk_plain_text spk_plain(const char *text) {
    spk_plain_text result;
    spk_plain_into(text, SPK_PLAIN_SIZE / 2, result.text, sizeof result.text);
    return result;
}

/* As JSON escapes it: above U+FFFF in two halves. */
static size_t json_escape(uint32_t code, char out[UNIT_SIZE]) {
    int length = code <= 0xFFFF ? snprintf(out, UNIT_SIZE, "\\u%04x", (unsigned)code)
                                : snprintf(out, UNIT_SIZE, "\\u%04x\\u%04x", (unsigned)(0xD800 + ((code - 0x10000) >> 10)),
                                           (unsigned)(0xDC00 + (code & 0x3FF)));
    return (size_t)length;
}

char *spk_plain_json(const cJSON *root, bool is_indented) {
    char *raw = is_indented ? cJSON_Print(root) : cJSON_PrintUnformatted(root);
    size_t size = raw == NULL ? 0 : strlen(raw), used = 0;
    char *out = raw == NULL ? NULL : malloc(6 * size + 1);     /* a byte that is no UTF-8 becomes \ufffd */
    for (size_t at = 0, count; out != NULL && at < size; at += count) {
        size_t wanted;
        uint32_t code;
        count = spk_utf8_decode((const unsigned char *)raw + at, size - at, &wanted, &code);
        if (count != wanted) code = 0xFFFD;
        if (count == wanted && (spk_is_plain(code) || code < 0x20)) {     /* below 0x20 only what cJSON indents with is left */
            memcpy(out + used, raw + at, count);
            used += count;
        } else {
            used += json_escape(code, out + used);
        }
    }
    if (out != NULL) out[used] = '\0';
    cJSON_free(raw);
    return out;
}
