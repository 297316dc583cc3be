/* formats/status.c - see status.h. */
#include "formats/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { LONGEST = 16384, HEAD = 120 };

const char *spk_status_name(spk_status status) {
    switch (status) {
    case SPK_OK:            return "SPK_OK";
    case SPK_E_IO:          return "SPK_E_IO";
    case SPK_E_MEMORY:      return "SPK_E_MEMORY";
    case SPK_E_EXISTS:      return "SPK_E_EXISTS";
    case SPK_E_SPACE:       return "SPK_E_SPACE";
    case SPK_E_MAGIC:       return "SPK_E_MAGIC";
    case SPK_E_VERSION:     return "SPK_E_VERSION";
    case SPK_E_CORRUPT:     return "SPK_E_CORRUPT";
    case SPK_E_CHECKSUM:    return "SPK_E_CHECKSUM";
    case SPK_E_LIMIT:       return "SPK_E_LIMIT";
    case SPK_E_SHAPE:       return "SPK_E_SHAPE";
    case SPK_E_NONFINITE:   return "SPK_E_NONFINITE";
    case SPK_E_MISSING:     return "SPK_E_MISSING";
    case SPK_E_MISMATCH:    return "SPK_E_MISMATCH";
    case SPK_E_UNSUPPORTED: return "SPK_E_UNSUPPORTED";
    case SPK_E_USAGE:       return "SPK_E_USAGE";
    }
    return "SPK_E_?";
}

spk_status spk_fail(spk_error *err, spk_status status, const char *format, ...) {
    if (err == NULL) return status;
    err->status = status;
    char full[LONGEST];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(full, sizeof full, format, args);
    va_end(args);
    size_t size = length < 0 ? 0 : (size_t)length < sizeof full ? (size_t)length : sizeof full - 1;
    if (size < sizeof err->text) {
        memcpy(err->text, full, size);
        err->text[size] = '\0';
    } else {   /* a long path in front must not push out what went wrong behind it */
        memcpy(err->text, full, HEAD);
        memcpy(err->text + HEAD, "...", 3);
        memcpy(err->text + HEAD + 3, full + size - (sizeof err->text - HEAD - 4), sizeof err->text - HEAD - 4);
        err->text[sizeof err->text - 1] = '\0';
    }
    for (char *c = err->text; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return status;
}
