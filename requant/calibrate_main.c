/* requant/calibrate_main.c - spk-calibrate: what a model's matrices are multiplied with over a text. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/cli.h"
#include "formats/outfile.h"
#include "formats/plain.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "requant/calibration.h"
#include "runtime/runtime.h"
#include "runtime/tool.h"
#include "runtime/watch.h"

static const char TOOL[] = "spk-calibrate";
enum { BATCH = 64, CTX_DEFAULT = 512 };

static const char HELP[] =
    "usage: spk-calibrate (--text FILE | --tokens FILE) [options] -o STATS MODEL\n"
    "\n"
    "Run MODEL (.gguf or .spk) over a text and record what each matrix is multiplied with: for spk-pack --calibration,\n"
    "and, since STATS is an importance matrix with more in it, for --imatrix and for llama.cpp.\n"
    "\n"
    "  -o FILE          where to write it                                            [required]\n"
    "  --text FILE      text like that which the model is for; 40,000 tokens will do for small models, an expert needs as\n"
    "                   many as its matrices have columns\n"
    "  --tokens FILE    token ids in decimal, separated by spaces, commas or lines\n"
    "  --ctx N          tokens of a window; each begins from an empty state          [512, or the trained context]\n"
    "  --max-tokens N   use the first N tokens of the text                           [all]\n"
    "  --importance     an importance matrix alone: a small file, and no use to --calibration\n"
    "  --force          replace FILE if it exists\n"
    "  --backend NAME   cpu or ref; the inputs are those of its arithmetic           [cpu where there is AVX2]\n"
    "  --threads N      never changes a result                                       [all CPUs]\n"
    "  -h, --help       this text\n"
    "  -V, --version    version\n"
    "\n"
    "exit status: 0 done; 1 failed, and no file is written; 2 wrong usage\n"
    "example:     spk-calibrate --text text.txt -o model.stats.gguf model.gguf\n";

typedef struct {
    const char *text_path, *tokens_path, *out_path, *model_path;
    uint64_t    ctx, max_tokens, thread_count;   /* ctx 0: not given */
    spk_backend backend;
    bool        is_importance_alone, is_forced;
} arguments;

typedef struct {
    const arguments *arguments;
    spk_model     *model;
    spk_session   *session;
    spk_watch     *watch;
    spk_collector *collector;
    spk_outfile   *file;                 /* NULL before it is begun, and when it is handed over */
    float         *logits;               /* [BATCH][vocab]: the LM head has inputs only where logits are wanted */
    uint32_t      *tokens;
    uint64_t       token_count, ctx;
} calibration;

/* ---- Model and text ---- */

static spk_status open_model(calibration *c, spk_error *err) {
    const arguments *a = c->arguments;
    spk_cli_progress progress = { .what = a->model_path };
    spk_model_options options = { .backend = a->backend == SPK_BACKEND_AUTO ? SPK_BACKEND_CPU : a->backend,
                                  .thread_count = (uint32_t)a->thread_count, .progress = spk_cli_progress_show,
                                  .progress_context = &progress };
    spk_status status = spk_model_open(a->model_path, &options, &c->model, err);
    if (status == SPK_E_UNSUPPORTED && a->backend == SPK_BACKEND_AUTO) {
        options.backend = SPK_BACKEND_REF;
        status = spk_model_open(a->model_path, &options, &c->model, err);
    }
    spk_cli_progress_end(&progress);
    if (status != SPK_OK) return status;
    uint32_t trained = spk_model_context_length(c->model);
    if (a->ctx > trained)
        return spk_fail(err, SPK_E_USAGE, "--ctx %" PRIu64 ": %s was trained on %" PRIu32 " tokens", a->ctx, a->model_path,
                        trained);
    c->ctx = a->ctx > 0 ? a->ctx : trained < CTX_DEFAULT ? trained : CTX_DEFAULT;
    SPK_TRY(spk_tool_output_check_model("-o", a->out_path, c->model, err));
    spk_session_options session = { .context_tokens = (uint32_t)c->ctx, .batch_tokens = BATCH };
    return spk_session_create(c->model, &session, &c->session, err);
}

static spk_status read_tokens(calibration *c, spk_error *err) {
    const arguments *a = c->arguments;
    const char *path = a->text_path ? a->text_path : a->tokens_path;
    char *text = NULL;
    size_t size = 0, count = 0;
    SPK_TRY(spk_cli_read_file(path, SPK_TOOL_TEXT_BYTES_MAX, &text, &size, err));
    spk_tokenizer *tokenizer = NULL;
    spk_status status = SPK_OK;
    if (a->text_path != NULL) {
        status = spk_tokenizer_create(c->model, &tokenizer, err);
        if (status == SPK_OK) status = spk_tokenizer_encode(tokenizer, text, size, false, &c->tokens, &count, err);
        spk_tokenizer_destroy(tokenizer);
    } else {
        status = spk_tool_tokens(path, text, size, spk_model_vocab_size(c->model), &c->tokens, &count, err);
    }
    free(text);
    if (status != SPK_OK) return status;
    c->token_count = count < a->max_tokens ? count : a->max_tokens;
    return c->token_count > 0 ? SPK_OK : spk_fail(err, SPK_E_LIMIT, "%s: has no tokens", path);
}

