/* formats/utf8.h - strict UTF-8, one character at a time. */
#ifndef SPK_UTF8_H
#define SPK_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define SPK_UTF8_REPLACEMENT "\xEF\xBF\xBD"   /* U+FFFD, for what is no character */

/* Looks at bytes[0..size), size >= 1.  Returns how many bytes belong together: a whole character, whose code point
 * goes to *code, or else the longest start of one.  *wanted is the length that the first byte announces, 0 if no
 * character starts with it; the character is whole if and only if the result equals *wanted.  Strict: no overlong
 * forms, no surrogates, nothing above U+10FFFF. */
size_t spk_utf8_decode(const unsigned char *bytes, size_t size, size_t *wanted, uint32_t *code);

#endif
