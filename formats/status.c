/* formats/status.c - see status.h. */
#include "formats/status.h"

#include <stdarg.h>
#include <stdio.h>

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
    va_list args;
    va_start(args, format);
    (void)vsnprintf(err->text, sizeof err->text, format, args);
    va_end(args);
    for (char *c = err->text; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = '?';
    return status;
}
