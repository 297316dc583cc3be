/* runtime/compare_main.c - spk-compare: what a pack's smaller weights cost, measured on a text.
 *
 * Runs every model over the same windows in lock step and scores every position; the statistics are compare.h's.
 * Weights are always the bytes of the files given: nothing here changes a model.  Holds one batch of logits a model.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/cli.h"
#include "formats/html.h"
#include "formats/model.h"
#include "formats/plain.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "runtime/compare.h"
#include "runtime/compare_page.h"
#include "runtime/runtime.h"
#include "runtime/tool.h"

static const char TOOL[] = "spk-compare";
enum { MODELS_MAX = SPK_COMPARE_MODEL_COUNT_MAX, BATCH = 32, CTX_DEFAULT = 512 };

static const char HELP[] =
    "usage: spk-compare (--text FILE | --tokens FILE) [options] BASE CANDIDATE [CANDIDATE]...\n"
    "\n"
    "Compare the predictions of models (.spk or .gguf) with those of BASE, at every position of a text and over the\n"
    "full vocabulary: KL divergence, same top-1, probability of the true token, perplexity.\n"
    "\n"
    "  --text FILE      text, tokenized with BASE's tokenizer, which all models must share\n"
    "  --tokens FILE    token ids in decimal, separated by spaces, commas or lines; no tokenizer is looked at\n"
    "  --ctx N          tokens of a window; each begins from an empty state          [512, or the trained context]\n"
    "  --max-tokens N   use the first N tokens of the text                           [all]\n"
    "  --max-kl X       exit 1 if a candidate's mean KL + 1.645 standard errors (the larger of the two that are\n"
    "                   printed) is above X\n"
    "  --min-top1 X     exit 1 if the lower bound of its same-top-1 share (Wilson's, one-sided 95 %) is below X\n"
    "                   (0 to 1); 1 asks for the same token at every position\n"
    "  --json FILE      also write the figures as JSON\n"
    "  --html FILE      and a page to look at: KL along the text, its distribution, the worst tokens, sizes, provenance,\n"
    "                   and of packs the error of each layer and class\n"
    "  --force          replace these files if they exist\n"
    "  --backend NAME   auto, cpu, ref or cuda                                       [auto]\n"
    "  --base-backend NAME\n"
    "                   BASE on another one: BASE against itself then measures backends [as --backend]\n"
    "  --kv f16|q8      keys and values of the candidates, on a GPU; against a base in f16      [f16]\n"
    "  --threads N      never changes a result                                       [all CPUs]\n"
    "  -h, --help       this text\n"
    "  -V, --version    version\n"
    "\n"
    "exit status: 0 done; 1 failed, or a gate failed; 2 wrong usage\n"
    "example:     spk-compare --text tests/text/held-out.txt --max-kl 0.01 model.gguf model.spk\n";

typedef struct {
    const char *text_path, *tokens_path, *json_path, *html_path;
    uint64_t    ctx, max_tokens, thread_count;   /* ctx 0: not given */
    spk_backend backend, base_backend;
    bool        has_base_backend;            /* else base_backend is not looked at */
    bool        is_kv_q8;                    /* of the candidates */
    bool        is_forced;
    bool        has_max_kl, has_min_top1;
    double      max_kl, min_top1;
    const char *paths[MODELS_MAX];       /* base, candidates */
    uint32_t    model_count;
} arguments;

typedef struct {
    const arguments *arguments;
    uint64_t       ctx;                  /* tokens of a window, as resolved */
    spk_outfile   *json_file, *html_file; /* NULL if none was asked for, or it is done */
    spk_model     *models[MODELS_MAX];
    spk_session   *sessions[MODELS_MAX];
    float         *logits[MODELS_MAX];   /* [BATCH][vocab] */
    uint32_t       vocab_size;
    uint32_t      *tokens;
    uint64_t       token_count;
    spk_pool      *pool;
    spk_compare   *compare;
    spk_compare_summary summaries[MODELS_MAX - 1];
} comparison;

/* ---- Models and text ---- */

