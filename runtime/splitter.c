/* runtime/splitter.c - the pre-tokenizer: cuts text into the pieces inside which merges happen.
 *
 * Both patterns are ordered alternatives, tried at each place, the first that matches wins:
 *
 *   qwen2   (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N} | ?[^\s\p{L}\p{N}]+[\r\n]*
 *           | \s*[\r\n]+ | \s+(?!\S) | \s+
 *   qwen35  the same with [\p{L}\p{M}] for \p{L}
 *
 * so marks behave as letters in qwen35 and as punctuation in qwen2, and the scanner below sees no difference.
 * The contractions ignore case in ASCII alone (as llama.cpp; U+017F is no s here).  A byte that is not part of valid
 * UTF-8 is a character of its own that is neither letter, number nor space.
 */
#include <stdlib.h>
#include "runtime/tokenizer_internal.h"

enum { CODE_COUNT = 0x110000 };

spk_status spk_splitter_init(spk_text pre, const char *where, spk_splitter *out, spk_error *err) {
    uint8_t mark_kind;
    if (spk_text_equal(pre, "qwen2")) {
        mark_kind = SPK_CHAR_OTHER;
    } else if (spk_text_equal(pre, "qwen35")) {
        mark_kind = SPK_CHAR_LETTER;
    } else {
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: pre-tokenizer '%.*s' is not supported (qwen2 and qwen35 are)",
                        where, (int)(pre.size_bytes < 64 ? pre.size_bytes : 64), pre.bytes);
    }
    uint8_t *kinds = calloc(CODE_COUNT, 1);
    if (!kinds) return spk_fail(err, SPK_E_MEMORY, "%s: no memory for the tokenizer", where);
    for (size_t i = 0; i < spk_char_range_count; i++) {
        const spk_char_range *range = &spk_char_ranges[i];
        for (uint32_t code = range->first; code <= range->last; code++)
            kinds[code] = range->kind == SPK_CHAR_MARK ? mark_kind : range->kind;
    }
    out->kinds = kinds;
    return SPK_OK;
}

void spk_splitter_free(spk_splitter *splitter) {
    free(splitter->kinds);
    splitter->kinds = NULL;
}

/* A place in the text and the character there; length 0 at the end of the text. */
typedef struct {
    const uint8_t       *kinds;
    const unsigned char *text;
    size_t               size, at, length;
    unsigned             kind;      /* SPK_CHAR_*, or at the end: */
} cursor;
enum { KIND_END = 255 };

static inline void look(cursor *c) {
    if (c->at >= c->size) {
        c->length = 0;
        c->kind = KIND_END;
        return;
    }
    const unsigned lead = c->text[c->at];
    c->length = 1;
    if (lead < 0x80) {
        c->kind = c->kinds[lead];
        return;
    }
    size_t wanted;
    uint32_t code;
    const size_t count = spk_utf8_decode(c->text + c->at, c->size - c->at, &wanted, &code);
    c->kind = SPK_CHAR_OTHER;
    if (count == wanted) {
        c->kind = c->kinds[code];
        c->length = count;
    }
}

static inline void step(cursor *c) {
    c->at += c->length;
    look(c);
}

static void skip(cursor *c, unsigned kind) {
    while (c->kind == kind) step(c);
}

/* Bytes of 's 't 'm 'd 're 've 'll in either case at an apostrophe, or 0. */
static size_t contraction(const unsigned char *text, size_t size) {
    if (size < 2) return 0;
    const unsigned first = text[1] | 0x20u;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
    if (size < 3) return 0;
    const unsigned second = text[2] | 0x20u;
    return ((first == 'r' || first == 'v') && second == 'e') || (first == 'l' && second == 'l') ? 3 : 0;
}

/* The three alternatives that are only white space; c is at its first character. */
static size_t white_space(cursor *c) {
    size_t after_newline = 0, last = 0;
    while (c->kind == SPK_CHAR_SPACE || c->kind == SPK_CHAR_NEWLINE) {
        last = c->at;
        const bool newline = c->kind == SPK_CHAR_NEWLINE;
        step(c);
        if (newline) after_newline = c->at;
    }
    if (after_newline) return after_newline;
    /* The last one is left for the word that follows, if it is not all there is. */
    return c->kind != KIND_END && last > 0 ? last : c->at;
}

size_t spk_splitter_next(const spk_splitter *splitter, const char *text, size_t size_bytes) {
    cursor c = { .kinds = splitter->kinds, .text = (const unsigned char *)text, .size = size_bytes };
    look(&c);
    if (c.text[0] == '\'') {
        const size_t size = contraction(c.text, size_bytes);
        if (size) return size;
    }
    if (c.kind == SPK_CHAR_NUMBER) return c.length;
    if (c.kind == SPK_CHAR_LETTER) {
        skip(&c, SPK_CHAR_LETTER);
        return c.at;
    }
    if (c.kind != SPK_CHAR_NEWLINE) {
        cursor next = c;
        step(&next);
        if (next.kind == SPK_CHAR_LETTER) {
            skip(&next, SPK_CHAR_LETTER);
            return next.at;
        }
        if (c.kind == SPK_CHAR_OTHER || (c.text[0] == ' ' && next.kind == SPK_CHAR_OTHER)) {
            skip(&next, SPK_CHAR_OTHER);
            skip(&next, SPK_CHAR_NEWLINE);
            return next.at;
        }
    }
    return white_space(&c);
}
