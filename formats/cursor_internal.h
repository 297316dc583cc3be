/* formats/cursor_internal.h - bounded reading of little-endian fields; private to formats/. */
#ifndef SPK_CURSOR_INTERNAL_H
#define SPK_CURSOR_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* at <= size_bytes always holds, so that "left" cannot wrap. */
typedef struct {
    const uint8_t *bytes;
    uint64_t       size_bytes, at;
} spk_cursor;

static inline uint64_t spk_cursor_left(const spk_cursor *cursor) { return cursor->size_bytes - cursor->at; }

static inline const uint8_t *spk_cursor_here(const spk_cursor *cursor) { return cursor->bytes + cursor->at; }

/* Copy the next bytes to `out` and step over them; false, and no step, if fewer are left. */
static inline bool spk_cursor_take(spk_cursor *cursor, void *out, uint64_t size_bytes) {
    if (size_bytes > spk_cursor_left(cursor)) return false;
    memcpy(out, spk_cursor_here(cursor), size_bytes);
    cursor->at += size_bytes;
    return true;
}

#endif
