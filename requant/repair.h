/* requant/repair.h - damaged chunks of a pack, made again from the files that the pack was made from.
 *
 * The pack must open: only weights can be repaired, since what describes them says what to make.  A chunk is written only
 * when what was made has the chunk's digest, and then in its place, so a pack that is in use, or a repair that is killed, is
 * no worse than before.
 */
#ifndef SPK_REPAIR_H
#define SPK_REPAIR_H

#include "formats/gguf.h"
#include "requant/convert.h"
#include "requant/imatrix.h"

typedef struct {
    const spk_gguf    *source;           /* borrowed */
    /* Borrowed, or NULL; only looked at where provenance says that there was one, and for chunks with requantized weights. */
    const spk_gguf    *weights;          /* what requantized weights were fitted from */
    const spk_imatrix *imatrix;          /* what they were weighed with */
    const spk_calibration *calibration;  /* likewise, instead of an imatrix */
    /* Why such a file could not be opened: it stops only what cannot be made without it.  SPK_OK: there is nothing to say. */
    spk_error          no_weights, no_statistics;
    spk_convert_progress_fn *progress;   /* may be NULL; bytes read of the pack and the source */
    void              *progress_context;
} spk_repair_options;

typedef struct {
    uint64_t damaged_count, repaired_count;   /* chunks */
    uint64_t repaired_bytes;
} spk_repair_result;

/* SPK_E_MISMATCH where the source is not the one that the pack was made from (size and digest), where the pack's directory is not one
 * that spk-pack makes of it (types and places), or where a chunk comes out otherwise than it was, or cannot be made: without the imatrix,
 * calibration or file of better weights that was used, with another one, or with another version.  All chunks are tried, since most need
 * none of these; the message has the first that stays damaged and how many were repaired, and *result is filled in then, too. */
SPK_MUST_CHECK spk_status spk_repair(const char *pack_path, const spk_repair_options *options, spk_repair_result *result,
                                     spk_error *err);

#endif