/* Before the work: a path that cannot be written, or that somebody else is writing, costs no time. */
static spk_status begin_file(calibration *c, spk_error *err) {
    const arguments *a = c->arguments;
    const char *const inputs[] = { a->text_path, a->tokens_path, a->model_path };
    return spk_tool_output_begin("-o", a->out_path, a->is_forced, inputs, sizeof inputs / sizeof *inputs, 0, &c->file, err);
}

/* ---- Sums ---- */

static spk_status add_metrics(calibration *c, spk_error *err) {
    const spk_model_config *config = spk_model_shape(c->model);
    if (config->expert_count == 0 || c->arguments->is_importance_alone) return SPK_OK;
    uint64_t hidden = config->hidden_size;
    float *metric = malloc(hidden * hidden * sizeof *metric), *rows = malloc(config->expert_count * hidden * sizeof *rows);
    spk_status status = metric && rows ? SPK_OK : spk_fail(err, SPK_E_MEMORY, "out of memory for a metric");
    for (uint32_t k = 0; status == SPK_OK && k < 2 * config->layer_count; k++) {
        bool is_mixer = k % 2 == 0;
        uint32_t nearest = k / 2 + (is_mixer ? 0 : 1);   /* a mixer's output is read by the router of its own layer */
        spk_metric_begin(metric, hidden);
        for (uint32_t d = 0; d < SPK_METRIC_ROUTERS_MAX && nearest + d < config->layer_count; d++) {
            spk_model_router_rows(c->model, nearest + d, rows);
            spk_metric_add_router(metric, hidden, rows, config->expert_count, d);
        }
        spk_metric_end(metric, hidden);
        status = spk_collector_set_metric(c->collector, k / 2, is_mixer, metric, err);
    }
    free(metric);
    free(rows);
    return status;
}

static void collect(void *context, const spk_watched *watched) {
    spk_collector_add(context, watched->tensor_index, watched->matrix_index, watched->count, watched->x, watched->weight);
}

