/* runtime/bench_main.c - spk-bench: load time, prefill and decode speed, and how near decode comes to the memory limit.
 *
 * The ceiling is a plain read of a buffer larger than the caches, by as many threads, in the same process: what bytes a
 * token times tokens a second cannot pass, unless weights stay in a cache.  With two models every repeat measures one,
 * then the other, so that a drifting machine touches both alike.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "formats/cli.h"
#include "formats/model.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "runtime/compare.h"
#include "runtime/runtime.h"
#include "runtime/tool.h"

static const char TOOL[] = "spk-bench";
enum { MODELS_MAX = 2, CONTEXTS_MAX = 16, REPEATS_MAX = 100, CEILING_PASSES = 7 };
#define CEILING_BYTES_MIN (UINT64_C(512) << 20)
#define TOKEN_SEED UINT64_C(1)

static const char HELP[] =
    "usage: spk-bench [options] MODEL [MODEL2]\n"
    "\n"
    "Measure a model (.spk or .gguf): load, prefill, and decode at several context lengths, beside the read bandwidth\n"
    "of this machine. With MODEL2 the two are measured in turn and their ratio is printed.\n"
    "\n"
    "  --contexts LIST  context lengths at which decode is measured, with commas     [128,512]\n"
    "  --tokens N       tokens of one decode measurement                             [32]\n"
    "  --prompt N       tokens of one prefill measurement                            [512]\n"
    "  --repeats N      measurements of each; the median is reported                 [3]\n"
    "  --json FILE      also write the figures as JSON\n"
    "  --backend NAME   auto, cpu, ref or cuda                                       [auto]\n"
    "  --no-fuse LIST   leave out fused GPU kernels: router, addnorm3, shexp, gdn-conv, gdn-core\n"
    "  --threads N      worker threads                                               [all CPUs]\n"
    "  -h, --help       this text\n"
    "  -V, --version    version\n"
    "\n"
    "Token ids are a fixed pseudo-random sequence over the vocabulary; nothing is sampled and no token ends a run.\n"
    "exit status: 0 done; 1 failed; 2 wrong usage\n"
    "example:     spk-bench --contexts 128,4096 model.gguf model.spk\n";

typedef struct {
    const char *json_path;
    uint64_t    contexts[CONTEXTS_MAX];
    uint32_t    context_count;
    uint64_t    token_count, prompt_count, repeat_count, thread_count;
    spk_backend backend;
    uint32_t    fusions_off;
    const char *paths[MODELS_MAX];
    uint32_t    model_count;
} arguments;

typedef struct {
    spk_model   *model;
    spk_session *session;
    float       *logits;                 /* [vocab] */
    uint32_t    *tokens;                 /* capacity ids of the fixed sequence */
    double       load_s, first_token_s;  /* opening and laying out; then one token with cold weights */
    double       prefill[REPEATS_MAX];   /* tokens a second */
    double       decode[CONTEXTS_MAX][REPEATS_MAX];
} subject;

typedef struct {
    const arguments *arguments;
    uint64_t capacity;                   /* tokens of the longest run */
    uint32_t thread_count;               /* as resolved */
    char     cpu[128], date[32];
    double   ceiling_bytes_per_s;
    uint64_t ceiling_buffer_bytes, cache_bytes;   /* cache: the last level, 0 if the system does not say */
    subject  subjects[MODELS_MAX];
    spk_outfile *json_file;              /* NULL if none was asked for, or it is done */
} bench;

/* ---- The machine ---- */

typedef struct { const uint64_t *words; uint64_t sums[SPK_POOL_THREAD_MAX]; } read_job;
enum { PIECE_BYTES = 2 << 20, PIECE_WORDS = PIECE_BYTES / 8, READ_AHEAD_WORDS = 512 };

static void read_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    read_job *job = context;
    uint64_t sums[8] = { 0 };
    for (uint64_t i = begin * PIECE_WORDS; i < end * PIECE_WORDS; i += 8) {
        __builtin_prefetch(job->words + i + READ_AHEAD_WORDS);
        for (uint64_t l = 0; l < 8; l++) sums[l] += job->words[i + l];
    }
    for (uint64_t l = 0; l < 8; l++) job->sums[thread_index] += sums[l];   /* used, so the loads stay */
}