static spk_status open_models(comparison *c, spk_error *err) {
    const arguments *a = c->arguments;
    for (uint32_t m = 0; m < a->model_count; m++) {
        spk_cli_progress progress = { .what = a->paths[m] };
        spk_backend backend = m == 0 && a->has_base_backend ? a->base_backend : a->backend;
        spk_model_options options = { .backend = backend, .thread_count = (uint32_t)a->thread_count,
                                      .progress = spk_cli_progress_show, .progress_context = &progress };
        spk_status status = spk_model_open(a->paths[m], &options, &c->models[m], err);
        spk_cli_progress_end(&progress);
        if (status != SPK_OK) return status;
        spk_cli_note(TOOL, "on the CPU, not on the GPU", spk_model_gpu_refusal(c->models[m]));
        uint32_t vocab_size = spk_model_vocab_size(c->models[m]);
        if (m == 0) c->vocab_size = vocab_size;
        if (vocab_size != c->vocab_size)
            return spk_fail(err, SPK_E_MISMATCH, "%s: vocabulary of %" PRIu32 " tokens, but %s has %" PRIu32,
                            a->paths[m], vocab_size, a->paths[0], c->vocab_size);
        uint32_t trained = spk_model_context_length(c->models[m]);
        if (a->ctx > trained)
            return spk_fail(err, SPK_E_USAGE, "--ctx %" PRIu64 ": %s was trained on %" PRIu32 " tokens", a->ctx,
                            a->paths[m], trained);
        if (a->ctx == 0 && trained < c->ctx) c->ctx = trained;
        if (m > 0 && a->text_path != NULL) SPK_TRY(spk_tool_same_tokenizer(c->models[0], c->models[m], err));
        SPK_TRY(spk_tool_output_check_model("--json", a->json_path, c->models[m], err));
        SPK_TRY(spk_tool_output_check_model("--html", a->html_path, c->models[m], err));
    }
    return SPK_OK;
}

static spk_status make_sessions(comparison *c, spk_error *err) {
    for (uint32_t m = 0; m < c->arguments->model_count; m++) {
        spk_session_options options = { .context_tokens = (uint32_t)c->ctx, .batch_tokens = BATCH,
                                        .kv_q8 = m > 0 && c->arguments->is_kv_q8 };
        SPK_TRY(spk_session_create(c->models[m], &options, &c->sessions[m], err));
        c->logits[m] = malloc(sizeof(float) * BATCH * c->vocab_size);
        if (c->logits[m] == NULL)
            return spk_fail(err, SPK_E_MEMORY, "logits of %s: out of memory", c->arguments->paths[m]);
    }
    spk_compare_options options = { .vocab_size = c->vocab_size, .model_count = c->arguments->model_count,
                                    .names = c->arguments->paths, .window_positions = (uint32_t)c->ctx };
    SPK_TRY(spk_pool_create((uint32_t)c->arguments->thread_count, &c->pool, err));
    return spk_compare_create(&options, &c->compare, err);
}

static spk_status read_tokens(comparison *c, spk_error *err) {
    const arguments *a = c->arguments;
    const char *path = a->text_path ? a->text_path : a->tokens_path;
    char *text = NULL;
    size_t size = 0, count = 0;
    spk_tokenizer *tokenizer = NULL;
    SPK_TRY(spk_cli_read_file(path, SPK_TOOL_TEXT_BYTES_MAX, &text, &size, err));
    spk_status status = SPK_OK;
    if (a->text_path) {
        status = spk_tokenizer_create(c->models[0], &tokenizer, err);
        if (status == SPK_OK) status = spk_tokenizer_encode(tokenizer, text, size, false, &c->tokens, &count, err);
        spk_tokenizer_destroy(tokenizer);
    } else {
        status = spk_tool_tokens(path, text, size, c->vocab_size, &c->tokens, &count, err);
    }
    free(text);
    if (status != SPK_OK) return status;
    c->token_count = count < a->max_tokens ? count : a->max_tokens;
    if (c->token_count < 3 || c->token_count - 1 > SPK_COMPARE_POSITION_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " tokens; expected 3 to %" PRIu64 " (see --max-tokens)", path,
                        c->token_count, SPK_COMPARE_POSITION_COUNT_MAX + 1);
    return SPK_OK;
}

