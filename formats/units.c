/* formats/units.c - see units.h. */
#include "formats/units.h"

#include <stddef.h>
#include <stdio.h>

const char *spk_bytes_text(uint64_t bytes, char out[SPK_BYTES_TEXT_SIZE]) {
    static const char *const units[] = { "B", "kB", "MB", "GB", "TB", "PB" };
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 999.95 && unit + 1 < sizeof units / sizeof *units) value /= 1000, unit++;
    (void)snprintf(out, SPK_BYTES_TEXT_SIZE, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return out;
}
