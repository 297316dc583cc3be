/* runtime/gpu_generate.c - token after token without waiting for the host.
 *
 * A step chooses its successor's token on the device and also writes it into host memory.  The step after the running one
 * is always queued, so the host has the time of a whole step to see a token, hand it on and queue the next: the GPU goes
 * from step to step by itself.
 *
 * Where the caller stops at a token, the step that evaluates it has begun all the same, and is taken back by setting the
 * position: what it wrote into the caches is written again before it is read, the convolution's ring has one slot more than
 * is read, and of the recurrent state the one before a token is kept beside the one after it (SPK_CUDA_GDN_STATES).
 */
#include "runtime/gpu_internal.h"
#include "runtime/sample_internal.h"

#include <sched.h>

_Static_assert(SPK_CUDA_TOKEN_FREE == SPK_TOKEN_NONE, "kernels write the one where the caller looks for the other");
#define NOT_YET (SPK_TOKEN_NONE - 1)             /* in host memory, where a step will write a token; no token's id */
enum { RUN_AHEAD = 1,                            /* steps queued beyond the one whose token is awaited */
       POLLS_A_CHECK = 4096 };                   /* looks at the host memory between two at the stream, for its errors */

/* Steps that can be taken back. */
static uint32_t run_ahead(const spk_gpu_session *s) {
    const bool has_gdn = s->model->config.full_attention_interval > 1;
    return has_gdn && SPK_CUDA_GDN_STATES - 1 < RUN_AHEAD ? SPK_CUDA_GDN_STATES - 1 : RUN_AHEAD;
}

void spk_gpu_record_draw(spk_gpu_session *s) {
    spk_cuda_sample draw = { .sequence = s->sequence, .logits = s->logits, .vocab_size = s->model->config.vocab_size,
                             .d_sampling = s->d_sampling };
    spk_cuda_launch_sample(s->cuda, &draw);
}

/* The token that the step before `position` chose. */
static spk_status await(spk_gpu_session *s, uint32_t position, uint32_t *token, spk_error *err) {
    bool is_idle = false;
    for (uint32_t poll = 1;; poll++) {
        *token = __atomic_load_n(s->chosen + position, __ATOMIC_ACQUIRE);
        if (*token != NOT_YET) return SPK_OK;
        if (is_idle) return spk_fail(err, SPK_E_IO, "GPU: the step at position %u ended without a token", position - 1);
        if (poll % POLLS_A_CHECK == 0) SPK_TRY(spk_cuda_is_idle(s->cuda, &is_idle, err));
        else (void)sched_yield();
    }
}

/* `token` at `position`, then free places; the sampler's options and state. */
static spk_status prepare(spk_gpu_session *s, uint32_t position, uint32_t token, const spk_sampler *sampler, uint32_t step_limit,
                          spk_error *err) {
    for (uint32_t i = 1; i <= step_limit; i++) s->chosen[position + i] = NOT_YET;
    SPK_TRY(spk_cuda_upload(s->cuda, s->sequence.d_tokens + position, &token, sizeof token, err));
    SPK_TRY(spk_cuda_fill(s->cuda, s->sequence.d_tokens + position + 1, 0xff, step_limit * sizeof token, err));
    if (spk_sampler_is_greedy(sampler)) return SPK_OK;
    const spk_sampling plan = spk_sampler_plan(sampler);
    SPK_TRY(spk_cuda_upload(s->cuda, s->d_sampling, &plan, sizeof plan, err));
    return s->sampled_step != NULL ? SPK_OK : spk_gpu_record(s, true, &s->sampled_step, err);
}

spk_status spk_gpu_generate(spk_gpu_session *s, uint32_t *position, uint32_t *token, const spk_generation *g, bool *stopped,
                            spk_error *err) {
    const bool is_greedy = spk_sampler_is_greedy(g->sampler);
    const uint32_t first = *position, room = s->context_tokens - first, ahead = run_ahead(s);
    const uint32_t step_limit = g->token_limit < room ? g->token_limit : room;
    uint32_t queued = 0, done = 0;
    *stopped = false;
    SPK_TRY(prepare(s, first, *token, g->sampler, step_limit, err));
    const spk_cuda_step *step = is_greedy ? s->step : s->sampled_step;
    while (!*stopped && done < step_limit && *token != SPK_TOKEN_NONE) {
        const uint32_t wanted = step_limit - done - 1 < ahead ? step_limit : done + 1 + ahead;
        SPK_TRY(spk_cuda_step_run(s->cuda, step, wanted - queued, err));
        queued = wanted;
        SPK_TRY(await(s, first + ++done, token, err));
        if (*token == SPK_TOKEN_NONE) break;
        if (!is_greedy) g->sampler->state += SPK_SAMPLING_STATE_STEP;
        *stopped = !g->on_token(g->context, *token);
    }
    *position = first + done;
    return queued > done ? spk_cuda_upload(s->cuda, s->sequence.d_position, position, sizeof *position, err) : SPK_OK;
}
