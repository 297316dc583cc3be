/* tests/test_endurance.c - long and concurrent use: many sessions of one model in threads, a session of 100,000 tokens, and a
 * thousand openings: the same bits as ever, in memory that does not grow.
 *
 * `make tsan` runs this under ThreadSanitizer.  SPK_TEST_LONG_TOKENS=100000 gives the model with attention, whose time grows
 * with the square, as many tokens as the one without: some 40 s.
 */
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "requant/convert.h"
#include "runtime/runtime.h"
#include "tests/check.h"
#include "tests/gguf_build.h"
#include "tests/model_build.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { IS_SANITIZED = 1, LONG_TOKENS = 3000, ATTENTION_TOKENS = 1000, OPENINGS = 200 };
#else
enum { IS_SANITIZED = 0, LONG_TOKENS = 100000, ATTENTION_TOKENS = 15000, OPENINGS = 1000 };
#endif
enum { HEAP_SLACK_BYTES = 8000 };        /* the allocator counts blocks that it keeps for reuse; a leak would be 16 bytes a time */
enum { SESSIONS = 64, TOKENS = 24 };

static char dir[GB_PATH_MAX], source_path[GB_PATH_MAX], pack_path[GB_PATH_MAX], long_path[GB_PATH_MAX], recurrent_path[GB_PATH_MAX];

static void make_models(void) {
    static const model_shape shape = { 256, 2, 4, 2, 64, 2, 4, 64, 256, 512, SPK_TYPE_Q8_0 };
    static const model_shape small = { 32, 2, 1, 1, 32, 1, 1, 32, 32, 32, SPK_TYPE_F32 };
    spk_error err = { 0 };
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    model_build(gb_path(source_path, dir, "a.gguf"), &shape, 1);
    static const model_shape recurrent = { 32, 1, 1, 1, 32, 1, 1, 32, 32, 32, SPK_TYPE_F32 };
    model_build(gb_path(long_path, dir, "long.gguf"), &small, 2);
    model_build(gb_path(recurrent_path, dir, "recurrent.gguf"), &recurrent, 3);
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
    spk_convert_options options = { .source = source, .out_path = gb_path(pack_path, dir, "a.spk"), .recipe = recipe,
                                    .imatrix_name = "" };
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    CHECK_OK(spk_convert_run(&options, &plan, &err), err);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
}

/* ---- Many sessions ---- */

typedef struct {
    const spk_model *model;
    uint32_t         index;
    spk_status       status;
    spk_error        err;
    float           *logits;         /* of the last token */
} one_session;

/* Tokens of session i, in batches that depend on it. */
static void *run_session(void *context) {
    one_session *s = context;
    spk_session *session = NULL;
    spk_session_options so = { .context_tokens = TOKENS, .batch_tokens = 1 + s->index % 7 };
    uint32_t tokens[TOKENS];
    for (uint32_t t = 0; t < TOKENS; t++) tokens[t] = (t * 37 + s->index % 8 * 11 + 5) % 512;
    s->status = spk_session_create(s->model, &so, &session, &s->err);
    for (uint32_t at = 0, step; s->status == SPK_OK && at < TOKENS; at += step) {
        step = 1 + (s->index + at) % 5;
        if (step > TOKENS - at) step = TOKENS - at;
        s->status = spk_session_eval(session, tokens + at, step, at + step == TOKENS ? SPK_LOGITS_LAST : SPK_LOGITS_NONE,
                                     s->logits, &s->err);
    }
    spk_session_destroy(session);
    return NULL;
}

static void sessions_in_threads_do_not_disturb_each_other(void) {
    spk_model *model = NULL;
    spk_error err = { 0 };
    for (int backend = SPK_BACKEND_REF; backend <= SPK_BACKEND_CPU; backend++) {
        for (uint32_t threads = 1; threads <= 2; threads++) {
            spk_model_options mo = { .backend = (spk_backend)backend, .thread_count = threads };
            if (spk_model_open(pack_path, &mo, &model, &err) == SPK_E_UNSUPPORTED) continue;
            static one_session sessions[SESSIONS];
            pthread_t ids[SESSIONS];
            uint32_t vocab = spk_model_vocab_size(model);
            for (uint32_t i = 0; i < SESSIONS; i++)
                sessions[i] = (one_session){ .model = model, .index = i, .logits = malloc(vocab * sizeof(float)) };
            for (int i = 0; i < SESSIONS; i++) CHECK(pthread_create(&ids[i], NULL, run_session, &sessions[i]) == 0, "thread %d", i);
            for (int i = 0; i < SESSIONS; i++) CHECK(pthread_join(ids[i], NULL) == 0, "thread %d", i);
            for (uint32_t i = 0; i < SESSIONS; i++) {
                CHECK(sessions[i].status == SPK_OK, "session %u: %s", i, sessions[i].err.text);
                CHECK(memcmp(sessions[i].logits, sessions[i % 8].logits, vocab * sizeof(float)) == 0, "session %u differs", i);
                if (i >= 8) free(sessions[i].logits);
            }
            for (int i = 0; i < 8; i++) free(sessions[i].logits);
            spk_model_close(model);
        }
    }
}

/* ---- A long one ---- */

static long resident_pages(void) {
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%ld %ld", &size, &resident) != 2) resident = -1;
    if (file != NULL) (void)fclose(file);
    return resident;
}

