/* runtime/trial.h - what requantizing some tensors of a model would cost, without a pack: the model is opened once, single
 * tensors are replaced in memory, and both are run over the same windows of a text.
 *
 * The figures are those that spk-compare gives for a pack with these tensors: the same windows, kernels and statistics.
 * Windows are independent, so they are spread over threads, each with a session of its own; threads never change a result.
 * Runs on the CPU.
 */
#ifndef SPK_TRIAL_H
#define SPK_TRIAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "formats/model.h"
#include "formats/status.h"
#include "runtime/compare.h"

typedef struct spk_trial spk_trial;

enum { SPK_TRIAL_CTX_DEFAULT = 512 };
/* The base's logits are kept up to here; where they take more, the base runs again beside each candidate. */
#define SPK_TRIAL_KEPT_BYTES_MAX (UINT64_C(4) << 30)

typedef struct {
    const struct spk_gguf *model;    /* borrowed, must outlive the trial: what is tried is what is packed, also where another file
                                      * has taken its name */
    const char *text_path;           /* for messages */
    const char *text;                /* [text_bytes], borrowed during the call; tokenized by the model */
    size_t      text_bytes;
    uint64_t    ctx;                 /* tokens of a window; 0: SPK_TRIAL_CTX_DEFAULT, or the trained context */
    uint64_t    token_count_max;     /* use the first so many tokens */
    uint64_t    position_count_min;  /* a text with fewer positions is SPK_E_LIMIT */
    uint64_t    sample_positions;    /* of a sample: whole windows, evenly spread, of about so many positions */
    uint32_t    thread_count;        /* 0: all CPUs */
} spk_trial_options;

SPK_MUST_CHECK spk_status spk_trial_open(const spk_trial_options *options, spk_trial **out, spk_error *err);
void spk_trial_close(spk_trial *trial);                  /* NULL is fine */

uint64_t spk_trial_ctx(const spk_trial *trial);
uint64_t spk_trial_position_count(const spk_trial *trial, bool is_whole);

/* From the next measurement on, tensor `index` (of the file) of the candidate is `block`, in which it lies as `tensor`
 * says, with offset 0; a matrix that decode reads.  Takes `block` over, which free() frees; NULL: as in the model. */
void spk_trial_set(spk_trial *trial, uint64_t index, const spk_tensor *tensor, uint8_t *block);

/* The candidate against the model, over all positions of the text or over the sample. */
SPK_MUST_CHECK spk_status spk_trial_measure(spk_trial *trial, bool is_whole, spk_compare_summary *out, spk_error *err);

#endif
