/* runtime/utf8.c - strict UTF-8: one character, and a stream that is cut anywhere.
 *
 * Tokens end in the middle of characters, so text is printed through the stream.  Invalid input follows Unicode's
 * recommendation: each longest start of a character becomes one U+FFFD.
 */
#include <string.h>
#include "runtime/tokenizer_internal.h"

size_t spk_utf8_decode(const unsigned char *bytes, size_t size, size_t *wanted, uint32_t *code) {
    const unsigned lead = bytes[0];
    *wanted = lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
    if (*wanted <= 1) {
        *code = lead;
        return 1;
    }
    /* Overlong forms, surrogates and too large values all show in the second byte. */
    const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    uint32_t value = lead & (0xFFu >> (*wanted + 1));
    size_t count = 1;
    for (; count < *wanted && count < size; count++) {
        const unsigned next = bytes[count];
        if (next < (count == 1 ? low : 0x80u) || next > (count == 1 ? high : 0xBFu)) break;
        value = value << 6 | (next & 0x3F);
    }
    *code = value;
    return count;
}

static size_t put_replacement(char *out) {
    memcpy(out, "\xEF\xBF\xBD", 3);
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
