/* tests/gpu_openings.c [--quick] - a model opened on a GPU, used and closed, again and again: the device has as much free memory
 * at the end as it had after the first time.
 *
 *   make build/tests/gpu_openings && build/tests/gpu_openings
 *
 * --quick is for a GPU that is emulated: ten openings instead of a thousand.  Exits 77 where there is no GPU. */
#include <string.h>

#include "kernels/cuda.h"
#include "runtime/runtime.h"
#include "tests/check.h"

enum { EXIT_SKIPPED = 77, OPENINGS = 1000, QUICK_OPENINGS = 10 };
static const uint64_t SLACK_BYTES = UINT64_C(16) << 20;   /* what the driver may have kept for itself */
static const char MODEL[] = "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf";
static int opening_count = OPENINGS;

static spk_status open_and_close(spk_error *err) {
    spk_model *model = NULL;
    spk_session *session = NULL;
    uint32_t token = 1;
    spk_model_options mo = { .backend = SPK_BACKEND_CUDA };
    spk_session_options so = { .context_tokens = 64 };
    spk_status status = spk_model_open(MODEL, &mo, &model, err);
    if (status == SPK_OK) status = spk_session_create(model, &so, &session, err);
    if (status == SPK_OK) status = spk_session_eval(session, &token, 1, SPK_LOGITS_NONE, NULL, err);
    spk_session_destroy(session);
    spk_model_close(model);
    return status;
}

static void opening_and_closing_leaks_no_device_memory(void) {
    spk_error err = { 0 };
    spk_cuda *cuda = NULL;
    uint64_t first = 0, last = 0, total = 0;
    CHECK_OK(spk_cuda_open(&cuda, &err), err);
    CHECK_OK(spk_cuda_memory(cuda, &first, &total, &err), err);
    for (int i = 1; i < opening_count && check_failures == 0; i++) CHECK_OK(open_and_close(&err), err);
    CHECK_OK(spk_cuda_memory(cuda, &last, &total, &err), err);
    CHECK(last + SLACK_BYTES >= first, "%llu bytes of device memory are gone", (unsigned long long)(first - last));
    printf("# %d openings: %llu bytes free before, %llu after\n", opening_count, (unsigned long long)first, (unsigned long long)last);
    spk_cuda_close(cuda);
}

int main(int argc, char **argv) {
    spk_error err = { 0 };
    if (argc > 1 && strcmp(argv[1], "--quick") == 0) opening_count = QUICK_OPENINGS;
    if (open_and_close(&err) == SPK_E_UNSUPPORTED) {
        printf("no GPU: skipped (%s)\n", err.text);
        return EXIT_SKIPPED;
    }
    RUN(opening_and_closing_leaks_no_device_memory);
    return CHECK_EXIT();
}