static void touch_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    memset((uint64_t *)context + begin * PIECE_WORDS, 1, (end - begin) * PIECE_BYTES);
}

/* The fastest of a few passes over the buffer. */
static spk_status measure_ceiling(bench *b, spk_error *err) {
    long cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    b->cache_bytes = cache_bytes > 0 ? (uint64_t)cache_bytes : 0;
    uint64_t bytes = 4 * b->cache_bytes;
    if (bytes < CEILING_BYTES_MIN) bytes = CEILING_BYTES_MIN;
    uint64_t pieces = bytes / PIECE_BYTES;
    b->ceiling_buffer_bytes = pieces * PIECE_BYTES;
    spk_pool *pool = NULL;
    SPK_TRY(spk_pool_create((uint32_t)b->arguments->thread_count, &pool, err));
    /* Large pages where there are any, so that the ceiling is the memory's and not the page tables'. */
    uint64_t *words = aligned_alloc(PIECE_BYTES, b->ceiling_buffer_bytes + PIECE_BYTES);
    read_job job = { .words = words };
    if (words == NULL) {
        spk_pool_destroy(pool);
        return spk_fail(err, SPK_E_MEMORY, "bandwidth buffer of %" PRIu64 " bytes: out of memory",
                        b->ceiling_buffer_bytes);
    }
    (void)madvise(words, b->ceiling_buffer_bytes, MADV_HUGEPAGE);
    b->thread_count = spk_pool_thread_count(pool);
    spk_pool_run(pool, pieces, 1, touch_pieces, words);
    for (int pass = 0; pass < CEILING_PASSES; pass++) {
        double start_s = spk_cli_now_s();
        spk_pool_run(pool, pieces, 1, read_pieces, &job);
        double rate = (double)b->ceiling_buffer_bytes / (spk_cli_now_s() - start_s);
        if (rate > b->ceiling_bytes_per_s) b->ceiling_bytes_per_s = rate;
    }
    free(words);
    spk_pool_destroy(pool);
    return SPK_OK;
}

static void describe_machine(bench *b) {
    (void)snprintf(b->cpu, sizeof b->cpu, "unknown CPU");
    FILE *file = fopen("/proc/cpuinfo", "r");
    char line[256];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
        colon[strcspn(colon, "\n")] = '\0';
        (void)snprintf(b->cpu, sizeof b->cpu, "%.120s", colon + 2);
        break;
    }
    if (file != NULL) (void)fclose(file);
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) != NULL) (void)strftime(b->date, sizeof b->date, "%Y-%m-%d %H:%M UTC", &utc);
}

/* ---- One model ---- */

static spk_status start_subject(const bench *b, uint32_t index, subject *s, spk_error *err) {
    const arguments *a = b->arguments;
    spk_cli_progress progress = { .what = a->paths[index] };
    spk_model_options model_options = { .backend = a->backend, .thread_count = (uint32_t)a->thread_count,
                                        .progress = spk_cli_progress_show, .progress_context = &progress };
    double start_s = spk_cli_now_s();
    spk_status status = spk_model_open(a->paths[index], &model_options, &s->model, err);
    s->load_s = spk_cli_now_s() - start_s;
    spk_cli_progress_end(&progress);
    if (status != SPK_OK) return status;
    SPK_TRY(spk_tool_output_check("--json", a->json_path, s->model, err));

    spk_session_options session_options = { .context_tokens = (uint32_t)b->capacity, .fusions_off = a->fusions_off };
    SPK_TRY(spk_session_create(s->model, &session_options, &s->session, err));
    uint32_t vocab_size = spk_model_vocab_size(s->model);
    s->logits = malloc(sizeof *s->logits * vocab_size);
    s->tokens = malloc(sizeof *s->tokens * b->capacity);
    if (s->logits == NULL || s->tokens == NULL)
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", a->paths[index]);
    uint64_t state = TOKEN_SEED;
    for (uint64_t i = 0; i < b->capacity; i++) {         /* a 64-bit linear congruence, its upper bits */
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        s->tokens[i] = (uint32_t)((state >> 33) % vocab_size);
    }
    start_s = spk_cli_now_s();
    SPK_TRY(spk_session_eval(s->session, s->tokens, 1, SPK_LOGITS_LAST, s->logits, err));
    s->first_token_s = spk_cli_now_s() - start_s;
    return spk_tool_logits_check(a->paths[index], 0, s->logits, vocab_size, err);
}

