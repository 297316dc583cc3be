/* runtime/gpu_account.c - where the time of one step goes.
 *
 * Beginnings of the step of growing length are recorded and replayed, all at one position: what one more kernel adds is its time,
 * with all that it overlaps with.  So phases add up to the whole, and no kernel is changed to be measured.
 */
#include "runtime/gpu_internal.h"

#include <stdlib.h>
#include <string.h>

enum { RUNS = 8, TICKS = 64 };           /* replays in one measurement; kernels that do nothing, for the cost of one */

void spk_gpu_account_mark(spk_account *a, spk_phase phase, uint32_t kernel_count, uint64_t bytes) {
    for (; a->kernel_count < kernel_count; a->kernel_count++)
        if (a->kernel_count < SPK_ACCOUNT_KERNELS_MAX) a->phase_of[a->kernel_count] = (uint8_t)phase;
    a->phases[phase].bytes += bytes;
}

/* The first kernel_count kernels of the session's step, and a tick. */
static spk_status record_part(spk_gpu_session *s, uint32_t kernel_count, spk_account *account, spk_cuda_step **out, spk_error *err) {
    SPK_TRY(spk_cuda_step_begin_part(s->cuda, kernel_count, err));
    s->is_sampled = s->is_account = true;
    s->account = account;
    spk_gpu_record_step(s);
    s->account = NULL;
    s->is_account = false;
    spk_cuda_launch_tick(s->cuda, s->sequence.d_step);
    return spk_cuda_step_end(s->cuda, out, err);
}
static spk_status record_ticks(spk_gpu_session *s, uint32_t count, spk_cuda_step **out, spk_error *err) {
    SPK_TRY(spk_cuda_step_begin(s->cuda, err));
    for (uint32_t i = 0; i < count; i++) spk_cuda_launch_tick(s->cuda, s->sequence.d_step);
    return spk_cuda_step_end(s->cuda, out, err);
}

/* Seconds of one replay: the least of repeat_count measurements, for what disturbs only adds.  Frees the step. */
static spk_status time_step(spk_gpu_session *s, spk_cuda_step *step, uint32_t repeat_count, double *out_s, spk_error *err) {
    spk_status status = SPK_OK;
    for (uint32_t r = 0; r <= repeat_count && status == SPK_OK; r++) {       /* the first warms up */
        const double start_s = spk_gpu_now_s();
        status = spk_cuda_step_run(s->cuda, step, RUNS, err);
        if (status == SPK_OK) status = spk_cuda_wait(s->cuda, err);
        const double each_s = (spk_gpu_now_s() - start_s) / RUNS;
        if (r == 1 || (r > 1 && each_s < *out_s)) *out_s = each_s;
    }
    spk_cuda_step_free(step);
    return status;
}

static spk_status time_phases(spk_gpu_session *s, uint32_t repeat_count, spk_account *a, spk_error *err) {
    spk_cuda_step *step = NULL;
    double before_s = 0, after_s = 0, ticks_s = 0;
    SPK_TRY(record_part(s, UINT32_MAX, a, &step, err));
    SPK_TRY(time_step(s, step, 1, &after_s, err));
    if (a->kernel_count > SPK_ACCOUNT_KERNELS_MAX)
        return spk_fail(err, SPK_E_LIMIT, "a step of %u kernels, expected at most %d", a->kernel_count, SPK_ACCOUNT_KERNELS_MAX);
    SPK_TRY(record_part(s, 0, NULL, &step, err));
    SPK_TRY(time_step(s, step, repeat_count, &before_s, err));
    a->replay_s = before_s;
    SPK_TRY(record_ticks(s, TICKS, &step, err));
    SPK_TRY(time_step(s, step, repeat_count, &ticks_s, err));
    a->node_s = (ticks_s - before_s) / (TICKS - 1);
    for (uint32_t i = 0; i < a->kernel_count; i++) {
        SPK_TRY(record_part(s, i + 1, NULL, &step, err));
        SPK_TRY(time_step(s, step, repeat_count, &after_s, err));
        a->phases[a->phase_of[i]].kernel_count++;
        a->phases[a->phase_of[i]].s += after_s - before_s;
        before_s = after_s;
    }
    return SPK_OK;
}

spk_status spk_gpu_account(spk_gpu_session *s, uint32_t position, uint32_t repeat_count, spk_account *out, spk_error *err) {
    static const uint32_t token = 0, open_end = SPK_CUDA_TOKEN_FREE;
    memset(out, 0, sizeof *out);
    SPK_TRY(spk_cuda_upload(s->cuda, s->sequence.d_tokens + position, &token, sizeof token, err));
    SPK_TRY(time_phases(s, repeat_count, out, err));
    spk_cuda_attention shape = spk_gpu_attention_shape(s);
    shape.context_tokens = position + 1;
    for (uint32_t i = 0; i < s->model->config.layer_count; i++)
        if (s->model->layers[i].is_attention) out->phases[SPK_PHASE_ATTENTION].bytes += 2 * spk_cuda_attention_cache_bytes(&shape);
    return spk_cuda_upload(s->cuda, s->sequence.d_tokens + position, &open_end, sizeof open_end, err);
}
