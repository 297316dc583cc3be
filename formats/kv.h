/* formats/kv.h - GGUF metadata: a parsed view of key-value entries in memory.
 *
 * A GGUF file and the META section of a pack hold the same bytes: entries one after another.  The set
 * borrows those bytes; they must outlive it.  Read-only after parsing, so safe to share over threads.
 */
#ifndef SPK_KV_H
#define SPK_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "formats/status.h"

enum {
    SPK_KV_U8 = 0, SPK_KV_I8 = 1, SPK_KV_U16 = 2, SPK_KV_I16 = 3, SPK_KV_U32 = 4, SPK_KV_I32 = 5,
    SPK_KV_F32 = 6, SPK_KV_BOOL = 7, SPK_KV_STRING = 8, SPK_KV_ARRAY = 9,
    SPK_KV_U64 = 10, SPK_KV_I64 = 11, SPK_KV_F64 = 12
};

enum {
    SPK_KV_COUNT_MAX     = 65536,
    SPK_KV_KEY_BYTES_MAX = 65535
};
#define SPK_KV_ARRAY_COUNT_MAX (UINT64_C(1) << 28)

/* Bytes in borrowed memory, not NUL-terminated; may hold any byte value. */
typedef struct {
    const char *bytes;
    uint64_t    size_bytes;
} spk_text;

bool spk_text_equal(spk_text a, const char *b);

typedef struct {
    spk_text       key;
    uint32_t       type;         /* SPK_KV_* */
    uint32_t       element_type; /* of an array, else equal to type; never ARRAY (nested arrays are refused) */
    uint64_t       count;        /* elements of an array, else 1 */
    const uint8_t *value;        /* first element; a string element is u64 length + bytes; unaligned */
    uint64_t       value_bytes;  /* from value to the end of the entry */
    const uint8_t *entry;        /* the whole entry as serialised: key, type, value */
    uint64_t       entry_bytes;
} spk_kv;

typedef struct {
    uint64_t  count;
    spk_kv   *items;             /* in file order */
    uint32_t *slots;             /* open-addressing hash over keys; private */
    uint64_t  slot_count;
} spk_kv_set;

/* Parse `count` entries at bytes[0..size_bytes).  `where` names the file in messages.
 * *used_bytes gets the number of bytes that the entries occupy.  Duplicate and empty keys, unknown types,
 * nested arrays, bools other than 0 and 1 and anything that reaches past size_bytes are SPK_E_CORRUPT;
 * counts past the limits above are SPK_E_LIMIT.  O(bytes). */
SPK_MUST_CHECK spk_status spk_kv_parse(const uint8_t *bytes, uint64_t size_bytes, uint64_t count,
                                       const char *where, spk_kv_set *out, uint64_t *used_bytes,
                                       spk_error *err);
void spk_kv_free(spk_kv_set *set);                       /* safe on a zeroed set */

/* NULL if there is no such key. */
const spk_kv *spk_kv_find(const spk_kv_set *set, const char *key);

/* Getters take scalars, or arrays by element index, of any integer width; false if the entry is NULL, of
 * another kind, out of the result's range, or index >= count. */
bool spk_kv_u64(const spk_kv *kv, uint64_t index, uint64_t *out);
bool spk_kv_scalar_u64(const spk_kv *kv, uint64_t *out);          /* no array, not even of one element */
bool spk_kv_f64(const spk_kv *kv, uint64_t index, double *out);   /* floats and integers */
bool spk_kv_bool(const spk_kv *kv, bool *out);
bool spk_kv_text(const spk_kv *kv, spk_text *out);                /* scalar string only */

/* Walk the strings of an array once, in order: start with *cursor = NULL; false at the end or if the entry
 * is not an array of strings.  O(1) a step (random access to packed strings would be O(n)). */
bool spk_kv_next_text(const spk_kv *kv, const uint8_t **cursor, spk_text *out);

#endif
