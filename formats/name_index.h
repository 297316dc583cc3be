/* formats/name_index.h - find things by name in constant time.
 *
 * A hash over names that live elsewhere (an array of entries or tensors): it stores item indexes only.  Finds
 * duplicates in O(n), which matters because counts come from files.
 */
#ifndef SPK_NAME_INDEX_H
#define SPK_NAME_INDEX_H

#include <stdint.h>
#include "formats/kv.h"
#include "formats/status.h"

#define SPK_NAME_NONE UINT64_MAX

/* Drawn once a process, for hashes of what comes from files: with a known one, names can be made that all meet in one place, and finding
 * them takes hours.  Never 0; nothing that is written depends on it.  Thread-safe. */
uint64_t spk_hash_seed(void);

/* The name of items[index]. */
typedef spk_text spk_name_of(const void *items, uint64_t index);

/* Index `count` items (below 2^31) of the file `where`.  The caller frees *out_slots.  *duplicate gets the first item that
 * has the name of an earlier one, or SPK_NAME_NONE.  Only SPK_E_MEMORY can fail. */
SPK_MUST_CHECK spk_status spk_name_index_build(const void *items, uint64_t count, spk_name_of *name_of, const char *where,
                                               uint32_t **out_slots, uint64_t *out_slot_count, uint64_t *duplicate,
                                               spk_error *err);
/* The item of that name (of duplicates the first), or SPK_NAME_NONE.  slot_count 0 means an empty index. */
uint64_t spk_name_index_find(const uint32_t *slots, uint64_t slot_count, const void *items, spk_name_of *name_of,
                             spk_text name);

#endif
