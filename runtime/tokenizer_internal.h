/* runtime/tokenizer_internal.h - the parts of the tokenizer, bottom up: characters, pieces, merges, metadata.
 *
 *   text ── special tokens cut out (tokenizer.c) ──► fragments ── spk_splitter ──► pieces ── spk_bpe ──► token ids
 *
 * Everything is in bytes: the printable alphabet in which GGUF writes tokens and merges is undone once, at creation.
 */
#ifndef SPK_TOKENIZER_INTERNAL_H
#define SPK_TOKENIZER_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "formats/kv.h"
#include "formats/utf8.h"
#include "runtime/runtime.h"

enum {
    SPK_TOKENIZER_TOKEN_COUNT_MAX = 1 << 24,
    SPK_TOKENIZER_MERGE_COUNT_MAX = 1 << 24,
    SPK_TOKENIZER_SPECIAL_BYTES_MAX = 1024    /* text of one control or user-defined token */
};
#define SPK_TOKENIZER_TEXT_BYTES_MAX  (UINT64_C(1) << 30)   /* of one encode call */
#define SPK_TOKENIZER_VOCAB_BYTES_MAX (UINT64_C(1) << 30)   /* of all tokens and merges together */

/* ---- Characters: formats/utf8.c, unicode_classes.c ---- */

enum {
    SPK_CHAR_OTHER = 0,   /* punctuation, symbols, controls, unassigned, bytes that are not UTF-8 */
    SPK_CHAR_LETTER,      /* \p{L} */
    SPK_CHAR_NUMBER,      /* \p{N} */
    SPK_CHAR_MARK,        /* \p{M} */
    SPK_CHAR_SPACE,       /* White_Space, but for the next */
    SPK_CHAR_NEWLINE      /* \r and \n */
};
typedef struct { uint32_t first, last; uint8_t kind; } spk_char_range;
extern const spk_char_range spk_char_ranges[];
extern const size_t spk_char_range_count;

/* ---- Pre-tokenizer: splitter.c ---- */

typedef struct {
    uint8_t *kinds;       /* SPK_CHAR_* of every code point; MARK is folded into LETTER or OTHER */
} spk_splitter;

/* pre: "qwen2" or "qwen35"; anything else is SPK_E_UNSUPPORTED naming it and `where`. */
SPK_MUST_CHECK spk_status spk_splitter_init(spk_text pre, const char *where, spk_splitter *out, spk_error *err);
void spk_splitter_free(spk_splitter *splitter);
/* Bytes of the first piece of text[0..size_bytes), size_bytes >= 1; at least 1.  No
 * byte of a text that is split piece by piece is looked at more than a few times. */
size_t spk_splitter_next(const spk_splitter *splitter, const char *text, size_t size_bytes);

/* ---- Byte strings with numbers: strings.c ---- */

#define SPK_STRING_NONE UINT32_MAX

typedef struct { uint32_t hash, index_plus_1; } spk_string_slot;
typedef struct {
    char            *bytes;         /* all strings, one after another */
    uint64_t         bytes_size, bytes_capacity;
    uint32_t        *ends;          /* string i is bytes[i ? ends[i - 1] : 0 .. ends[i]) */
    uint32_t         count, capacity;
    spk_string_slot *slots;         /* open addressing over the findable strings */
    uint64_t         slot_count;
    uint32_t         findable_count;
} spk_strings;

/* Errors of these, and of merges below, do not name the file: tokenizer.c does.
 *
 * Append a string, which gets number `count`.  findable: spk_strings_find may return it; of equal strings the first
 * is found.  SPK_E_LIMIT beyond SPK_TOKENIZER_VOCAB_BYTES_MAX, SPK_E_MEMORY. */
SPK_MUST_CHECK spk_status spk_strings_add(spk_strings *strings, const char *bytes, size_t size_bytes, bool findable,
                                          spk_error *err);
/* SPK_STRING_NONE if there is none. */
uint32_t    spk_strings_find(const spk_strings *strings, const char *bytes, size_t size_bytes);
const char *spk_strings_at(const spk_strings *strings, uint32_t index, size_t *size_bytes);      /* index < count */
void        spk_strings_free(spk_strings *strings);      /* safe on a zeroed one */

/* ---- Merges: bpe.c ---- */

/* Growing list of token ids; zero-initialise, free ids. */
typedef struct { uint32_t *ids; size_t count, capacity; } spk_id_list;
SPK_MUST_CHECK spk_status spk_id_list_push(spk_id_list *list, uint32_t id, spk_error *err);

enum { SPK_BPE_ALPHABET_SIZE = 256 + 68 };
typedef struct { uint64_t pair; uint32_t rank, merged; } spk_merge_slot;
/* A symbol is the number of a string in `symbols`.  Numbers below token_count are token ids; the rest are strings
 * that only occur inside merges: they can be merged further, and are written as single bytes where they remain. */
typedef struct {
    uint8_t         byte_of[SPK_BPE_ALPHABET_SIZE];   /* the printable alphabet; 0: not in it (but see U+0100) */
    spk_strings     symbols;
    uint32_t        token_count;
    uint32_t        byte_symbols[256];
    spk_merge_slot *slots;          /* open addressing over pairs of symbols */
    uint64_t        slot_count;
} spk_bpe;

void spk_bpe_init(spk_bpe *bpe);
void spk_bpe_free(spk_bpe *bpe);    /* safe on a zeroed one */
/* Undo the printable alphabet; false if the text has a character outside it.  out has room for text.size_bytes. */
bool spk_bpe_decode(const spk_bpe *bpe, spk_text text, char *out, size_t *out_size);
/* Call once, when bpe->symbols holds the tokens and token_count is set.  Merges are lines "left right" in order of
 * rank; one that cannot apply to any text (no space, characters outside the alphabet) is ignored, and of equal
 * pairs the first counts.  buffer has room for the longest. */
SPK_MUST_CHECK spk_status spk_bpe_add_merges(spk_bpe *bpe, const spk_kv *merges, char *buffer, spk_error *err);

/* Memory of one encode call, reused from piece to piece; zero-initialise. */
typedef struct {
    struct spk_bpe_node *nodes;
    uint64_t            *heap;
    size_t               capacity;
} spk_bpe_work;
void spk_bpe_work_free(spk_bpe_work *work);

/* Append the ids of one piece: merge the adjacent pair of lowest rank, leftmost first, until none is left.
 * O(n log n).  SPK_E_MISSING if a byte has no token. */
SPK_MUST_CHECK spk_status spk_bpe_encode(const spk_bpe *bpe, const char *piece, size_t size_bytes, spk_bpe_work *work,
                                         spk_id_list *out, spk_error *err);

/* ---- The tokenizer of a model's metadata: tokenizer.c ---- */

/* `where` names the file in messages.  kvs must outlive the call only. */
SPK_MUST_CHECK spk_status spk_tokenizer_from_kvs(const spk_kv_set *kvs, const char *where, spk_tokenizer **out,
                                                 spk_error *err);
uint32_t spk_tokenizer_token_count(const spk_tokenizer *tokenizer);

#endif