static spk_status measure_prefill(const bench *b, subject *s, double *out, spk_error *err) {
    uint32_t count = (uint32_t)b->arguments->prompt_count;
    spk_session_reset(s->session);
    double start_s = spk_cli_now_s();
    SPK_TRY(spk_session_eval(s->session, s->tokens, count, SPK_LOGITS_LAST, s->logits, err));
    *out = count / (spk_cli_now_s() - start_s);
    return SPK_OK;
}

/* The ceiling that is measured is the CPU's. */
static bool is_on_gpu(const subject *s) { return strcmp(spk_model_backend_name(s->model), "cuda") == 0; }

/* One block of tokens, one at a time, from where the session stands.  A GPU walks them by itself. */
static spk_status measure_decode(const bench *b, subject *s, double *out, spk_error *err) {
    uint64_t count = b->arguments->token_count;
    uint32_t step = is_on_gpu(s) ? (uint32_t)count : 1;
    double start_s = spk_cli_now_s();
    for (uint64_t i = 0; i < count; i += step)
        SPK_TRY(spk_session_eval(s->session, s->tokens + spk_session_position(s->session), step, SPK_LOGITS_LAST,
                                 s->logits, err));
    *out = (double)count / (spk_cli_now_s() - start_s);
    return SPK_OK;
}

/* Repeats outside, models inside: A B A B ...  Decode blocks of a context follow one another, so repeat r starts at
 * context + r * tokens; there is no way to step a recurrent state back. */
static spk_status measure(bench *b, spk_error *err) {
    const arguments *a = b->arguments;
    for (uint64_t r = 0; r < a->repeat_count; r++)
        for (uint32_t m = 0; m < a->model_count; m++)
            SPK_TRY(measure_prefill(b, &b->subjects[m], &b->subjects[m].prefill[r], err));
    for (uint32_t c = 0; c < a->context_count; c++) {
        for (uint32_t m = 0; m < a->model_count; m++) {
            subject *s = &b->subjects[m];
            spk_session_reset(s->session);
            SPK_TRY(spk_session_eval(s->session, s->tokens, (uint32_t)a->contexts[c], SPK_LOGITS_NONE, NULL, err));
        }
        for (uint64_t r = 0; r < a->repeat_count; r++)
            for (uint32_t m = 0; m < a->model_count; m++)
                SPK_TRY(measure_decode(b, &b->subjects[m], &b->subjects[m].decode[c][r], err));
    }
    return SPK_OK;
}

/* ---- Report ---- */

typedef struct { double low, median, high; } spread;

static spread spread_of(const double *values, uint64_t count) {
    double sorted[REPEATS_MAX];
    memcpy(sorted, values, count * sizeof *sorted);
    spk_sort_doubles(sorted, count);
    return (spread){ sorted[0], spk_percentile(sorted, count, 0.5), sorted[count - 1] };
}

