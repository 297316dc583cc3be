/* tests/test_gpu_step.c - the GPU side of the runtime, with a host that stands in for the device: the step that a session
 * records, with every fusion switch, against the reference.
 *
 * The kernels are not tested here (tests/checkkern.c does that where there is a GPU), but what is made of them.
 */
#include "tests/host_device.h"

#include "runtime/bench_account.h"
#include "runtime/runtime.h"
#include "tests/check.h"

static const char *const MODELS[] = { "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf",
                                      "tests/models/tiny-qwen3moe-q4_k_m.gguf",
                                      "tests/models/tiny-qwen35-q4_k_m.gguf" };
enum { MODEL_COUNT = 3, TOKEN_COUNT = 12 };

typedef struct { uint32_t vocab, token_count; float *logits; } evaluation;     /* [token_count][vocab] */

static evaluation evaluate_tokens(const char *path, spk_backend backend, uint32_t fusions_off, const uint32_t *tokens, uint32_t token_count) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_session *session = NULL;
    const spk_model_options mo = { .backend = backend, .thread_count = 1 };
    const spk_session_options so = { .context_tokens = token_count, .fusions_off = fusions_off };
    evaluation e = { .token_count = token_count };
    CHECK_OK(spk_model_open(path, &mo, &model, &err), err);
    if (model == NULL) return e;
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    e.vocab = spk_model_vocab_size(model);
    e.logits = malloc((size_t)token_count * e.vocab * sizeof *e.logits);
    for (uint32_t count = 1; count <= 3; count += 2) {
        CHECK_OK(spk_session_eval(session, tokens, count, SPK_LOGITS_NONE, NULL, &err), err);
        spk_session_reset(session);             /* nothing of these may be left, but the count of steps must go on */
    }
    CHECK_OK(spk_session_eval(session, tokens, token_count, SPK_LOGITS_ALL, e.logits, &err), err);
    spk_session_destroy(session);
    spk_model_close(model);
    return e;
}
static evaluation evaluate(const char *path, spk_backend backend, uint32_t fusions_off, const uint32_t *tokens) {
    return evaluate_tokens(path, backend, fusions_off, tokens, TOKEN_COUNT);
}

/* Mean KL(a || b) in nats. */
static double divergence(const evaluation *a, const evaluation *b) {
    double sum = 0;
    for (uint32_t t = 0; t < a->token_count; t++) {
        const float *x = a->logits + (size_t)t * a->vocab, *y = b->logits + (size_t)t * a->vocab;
        double x_top = x[0], y_top = y[0], x_sum = 0, y_sum = 0, mean = 0;
        for (uint32_t i = 1; i < a->vocab; i++) {
            x_top = fmax(x_top, (double)x[i]);
            y_top = fmax(y_top, (double)y[i]);
        }
        for (uint32_t i = 0; i < a->vocab; i++) {
            x_sum += exp((double)x[i] - x_top);
            y_sum += exp((double)y[i] - y_top);
            mean += exp((double)x[i] - x_top) * ((double)x[i] - x_top - (double)y[i] + y_top);
        }
        sum += mean / x_sum - log(x_sum) + log(y_sum);
    }
    return sum / a->token_count;
}

static void test_every_fusion_gives_the_same_logits(void) {
    static const uint32_t tokens[TOKEN_COUNT] = { 17, 900, 3, 3, 1500, 42, 0, 271, 1999, 5, 700, 8 };
    static const uint32_t off[] = {
        SPK_FUSE_ROUTER, SPK_FUSE_ADDNORM3, SPK_FUSE_SHEXP, SPK_FUSE_GDN_CORE, SPK_FUSE_GDN_CORE | SPK_FUSE_GDN_CONV,
        SPK_FUSE_ALL
    };
    for (int m = 0; m < MODEL_COUNT; m++) {
        evaluation ref = evaluate(MODELS[m], SPK_BACKEND_REF, 0, tokens),
                   fused = evaluate(MODELS[m], SPK_BACKEND_CUDA, 0, tokens);
        if (ref.logits == NULL || fused.logits == NULL) continue;
        host_reads_late = true;
        evaluation late = evaluate(MODELS[m], SPK_BACKEND_CUDA, 0, tokens);
        host_reads_late = false;
        CHECK(late.logits != NULL && memcmp(late.logits, fused.logits, (size_t)TOKEN_COUNT * late.vocab * sizeof(float)) == 0,
              "%s: logits depend on when a signal is seen", MODELS[m]);
        free(late.logits);
        double kl = divergence(&ref, &fused);
        CHECK(kl >= -1e-9 && kl <= 0.001, "%s: mean KL %.6f", MODELS[m], kl);
        for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
            evaluation e = evaluate(MODELS[m], SPK_BACKEND_CUDA, off[i], tokens);
            CHECK(e.logits != NULL && memcmp(e.logits, fused.logits, (size_t)TOKEN_COUNT * e.vocab * sizeof(float)) == 0,
                  "%s: logits without fusions %u differ", MODELS[m], off[i]);
            free(e.logits);
        }
        free(ref.logits), free(fused.logits);
    }
}