/* The memory for the context is there from the start and grows no more; its end is an error, and nothing is written past it. */
static void check_long_session(const char *path, uint32_t token_count) {
    spk_model *model = NULL;
    spk_session *session = NULL, *again = NULL;
    spk_error err = { 0 };
    spk_model_options mo = { .backend = SPK_BACKEND_AUTO, .thread_count = 1 };
    spk_session_options so = { .context_tokens = token_count, .batch_tokens = 64 };
    CHECK_OK(spk_model_open(path, &mo, &model, &err), err);
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    uint32_t vocab = spk_model_vocab_size(model), tokens[64];
    uint64_t bytes = spk_session_state_bytes(session);
    float *logits = malloc(vocab * sizeof *logits), *full = malloc(vocab * sizeof *full);
    long pages = resident_pages();
    size_t heap = mallinfo2().uordblks;
    for (uint32_t at = 0; at < token_count; at += 64) {
        uint32_t count = token_count - at < 64 ? token_count - at : 64;
        for (uint32_t t = 0; t < count; t++) tokens[t] = ((at + t) * 7 + (at + t) / 31) % vocab;
        CHECK_OK(spk_session_eval(session, tokens, count, SPK_LOGITS_LAST, logits, &err), err);
        for (uint32_t v = 0; v < vocab; v++)
            if (!(logits[v] > -1e30f && logits[v] < 1e30f)) CHECK(false, "position %u: logit %u is %g", at, v, (double)logits[v]);
        if (check_failures > 5) break;
    }
    CHECK(spk_session_position(session) == token_count, "position %u", spk_session_position(session));
    CHECK(spk_session_state_bytes(session) == bytes, "the state grew");
    CHECK(IS_SANITIZED || mallinfo2().uordblks <= heap + HEAP_SLACK_BYTES, "the heap grew by %d bytes", (int)(mallinfo2().uordblks - heap));
    long grown = (resident_pages() - pages) * 4096;
    CHECK(IS_SANITIZED || grown < (long)bytes + (8 << 20), "resident memory grew by %ld bytes, the state has %ld", grown, (long)bytes);
    memcpy(full, logits, vocab * sizeof *full);
    CHECK(spk_session_eval(session, tokens, 1, SPK_LOGITS_LAST, logits, &err) == SPK_E_LIMIT, "a full context");
    CHECK(strstr(err.text, "is full") != NULL && memcmp(full, logits, vocab * sizeof *full) == 0, "%s", err.text);
    CHECK(spk_session_position(session) == token_count, "nothing was evaluated");
    spk_session_reset(session);                          /* and it can begin again, with the bits of a new session */
    so.context_tokens = 64;
    CHECK_OK(spk_session_create(model, &so, &again, &err), err);
    CHECK_OK(spk_session_eval(session, tokens, 16, SPK_LOGITS_LAST, logits, &err), err);
    CHECK_OK(spk_session_eval(again, tokens, 16, SPK_LOGITS_LAST, full, &err), err);
    CHECK(memcmp(full, logits, vocab * sizeof *full) == 0, "after a reset, other bits");
    printf("# %u tokens in one session: %ld bytes of state, resident memory grew by %ld\n", token_count, (long)bytes, grown);
    free(logits);
    free(full);
    spk_session_destroy(again);
    spk_session_destroy(session);
    spk_model_close(model);
}

static void a_long_session_stays_in_its_memory(void) {
    const char *wanted = getenv("SPK_TEST_LONG_TOKENS");
    check_long_session(recurrent_path, LONG_TOKENS);
    check_long_session(long_path, wanted != NULL ? (uint32_t)atoi(wanted) : ATTENTION_TOKENS);
}

/* ---- Opening and closing ---- */

static int open_files(void) {
    int count = 0;
    for (int fd = 0; fd < 256; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void open_and_close(const char *path) {
    spk_model *model = NULL;
    spk_session *session = NULL;
    spk_error err = { 0 };
    uint32_t token = 1;
    spk_model_options mo = { .backend = SPK_BACKEND_CPU, .thread_count = 2 };
    spk_session_options so = { .context_tokens = 8 };
    if (spk_model_open(path, &mo, &model, &err) == SPK_E_UNSUPPORTED) mo.backend = SPK_BACKEND_REF;
    if (model == NULL) CHECK_OK(spk_model_open(path, &mo, &model, &err), err);
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    CHECK_OK(spk_session_eval(session, &token, 1, SPK_LOGITS_NONE, NULL, &err), err);
    spk_session_destroy(session);
    spk_model_close(model);
}

static void opening_and_closing_leaks_nothing(void) {
    open_and_close(pack_path);
    open_and_close(source_path);
    int files = open_files();
    long pages = resident_pages();
    size_t heap = mallinfo2().uordblks;
    for (int i = 0; i < OPENINGS && check_failures < 5; i++) open_and_close(i % 4 == 0 ? source_path : pack_path);
    CHECK(IS_SANITIZED || mallinfo2().uordblks <= heap + HEAP_SLACK_BYTES, "%d bytes of heap are left", (int)(mallinfo2().uordblks - heap));
    CHECK(open_files() == files, "%d files are open, %d were", open_files(), files);
    long grown = (resident_pages() - pages) * 4096;
    CHECK(IS_SANITIZED || grown < 4 << 20, "resident memory grew by %ld bytes", grown);
}

int main(void) {
    gb_make_dir(dir);
    make_models();
    RUN(sessions_in_threads_do_not_disturb_each_other);
    RUN(a_long_session_stays_in_its_memory);
    RUN(opening_and_closing_leaks_nothing);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
