/* formats/infile.h - opening what must be a regular file, and what it seems to be where it is not what was expected. */
#ifndef SPK_INFILE_H
#define SPK_INFILE_H

#include <stdint.h>
#include "formats/status.h"

/* A directory, pipe, device or socket is SPK_E_IO, and is not waited for: opening a FIFO as usual blocks until
 * somebody writes to it.  `expected` completes the message: "a GGUF file".  *size_bytes gets the size at this moment.
 * The caller closes *fd. */
SPK_MUST_CHECK spk_status spk_infile_open(const char *path, const char *expected, int *fd, uint64_t *size_bytes,
                                          spk_error *err);

/* What a file with these first bytes (more of them are no harm) seems to be, as "not GGUF but ..." goes on; NULL if we have no
 * idea. */
const char *spk_infile_kind(const uint8_t *bytes, uint64_t size_bytes);

#endif