static void print_report(const bench *b) {
    const arguments *a = b->arguments;
    char text[24], text2[24];
    printf("spk %s, %s: %s, %" PRIu32 " thread%s\n", SPK_VERSION_TEXT, b->date, b->cpu, b->thread_count,
           b->thread_count == 1 ? "" : "s");
    printf("read bandwidth %s/s (best of %d passes over %s)\n",
           spk_cli_bytes_text((uint64_t)b->ceiling_bytes_per_s, text), CEILING_PASSES,
           spk_cli_bytes_text(b->ceiling_buffer_bytes, text2));
    printf("medians of %" PRIu64 "; in brackets lowest and highest; prefill of %" PRIu64 " tokens, decode of %" PRIu64
           " tokens a time\n", a->repeat_count, a->prompt_count, a->token_count);
    for (uint32_t m = 0; m < a->model_count; m++) {
        const subject *s = &b->subjects[m];
        uint64_t bytes = spk_model_bytes_per_token(s->model);
        spread prefill = spread_of(s->prefill, a->repeat_count);
        printf("\n%s  (%s, %s backend; weights %s, %s a token)\n", a->paths[m], spk_model_arch(s->model),
               spk_model_backend_name(s->model), spk_cli_bytes_text(spk_model_weight_bytes(s->model), text),
               spk_cli_bytes_text(bytes, text2));
        if (spk_model_weight_bytes(s->model) < b->cache_bytes)
            printf("  (fits in the last-level cache of %s: the share of the bandwidth may pass 100 %%)\n",
                   spk_cli_bytes_text(b->cache_bytes, text));
        printf("  load            %10.3f s, then first token %.3f s\n", s->load_s, s->first_token_s);
        printf("  prefill         %10.2f tok/s  [%.2f %.2f]\n", prefill.median, prefill.low, prefill.high);
        for (uint32_t c = 0; c < a->context_count; c++) {
            spread d = spread_of(s->decode[c], a->repeat_count);
            double rate = (double)bytes * d.median;
            printf("  decode @%-7" PRIu64 " %10.2f tok/s  [%.2f %.2f]  %s/s of weights", a->contexts[c], d.median, d.low,
                   d.high, spk_cli_bytes_text((uint64_t)rate, text));
            if (!is_on_gpu(s)) printf(", %.0f %% of the bandwidth", 100 * rate / b->ceiling_bytes_per_s);
            printf("\n");
        }
    }
    if (a->model_count == 2) {
        const subject *s = b->subjects;
        printf("\nsecond / first    prefill %.3f", spread_of(s[1].prefill, a->repeat_count).median /
                                                   spread_of(s[0].prefill, a->repeat_count).median);
        for (uint32_t c = 0; c < a->context_count; c++)
            printf("  decode @%" PRIu64 " %.3f", a->contexts[c], spread_of(s[1].decode[c], a->repeat_count).median /
                                                                    spread_of(s[0].decode[c], a->repeat_count).median);
        printf("\n");
    }
}

static void add_samples(cJSON *object, const double *samples, uint64_t count) {
    spk_tool_json_number(object, "tok_per_s", spread_of(samples, count).median);
    cJSON *array = cJSON_AddArrayToObject(object, "samples");
    for (uint64_t i = 0; i < count; i++) cJSON_AddItemToArray(array, cJSON_CreateNumber(samples[i]));
}

static cJSON *subject_json(const bench *b, uint32_t index) {
    const arguments *a = b->arguments;
    const subject *s = &b->subjects[index];
    double bytes = (double)spk_model_bytes_per_token(s->model);
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToObject(object, "path", spk_cli_json_string(a->paths[index]));
    cJSON_AddBoolToObject(object, "pack", spk_model_is_pack(s->model));
    cJSON_AddStringToObject(object, "model", spk_model_fingerprint_text(s->model));
    cJSON_AddStringToObject(object, "backend", spk_model_backend_name(s->model));
    spk_tool_json_number(object, "weight_bytes", (double)spk_model_weight_bytes(s->model));
    spk_tool_json_number(object, "bytes_per_token", bytes);
    spk_tool_json_number(object, "state_bytes", (double)spk_session_state_bytes(s->session));
    spk_tool_json_number(object, "load_s", s->load_s);
    spk_tool_json_number(object, "first_token_s", s->first_token_s);
    cJSON *prefill = cJSON_AddObjectToObject(object, "prefill");
    spk_tool_json_number(prefill, "tokens", (double)a->prompt_count);
    add_samples(prefill, s->prefill, a->repeat_count);
    cJSON *decode = cJSON_AddArrayToObject(object, "decode");
    for (uint32_t c = 0; c < a->context_count; c++) {
        double bytes_per_s = bytes * spread_of(s->decode[c], a->repeat_count).median;
        cJSON *row = cJSON_CreateObject();
        spk_tool_json_number(row, "context", (double)a->contexts[c]);
        spk_tool_json_number(row, "tokens", (double)a->token_count);
        add_samples(row, s->decode[c], a->repeat_count);
        spk_tool_json_number(row, "bytes_per_s", bytes_per_s);
        if (!is_on_gpu(s)) spk_tool_json_number(row, "fraction_of_ceiling", bytes_per_s / b->ceiling_bytes_per_s);
        cJSON_AddItemToArray(decode, row);
    }
    return object;
}