static spk_status prepare(calibration *c, spk_error *err) {
    spk_collector_options options = { .config = spk_model_shape(c->model), .where = c->arguments->model_path, .has_moments = !c->arguments->is_importance_alone,
                                      .thread_count = (uint32_t)c->arguments->thread_count };
    options.tensors = spk_model_tensors(c->model, &options.tensor_count);
    SPK_TRY(spk_collector_create(&options, &c->collector, err));
    SPK_TRY(add_metrics(c, err));
    SPK_TRY(spk_outfile_expect(c->file, spk_collector_file_bytes(c->collector), err));
    c->logits = malloc((uint64_t)BATCH * spk_model_vocab_size(c->model) * sizeof *c->logits);
    if (c->logits == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for logits");
    return spk_watch_start(c->session, collect, c->collector, &c->watch, err);
}

static spk_status run_text(calibration *c, spk_error *err) {
    bool is_terminal = isatty(STDERR_FILENO) == 1;
    for (uint64_t done = 0; done < c->token_count;) {
        uint64_t in_window = done % c->ctx, count = c->ctx - in_window;
        if (count > BATCH) count = BATCH;
        if (count > c->token_count - done) count = c->token_count - done;
        if (in_window == 0) spk_session_reset(c->session);
        SPK_TRY(spk_session_eval(c->session, c->tokens + done, (uint32_t)count, SPK_LOGITS_ALL, c->logits, err));
        done += count;
        if (is_terminal) fprintf(stderr, "\r\033[K%s: %" PRIu64 " of %" PRIu64 " tokens", TOOL, done, c->token_count);
    }
    if (is_terminal) fprintf(stderr, "\r\033[K");
    return SPK_OK;
}

/* ---- The result ---- */

static void print_result(const calibration *c) {
    uint64_t tensor_count;
    const spk_tensor *tensors = spk_model_tensors(c->model, &tensor_count);
    printf("model    %s  (%s, %s backend)\n", spk_plain(c->arguments->model_path).text, spk_model_arch(c->model),
           spk_model_backend_name(c->model));
    printf("text     %" PRIu64 " tokens in windows of %" PRIu64 "\n", c->token_count, c->ctx);
    for (uint64_t i = 0; i < tensor_count; i++) {
        uint64_t few = spk_collector_few_count(c->collector, i), count = spk_tensor_matrix_count(&tensors[i]);
        if (few > 0)
            printf("few      %s: %" PRIu64 " of %" PRIu64 " saw fewer inputs than they have columns, and will be packed without "
                   "calibration\n", spk_plain(tensors[i].name).text, few, count);
    }
    printf("written  %s\n", spk_plain(c->arguments->out_path).text);
}

static spk_status calibrate(calibration *c, spk_error *err) {
    const arguments *a = c->arguments;
    SPK_TRY(begin_file(c, err));
    SPK_TRY(open_model(c, err));
    SPK_TRY(read_tokens(c, err));
    SPK_TRY(prepare(c, err));
    SPK_TRY(run_text(c, err));
    spk_calibration_file file = { .path = a->out_path, .replace = a->is_forced, .file = c->file,
                                  .dataset = a->text_path ? a->text_path : a->tokens_path, .chunk_tokens = (uint32_t)c->ctx,
                                  .chunk_count = (uint32_t)((c->token_count + c->ctx - 1) / c->ctx) };
    c->file = NULL;
    return spk_collector_write(c->collector, &file, err);
}

/* ---- Command line ---- */

enum { OPT_TEXT = 256, OPT_TOKENS, OPT_CTX, OPT_MAX_TOKENS, OPT_IMPORTANCE, OPT_FORCE, OPT_BACKEND, OPT_THREADS };

static const struct option LONG_OPTIONS[] = {
    { "text", required_argument, NULL, OPT_TEXT }, { "tokens", required_argument, NULL, OPT_TOKENS },
    { "ctx", required_argument, NULL, OPT_CTX }, { "max-tokens", required_argument, NULL, OPT_MAX_TOKENS },
    { "importance", no_argument, NULL, OPT_IMPORTANCE }, { "force", no_argument, NULL, OPT_FORCE },
    { "backend", required_argument, NULL, OPT_BACKEND }, { "threads", required_argument, NULL, OPT_THREADS },
    { "help", no_argument, NULL, 'h' }, { "version", no_argument, NULL, 'V' }, { 0 },
};

static spk_status take_option(int option, arguments *a, spk_error *err) {
    switch (option) {
    case 'o':            a->out_path = optarg; return SPK_OK;
    case OPT_TEXT:       a->text_path = optarg; return SPK_OK;
    case OPT_TOKENS:     a->tokens_path = optarg; return SPK_OK;
    case OPT_CTX:        return spk_cli_u64("--ctx", optarg, 1, SPK_CONTEXT_MAX, &a->ctx, err);
    case OPT_MAX_TOKENS: return spk_cli_u64("--max-tokens", optarg, 1, UINT64_MAX, &a->max_tokens, err);
    case OPT_IMPORTANCE: a->is_importance_alone = true; return SPK_OK;
    case OPT_FORCE:      a->is_forced = true; return SPK_OK;
    case OPT_THREADS:    return spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &a->thread_count, err);
    default:             return spk_tool_backend("--backend", optarg, &a->backend, err);
    }
}

/* Returns -1 to go on, else an exit status. */
static int parse_arguments(int argc, char **argv, arguments *a) {
    spk_error err;
    for (int option; (option = spk_cli_option(argc, argv, ":ho:V", LONG_OPTIONS, &err)) != -1;) {
        if (option == 'h' || option == 'V') {
            if (option == 'h') fputs(HELP, stdout);
            else printf("%s %s\n", TOOL, SPK_VERSION_TEXT);
            return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        }
        if (option == '?' || take_option(option, a, &err) != SPK_OK) return spk_cli_usage(TOOL, "%s", err.text);
    }
    if (argc - optind != 1) return spk_cli_usage(TOOL, "expected one MODEL, got %d", argc - optind);
    a->model_path = argv[optind];
    if ((a->text_path != NULL) == (a->tokens_path != NULL))
        return spk_cli_usage(TOOL, "expected exactly one of --text and --tokens");
    if (a->out_path == NULL) return spk_cli_usage(TOOL, "expected -o FILE");
    if (a->backend == SPK_BACKEND_CUDA) return spk_cli_usage(TOOL, "--backend cuda: inputs are seen on cpu and ref only");
    return -1;
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, spk_outfile_remove_all);
    arguments a = { .max_tokens = UINT64_MAX };
    calibration c = { .arguments = &a };
    spk_error err = { 0 };
    int exit_status = parse_arguments(argc, argv, &a);
    if (exit_status >= 0) return exit_status;
    spk_tool_signals();
    exit_status = SPK_EXIT_DONE;
    if (calibrate(&c, &err) == SPK_OK) print_result(&c);
    else exit_status = spk_cli_fail(TOOL, &err);

    spk_outfile_abort(c.file);
    spk_watch_stop(c.watch);
    spk_collector_destroy(c.collector);
    free(c.logits);
    free(c.tokens);
    spk_session_destroy(c.session);
    spk_model_close(c.model);
    return spk_cli_finish(TOOL, exit_status);
}
