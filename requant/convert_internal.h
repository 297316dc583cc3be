/* requant/convert_internal.h - what convert.c and pipeline.c share: a conversion's work, and filling one run of it. */
#ifndef SPK_CONVERT_INTERNAL_H
#define SPK_CONVERT_INTERNAL_H

#include "requant/convert.h"

/* Weights that are decoded, encoded and compared at a time: whole rows, and small enough for a core's cache. */
enum { SPK_CONVERT_STRETCH_WEIGHTS = 1 << 16 };

/* The files that weights come from. */
enum { SPK_CONVERT_SOURCE, SPK_CONVERT_WEIGHTS, SPK_CONVERT_FILE_COUNT };

/* options->weights against the source and the plan, whose types are chosen: fills counterparts and fitted_count, or
 * refuses, as spk_convert_plan_make says. */
SPK_MUST_CHECK spk_status spk_convert_check_weights(const spk_convert_options *options, spk_convert_plan *plan,
                                                    spk_error *err);
/* SPK_E_MEMORY, naming the file. */
spk_status spk_convert_out_of_memory(const spk_gguf *file, spk_error *err);

/* A conversion as the workers see it; immutable while they run. */
typedef struct {
    const spk_convert_options *options;
    const spk_convert_plan    *plan;
    spk_run                   *runs;
    uint64_t                   run_count;
    uint64_t                   run_bytes_max, piece_bytes_max;  /* over all runs, in the target's types */
    uint64_t                   stretch_weights_max;
} spk_convert_job;

/* One thread's buffers. */
typedef struct {
    uint8_t *rows;             /* [piece_bytes_max] rows of a piece in the target's type */
    uint8_t *source;           /* a stretch of rows that are requantized, as they are in their file */
    float   *weights, *decoded; /* [stretch_weights_max] that stretch, and what its requant decodes to */
} spk_convert_scratch;

/* Read, requantize where the plan says so, and lay out one run.  buffer[run->size_bytes] is written whole; errors[p]
 * gets the sums of piece p (zero where copied); passed_bytes, by file, the size of these rows there, whether they were
 * read or not.  Thread-safe, each thread with a scratch of its own. */
SPK_MUST_CHECK spk_status spk_convert_fill(const spk_convert_job *job, const spk_run *run,
                                           spk_convert_scratch *scratch, uint8_t *buffer,
                                           spk_quant_error errors[SPK_RUN_PIECE_MAX],
                                           uint64_t passed_bytes[SPK_CONVERT_FILE_COUNT], spk_error *err);

/* Fill all runs on worker threads and append them to the writer in order.  errors[tensor_count] gets the sums of each
 * tensor, added in the order of runs; digests, by file, the hash of all its parts' bytes (of a file that is used). */
SPK_MUST_CHECK spk_status spk_convert_pipeline(const spk_convert_job *job, spk_pack_writer *writer,
                                               spk_quant_error *errors, spk_digest digests[SPK_CONVERT_FILE_COUNT],
                                               spk_error *err);

#endif
