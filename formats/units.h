/* formats/units.h - sizes as people read them. */
#ifndef SPK_UNITS_H
#define SPK_UNITS_H

#include <stdint.h>

enum { SPK_BYTES_TEXT_SIZE = 24 };
/* "22.1 GB", "417.2 MB", "36 B" (decimal units); returns out. */
const char *spk_bytes_text(uint64_t bytes, char out[SPK_BYTES_TEXT_SIZE]);

#endif
