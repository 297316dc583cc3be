/* tests/test_session.c - the runtime against the golden logits, and what must not change a result. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "requant/convert.h"
#include "runtime/runtime.h"
#include "tests/check.h"
#include "tests/model_build.h"

static const char *const MODELS[][2] = {
    { "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf", "tests/golden/tiny-qwen36-ud-q4_k_m.json" },
    { "build/models/tiny-qwen36-bf16.gguf", "tests/golden/tiny-qwen36-bf16.json" },
    { "tests/models/tiny-qwen3moe-q4_k_m.gguf", "tests/golden/tiny-qwen3moe-q4_k_m.json" },
    { "tests/models/tiny-qwen35-q4_k_m.gguf", "tests/golden/tiny-qwen35-q4_k_m.json" },
};
enum { MODEL_COUNT = 4, GOLDEN_TOKENS_MAX = 1024 };

typedef struct {
    uint32_t tokens[GOLDEN_TOKENS_MAX], count;
    cJSON   *root;
} golden;

static golden golden_read(const char *path) {
    golden g = { 0 };
    FILE *file = fopen(path, "rb");
    static char text[1 << 20];
    size_t size = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) fclose(file);
    text[size] = '\0';
    g.root = cJSON_Parse(text);
    cJSON *tokens = cJSON_GetObjectItem(g.root, "tokens"), *token;
    CHECK(tokens != NULL, "%s: no tokens", path);
    cJSON_ArrayForEach(token, tokens) if (g.count < GOLDEN_TOKENS_MAX) g.tokens[g.count++] = (uint32_t)token->valuedouble;
    return g;
}

/* Logits [count][vocab] of tokens, batch by batch; the caller frees. */
static float *evaluate(const char *path, spk_backend backend, uint32_t threads, uint32_t batch, const uint32_t *tokens,
                       uint32_t count, uint32_t *vocab) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_session *session = NULL;
    spk_model_options mo = { .backend = backend, .thread_count = threads };
    spk_session_options so = { .context_tokens = count, .batch_tokens = batch };
    CHECK_OK(spk_model_open(path, &mo, &model, &err), err);
    if (model == NULL) return NULL;
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    *vocab = spk_model_vocab_size(model);
    float *logits = malloc((size_t)count * *vocab * sizeof *logits);
    CHECK_OK(spk_session_eval(session, tokens, count, SPK_LOGITS_ALL, logits, &err), err);
    spk_session_destroy(session);
    spk_model_close(model);
    return logits;
}

static double log_sum_exp(const float *logits, uint32_t count) {
    double top = logits[0], sum = 0;
    for (uint32_t i = 1; i < count; i++) if (logits[i] > top) top = logits[i];
    for (uint32_t i = 0; i < count; i++) sum += exp(logits[i] - top);
    return top + log(sum);
}

static uint32_t argmax(const float *logits, uint32_t count) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++) if (logits[i] > logits[best]) best = i;
    return best;
}

static void check_golden(const golden *g, const float *logits, uint32_t vocab, const char *name) {
    cJSON *ids = cJSON_GetObjectItem(g->root, "top_ids"), *values = cJSON_GetObjectItem(g->root, "top_logits");
    double worst = 0, nll = 0;
    uint32_t same = 0;
    for (uint32_t t = 0; t < g->count; t++) {
        const float *row = logits + (size_t)t * vocab;
        cJSON *id = cJSON_GetArrayItem(ids, (int)t)->child, *value = cJSON_GetArrayItem(values, (int)t)->child;
        same += argmax(row, vocab) == (uint32_t)id->valuedouble;
        for (; id != NULL; id = id->next, value = value->next)
            worst = fmax(worst, fabs(row[(uint32_t)id->valuedouble] - value->valuedouble));
        if (t + 1 < g->count) nll += log_sum_exp(row, vocab) - row[g->tokens[t + 1]];
    }
    nll /= g->count - 1;
    double expected = cJSON_GetObjectItem(g->root, "mean_nll")->valuedouble;
    printf("# %s: worst top-10 difference %.6f, top-1 %u of %u, mean NLL %.6f (golden %.6f)\n", name, worst, same, g->count,
           nll, expected);
    CHECK(worst <= 2e-3, "%s: worst top-10 difference %g", name, worst);
    CHECK(same == g->count, "%s: top-1 %u of %u", name, same, g->count);
    CHECK(fabs(nll - expected) <= 1e-4, "%s: mean NLL %.7f, golden %.7f", name, nll, expected);
}

/* Mean over positions of KL(a || b), and share of equal top-1. */
static double mean_kl(const float *a, const float *b, uint32_t count, uint32_t vocab, double *top1) {
    double sum = 0;
    uint32_t same = 0;
    for (uint32_t t = 0; t < count; t++, a += vocab, b += vocab) {
        double za = log_sum_exp(a, vocab), zb = log_sum_exp(b, vocab);
        for (uint32_t i = 0; i < vocab; i++) sum += exp(a[i] - za) * ((a[i] - za) - (b[i] - zb));
        same += argmax(a, vocab) == argmax(b, vocab);
    }
    *top1 = (double)same / count;
    return sum / count;
}

