/* formats/status.c - see status.h. */
#include "formats/status.h"

#include <stdarg.h>
#include <stdio.h>
#include "formats/plain.h"

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
    if (vsnprintf(full, sizeof full, format, args) < 0) full[0] = '\0';
    va_end(args);
    spk_plain_into(full, HEAD, err->text, sizeof err->text);   /* a long path in front does not push out what went wrong behind it */
    return status;
}

spk_status spk_fail_in(const char *where, spk_status status, spk_error *err) {
    if (status == SPK_OK || err == NULL) return status;
    spk_error inner = *err;
    return spk_fail(err, status, "%s: %s", where, inner.text);
}