/* ---- Scoring ---- */

/* The last token of the text has no successor and is not evaluated. */
static spk_status score_positions(comparison *c, bool is_terminal, spk_error *err) {
    const uint64_t positions = c->token_count - 1;
    for (uint64_t done = 0; done < positions;) {
        uint64_t in_window = done % c->ctx, count = c->ctx - in_window;
        if (count > BATCH) count = BATCH;
        if (count > positions - done) count = positions - done;
        for (uint32_t m = 0; m < c->arguments->model_count; m++) {
            if (in_window == 0) spk_session_reset(c->sessions[m]);
            SPK_TRY(spk_session_eval(c->sessions[m], c->tokens + done, (uint32_t)count, SPK_LOGITS_ALL, c->logits[m],
                                     err));
        }
        SPK_TRY(spk_compare_add(c->compare, (const float *const *)c->logits, c->tokens + done + 1, (uint32_t)count,
                                c->pool, err));
        done += count;
        if (is_terminal) fprintf(stderr, "\r\033[Kscored %" PRIu64 " of %" PRIu64 " positions", done, positions);
    }
    return SPK_OK;
}

static spk_status score(comparison *c, spk_error *err) {
    bool is_terminal = isatty(STDERR_FILENO) == 1;
    spk_status status = score_positions(c, is_terminal, err);
    if (is_terminal) fprintf(stderr, "\r\033[K");       /* an error, too, begins a line */
    if (status != SPK_OK) return status;
    for (uint32_t i = 0; i + 1 < c->arguments->model_count; i++)
        SPK_TRY(spk_compare_summarize(c->compare, i, &c->summaries[i], err));
    return SPK_OK;
}

/* ---- Report ---- */

static void print_candidate(const comparison *c, uint32_t index) {
    const spk_compare_summary *s = &c->summaries[index];
    char bytes[24];
    const spk_model *model = c->models[index + 1];
    printf("\n%s  (%s, ", spk_plain(c->arguments->paths[index + 1]).text, spk_model_arch(model));
    if (c->arguments->has_base_backend) printf("%s backend, ", spk_model_backend_name(model));
    printf("%s of weights a token)\n", spk_cli_bytes_text(spk_model_bytes_per_token(model), bytes));
    printf("  same top-1        %.3f %% +- %.3f\n", 100 * s->top1, 100 * s->top1_se);
    printf("  mean KL           %.3g +- %.2g", s->kl_mean, s->kl_se);
    if (s->window_count >= 2) printf("  (windows as draws: +- %.2g)", s->kl_window_se);
    printf("\n  KL percentiles    median %.3g  90 %% %.3g  95 %% %.3g  99 %% %.3g  99.9 %% %.3g  max %.3g\n",
           s->kl_median, s->kl_p90, s->kl_p95, s->kl_p99, s->kl_p999, s->kl_max);
    printf("  delta p           mean %+.4f %%  rms %.4f %%\n", 100 * s->dp_mean, 100 * s->dp_rms);
    printf("  perplexity        base %.4f  candidate %.4f  ln ratio %+.5f +- %.5f\n", s->ppl_base, s->ppl_candidate,
           s->ln_ppl_ratio, s->ln_ppl_ratio_se);
    if (index > 0)
        printf("  mean KL - first's %+.3g +- %.2g  (paired)\n", s->kl_diff_to_first, s->kl_diff_se);
}

