/* formats/digest.h - XXH3-128, the digest of everything: sections and chunks of a pack, and source files.
 *
 * Finds damage, not malice.
 */
#ifndef SPK_DIGEST_H
#define SPK_DIGEST_H

#include <stdint.h>
#include "formats/status.h"

/* In canonical (big-endian) byte order, seed 0. */
typedef struct { uint8_t bytes[16]; } spk_digest;

spk_digest spk_digest_of(const void *bytes, uint64_t size_bytes);
/* 32 hexadecimal digits and a NUL. */
void spk_digest_text(const spk_digest *digest, char out[33]);

/* Of bytes that come in pieces. */
typedef struct spk_digester spk_digester;
SPK_MUST_CHECK spk_status spk_digester_create(spk_digester **out, spk_error *err);
void       spk_digester_reset(spk_digester *digester);           /* as it was created */
void       spk_digester_add(spk_digester *digester, const void *bytes, uint64_t size_bytes);
spk_digest spk_digester_result(const spk_digester *digester);    /* of all that was added; more may follow */
void       spk_digester_destroy(spk_digester *digester);         /* NULL is fine */

#endif