static spk_status write_json(bench *b, spk_error *err) {
    cJSON *report = cJSON_CreateObject();
    cJSON_AddStringToObject(report, "tool", "spk-bench " SPK_VERSION_TEXT);
    cJSON_AddStringToObject(report, "date", b->date);
    cJSON_AddItemToObject(report, "cpu", spk_cli_json_string(b->cpu));
    spk_tool_json_number(report, "threads", (double)b->thread_count);
    spk_tool_json_number(report, "ceiling_bytes_per_s", b->ceiling_bytes_per_s);
    spk_tool_json_number(report, "ceiling_buffer_bytes", (double)b->ceiling_buffer_bytes);
    cJSON *models = cJSON_AddArrayToObject(report, "models");
    for (uint32_t m = 0; m < b->arguments->model_count; m++) cJSON_AddItemToArray(models, subject_json(b, m));
    spk_status status = spk_tool_json_commit(b->json_file, report, err);
    b->json_file = NULL;
    cJSON_Delete(report);
    return status;
}

/* ---- Command line ---- */

enum { OPT_CONTEXTS = 256, OPT_TOKENS, OPT_PROMPT, OPT_REPEATS, OPT_JSON, OPT_BACKEND, OPT_NO_FUSE, OPT_THREADS };

static const struct option LONG_OPTIONS[] = {
    { "contexts", required_argument, NULL, OPT_CONTEXTS }, { "tokens", required_argument, NULL, OPT_TOKENS },
    { "prompt", required_argument, NULL, OPT_PROMPT }, { "repeats", required_argument, NULL, OPT_REPEATS },
    { "json", required_argument, NULL, OPT_JSON }, { "backend", required_argument, NULL, OPT_BACKEND },
    { "threads", required_argument, NULL, OPT_THREADS }, { "no-fuse", required_argument, NULL, OPT_NO_FUSE },
    { "help", no_argument, NULL, 'h' }, { "version", no_argument, NULL, 'V' }, { 0 },
};

static spk_status take_contexts(char *list, arguments *a, spk_error *err) {
    char *state = NULL;
    a->context_count = 0;
    for (char *word = strtok_r(list, ",", &state); word != NULL; word = strtok_r(NULL, ",", &state)) {
        if (a->context_count == CONTEXTS_MAX)
            return spk_fail(err, SPK_E_USAGE, "--contexts: more than %d lengths", CONTEXTS_MAX);
        SPK_TRY(spk_cli_u64("--contexts", word, 1, SPK_CONTEXT_MAX, &a->contexts[a->context_count++], err));
    }
    return a->context_count > 0 ? SPK_OK : spk_fail(err, SPK_E_USAGE, "--contexts: expected lengths with commas");
}

static spk_status take_fusions(char *list, uint32_t *off, spk_error *err) {
    static const struct { const char *name; uint32_t bit; } fusions[] = {
        { "router", SPK_FUSE_ROUTER }, { "addnorm3", SPK_FUSE_ADDNORM3 }, { "shexp", SPK_FUSE_SHEXP },
        { "gdn-conv", SPK_FUSE_GDN_CONV }, { "gdn-core", SPK_FUSE_GDN_CORE } };
    char *state = NULL;
    for (char *word = strtok_r(list, ",", &state); word != NULL; word = strtok_r(NULL, ",", &state)) {
        uint32_t bit = 0;
        for (size_t i = 0; i < sizeof fusions / sizeof *fusions; i++)
            if (strcmp(word, fusions[i].name) == 0) bit = fusions[i].bit;
        if (bit == 0)
            return spk_fail(err, SPK_E_USAGE, "--no-fuse '%s': expected router, addnorm3, shexp, gdn-conv or gdn-core", word);
        *off |= bit;
    }
    return SPK_OK;
}