static void print_report(const comparison *c) {
    const arguments *a = c->arguments;
    printf("base    %s  (%s, %s backend)\n", spk_plain(a->paths[0]).text, spk_model_arch(c->models[0]),
           spk_model_backend_name(c->models[0]));
    printf("text    %s: %" PRIu64 " tokens; %" PRIu64 " positions scored in %" PRIu64 " windows of %" PRIu64 "\n",
           spk_plain(a->text_path ? a->text_path : a->tokens_path).text, c->token_count, c->summaries[0].positions,
           c->summaries[0].window_count, c->ctx);
    for (uint32_t i = 0; i + 1 < a->model_count; i++) print_candidate(c, i);
    printf("\nKL is KL(base || candidate) in nats; +- is one standard error, positions taken as independent.\n");
}

static cJSON *model_json(const comparison *c, uint32_t m) {
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToObject(object, "path", spk_cli_json_string(c->arguments->paths[m]));
    cJSON_AddStringToObject(object, "model", spk_model_fingerprint_text(c->models[m]));
    cJSON_AddStringToObject(object, "backend", spk_model_backend_name(c->models[m]));
    spk_tool_json_number(object, "bytes_per_token", (double)spk_model_bytes_per_token(c->models[m]));
    return object;
}

static cJSON *candidate_json(const comparison *c, uint32_t index) {
    const spk_compare_summary *s = &c->summaries[index];
    const struct { const char *key; double value; } figures[] = {
        { "positions", (double)s->positions }, { "top1", s->top1 }, { "top1_se", s->top1_se },
        { "kl_mean", s->kl_mean }, { "kl_se", s->kl_se }, { "windows", (double)s->window_count },
        { "kl_median", s->kl_median }, { "kl_p90", s->kl_p90 }, { "kl_p95", s->kl_p95 }, { "kl_p99", s->kl_p99 },
        { "kl_p999", s->kl_p999 }, { "kl_max", s->kl_max }, { "kl_upper", spk_compare_kl_upper(s) },
        { "top1_lower", spk_compare_top1_lower(s) },
        { "mean_dp", s->dp_mean }, { "rms_dp", s->dp_rms }, { "ppl_base", s->ppl_base },
        { "ppl_candidate", s->ppl_candidate }, { "ln_ppl_ratio", s->ln_ppl_ratio },
        { "ln_ppl_ratio_se", s->ln_ppl_ratio_se }, { "kl_diff_to_first", s->kl_diff_to_first },
        { "kl_diff_se", s->kl_diff_se },
    };
    cJSON *object = model_json(c, index + 1);
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
        spk_tool_json_number(object, figures[i].key, figures[i].value);
    if (s->window_count >= 2) spk_tool_json_number(object, "kl_window_se", s->kl_window_se);
    return object;
}

static cJSON *make_report(const comparison *c) {
    const arguments *a = c->arguments;
    cJSON *report = cJSON_CreateObject();
    cJSON_AddStringToObject(report, "tool", "spk-compare " SPK_VERSION_TEXT);
    cJSON_AddItemToObject(report, "text", spk_cli_json_string(a->text_path ? a->text_path : a->tokens_path));
    spk_tool_json_number(report, "tokens", (double)c->token_count);
    spk_tool_json_number(report, "ctx", (double)c->ctx);
    cJSON_AddItemToObject(report, "base", model_json(c, 0));
    cJSON *candidates = cJSON_AddArrayToObject(report, "candidates");
    for (uint32_t i = 0; i + 1 < a->model_count; i++) cJSON_AddItemToArray(candidates, candidate_json(c, i));
    return report;
}

static spk_status write_html(comparison *c, const cJSON *figures, spk_error *err) {
    const arguments *a = c->arguments;
    spk_html page = { 0 };
    spk_tokenizer *tokenizer = NULL;
    spk_error why;
    if (spk_tokenizer_create(c->models[0], &tokenizer, &why) != SPK_OK) tokenizer = NULL;   /* then ids are shown */
    spk_compare_page source = { .paths = a->paths, .models = c->models, .model_count = a->model_count,
                                .compare = c->compare, .summaries = c->summaries, .tokens = c->tokens,
                                .window_positions = c->ctx, .text_path = a->text_path ? a->text_path : a->tokens_path,
                                .tokenizer = tokenizer, .report = figures };
    spk_compare_page_write(&page, &source);
    spk_tokenizer_destroy(tokenizer);
    spk_status status = spk_html_commit(&page, c->html_file, err);
    c->html_file = NULL;
    return status;
}

