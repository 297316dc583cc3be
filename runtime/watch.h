/* runtime/watch.h - what matrices are multiplied with while a session evaluates tokens.  For calibration; CPU backends.
 *
 * A session that nobody watches pays one comparison for each group of products.
 */
#ifndef SPK_WATCH_H
#define SPK_WATCH_H

#include <stdint.h>
#include "formats/model.h"
#include "runtime/runtime.h"

/* The inputs of one matrix in one batch.  weight[t] is how much an error of output t counts: its factor in what the
 * layer adds to the residual stream (an expert's probability, the shared expert's gate, else 1), squared, over the mean
 * square of the stream after the addition, by which the next norm divides it.  Inputs of the LM head all weigh 1. */
typedef struct {
    uint64_t            tensor_index, matrix_index;
    uint32_t            count;                /* of vectors */
    const float *const *x;                    /* [count], each as wide as the matrix; borrowed during the call */
    const float        *weight;               /* [count], finite, >= 0 */
} spk_watched;

/* Called on the thread that evaluates, for every matrix that may be requantized and has inputs in a batch, always in the
 * same order.  Matrices that read the same vectors follow one another with equal x and weight. */
typedef void spk_watch_fn(void *context, const spk_watched *watched);

typedef struct spk_watch spk_watch;

/* SPK_E_UNSUPPORTED on a GPU backend.  One watch a session. */
SPK_MUST_CHECK spk_status spk_watch_start(spk_session *session, spk_watch_fn *fn, void *context, spk_watch **out,
                                          spk_error *err);
void spk_watch_stop(spk_watch *watch);                   /* before the session is destroyed; NULL is fine */

/* The model's tensors, by spk_watched.tensor_index, and its configuration. */
const spk_tensor       *spk_model_tensors(const spk_model *model, uint64_t *count);
const spk_model_config *spk_model_shape(const spk_model *model);

/* What the router of layer `layer` reads of the residual stream: rows[expert_count][hidden], each expert's row times the
 * norm's weights, less the mean of all experts, which changes no choice.  The model has experts. */
void spk_model_router_rows(const spk_model *model, uint32_t layer, float *rows);

#endif