static void reference_reproduces_the_golden_logits_and_the_fast_path_stays_near(void) {
    for (int i = 0; i < MODEL_COUNT; i++) {
        golden g = golden_read(MODELS[i][1]);
        uint32_t vocab = 0;
        float *ref = evaluate(MODELS[i][0], SPK_BACKEND_REF, 0, 0, g.tokens, g.count, &vocab);
        float *fast = evaluate(MODELS[i][0], SPK_BACKEND_AUTO, 0, 0, g.tokens, g.count, &vocab);
        if (ref != NULL && fast != NULL) {
            double top1 = 0, kl = mean_kl(ref, fast, g.count, vocab, &top1);
            check_golden(&g, ref, vocab, MODELS[i][0]);
            printf("# fast path: mean KL to reference %.6f, same top-1 %.4f\n", kl, top1);
            CHECK(kl <= 1e-3 && kl >= 0, "mean KL %g", kl);
            CHECK(top1 >= 0.985, "top-1 %g", top1);
        }
        free(ref);
        free(fast);
        cJSON_Delete(g.root);
    }
}

static void threads_and_batches_never_change_a_bit(void) {
    static const struct { spk_backend backend; uint32_t threads, batch; } ways[] = {
        { SPK_BACKEND_AUTO, 1, 1 }, { SPK_BACKEND_AUTO, 3, 7 }, { SPK_BACKEND_AUTO, 2, 64 },
        { SPK_BACKEND_REF, 1, 1 }, { SPK_BACKEND_REF, 2, 33 },
    };
    for (int i = 0; i < MODEL_COUNT; i++) {
        if (i == 1) continue;
        golden g = golden_read(MODELS[i][1]);
        uint32_t vocab = 0;
        float *first = NULL;
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            float *logits = evaluate(MODELS[i][0], ways[w].backend, ways[w].threads, ways[w].batch, g.tokens, 48, &vocab);
            if (w == 0 || ways[w].backend != ways[w - 1].backend) {
                free(first);
                first = logits;
                continue;
            }
            CHECK(memcmp(first, logits, (size_t)48 * vocab * sizeof *logits) == 0, "%s: threads %u batch %u differ",
                  MODELS[i][0], ways[w].threads, ways[w].batch);
            free(logits);
        }
        free(first);
        cJSON_Delete(g.root);
    }
}

/* A native pack of a model beside the test's scratch files. */
static void make_native_pack(const char *source, const char *out_path) {
    spk_error err = { 0 };
    spk_gguf *gguf = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { 0 };
    CHECK_OK(spk_gguf_open(source, &gguf, &err), err);
    CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
    spk_convert_options options = { .source = gguf, .out_path = out_path, .replace = true, .recipe = recipe, .imatrix_name = "" };
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    CHECK_OK(spk_convert_run(&options, &plan, &err), err);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(gguf);
}

static void a_native_pack_gives_the_bits_of_its_gguf(void) {
    char path[64];
    (void)snprintf(path, sizeof path, "/tmp/spk-test-session-%d.spk", (int)getpid());
    for (int i = 0; i < MODEL_COUNT; i++) {
        golden g = golden_read(MODELS[i][1]);
        make_native_pack(MODELS[i][0], path);
        for (int b = 0; b < 2; b++) {
            spk_backend backend = b ? SPK_BACKEND_REF : SPK_BACKEND_AUTO;
            uint32_t vocab = 0;
            float *from_gguf = evaluate(MODELS[i][0], backend, 0, 0, g.tokens, 32, &vocab);
            float *from_pack = evaluate(path, backend, 0, 0, g.tokens, 32, &vocab);
            CHECK(from_gguf && from_pack && memcmp(from_gguf, from_pack, (size_t)32 * vocab * sizeof *from_gguf) == 0,
                  "%s: backend %d differs", MODELS[i][0], (int)backend);
            free(from_gguf);
            free(from_pack);
        }
        cJSON_Delete(g.root);
    }
    (void)remove(path);
}

/* Widths that the bundled models do not have: attention wider or narrower than GDN, odd numbers of super-blocks, widths
 * that tiles do not take, a V-to-K head ratio of 3, a tied head. */
