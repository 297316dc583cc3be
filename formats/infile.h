/* formats/infile.h - opening what must be a regular file. */
#ifndef SPK_INFILE_H
#define SPK_INFILE_H

#include <stdint.h>
#include "formats/status.h"

/* A directory, pipe, device or socket is SPK_E_IO, and is not waited for: opening a FIFO as usual blocks until
 * somebody writes to it.  `expected` completes the message: "a GGUF file".  *size_bytes gets the size at this moment.
 * The caller closes *fd. */
SPK_MUST_CHECK spk_status spk_infile_open(const char *path, const char *expected, int *fd, uint64_t *size_bytes,
                                          spk_error *err);

#endif