static spk_status take_option(int option, arguments *a, spk_error *err) {
    switch (option) {
    case OPT_CONTEXTS: return take_contexts(optarg, a, err);
    case OPT_TOKENS:   return spk_cli_u64("--tokens", optarg, 1, SPK_CONTEXT_MAX, &a->token_count, err);
    case OPT_PROMPT:   return spk_cli_u64("--prompt", optarg, 1, SPK_CONTEXT_MAX, &a->prompt_count, err);
    case OPT_REPEATS:  return spk_cli_u64("--repeats", optarg, 1, REPEATS_MAX, &a->repeat_count, err);
    case OPT_NO_FUSE:  return take_fusions(optarg, &a->fusions_off, err);
    case OPT_BACKEND:  return spk_tool_backend("--backend", optarg, &a->backend, err);
    case OPT_THREADS:  return spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &a->thread_count, err);
    default:           a->json_path = optarg; return SPK_OK;
    }
}

/* Returns -1 to go on, else an exit status. */
static int parse_arguments(int argc, char **argv, arguments *a) {
    spk_error err;
    for (int option; (option = spk_cli_option(argc, argv, ":hV", LONG_OPTIONS, &err)) != -1;) {
        if (option == 'h' || option == 'V') {
            if (option == 'h') fputs(HELP, stdout);
            else printf("%s %s\n", TOOL, SPK_VERSION_TEXT);
            return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        }
        if (option == '?' || take_option(option, a, &err) != SPK_OK) return spk_cli_usage(TOOL, "%s", err.text);
    }
    int model_count = argc - optind;
    if (model_count < 1 || model_count > MODELS_MAX)
        return spk_cli_usage(TOOL, "expected 1 or 2 models, got %d", model_count);
    for (int m = 0; m < model_count; m++) a->paths[m] = argv[optind + m];
    a->model_count = (uint32_t)model_count;
    return -1;
}

static spk_status bench_models(bench *b, spk_error *err) {
    const arguments *a = b->arguments;
    b->capacity = a->prompt_count;
    for (uint32_t c = 0; c < a->context_count; c++) {
        uint64_t end = a->contexts[c] + a->repeat_count * a->token_count;
        if (end > b->capacity) b->capacity = end;
    }
    if (b->capacity > SPK_CONTEXT_MAX)
        return spk_fail(err, SPK_E_USAGE, "--contexts, --repeats and --tokens need a context of %" PRIu64
                        " tokens, at most %d", b->capacity, (int)SPK_CONTEXT_MAX);
    if (a->json_path != NULL)
        SPK_TRY(spk_tool_output_begin("--json", a->json_path, a->paths, MODELS_MAX, 0, &b->json_file, err));
    describe_machine(b);
    SPK_TRY(measure_ceiling(b, err));
    for (uint32_t m = 0; m < a->model_count; m++) SPK_TRY(start_subject(b, m, &b->subjects[m], err));
    SPK_TRY(measure(b, err));
    print_report(b);
    return b->json_file != NULL ? write_json(b, err) : SPK_OK;
}

int main(int argc, char **argv) {
    static bench b;                      /* samples of every repeat: too large for a stack */
    arguments a = { .contexts = { 128, 512 }, .context_count = 2, .token_count = 32, .prompt_count = 512,
                    .repeat_count = 3 };
    spk_error err = { 0 };
    int exit_status = parse_arguments(argc, argv, &a);
    if (exit_status >= 0) return exit_status;
    b.arguments = &a;
    spk_tool_signals();
    exit_status = bench_models(&b, &err) == SPK_OK ? SPK_EXIT_DONE : spk_cli_fail(TOOL, &err);
    spk_outfile_abort(b.json_file);
    for (uint32_t m = 0; m < a.model_count; m++) {
        free(b.subjects[m].logits);
        free(b.subjects[m].tokens);
        spk_session_destroy(b.subjects[m].session);
        spk_model_close(b.subjects[m].model);
    }
    return spk_cli_finish(TOOL, exit_status);
}
