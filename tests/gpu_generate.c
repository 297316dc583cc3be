/* tests/gpu_generate.c [--quick] [MODEL] - generation on a GPU: the promises of generate_check.h on the tiny models or on MODEL,
 * then the time between steps.  --quick is for a GPU that is emulated: a few of the promises.
 *
 *   make build/tests/gpu_generate && build/tests/gpu_generate
 *
 * Exits 77 where there is no GPU. */
#include <time.h>

#include "tests/generate_check.h"

enum { EXIT_SKIPPED = 77, TIMED_TOKENS = 256, TIMED_RUNS = 5 };

static double now_us(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static bool keep_on(void *context, uint32_t token) {
    (void)context;
    (void)token;
    return true;
}

/* us a token: TIMED_TOKENS replays queued at once, and as many generated. */
static spk_status time_session(spk_session *session, spk_sampler *sampler, double *queued_us, double *generated_us, spk_error *err) {
    static uint32_t tokens[TIMED_TOKENS];
    spk_generation g = { .sampler = sampler, .token_limit = TIMED_TOKENS, .on_token = keep_on };
    for (uint32_t i = 0; i < TIMED_TOKENS; i++) tokens[i] = (i * 7919 + 13) % 2000;
    *queued_us = *generated_us = 1e9;
    for (int run = 0; run < TIMED_RUNS; run++) {
        spk_session_reset(session);
        SPK_TRY(spk_session_eval(session, tokens, 1, SPK_LOGITS_NONE, NULL, err));
        double start = now_us();
        SPK_TRY(spk_session_eval(session, tokens, TIMED_TOKENS, SPK_LOGITS_NONE, NULL, err));
        double middle = now_us();
        spk_session_reset(session);
        SPK_TRY(spk_session_eval(session, tokens, 1, SPK_LOGITS_NONE, NULL, err));
        double again = now_us();
        SPK_TRY(spk_session_generate(session, tokens, 1, &g, err));
        double end = now_us();
        if ((middle - start) / TIMED_TOKENS < *queued_us) *queued_us = (middle - start) / TIMED_TOKENS;
        if ((end - again) / TIMED_TOKENS < *generated_us) *generated_us = (end - again) / TIMED_TOKENS;
    }
    return SPK_OK;
}

static void print_times(const spk_model *model) {
    spk_error err = { 0 };
    spk_session *session = generate_session(model, TIMED_TOKENS + 1);
    spk_sampler sampler = spk_sampler_start(&GENERATE_OPTIONS[2]);
    double queued = 0, greedy = 0, sampled = 0;
    CHECK_OK(time_session(session, NULL, &queued, &greedy, &err), err);
    CHECK_OK(time_session(session, &sampler, &queued, &sampled, &err), err);
    printf("# us a token: replays queued at once %.1f; generated greedy %.1f, so %.1f more between steps; sampled %.1f\n", queued, greedy,
           greedy - queued, sampled);
    spk_session_destroy(session);
}

static const char *path;
static bool is_quick;

static void generation_is_evaluating_and_drawing_in_turn(void) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_model_options mo = { .backend = SPK_BACKEND_CUDA };
    printf("# %s\n", path);
    CHECK_OK(spk_model_open(path, &mo, &model, &err), err);
    if (model == NULL) return;
    if (is_quick) {
        generate_ends_with_the_context(model);
        generate_checks_its_input(model);
    } else {
        generate_check_model(model);
        if (check_failures == 0) print_times(model);
    }
    spk_model_close(model);
}

int main(int argc, char **argv) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_model_options mo = { .backend = SPK_BACKEND_CUDA };
    is_quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    argc -= is_quick;
    argv += is_quick;
    if (spk_model_open(GENERATE_MODELS[0], &mo, &model, &err) == SPK_E_UNSUPPORTED) {
        printf("no GPU: skipped (%s)\n", err.text);
        return EXIT_SKIPPED;
    }
    spk_model_close(model);
    for (int i = 0; i < (argc > 1 ? 1 : GENERATE_MODEL_COUNT); i++) {
        path = argc > 1 ? argv[1] : GENERATE_MODELS[i];
        RUN(generation_is_evaluating_and_drawing_in_turn);
    }
    return CHECK_EXIT();
}
