/* formats/utf8.c - see utf8.h. */
#include "formats/utf8.h"

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
