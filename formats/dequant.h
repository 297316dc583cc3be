/* formats/dequant.h - GGML blocks to floats; the meaning of every weight type, and nothing else.
 *
 * Pure functions: no I/O, no allocation, thread-safe.  Arithmetic is exact F32 per the format's formula
 * (compiled without contraction), so results are the same on every machine.
 */
#ifndef SPK_DEQUANT_H
#define SPK_DEQUANT_H

#include <stdint.h>
#include "formats/blocks.h"
#include "formats/status.h"

/* out[0..count) from blocks of `type` lying one after another.  count is a multiple of the type's
 * block_weights (asserted), type is in the type table (asserted).  `blocks` needs no alignment. */
void spk_dequantize(uint32_t type, const void *blocks, uint64_t count, float *out);

/* Bytes of `count` weights of a type; SPK_E_SHAPE if count is not a multiple of the block, SPK_E_LIMIT on
 * overflow.  `type` must be in the table. */
SPK_MUST_CHECK spk_status spk_type_bytes(uint32_t type, uint64_t count, uint64_t *out_bytes, spk_error *err);

/* Look for a block whose scales are NaN or infinite (for float types: any such weight).  Returns the index of
 * the first bad block, or UINT64_MAX if all is finite. */
uint64_t spk_find_nonfinite(uint32_t type, const void *blocks, uint64_t block_count);

#endif