/* As far as attention has four parts: a session has room for them, and the output projection is told of them. */
static void test_attention_in_parts(void) {
    enum { COUNT = 3 * SPK_CUDA_PART_POSITIONS + 2 };
    uint32_t tokens[COUNT];
    uint64_t random = 7;
    for (int i = 0; i < COUNT; i++) tokens[i] = (uint32_t)(check_random(&random) % 2000);
    evaluation ref = evaluate_tokens(MODELS[1], SPK_BACKEND_REF, 0, tokens, COUNT),
               parted = evaluate_tokens(MODELS[1], SPK_BACKEND_CUDA, 0, tokens, COUNT);
    CHECK(ref.logits != NULL && parted.logits != NULL && divergence(&ref, &parted) <= 0.001, "mean KL %.6f", divergence(&ref, &parted));
    free(ref.logits), free(parted.logits);
}

/* A step that used the wrong expert, position or head would show. */
static void test_a_wrong_kernel_shows(void) {
    static const uint32_t tokens[TOKEN_COUNT] = { 17, 900, 3, 3, 1500, 42, 0, 271, 1999, 5, 700, 8 };
    static const host_fault_kind faults[] = { FAULT_HEAD_MAP, FAULT_ATTEND_LAST, FAULT_EXPERT_STRIDE, FAULT_SHARED_GATE,
                                              FAULT_DOWN_RANK, FAULT_ROUTED_EARLY, FAULT_NO_AWAIT, FAULT_STALE_SIGNAL,
                                              FAULT_NOT_CLEARED, FAULT_CLEARED_SHORT, FAULT_SHARED_PLACE, FAULT_SHARED_UP,
                                              FAULT_ROUTER_NORM, FAULT_ROUTER_SHARED_ROW, FAULT_ROUTER_LAYER,
                                              FAULT_ROUTER_FOLDED, FAULT_ROUTER_LAST_GROUP, FAULT_ROUTER_SCALE };
    evaluation ref = evaluate(MODELS[0], SPK_BACKEND_REF, 0, tokens);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        host_fault = faults[i];
        first_router = NULL;
        evaluation e = evaluate(MODELS[0], SPK_BACKEND_CUDA, 0, tokens);
        CHECK(e.logits != NULL && ref.logits != NULL && !(divergence(&ref, &e) <= 0.001), "fault %d does not show",
              (int)faults[i]);
        free(e.logits);
    }
    host_fault = FAULT_NONE;
    free(ref.logits);
}

/* A signal that is not given, and one that the step before has left set: on a GPU the first hangs and the second lies. */
static void test_a_wrong_signal_ends_the_step(void) {
    static const struct { host_fault_kind fault; uint32_t token_count; } cases[] = {
        { FAULT_NO_ROUTED_SIGNAL, 1 }, { FAULT_STEP, 2 }
    };
    static const uint32_t tokens[2] = { 17, 900 };
    spk_error err = { 0 };
    spk_model *model = NULL;
    const spk_model_options mo = { .backend = SPK_BACKEND_CUDA, .thread_count = 1 };
    const spk_session_options so = { .context_tokens = TOKEN_COUNT };
    CHECK_OK(spk_model_open(MODELS[1], &mo, &model, &err), err);
    for (size_t i = 0; model != NULL && i < sizeof cases / sizeof *cases; i++) {
        spk_session *session = NULL;
        CHECK_OK(spk_session_create(model, &so, &session, &err), err);
        host_fault = cases[i].fault;
        spk_status status = spk_session_eval(session, tokens, cases[i].token_count, SPK_LOGITS_NONE, NULL, &err);
        CHECK(status != SPK_OK && strstr(err.text, "signal") != NULL, "fault %d: %d %s", (int)cases[i].fault, (int)status, err.text);
        host_fault = FAULT_NONE;
        spk_session_destroy(session);
    }
    spk_model_close(model);
}

