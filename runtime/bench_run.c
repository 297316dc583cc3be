/* runtime/bench_run.c - see bench_run.h. */
#include "runtime/bench_run.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

double spk_bench_now_s(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

spk_status spk_bench_start(const spk_model *model, const uint32_t *tokens, const spk_session_options *options,
                           spk_bench_run *run, spk_error *err) {
    run->model = model;
    run->tokens = tokens;
    run->logits = malloc(sizeof *run->logits * spk_model_vocab_size(model));
    if (run->logits == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    return spk_session_create(model, options, &run->session, err);
}

void spk_bench_end(spk_bench_run *run) {
    spk_session_destroy(run->session);
    free(run->logits);
    run->session = NULL;
    run->logits = NULL;
}

bool spk_bench_is_on_gpu(const spk_model *model) { return strcmp(spk_model_backend_name(model), "cuda") == 0; }

spk_status spk_bench_prefill(spk_bench_run *run, uint32_t count, double *out, spk_error *err) {
    spk_session_reset(run->session);
    double start_s = spk_bench_now_s();
    SPK_TRY(spk_session_eval(run->session, run->tokens, count, SPK_LOGITS_LAST, run->logits, err));
    *out = count / (spk_bench_now_s() - start_s);
    return SPK_OK;
}

spk_status spk_bench_go_to(spk_bench_run *run, uint32_t context, spk_error *err) {
    if (spk_session_position(run->session) > context) spk_session_reset(run->session);
    uint32_t position = spk_session_position(run->session);
    return spk_session_eval(run->session, run->tokens + position, context - position, SPK_LOGITS_NONE, NULL, err);
}

spk_status spk_bench_decode(spk_bench_run *run, uint32_t count, double *out, spk_error *err) {
    uint32_t step = spk_bench_is_on_gpu(run->model) ? count : 1;
    double start_s = spk_bench_now_s();
    for (uint32_t i = 0; i < count; i += step)
        SPK_TRY(spk_session_eval(run->session, run->tokens + spk_session_position(run->session), step, SPK_LOGITS_LAST,
                                 run->logits, err));
    *out = count / (spk_bench_now_s() - start_s);
    return SPK_OK;
}
