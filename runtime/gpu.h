/* runtime/gpu.h - the GPU side of a model and of a session; private to runtime/.
 *
 * A model's data sections lie on the device as they lie in the file.  A session records its decode step once, with the
 * fusions that were asked for, and replays it for every token; between tokens the host does nothing.
 */
#ifndef SPK_GPU_H
#define SPK_GPU_H

#include "runtime/runtime.h"

typedef struct spk_gpu_model spk_gpu_model;
typedef struct spk_gpu_session spk_gpu_session;

/* Starting the device takes some tenths of a second: begin it, open the model on the host meanwhile.  That there is no device
 * is said by spk_gpu_model_create. */
typedef struct spk_gpu_start spk_gpu_start;
SPK_MUST_CHECK spk_status spk_gpu_start_begin(spk_gpu_start **out, spk_error *err);
bool        spk_gpu_start_worked(spk_gpu_start *start);           /* waits for it */
void        spk_gpu_start_destroy(spk_gpu_start *start);          /* waits for it; NULL is fine */

/* Copy the weights of an opened (host) model to the device that was started.  SPK_E_UNSUPPORTED names the tensor or shape
 * that the kernels do not take, SPK_E_CHECKSUM the damaged chunk of a pack. */
SPK_MUST_CHECK spk_status spk_gpu_model_create(const spk_model *model, const spk_model_options *options,
                                               spk_gpu_start *start, spk_gpu_model **out, spk_error *err);
void        spk_gpu_model_destroy(spk_gpu_model *gpu);            /* NULL is fine */
const spk_load_times *spk_gpu_model_times(const spk_gpu_model *gpu);

SPK_MUST_CHECK spk_status spk_gpu_session_create(const spk_model *model, const spk_gpu_model *gpu, uint32_t context_tokens,
                                                 uint32_t fusions, bool kv_q8, spk_gpu_session **out, spk_error *err);
void     spk_gpu_session_destroy(spk_gpu_session *session);       /* NULL is fine */
uint64_t spk_gpu_session_bytes(const spk_gpu_session *session);

SPK_MUST_CHECK spk_status spk_gpu_reset(spk_gpu_session *session, spk_error *err);
/* As spk_session_eval, from `position`; arguments are checked by the caller. */
SPK_MUST_CHECK spk_status spk_gpu_eval(spk_gpu_session *session, uint32_t position, const uint32_t *tokens, uint32_t count,
                                       spk_logits which, float *logits, spk_error *err);

/* Evaluate *token at *position, and so on as spk_session_generate, until the limit, the end of the context (*token has been
 * chosen, but there is no room for it), a false from on_token (*stopped), or a token that cannot be chosen (*token is
 * SPK_TOKEN_NONE).  *token is the last that was chosen, *position where it belongs; it has not been evaluated. */
SPK_MUST_CHECK spk_status spk_gpu_generate(spk_gpu_session *session, uint32_t *position, uint32_t *token,
                                           const spk_generation *generation, bool *stopped, spk_error *err);

/* As spk_session_account, at `position`. */
SPK_MUST_CHECK spk_status spk_gpu_account(spk_gpu_session *session, uint32_t position, uint32_t repeat_count, spk_account *out,
                                          spk_error *err);

#endif