static spk_status write_files(comparison *c, spk_error *err) {
    if (c->json_file == NULL && c->html_file == NULL) return SPK_OK;
    cJSON *figures = make_report(c);
    spk_status status = SPK_OK;
    if (c->json_file != NULL) {
        status = spk_tool_json_commit(c->json_file, figures, err);
        c->json_file = NULL;
    }
    if (status == SPK_OK && c->html_file != NULL) status = write_html(c, figures, err);
    cJSON_Delete(figures);
    return status;
}

/* True if every gate that was asked for holds. */
static bool gates_hold(const comparison *c) {
    const arguments *a = c->arguments;
    bool all_hold = true;
    for (uint32_t i = 0; i + 1 < a->model_count; i++) {
        const spk_compare_summary *s = &c->summaries[i];
        bool is_exact = a->min_top1 >= 1;                /* no bound reaches 1: every position, then */
        double kl = spk_compare_kl_upper(s), top1 = is_exact ? s->top1 : spk_compare_top1_lower(s);
        const struct { const char *name, *what; bool is_set; double limit, bound, excess; } gates[] = {
            { "--max-kl", "mean KL + 1.645 s.e. =", a->has_max_kl, a->max_kl, kl, kl - a->max_kl },
            { "--min-top1", is_exact ? "same top-1 =" : "same top-1, lower bound =", a->has_min_top1, a->min_top1,
              top1, a->min_top1 - top1 },
        };
        for (size_t g = 0; g < 2; g++) {
            if (!gates[g].is_set) continue;
            bool holds = gates[g].excess <= 0;
            printf("%s %s %g: %s: %s %.5g", holds ? "passed" : "FAILED", gates[g].name, gates[g].limit,
                   spk_plain(a->paths[i + 1]).text, gates[g].what, gates[g].bound);
            if (!holds) printf(", off by %.3g", gates[g].excess);
            printf("\n");
            all_hold &= holds;
        }
    }
    return all_hold;
}

/* ---- Command line ---- */

enum { OPT_TEXT = 256, OPT_TOKENS, OPT_CTX, OPT_MAX_TOKENS, OPT_MAX_KL, OPT_MIN_TOP1, OPT_JSON, OPT_HTML, OPT_BACKEND,
       OPT_BASE_BACKEND, OPT_THREADS, OPT_KV, OPT_FORCE };

static const struct option LONG_OPTIONS[] = {
    { "text", required_argument, NULL, OPT_TEXT }, { "tokens", required_argument, NULL, OPT_TOKENS },
    { "ctx", required_argument, NULL, OPT_CTX }, { "max-tokens", required_argument, NULL, OPT_MAX_TOKENS },
    { "max-kl", required_argument, NULL, OPT_MAX_KL }, { "min-top1", required_argument, NULL, OPT_MIN_TOP1 },
    { "json", required_argument, NULL, OPT_JSON }, { "html", required_argument, NULL, OPT_HTML },
    { "backend", required_argument, NULL, OPT_BACKEND }, { "base-backend", required_argument, NULL, OPT_BASE_BACKEND },
    { "kv", required_argument, NULL, OPT_KV }, { "threads", required_argument, NULL, OPT_THREADS },
    { "force", no_argument, NULL, OPT_FORCE },
    { "help", no_argument, NULL, 'h' }, { "version", no_argument, NULL, 'V' }, { 0 },
};

