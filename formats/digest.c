/* formats/digest.c - see digest.h. */
#include "formats/digest.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#if defined(__x86_64__) && __has_include(<xxh_x86dispatch.h>)
#include <xxh_x86dispatch.h>             /* the same functions, in the widest vectors that the CPU has */
#endif

struct spk_digester {
    XXH3_state_t *state;
};

static spk_digest canonical(XXH128_hash_t hash) {
    XXH128_canonical_t bytes;
    XXH128_canonicalFromHash(&bytes, hash);
    spk_digest digest;
    memcpy(digest.bytes, bytes.digest, sizeof digest.bytes);
    return digest;
}

spk_digest spk_digest_of(const void *bytes, uint64_t size_bytes) {
    return canonical(XXH3_128bits(bytes, (size_t)size_bytes));
}

void spk_digest_text(const spk_digest *digest, char out[33]) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < sizeof digest->bytes; i++) {
        out[2 * i] = digits[digest->bytes[i] >> 4];
        out[2 * i + 1] = digits[digest->bytes[i] & 15];
    }
    out[32] = '\0';
}

spk_status spk_digester_create(spk_digester **out, spk_error *err) {
    spk_digester *digester = calloc(1, sizeof *digester);
    if (digester != NULL) digester->state = XXH3_createState();
    if (digester == NULL || digester->state == NULL) {
        free(digester);
        return spk_fail(err, SPK_E_MEMORY, "out of memory for a digest");
    }
    spk_digester_reset(digester);
    *out = digester;
    return SPK_OK;
}

void spk_digester_reset(spk_digester *digester) { (void)XXH3_128bits_reset(digester->state); }

void spk_digester_add(spk_digester *digester, const void *bytes, uint64_t size_bytes) {
    (void)XXH3_128bits_update(digester->state, bytes, (size_t)size_bytes);
}

spk_digest spk_digester_result(const spk_digester *digester) { return canonical(XXH3_128bits_digest(digester->state)); }

void spk_digester_destroy(spk_digester *digester) {
    if (digester == NULL) return;
    (void)XXH3_freeState(digester->state);
    free(digester);
}
