/* tests/test_generate.c - generation on the fastest backend of the machine and on the reference. */
#include "tests/generate_check.h"

static void check_model(const char *path, spk_backend backend, void (*check)(const spk_model *)) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_model_options mo = { .backend = backend };
    CHECK_OK(spk_model_open(path, &mo, &model, &err), err);
    if (model == NULL) return;
    check(model);
    spk_model_close(model);
}

static void generation_is_evaluating_and_drawing_in_turn(void) {
    for (int i = 0; i < GENERATE_MODEL_COUNT; i++) check_model(GENERATE_MODELS[i], SPK_BACKEND_AUTO, generate_check_model);
}

static void on_the_reference_too(void) { check_model(GENERATE_MODELS[0], SPK_BACKEND_REF, generate_equals_the_loop); }

int main(void) {
    RUN(generation_is_evaluating_and_drawing_in_turn);
    RUN(on_the_reference_too);
    return CHECK_EXIT();
}