static spk_status take_option(int option, arguments *a, spk_error *err) {
    switch (option) {
    case OPT_TEXT:       a->text_path = optarg; return SPK_OK;
    case OPT_TOKENS:     a->tokens_path = optarg; return SPK_OK;
    case OPT_CTX:        return spk_cli_u64("--ctx", optarg, 1, SPK_CONTEXT_MAX, &a->ctx, err);
    case OPT_MAX_TOKENS: return spk_cli_u64("--max-tokens", optarg, 3, UINT64_MAX, &a->max_tokens, err);
    case OPT_MAX_KL:     a->has_max_kl = true; return spk_cli_double("--max-kl", optarg, 0, 1e6, &a->max_kl, err);
    case OPT_MIN_TOP1:   a->has_min_top1 = true; return spk_cli_double("--min-top1", optarg, 0, 1, &a->min_top1, err);
    case OPT_BACKEND:    return spk_tool_backend("--backend", optarg, &a->backend, err);
    case OPT_KV:         return spk_tool_kv("--kv", optarg, &a->is_kv_q8, err);
    case OPT_BASE_BACKEND:
        a->has_base_backend = true;
        return spk_tool_backend("--base-backend", optarg, &a->base_backend, err);
    case OPT_THREADS:    return spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &a->thread_count, err);
    case OPT_FORCE:      a->is_forced = true; return SPK_OK;
    case OPT_HTML:       a->html_path = optarg; return SPK_OK;
    default:             a->json_path = optarg; return SPK_OK;
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
    if (model_count < 2 || model_count > MODELS_MAX)
        return spk_cli_usage(TOOL, "expected BASE and 1 to %d candidates, got %d models", MODELS_MAX - 1, model_count);
    for (int m = 0; m < model_count; m++) a->paths[m] = argv[optind + m];
    a->model_count = (uint32_t)model_count;
    if ((a->text_path != NULL) == (a->tokens_path != NULL))
        return spk_cli_usage(TOOL, "expected exactly one of --text and --tokens");
    if (a->json_path != NULL && a->html_path != NULL &&
        (strcmp(a->json_path, a->html_path) == 0 || spk_same_file(a->json_path, a->html_path)))
        return spk_cli_usage(TOOL, "--json and --html are the same file '%s'", a->html_path);
    return -1;
}

static spk_status compare_models(comparison *c, spk_error *err) {
    const arguments *a = c->arguments;
    const char *inputs[MODELS_MAX + 2] = { a->text_path, a->tokens_path };
    memcpy(inputs + 2, a->paths, sizeof a->paths);
    if (a->json_path != NULL)
        SPK_TRY(spk_tool_output_begin("--json", a->json_path, a->is_forced, inputs, MODELS_MAX + 2, 0, &c->json_file, err));
    if (a->html_path != NULL)
        SPK_TRY(spk_tool_output_begin("--html", a->html_path, a->is_forced, inputs, MODELS_MAX + 2, 0, &c->html_file, err));
    SPK_TRY(open_models(c, err));
    SPK_TRY(read_tokens(c, err));
    SPK_TRY(make_sessions(c, err));
    return score(c, err);
}

/* The gates are printed whatever becomes of the files. */
static int report(comparison *c) {
    spk_error err;
    print_report(c);
    int exit_status = gates_hold(c) ? SPK_EXIT_DONE : SPK_EXIT_FAILED;
    if (write_files(c, &err) == SPK_OK) return exit_status;
    return spk_cli_fail(TOOL, &err);
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, spk_outfile_remove_all);
    arguments a = { .max_tokens = UINT64_MAX };
    comparison c = { .arguments = &a };
    spk_error err = { 0 };
    int exit_status = parse_arguments(argc, argv, &a);
    if (exit_status >= 0) return exit_status;
    c.ctx = a.ctx > 0 ? a.ctx : CTX_DEFAULT;
    spk_tool_signals();
    exit_status = compare_models(&c, &err) == SPK_OK ? report(&c) : spk_cli_fail(TOOL, &err);

    spk_outfile_abort(c.json_file);
    spk_outfile_abort(c.html_file);
    spk_compare_destroy(c.compare);
    spk_pool_destroy(c.pool);
    free(c.tokens);
    for (uint32_t m = 0; m < a.model_count; m++) {
        free(c.logits[m]);
        spk_session_destroy(c.sessions[m]);
        spk_model_close(c.models[m]);
    }
    return spk_cli_finish(TOOL, exit_status);
}
