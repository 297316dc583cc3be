/* requant/calibration.h - what a model's matrices were multiplied with over a text: collected, written, read.
 *
 * The file is an importance matrix of llama.cpp (imatrix.h reads it, and so does llama.cpp) with more tensors, which others
 * ignore.  For a weight NAME with so many columns and matrices (experts):
 *
 *   NAME.in_sum2     F32 [cols, matrices]    sums of x^2: the imatrix
 *   NAME.counts      F32 [1, matrices]       how many vectors x each matrix has seen
 *   NAME.in_scale    F32 [cols, matrices]    s = sqrt(sum of w x^2 / sum of w), w as in the caller's hands
 *   NAME.in_moment   F16 [cols (cols - 1) / 2, matrices]    below the diagonal, row after row:
 *                    sum of w x[i] x[j] / (sum of w s[i] s[j]); absent of matrices that have importance alone
 *
 * And for what is added to the residual stream of layer N, by its mixer ("attn") and its feed-forward part ("ffn"), how
 * errors in its elements matter together, hidden x hidden, in the same form, with a mean of 1 on the diagonal:
 *
 *   blk.N.attn_out.scale [hidden], blk.N.attn_out.metric [hidden (hidden - 1) / 2], blk.N.ffn_out.scale, .metric
 */
#ifndef SPK_CALIBRATION_H
#define SPK_CALIBRATION_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/model.h"

enum { SPK_CALIBRATION_COLS_MAX = 1 << 15 };     /* of a matrix with moments: 2 GiB of them */

/* ---- Collecting ---- */

typedef struct spk_collector spk_collector;

typedef struct {
    const spk_tensor       *tensors;      /* of the model; borrowed while the collector lives, as is config */
    uint64_t                tensor_count;
    const spk_model_config *config;
    const char             *where;        /* the model's file, for messages; likewise */
    bool                    has_moments;  /* else an importance matrix alone */
    uint32_t                thread_count; /* 0: all CPUs.  Never changes a result */
} spk_collector_options;

SPK_MUST_CHECK spk_status spk_collector_create(const spk_collector_options *options, spk_collector **out, spk_error *err);
void spk_collector_destroy(spk_collector *collector);    /* NULL is fine */
uint64_t spk_collector_bytes(const spk_collector *collector);   /* of memory for sums */

/* Vectors x[count][cols] that one matrix was multiplied with, and their weights.  Of matrices that read the same vectors
 * (gate and up; q, k and v) only the first need be given; the others' are ignored.  Not thread-safe. */
void spk_collector_add(spk_collector *collector, uint64_t tensor_index, uint64_t matrix_index, uint32_t count,
                       const float *const *x, const float *weight);
/* Metric of what a layer adds: metric[hidden][hidden], symmetric, diagonal above 0; copied. */
SPK_MUST_CHECK spk_status spk_collector_set_metric(spk_collector *collector, uint32_t layer, bool is_mixer,
                                                   const float *metric, spk_error *err);

/* How errors in the residual stream matter to routers that read it: spk_metric_begin, then the rows that each router reads,
 * nearest first, then spk_metric_end, which leaves a mean of 1 on the diagonal. */
void spk_metric_begin(float *metric, uint64_t hidden);
void spk_metric_add_router(float *metric, uint64_t hidden, const float *rows, uint64_t row_count, uint32_t distance);
void spk_metric_end(float *metric, uint64_t hidden);
enum { SPK_METRIC_ROUTERS_MAX = 4 };     /* the next ones; what later ones would add is below one per cent */

typedef struct {
    const char *path;
    bool        replace;
    struct spk_outfile *file;      /* begun at path: spk_collector_write takes it over in every case; NULL: that begins it */
    const char *dataset;           /* name of the text */
    uint32_t    chunk_tokens;      /* tokens from one empty state to the next */
    uint32_t    chunk_count;
} spk_calibration_file;
SPK_MUST_CHECK spk_status spk_collector_write(const spk_collector *collector, const spk_calibration_file *file,
                                              spk_error *err);
/* Of the file that spk_collector_write would write: never less, and a little more. */
uint64_t spk_collector_file_bytes(const spk_collector *collector);
/* Matrices with moments of this tensor that saw too few vectors to use them. */
uint64_t spk_collector_few_count(const spk_collector *collector, uint64_t tensor_index);

/* ---- Reading ---- */

typedef struct spk_calibration spk_calibration;

/* SPK_E_MISMATCH for an importance matrix without moments; SPK_E_CORRUPT, SPK_E_LIMIT name the tensor, here for its shape and
 * type, below also for its values: scales are finite and >= 0, correlations between -1 and 1, and, where `out` is asked for, the
 * matrix positive definite once it is damped, else with expert and row. */
SPK_MUST_CHECK spk_status spk_calibration_open(const char *path, spk_calibration **out, spk_error *err);
void spk_calibration_close(spk_calibration *calibration);       /* NULL is fine */
const struct spk_gguf *spk_calibration_gguf(const spk_calibration *calibration);

typedef enum {
    SPK_CALIBRATION_FOUND = 0,
    SPK_CALIBRATION_ABSENT,        /* no moments of this tensor */
    SPK_CALIBRATION_FEW            /* this matrix has seen fewer vectors than it has columns, or none that weigh anything */
} spk_calibration_answer;

/* out[cols][cols] (NULL: only the answer): the moments, a little of their mean added to the diagonal, the mean of which
 * is then 1.  SPK_E_MISMATCH if the entry has another shape.  Thread-safe. */
SPK_MUST_CHECK spk_status spk_calibration_moment(const spk_calibration *calibration, const char *tensor_name,
                                                 uint64_t col_count, uint64_t matrix_count, uint64_t matrix_index,
                                                 spk_calibration_answer *answer, float *out, spk_error *err);
/* out[hidden][hidden]; FOUND or ABSENT. */
SPK_MUST_CHECK spk_status spk_calibration_metric(const spk_calibration *calibration, uint32_t layer, bool is_mixer,
                                                 uint64_t hidden, spk_calibration_answer *answer, float *out,
                                                 spk_error *err);

#endif
