/* formats/name_index.c - open addressing with linear probing, at most half full; a slot holds index + 1, 0 is empty. */
#include "formats/name_index.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

uint64_t spk_hash_seed(void) {
    static _Atomic uint64_t drawn;
    uint64_t fresh, seed = atomic_load(&drawn);
    if (seed != 0) return seed;
    if (getrandom(&fresh, sizeof fresh, GRND_NONBLOCK) != sizeof fresh) {     /* early in a boot: what nobody knows in advance */
        struct timespec now = { 0 };
        (void)clock_gettime(CLOCK_MONOTONIC, &now);
        fresh = (uint64_t)(uintptr_t)&fresh ^ (uint64_t)now.tv_nsec << 32 ^ (uint64_t)getpid();
    }
    fresh |= 1;                          /* 0: not drawn yet */
    return atomic_compare_exchange_strong(&drawn, &seed, fresh) ? fresh : seed;
}

/* The slot that holds `name`, or the empty slot where it would go. */
static uint64_t slot_of(const uint32_t *slots, uint64_t slot_count, const void *items, spk_name_of *name_of,
                        spk_text name) {
    uint64_t mask = slot_count - 1, slot = XXH3_64bits_withSeed(name.bytes, name.size_bytes, spk_hash_seed()) & mask;
    while (slots[slot] != 0) {
        spk_text other = name_of(items, slots[slot] - 1);
        if (other.size_bytes == name.size_bytes && memcmp(other.bytes, name.bytes, name.size_bytes) == 0) break;
        slot = (slot + 1) & mask;
    }
    return slot;
}

spk_status spk_name_index_build(const void *items, uint64_t count, spk_name_of *name_of, const char *where,
                                uint32_t **out_slots, uint64_t *out_slot_count, uint64_t *duplicate, spk_error *err) {
    uint64_t slot_count = 4;
    while (slot_count < 2 * count) slot_count *= 2;
    uint32_t *slots = calloc(slot_count, sizeof *slots);
    if (slots == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for an index of %" PRIu64 " names", where, count);
    *duplicate = SPK_NAME_NONE;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t slot = slot_of(slots, slot_count, items, name_of, name_of(items, i));
        if (slots[slot] == 0)
            slots[slot] = (uint32_t)i + 1;
        else if (*duplicate == SPK_NAME_NONE)
            *duplicate = i;
    }
    *out_slots = slots;
    *out_slot_count = slot_count;
    return SPK_OK;
}

uint64_t spk_name_index_find(const uint32_t *slots, uint64_t slot_count, const void *items, spk_name_of *name_of,
                             spk_text name) {
    if (slot_count == 0) return SPK_NAME_NONE;
    uint32_t found = slots[slot_of(slots, slot_count, items, name_of, name)];
    return found == 0 ? SPK_NAME_NONE : found - 1;
}