/* The phases are all of the step's, their bytes those of a token, and the session is where it was. */
static void test_an_account_takes_a_step_apart(void) {
    static const uint32_t tokens[TOKEN_COUNT] = { 17, 900, 3, 3, 1500, 42, 0, 271, 1999, 5, 700, 8 };
    static const uint32_t kernels[SPK_PHASE_COUNT] = { 1, 6, 6, 2, 2, 8, 0, 8, 8, 0, 1 };      /* six GDN layers and two of attention; a router has none of its own */
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_session *session = NULL;
    spk_account *account = malloc(sizeof *account);
    const spk_model_options mo = { .backend = SPK_BACKEND_CUDA, .thread_count = 1 };
    const spk_session_options so = { .context_tokens = TOKEN_COUNT };
    CHECK_OK(spk_model_open(MODELS[0], &mo, &model, &err), err);
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    float *straight = malloc(spk_model_vocab_size(model) * sizeof(float)), *taken_apart = malloc(spk_model_vocab_size(model) * sizeof(float));
    CHECK_OK(spk_session_eval(session, tokens, 8, SPK_LOGITS_LAST, straight, &err), err);
    spk_session_reset(session);
    CHECK_OK(spk_session_eval(session, tokens, 5, SPK_LOGITS_NONE, NULL, &err), err);
    CHECK_OK(spk_session_account(session, 1, account, &err), err);
    CHECK_OK(spk_session_eval(session, tokens + 5, 3, SPK_LOGITS_LAST, taken_apart, &err), err);
    CHECK(memcmp(straight, taken_apart, spk_model_vocab_size(model) * sizeof(float)) == 0, "other logits after an account");
    uint64_t bytes = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < SPK_PHASE_COUNT; i++) {
        CHECK(account->phases[i].kernel_count == kernels[i], "phase %u has %u kernels, expected %u", i, account->phases[i].kernel_count, kernels[i]);
        if (i != SPK_PHASE_GDN && i != SPK_PHASE_ATTENTION) bytes += account->phases[i].bytes;
        count += account->phases[i].kernel_count;
    }
    CHECK(count == account->kernel_count, "%u kernels in phases, %u in the step", count, account->kernel_count);
    CHECK(llabs((long long)bytes - (long long)spk_model_bytes_per_token(model)) < 100000, "%llu bytes in phases, %llu a token", (unsigned long long)bytes,
          (unsigned long long)spk_model_bytes_per_token(model));
    char line[SPK_BENCH_ACCOUNT_LINE];
    const uint32_t lines = spk_bench_account_line_count(account);
    CHECK(lines == 2 + 9, "%u lines of an account with nine phases", lines);
    spk_bench_account_line(account, 2, 1, 1e12, line);
    CHECK(strncmp(line, "GDN in ", 7) == 0, "the second phase is: %s", line);
    spk_bench_account_line(account, lines - 1, 1, 1e12, line);
    CHECK(strncmp(line, "sum ", 4) == 0, "the last line is: %s", line);
    CHECK_OK(spk_session_eval(session, tokens + 8, 4, SPK_LOGITS_NONE, NULL, &err), err);
    CHECK(spk_session_account(session, 1, account, &err) == SPK_E_LIMIT, "an account of a full context");
    free(straight), free(taken_apart), free(account);
    spk_session_destroy(session);
    spk_model_close(model);
}

int main(void) {
    RUN(test_a_wrong_signal_ends_the_step);
    RUN(test_every_fusion_gives_the_same_logits);
    RUN(test_attention_in_parts);
    RUN(test_a_wrong_kernel_shows);
    RUN(test_an_account_takes_a_step_apart);
    return CHECK_EXIT();
}
