/* requant/convert_internal.h - what convert.c and pipeline.c share: a conversion's work, and filling one run of it. */
#ifndef SPK_CONVERT_INTERNAL_H
#define SPK_CONVERT_INTERNAL_H

#include "requant/convert.h"

/* Weights that are decoded, encoded and compared at a time: whole rows, and small enough for a core's cache. */
enum { SPK_CONVERT_STRETCH_WEIGHTS = 1 << 16 };
/* A GPU gets so many stretches at a time; errors are summed by stretches all the same, and so are equal. */
enum { SPK_CONVERT_GPU_STRETCHES = 8 };

/* The files that weights come from. */
enum { SPK_CONVERT_SOURCE, SPK_CONVERT_WEIGHTS, SPK_CONVERT_FILE_COUNT };

/* options->weights against the source and the plan, whose types are chosen: fills counterparts and fitted_count, or
 * refuses, as spk_convert_plan_make says. */
SPK_MUST_CHECK spk_status spk_convert_check_weights(const spk_convert_options *options, spk_convert_plan *plan,
                                                    spk_error *err);
/* Looks up the moments of every tensor that options->calibration is for, and notes in the plan where there are none.  Every number
 * that the run will use is looked at: what is wrong is found now, and by a dry run, too. */
SPK_MUST_CHECK spk_status spk_convert_check_calibration(const spk_convert_options *options, spk_convert_plan *plan,
                                                        spk_error *err);
/* Adds a line to plan->importance_fallbacks. */
SPK_MUST_CHECK spk_status spk_convert_note_fallback(spk_convert_plan *plan, spk_error *err, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* True if a requant to this type uses moments where there are any. */
bool spk_convert_is_calibrated(const spk_convert_options *options, const spk_tensor *tensor);
/* As spk_quantize, for rows of one matrix of a calibrated tensor.  Rows of a matrix that lies in several runs are fitted
 * each by itself. */
SPK_MUST_CHECK spk_status spk_convert_quantize_calibrated(const spk_convert_options *options, const spk_convert_plan *plan,
                                                          const spk_tensor *tensor, uint64_t matrix_index,
                                                          const spk_quant_job *quant, spk_error *err);
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

/* The runs of a plan, and what room they need.  The caller frees out->runs. */
SPK_MUST_CHECK spk_status spk_convert_make_job(const spk_convert_options *options, const spk_convert_plan *plan,
                                               spk_convert_job *out, spk_error *err);

/* Names all that the data of the pack depend on, for a run that resumes: version, effort, the tensors as planned, the
 * importance of those that are requantized, and which files weights and calibration come from (not their bytes: device, inode,
 * size and time of change).  Whatever is to change the bytes of a pack belongs in here. */
SPK_MUST_CHECK spk_status spk_convert_job_digest(const spk_convert_job *job, spk_digest *out, spk_error *err);

/* One thread's buffers. */
typedef struct {
    uint8_t *rows;             /* [piece_bytes_max] rows of a piece in the target's type */
    uint8_t *source;           /* a stretch of rows that are requantized, as they are in their file */
    float   *weights, *decoded; /* [stretch_weights_max] that stretch, and what its requant decodes to */
    spk_quant_queue *queue;    /* NULL on a CPU; else weights are its memory */
} spk_convert_scratch;
bool spk_convert_scratch_alloc(const spk_convert_job *job, spk_convert_scratch *out);   /* false: out of memory, free it */
/* The scratch gets a queue of its own. */
SPK_MUST_CHECK spk_status spk_convert_scratch_use_gpu(const spk_convert_job *job, spk_convert_scratch *scratch, spk_error *err);
void spk_convert_scratch_free(spk_convert_scratch *scratch);

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