static void the_fast_path_follows_the_reference_on_any_shape(void) {
    static const model_shape shapes[] = {
        { 256, 4, 8, 2, 64, 2, 4, 64, 256, 512, SPK_TYPE_Q8_0 },    /* q 512, value 256 */
        { 256, 4, 4, 2, 64, 2, 8, 64, 512, 512, SPK_TYPE_Q8_0 },    /* q 256, value 512 */
        { 256, 4, 5, 5, 64, 2, 4, 64, 768, 512, SPK_TYPE_Q8_0 },    /* q 320: not in tiles */
        { 512, 2, 6, 3, 128, 2, 6, 64, 288, 320, SPK_TYPE_Q8_0 },   /* q 768, value 384, ff 288 */
        { 96, 2, 3, 1, 32, 1, 3, 32, 160, 96, SPK_TYPE_F32 },       /* nothing in tiles */
    };
    uint32_t tokens[24], vocab = 0;
    char path[64];
    (void)snprintf(path, sizeof path, "/tmp/spk-test-session-%d.gguf", (int)getpid());
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        for (uint32_t t = 0; t < 24; t++) tokens[t] = (t * 37 + 5) % shapes[i].vocab;
        model_build(path, &shapes[i], 100 + i);
        float *ref = evaluate(path, SPK_BACKEND_REF, 0, 0, tokens, 24, &vocab);
        float *fast = evaluate(path, SPK_BACKEND_AUTO, 0, 5, tokens, 24, &vocab);
        double error = 0, square = 0;
        for (size_t j = 0; ref && fast && j < 24 * (size_t)vocab; j++) {
            error += (ref[j] - fast[j]) * (double)(ref[j] - fast[j]);
            square += ref[j] * (double)ref[j];
        }
        double relative = sqrt(error / square);
        CHECK(relative < 0.02, "shape %zu: relative error of the logits %g", i, relative);
        free(ref);
        free(fast);
    }
    (void)remove(path);
}

static void reset_starts_over_and_the_context_has_an_end(void) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_session *session = NULL;
    spk_model_options mo = { .backend = SPK_BACKEND_AUTO };
    spk_session_options so = { .context_tokens = 8 };
    CHECK_OK(spk_model_open(MODELS[0][0], &mo, &model, &err), err);
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    uint32_t tokens[9] = { 10, 200, 3000, 4, 5, 6, 7, 8, 9 }, vocab = spk_model_vocab_size(model);
    float *a = malloc(vocab * sizeof *a), *b = malloc(vocab * sizeof *b);
    CHECK_OK(spk_session_eval(session, tokens, 8, SPK_LOGITS_LAST, a, &err), err);
    CHECK(spk_session_position(session) == 8, "position");
    CHECK(spk_session_eval(session, tokens, 1, SPK_LOGITS_LAST, b, &err) == SPK_E_LIMIT, "full context");
    CHECK(strstr(err.text, "8") != NULL, "%s", err.text);
    spk_session_reset(session);
    CHECK(spk_session_eval(session, tokens, 9, SPK_LOGITS_LAST, b, &err) == SPK_E_LIMIT, "nine tokens in eight places");
    CHECK(spk_session_position(session) == 0, "nothing was evaluated");
    CHECK(spk_session_eval(session, &vocab, 1, SPK_LOGITS_NONE, NULL, &err) == SPK_E_USAGE, "token beyond the vocabulary");
    CHECK_OK(spk_session_eval(session, tokens, 3, SPK_LOGITS_NONE, NULL, &err), err);
    CHECK_OK(spk_session_eval(session, tokens + 3, 5, SPK_LOGITS_LAST, b, &err), err);
    CHECK(memcmp(a, b, vocab * sizeof *a) == 0, "a reset session gives the same bits");
    free(a);
    free(b);
    spk_session_destroy(session);
    spk_model_close(model);
}

static void a_cpu_session_refuses_a_cache_in_q8(void) {
    spk_error err = { 0 };
    spk_model *model = NULL;
    spk_session *session = NULL;
    spk_model_options mo = { .backend = SPK_BACKEND_REF };
    spk_session_options so = { .context_tokens = 8, .kv_q8 = true };
    CHECK_OK(spk_model_open(MODELS[0][0], &mo, &model, &err), err);
    CHECK(spk_session_create(model, &so, &session, &err) == SPK_E_UNSUPPORTED, "a CPU session with kv_q8");
    CHECK(session == NULL && strstr(err.text, "q8") != NULL && strstr(err.text, "cuda") != NULL, "%s", err.text);
    spk_session_destroy(session);
    spk_model_close(model);
}

static void what_is_no_model_is_refused_in_one_line(void) {
    char fifo[64];
    (void)snprintf(fifo, sizeof fifo, "/tmp/spk-test-session-%d.fifo", (int)getpid());
    CHECK(mkfifo(fifo, 0600) == 0, "%s", fifo);
    const char *const paths[] = { "README.md", "tests", "/dev/null", "no-such-file", fifo };
    spk_model_options mo = { .backend = SPK_BACKEND_AUTO };
    for (size_t i = 0; i < sizeof paths / sizeof *paths; i++) {
        spk_error err = { 0 };
        spk_model *model = NULL;
        CHECK(spk_model_open(paths[i], &mo, &model, &err) != SPK_OK, "%s", paths[i]);
        CHECK(strstr(err.text, paths[i]) != NULL && strchr(err.text, '\n') == NULL, "%s", err.text);
    }
    (void)unlink(fifo);
}

int main(void) {
    RUN(reference_reproduces_the_golden_logits_and_the_fast_path_stays_near);
    RUN(threads_and_batches_never_change_a_bit);
    RUN(a_native_pack_gives_the_bits_of_its_gguf);
    RUN(the_fast_path_follows_the_reference_on_any_shape);
    RUN(reset_starts_over_and_the_context_has_an_end);
    RUN(a_cpu_session_refuses_a_cache_in_q8);
    RUN(what_is_no_model_is_refused_in_one_line);
    return CHECK_EXIT();
}
