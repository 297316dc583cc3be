/* runtime/utf8.c - a stream of UTF-8 that is cut anywhere.
 *
 * Tokens end in the middle of characters, so text is printed through the stream.  Invalid input follows Unicode's
 * recommendation: each longest start of a character becomes one U+FFFD.
 */
#include <string.h>
#include "formats/utf8.h"
#include "runtime/runtime.h"

static size_t put_replacement(char *out) {
    memcpy(out, SPK_UTF8_REPLACEMENT, 3);
    return 3;
}

/* Moves what is decided from pending to out. */
static size_t drain(spk_utf8_stream *stream, char *out) {
    size_t written = 0;
    while (stream->pending_count) {
        size_t wanted;
        uint32_t code;
        const size_t count = spk_utf8_decode(stream->pending, stream->pending_count, &wanted, &code);
        if (count == wanted) {
            memcpy(out + written, stream->pending, count);
            written += count;
        } else if (count == stream->pending_count && count < wanted) {
            break;
        } else {
            written += put_replacement(out + written);
        }
        stream->pending_count -= (unsigned)count;
        memmove(stream->pending, stream->pending + count, stream->pending_count);
    }
    return written;
}

size_t spk_utf8_push(spk_utf8_stream *stream, const char *bytes, size_t size_bytes, bool flush, char *out) {
    size_t written = 0;
    for (size_t i = 0; i < size_bytes; i++) {
        stream->pending[stream->pending_count++] = (unsigned char)bytes[i];
        written += drain(stream, out + written);
    }
    if (flush && stream->pending_count) {
        stream->pending_count = 0;
        written += put_replacement(out + written);
    }
    return written;
}
