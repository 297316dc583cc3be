/* runtime/strings.c - byte strings with numbers, and the way back from bytes to number.
 *
 * Strings need not be distinct: a vocabulary may hold two equal tokens, or tokens that must not be found.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "formats/name_index.h"
#include "runtime/tokenizer_internal.h"

static uint32_t hash_of(const char *bytes, size_t size_bytes) {
    return (uint32_t)(XXH3_64bits_withSeed(bytes, size_bytes, spk_hash_seed()) >> 32);
}

const char *spk_strings_at(const spk_strings *strings, uint32_t index, size_t *size_bytes) {
    const uint32_t start = index ? strings->ends[index - 1] : 0;
    *size_bytes = strings->ends[index] - start;
    return strings->bytes + start;
}

/* The slot that holds an equal string, or the empty one where it belongs. */
static spk_string_slot *slot_of(const spk_strings *strings, uint32_t hash, const char *bytes, size_t size_bytes) {
    const uint64_t mask = strings->slot_count - 1;
    for (uint64_t i = hash & mask;; i = (i + 1) & mask) {
        spk_string_slot *slot = &strings->slots[i];
        if (!slot->index_plus_1) return slot;
        if (slot->hash != hash) continue;
        size_t found_bytes;
        const char *found = spk_strings_at(strings, slot->index_plus_1 - 1, &found_bytes);
        if (found_bytes == size_bytes && memcmp(found, bytes, size_bytes) == 0) return slot;
    }
}

uint32_t spk_strings_find(const spk_strings *strings, const char *bytes, size_t size_bytes) {
    if (!strings->slot_count) return SPK_STRING_NONE;
    /* An empty slot holds 0, and 0 - 1 is SPK_STRING_NONE. */
    return slot_of(strings, hash_of(bytes, size_bytes), bytes, size_bytes)->index_plus_1 - 1;
}

static spk_status grow_slots(spk_strings *strings, spk_error *err) {
    const uint64_t count = strings->slot_count ? strings->slot_count * 2 : 1024;
    spk_string_slot *slots = calloc(count, sizeof *slots);
    if (!slots) return spk_fail(err, SPK_E_MEMORY, "no memory for %" PRIu64 " strings", count);
    for (uint64_t i = 0; i < strings->slot_count; i++) {
        const spk_string_slot old = strings->slots[i];
        if (!old.index_plus_1) continue;
        uint64_t to = old.hash & (count - 1);
        while (slots[to].index_plus_1) to = (to + 1) & (count - 1);
        slots[to] = old;
    }
    free(strings->slots);
    strings->slots = slots;
    strings->slot_count = count;
    return SPK_OK;
}

static spk_status reserve(spk_strings *strings, size_t size_bytes, spk_error *err) {
    if (size_bytes > SPK_TOKENIZER_VOCAB_BYTES_MAX - strings->bytes_size)
        return spk_fail(err, SPK_E_LIMIT, "tokens and merges take more than %" PRIu64 " bytes",
                        SPK_TOKENIZER_VOCAB_BYTES_MAX);
    if (strings->bytes_size + size_bytes > strings->bytes_capacity) {
        const uint64_t capacity = (strings->bytes_size + size_bytes) * 2 + 64;
        char *bytes = realloc(strings->bytes, capacity);
        if (!bytes) return spk_fail(err, SPK_E_MEMORY, "no memory for %" PRIu64 " bytes of tokens", capacity);
        strings->bytes = bytes;
        strings->bytes_capacity = capacity;
    }
    if (strings->count == strings->capacity) {
        const uint32_t capacity = strings->capacity * 2 + 64;
        uint32_t *ends = realloc(strings->ends, capacity * sizeof *ends);
        if (!ends) return spk_fail(err, SPK_E_MEMORY, "no memory for %" PRIu32 " tokens", capacity);
        strings->ends = ends;
        strings->capacity = capacity;
    }
    return strings->findable_count * UINT64_C(2) >= strings->slot_count ? grow_slots(strings, err) : SPK_OK;
}

spk_status spk_strings_add(spk_strings *strings, const char *bytes, size_t size_bytes, bool findable, spk_error *err) {
    SPK_TRY(reserve(strings, size_bytes, err));
    if (size_bytes) memcpy(strings->bytes + strings->bytes_size, bytes, size_bytes);
    strings->bytes_size += size_bytes;
    strings->ends[strings->count++] = (uint32_t)strings->bytes_size;
    if (findable) {
        const uint32_t hash = hash_of(bytes, size_bytes);
        spk_string_slot *slot = slot_of(strings, hash, bytes, size_bytes);
        if (!slot->index_plus_1) {
            *slot = (spk_string_slot){ .hash = hash, .index_plus_1 = strings->count };
            strings->findable_count++;
        }
    }
    return SPK_OK;
}

void spk_strings_free(spk_strings *strings) {
    free(strings->bytes);
    free(strings->ends);
    free(strings->slots);
    *strings = (spk_strings){0};
}
