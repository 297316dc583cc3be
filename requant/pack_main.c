/* requant/pack_main.c - spk-pack: GGUF to pack. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "formats/census.h"
#include "formats/cli.h"
#include "formats/outfile.h"
#include "formats/plain.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "requant/budget.h"
#include "requant/convert.h"
#include "requant/plan_report.h"
#include "requant/recipes_builtin.h"
#include "runtime/tokenizer_internal.h"
#include "runtime/tool.h"
#include "runtime/trial.h"

#define TOOL "spk-pack"

static const char help_head[] =
    "usage: spk-pack [options] IN.gguf OUT.spk\n"
    "\n"
    "Turn a GGUF model into a pack: weights as decode reads them, requantized where the recipe says so, with\n"
    "checksums and provenance.  Of a split model give any part.  The same files by the same names, recipe and\n"
    "versions (of this program and of libzstd) give the same bytes.\n"
    "\n"
    "  --recipe NAME|FILE  which tensor gets which type [the default of the model; native for a model without one]\n"
    "  --set REGEX=TYPE    a rule before all others: tensors whose whole name matches become TYPE; may be repeated\n"
    "  --source-weights F  a more precise GGUF of the same model (BF16, say; also split): what is requantized is fitted\n"
    "                      from it, everything else is IN's\n"
    "  --effort EFFORT     how long to look for the best fit of what is requantized: fast, normal or best [normal]\n"
    "  --imatrix FILE      importance matrix of llama.cpp (.gguf or .dat) for what is requantized\n"
    "  --max-kl X          a budget: find what to requantize, so that as few bytes as possible are read per token at a mean\n"
    "                      KL to IN of at most X, as spk-compare measures it on --text\n"
    "  --max-bytes-per-token N, --max-size N\n"
    "                      the same for bytes of weights read per token, and of the pack; without --max-kl with as little\n"
    "                      KL as possible.  All limits that are given hold; tensors that --set matches are not touched\n"
    "  --text FILE         text that a budget is measured on\n"
    "  --ctx N, --max-tokens N\n"
    "                      windows and tokens of it, as for spk-compare\n"
    "  --write-recipe FILE the recipe that was used, --set rules included: with it the same pack is made again\n"
    "  --calibration FILE  what spk-calibrate has recorded: Q4_K and Q5_K are fitted to what they do to the model\n"
    "  --threads N         worker threads; never changes the output [all CPUs]\n"
    "  --device DEVICE     where to quantize: cpu, cuda or auto, which is a GPU if there is one and enough to do; never changes\n"
    "                      the output [auto]\n"
    "  --dry-run           print the plan and the size; write no pack; OUT.spk may be left out\n"
    "  --force             replace OUT.spk and the files of --report and --write-recipe if they exist\n"
    "  --resume            go on where a run of the same conversion was killed, or met a full disk with --resume (same files,\n"
    "                      untouched; else start anew); a full disk leaves what is done, in the file that the message names\n"
    "  --json              the result as JSON on stdout\n"
    "  --report FILE       and a page to look at (HTML): error of each layer and class, sizes, provenance\n"
    "  --quiet             no progress and no notes on stderr\n"
    "  -h, --help          this text\n"
    "  -V, --version       program version\n"
    "\n"
    "recipes (packs/README.md):\n";
static const char help_tail[] =
    "\n"
    "exit status: 0 done; 1 failed, and no pack is written (only a recipe or page that cannot be leaves one); 2 wrong usage\n"
    "examples: spk-pack --recipe ffn Qwen3.6-35B-A3B-UD-Q4_K_M.gguf qwen3.6.spk\n"
    "          spk-pack --max-kl 0.01 --text held-out.txt --write-recipe mine.recipe model.gguf model.spk\n";

static const char *const effort_names[] = {
    [SPK_EFFORT_NORMAL] = "normal", [SPK_EFFORT_FAST] = "fast", [SPK_EFFORT_BEST] = "best",
};
static const char *const device_names[] = { "auto", "cpu", "cuda" };     /* of spk_convert_device */

typedef struct {
    const char  *in_path, *out_path;     /* out_path NULL: none given */
    const char  *recipe_name, *imatrix_path, *calibration_path, *weights_path, *report_path;
    const char  *text_path, *write_recipe_path;
    double       max_kl;                 /* negative: none */
    uint64_t     max_token_bytes, max_pack_bytes;    /* SPK_BUDGET_UNLIMITED: none */
    uint64_t     ctx, max_tokens;        /* ctx 0: not given */
    const char **sets;
    size_t       set_count;
    spk_quant_effort effort;
    spk_convert_device device;
    uint64_t     thread_count;
    bool         is_dry_run, is_forced, is_resuming, is_json, is_quiet;
} arguments;

typedef struct {
    const arguments     *args;
    spk_gguf            *source;
    spk_gguf            *weights;        /* of --source-weights, or NULL */
    spk_imatrix         *imatrix;
    spk_calibration     *calibration;
    spk_recipe          *recipe;
    bool                 is_default;     /* the recipe was not asked for, but names this model as its own */
    spk_error            misfit;         /* why the model's default was not taken; else status SPK_OK */
    spk_convert_options  options;
    spk_convert_plan     plan;
    spk_census           census;         /* of the plan */
    spk_cli_progress     progress;
    spk_outfile         *out_file, *report_file, *recipe_file;   /* NULL if none is wanted, or it is handed over */
    spk_trial           *trial;          /* while a budget is spent */
    spk_budget_meter     meter;
    spk_budget          *budget;         /* NULL without one */
    double               first_choice_s; /* when the second choice began to be measured */
    spk_model_config     config;
    char                 fingerprint[SPK_FINGERPRINT_SIZE];
    uint64_t             source_bytes, pack_bytes;
    char                 gpu_name[SPK_QUANT_GPU_NAME_SIZE];    /* where options.on_gpu */
    double               seconds;
} conversion;

/* ---- Text ---- */

static void print_text(const conversion *c) {
    const arguments *args = c->args;
    const spk_convert_plan *plan = &c->plan;
    char text[24], rate[24];
    printf("source     %s (%s, %" PRIu64 " tensors, %" PRIu32 " file%s)\n", spk_plain(args->in_path).text,
           spk_cli_bytes_text(c->source_bytes, text), plan->tensor_count, spk_gguf_part_count(c->source),
           spk_gguf_part_count(c->source) == 1 ? "" : "s");
    printf("model      %s\n", c->fingerprint);
    printf("recipe     %s%s: %s\n", spk_plain(spk_recipe_name(c->recipe)).text, c->is_default ? " (default)" : "",
           spk_plain(spk_recipe_about(c->recipe)).text);
    if (plan->fitted_count > 0)
        printf("fitted     %" PRIu64 " of %" PRIu64 " requantized tensors from %s\n", plan->fitted_count,
               c->census.requantized_count, spk_plain(args->weights_path).text);
    if (c->budget != NULL) spk_budget_print(c->budget, stdout);
    spk_plan_print(plan, !args->is_dry_run, stdout);
    if (args->is_dry_run) {
        printf("pack       %" PRIu64 " bytes of data and the metadata; dry run: nothing was written\n",
               spk_plan_data_bytes(plan));
        return;
    }
    if (c->options.on_gpu) printf("quantized  on %s\n", c->gpu_name);
    if (plan->resumed_bytes > 0)
        printf("resumed    after %" PRIu64 " of %" PRIu64 " bytes of data\n", plan->resumed_bytes, spk_plan_data_bytes(plan));
    printf("pack       %s (%s, %" PRIu64 " bytes)\n", spk_plain(args->out_path).text, spk_cli_bytes_text(c->pack_bytes, text),
           c->pack_bytes);
    printf("time       %.2f s, %s/s of source\n", c->seconds,
           spk_cli_bytes_text(c->seconds > 0 ? (uint64_t)((double)c->source_bytes / c->seconds) : 0, rate));
}

/* ---- JSON ---- */

static void add_bytes(cJSON *object, const char *name, uint64_t bytes) {
    (void)cJSON_AddNumberToObject(object, name, (double)bytes);
}

static void add_tensors(cJSON *root, const conversion *c, bool has_errors) {
    const spk_convert_plan *plan = &c->plan;
    cJSON *list = cJSON_AddArrayToObject(root, "requantized");
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i], source = spk_plan_in_source(t);
        if (!spk_tensor_is_requantized(t)) continue;
        cJSON *item = cJSON_CreateObject();
        (void)cJSON_AddItemToObject(item, "name", spk_cli_json_string(t->name));
        (void)cJSON_AddItemToObject(item, "rule", spk_cli_json_string(plan->choices[i].rule));
        (void)cJSON_AddStringToObject(item, "from", spk_type_name(t->source_type));
        if (spk_convert_is_fitted(plan, i))
            (void)cJSON_AddStringToObject(item, "fitted_from", spk_type_name(plan->counterparts[i]->type));
        (void)cJSON_AddStringToObject(item, "to", spk_type_name(t->type));
        add_bytes(item, "bytes_before", spk_tensor_bytes(&source));
        add_bytes(item, "bytes_after", spk_tensor_bytes(t));
        if (has_errors) {
            (void)cJSON_AddNumberToObject(item, "relative_rmse", t->relative_rmse);
            (void)cJSON_AddNumberToObject(item, "max_abs_error", t->max_abs_error);
            (void)cJSON_AddNumberToObject(item, "cosine", t->cosine);
        }
        (void)cJSON_AddItemToArray(list, item);
    }
    list = cJSON_AddArrayToObject(root, "copied");
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        if (c->census.of[type][type].tensor_count == 0) continue;
        cJSON *item = cJSON_CreateObject();
        (void)cJSON_AddStringToObject(item, "type", spk_type_name(type));
        add_bytes(item, "tensors", c->census.of[type][type].tensor_count);
        add_bytes(item, "bytes", c->census.of[type][type].byte_count);
        (void)cJSON_AddItemToArray(list, item);
    }
}

static cJSON *make_json(const conversion *c) {
    const spk_convert_plan *plan = &c->plan;
    bool is_written = !c->args->is_dry_run;
    spk_size_change weights = spk_plan_weight_bytes(plan), per_token = spk_plan_token_bytes(plan);
    cJSON *root = cJSON_CreateObject();
    (void)cJSON_AddItemToObject(root, "source", spk_cli_json_string(c->args->in_path));
    add_bytes(root, "source_bytes", c->source_bytes);
    add_bytes(root, "source_parts", spk_gguf_part_count(c->source));
    (void)cJSON_AddStringToObject(root, "model", c->fingerprint);
    (void)cJSON_AddItemToObject(root, "recipe", spk_cli_json_string(spk_recipe_name(c->recipe)));
    (void)cJSON_AddBoolToObject(root, "recipe_is_default", c->is_default);
    (void)cJSON_AddItemToObject(root, "recipe_text", spk_cli_json_string(spk_recipe_text(c->recipe)));
    if (plan->fitted_count > 0)
        (void)cJSON_AddItemToObject(root, "source_weights", spk_cli_json_string(c->args->weights_path));
    cJSON *fallbacks = cJSON_AddArrayToObject(root, "imatrix_fallbacks");
    for (uint64_t i = 0; i < plan->importance_fallback_count; i++)
        (void)cJSON_AddItemToArray(fallbacks, spk_cli_json_string(plan->importance_fallbacks[i]));
    (void)cJSON_AddStringToObject(root, "effort", effort_names[c->args->effort]);
    (void)cJSON_AddStringToObject(root, "device", device_names[c->options.on_gpu ? SPK_DEVICE_CUDA : SPK_DEVICE_CPU]);
    if (c->budget != NULL) (void)cJSON_AddItemToObject(root, "budget", spk_budget_json(c->budget));
    add_tensors(root, c, is_written);
    add_bytes(root, "weight_bytes_before", weights.source_bytes);
    add_bytes(root, "weight_bytes_after", weights.bytes);
    add_bytes(root, "token_bytes_before", per_token.source_bytes);
    add_bytes(root, "token_bytes_after", per_token.bytes);
    add_bytes(root, "data_bytes", spk_plan_data_bytes(plan));
    (void)cJSON_AddBoolToObject(root, "dry_run", c->args->is_dry_run);
    if (is_written) {
        (void)cJSON_AddItemToObject(root, "pack", spk_cli_json_string(c->args->out_path));
        add_bytes(root, "pack_bytes", c->pack_bytes);
        add_bytes(root, "resumed_bytes", plan->resumed_bytes);
        (void)cJSON_AddNumberToObject(root, "seconds", c->seconds);
    }
    return root;
}

/* False when out of memory. */
static bool print_json(const cJSON *root) {
    char *text = spk_plain_json(root, true);
    if (text != NULL) puts(text);
    bool is_printed = text != NULL;
    free(text);
    return is_printed;
}

/* ---- The page ---- */

/* What the page says of the pack it reads from the pack. */
static spk_status write_report(conversion *c, const cJSON *figures, spk_error *err) {
    if (c->report_file == NULL) return SPK_OK;
    spk_pack *pack = NULL;
    spk_html page = { 0 };
    SPK_TRY(spk_pack_open(c->args->out_path, &pack, err));
    const spk_plan_page source = { .in_path = c->args->in_path, .out_path = c->args->out_path, .fingerprint = c->fingerprint,
                                   .recipe = c->recipe, .plan = &c->plan, .pack = pack, .source_bytes = c->source_bytes,
                                   .pack_bytes = c->pack_bytes, .figures = figures };
    spk_status status = spk_plan_check_pack(&c->plan, pack, err);
    if (status == SPK_OK) spk_plan_page_write(&page, &source);
    spk_pack_close(pack);
    if (status != SPK_OK) return status;
    spk_outfile *file = c->report_file;
    c->report_file = NULL;
    return spk_html_commit(&page, file, err);
}

/* Begun before the work, so that a bad path, or one that somebody else is writing, costs no time. */
static spk_status begin_output(conversion *c, const char *option, const char *path, spk_outfile **out, spk_error *err) {
    const arguments *args = c->args;
    const char *const inputs[] = { args->imatrix_path, args->calibration_path, args->recipe_name, args->text_path };
    const struct { const char *name, *path; } others[] = {
        { "the pack", args->out_path }, { "the page", args->report_path }, { "the recipe", args->write_recipe_path } };
    if (path == NULL) return SPK_OK;
    SPK_TRY(spk_tool_output_check(option, path, inputs, sizeof inputs / sizeof *inputs, err));
    SPK_TRY(spk_tool_output_check_gguf(option, path, c->source, err));
    SPK_TRY(spk_tool_output_check_gguf(option, path, c->weights, err));
    SPK_TRY(spk_tool_output_check_gguf(option, path, c->calibration ? spk_calibration_gguf(c->calibration) : NULL, err));
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const char *other = others[i].path;
        if (other != NULL && other != path && (strcmp(other, path) == 0 || spk_same_file(other, path)))
            return spk_fail(err, SPK_E_EXISTS, "%s %s: that is %s", option, path, others[i].name);
    }
    if (path != args->out_path) return spk_outfile_create(path, args->is_forced, 0, out, err);
    if (args->is_dry_run) return SPK_OK;
    return (args->is_resuming ? spk_outfile_reopen : spk_outfile_create)(path, args->is_forced, 0, out, err);
}

static spk_status write_recipe(conversion *c, spk_error *err) {
    if (c->recipe_file == NULL) return SPK_OK;
    const char *text = spk_recipe_text(c->recipe);
    spk_outfile *file = c->recipe_file;
    SPK_TRY(spk_outfile_write(file, 0, text, strlen(text), err));
    c->recipe_file = NULL;
    return spk_outfile_commit(file, err);
}

/* ---- A budget ---- */

static bool has_budget(const arguments *args) {
    return args->max_kl >= 0 || args->max_token_bytes != SPK_BUDGET_UNLIMITED ||
           args->max_pack_bytes != SPK_BUDGET_UNLIMITED;
}

static void set_tensor(void *context, uint64_t index, const spk_tensor *tensor, uint8_t *block) {
    spk_trial_set(context, index, tensor, block);
}

static spk_status measure(void *context, bool is_whole, spk_budget_cost *out, spk_error *err) {
    spk_compare_summary summary;
    SPK_TRY(spk_trial_measure(context, is_whole, &summary, err));
    *out = (spk_budget_cost){ summary.kl_mean, summary.kl_se, spk_compare_kl_upper(&summary) };
    return SPK_OK;
}

/* How long it will take is known once the second choice was measured: the first one ran the base, too. */
static void show_budget(void *context, const char *what, uint64_t index, uint64_t count) {
    conversion *c = context;
    if (strcmp(what, "choice") == 0 && index == 1) c->first_choice_s = spk_cli_now_s();
    if (strcmp(what, "choice") == 0 && index == 2) {
        double choice_s = spk_cli_now_s() - c->first_choice_s;
        double set_s = choice_s * (double)c->meter.position_count / (double)c->meter.sample_count;
        fprintf(stderr, TOOL ": measuring %" PRIu64 " choices on %" PRIu64 " positions, and some %d sets on %" PRIu64 ": about %.0f s\n",
                count, c->meter.sample_count, (int)SPK_BUDGET_SETS_EXPECTED, c->meter.position_count,
                choice_s * (double)(count - 2) + set_s * SPK_BUDGET_SETS_EXPECTED);
    }
    if (isatty(STDERR_FILENO) != 1) return;
    if (count > 0) fprintf(stderr, "\r\033[Kmeasuring %s %" PRIu64 " of %" PRIu64, what, index + 1, count);
    else fprintf(stderr, "\r\033[Kmeasuring %s %" PRIu64, what, index + 1);
}

static spk_status open_trial(conversion *c, spk_error *err) {
    const arguments *args = c->args;
    spk_trial_options options = { .model = c->source, .text_path = args->text_path, .ctx = args->ctx,
                                  .token_count_max = args->max_tokens, .position_count_min = SPK_BUDGET_POSITIONS_MIN,
                                  .sample_positions = SPK_BUDGET_SAMPLE_POSITIONS,
                                  .thread_count = (uint32_t)args->thread_count };
    char *text = NULL;
    SPK_TRY(spk_cli_read_file(args->text_path, SPK_TOOL_TEXT_BYTES_MAX, &text, &options.text_bytes, err));
    options.text = text;
    spk_status status = spk_trial_open(&options, &c->trial, err);
    free(text);
    return status;
}

/* The recipe that holds the budget. */
static spk_status spend_budget(conversion *c, spk_error *err) {
    const arguments *args = c->args;
    SPK_TRY(open_trial(c, err));
    c->meter = (spk_budget_meter){ .context = c->trial, .position_count = spk_trial_position_count(c->trial, true),
                                   .sample_count = spk_trial_position_count(c->trial, false), .set = set_tensor,
                                   .measure = measure };
    const char *slash = strrchr(args->text_path, '/');
    spk_budget_options options = { .convert = &c->options, .sets = args->sets, .set_count = args->set_count,
                                   .meter = &c->meter, .text_name = slash == NULL ? args->text_path : slash + 1,
                                   .max_kl = args->max_kl, .max_token_bytes = args->max_token_bytes,
                                   .max_pack_bytes = args->max_pack_bytes,
                                   .progress = args->is_quiet ? NULL : show_budget, .progress_context = c };
    spk_status status = spk_budget_choose(&options, &c->budget, err);
    if (!args->is_quiet && isatty(STDERR_FILENO) == 1) fprintf(stderr, "\r\033[K");
    spk_trial_close(c->trial);           /* its memory is not needed for packing */
    c->trial = NULL;
    if (status != SPK_OK) return status;
    SPK_TRY(spk_gguf_check_unchanged(c->source, err));
    SPK_TRY(spk_budget_recipe(c->budget, &c->recipe, err));
    c->options.recipe = c->recipe;
    return spk_convert_plan_make(&c->options, &c->plan, err);
}

/* ---- Work ---- */

/* The recipe that was asked for, or else (NULL) the model's default; then the rules of --set. */
static spk_status load_recipe(conversion *c, const char *name, spk_error *err) {
    spk_recipe_free(c->recipe);
    c->recipe = NULL;
    c->is_default = false;
    if (name != NULL)
        SPK_TRY(spk_recipe_load(name, c->fingerprint, &c->recipe, err));
    else
        SPK_TRY(spk_recipe_default(c->fingerprint, &c->recipe, &c->is_default, err));
    for (size_t i = 0; i < c->args->set_count; i++) SPK_TRY(spk_recipe_set(c->recipe, c->args->sets[i], err));
    c->options.recipe = c->recipe;
    return SPK_OK;
}

/* A default is meant for one mix of types: a file of the same model in another mix is packed as it is, said aloud. */
static spk_status make_plan(conversion *c, spk_error *err) {
    SPK_TRY(load_recipe(c, c->args->recipe_name, err));
    spk_status status = spk_convert_plan_make(&c->options, &c->plan, err);
    if (status != SPK_E_MISMATCH || !c->is_default || c->imatrix != NULL || c->calibration != NULL ||
        c->weights != NULL)
        return status;
    c->misfit = *err;
    SPK_TRY(load_recipe(c, "native", err));
    return spk_convert_plan_make(&c->options, &c->plan, err);
}

static spk_status open_inputs(conversion *c, spk_error *err) {
    const arguments *args = c->args;
    SPK_TRY(spk_gguf_open(args->in_path, &c->source, err));
    for (uint32_t part = 0; part < spk_gguf_part_count(c->source); part++)
        c->source_bytes += spk_gguf_part_bytes(c->source, part);
    if (args->weights_path != NULL) SPK_TRY(spk_gguf_open(args->weights_path, &c->weights, err));
    if (args->imatrix_path != NULL) SPK_TRY(spk_imatrix_open(args->imatrix_path, &c->imatrix, err));
    if (args->calibration_path != NULL) SPK_TRY(spk_calibration_open(args->calibration_path, &c->calibration, err));
    SPK_TRY(spk_convert_config(c->source, &c->config, err));
    (void)spk_model_fingerprint(&c->config, c->fingerprint, sizeof c->fingerprint);
    const char *learnt = args->imatrix_path != NULL ? args->imatrix_path : args->calibration_path;
    const char *slash = learnt == NULL ? NULL : strrchr(learnt, '/');
    c->options = (spk_convert_options){ .source = c->source, .weights = c->weights, .out_path = args->out_path,
                                        .replace = args->is_forced, .resume = args->is_resuming, .imatrix = c->imatrix,
                                        .calibration = c->calibration, .imatrix_name = slash == NULL ? learnt : slash + 1,
                                        .effort = args->effort, .thread_count = (uint32_t)args->thread_count,
                                        .progress = args->is_quiet ? NULL : spk_cli_progress_show,
                                        .progress_context = &c->progress };
    return SPK_OK;
}

/* A model that spk-run could decode, but not in words, is packed all the same. */
static void print_tokenizer_note(const conversion *c) {
    spk_tokenizer *tokenizer = NULL;
    spk_error why;
    spk_status status = spk_tokenizer_from_kvs(spk_gguf_kvs(c->source), c->args->in_path, &tokenizer, &why);
    uint32_t token_count = status == SPK_OK ? spk_tokenizer_token_count(tokenizer) : 0;
    if (token_count > c->config.vocab_size)
        status = spk_fail(&why, SPK_E_MISMATCH, "%s: %" PRIu32 " tokens, but only %" PRIu32 " logits", c->args->in_path,
                          token_count, c->config.vocab_size);
    if (status != SPK_OK) fprintf(stderr, TOOL ": spk-run will have no tokenizer for this model: %s\n", why.text);
    spk_tokenizer_destroy(tokenizer);
}

static void print_notes(const conversion *c) {
    if (c->misfit.status != SPK_OK)
        fprintf(stderr, TOOL ": the model's default does not fit: %s: using 'native'\n", c->misfit.text);
    else if (c->args->recipe_name == NULL && !c->is_default && c->budget == NULL)
        fprintf(stderr, TOOL ": no recipe is the default of this model (%s): using '%s', %s\n", c->fingerprint,
                spk_plain(spk_recipe_name(c->recipe)).text, spk_plain(spk_recipe_about(c->recipe)).text);
    print_tokenizer_note(c);
    const char *const helpers[] = { c->args->imatrix_path, c->args->calibration_path, c->args->weights_path };
    for (size_t i = 0; i < sizeof helpers / sizeof *helpers && c->census.requantized_count == 0; i++)
        if (helpers[i] != NULL) fprintf(stderr, TOOL ": nothing is requantized, so %s is not used\n", spk_plain(helpers[i]).text);
    for (uint64_t i = 0; i < c->plan.importance_fallback_count; i++)
        fprintf(stderr, TOOL ": %s not used for %s\n", c->calibration != NULL ? "calibration" : "importance",
                spk_plain(c->plan.importance_fallbacks[i]).text);
}

static spk_status convert(conversion *c, spk_error *err) {
    double start_s = spk_cli_now_s();
    spk_outfile_remove_on_signals();
    SPK_TRY(open_inputs(c, err));
    SPK_TRY(begin_output(c, "--report", c->args->report_path, &c->report_file, err));
    SPK_TRY(begin_output(c, "--write-recipe", c->args->write_recipe_path, &c->recipe_file, err));
    SPK_TRY(begin_output(c, "OUT.spk", c->args->out_path, &c->out_file, err));
    SPK_TRY(has_budget(c->args) ? spend_budget(c, err) : make_plan(c, err));
    spk_census_take(c->plan.tensors, c->plan.tensor_count, &c->census);
    if (!c->args->is_quiet) print_notes(c);
    if (c->args->is_dry_run) return write_recipe(c, err);
    SPK_TRY(spk_convert_choose_device(c->args->device, &c->options, &c->plan, &c->options.on_gpu, c->gpu_name, err));
    c->options.out_file = c->out_file;
    c->out_file = NULL;
    spk_status status = spk_convert_run(&c->options, &c->plan, err);
    spk_cli_progress_end(&c->progress);
    if (status != SPK_OK) return status;
    struct stat info;
    if (stat(c->args->out_path, &info) != 0)
        return spk_fail(err, SPK_E_IO, "%s: was written, but cannot be found", c->args->out_path);
    c->pack_bytes = (uint64_t)info.st_size;
    c->seconds = spk_cli_now_s() - start_s;
    return write_recipe(c, err);
}

static int run(const arguments *args) {
    conversion c = { .args = args, .progress = { .what = "packing" } };
    spk_error err;
    int exit_status = SPK_EXIT_DONE;
    if (convert(&c, &err) != SPK_OK) {
        exit_status = spk_cli_fail(TOOL, &err);
    } else {
        cJSON *figures = make_json(&c);
        if (!args->is_json) {
            print_text(&c);
        } else if (!print_json(figures)) {
            fprintf(stderr, TOOL ": out of memory\n");
            exit_status = SPK_EXIT_FAILED;
        }
        if (write_report(&c, figures, &err) != SPK_OK) exit_status = spk_cli_fail(TOOL, &err);
        cJSON_Delete(figures);
    }
    spk_outfile_abort(c.out_file);
    spk_outfile_abort(c.report_file);
    spk_outfile_abort(c.recipe_file);
    spk_budget_free(c.budget);
    spk_trial_close(c.trial);
    spk_convert_plan_free(&c.plan);
    spk_recipe_free(c.recipe);
    spk_imatrix_close(c.imatrix);
    spk_calibration_close(c.calibration);
    spk_gguf_close(c.weights);
    spk_gguf_close(c.source);
    return spk_cli_finish(TOOL, exit_status);
}

static int print_help(void) {
    fputs(help_head, stdout);
    for (const spk_builtin_recipe *b = spk_builtin_recipes; b->path != NULL; b++) {
        spk_recipe *recipe;
        spk_error err;
        if (spk_recipe_parse(b->text, b->path, &recipe, &err) != SPK_OK) return spk_cli_fail(TOOL, &err);
        printf("  %-19s %s\n", spk_recipe_name(recipe), spk_recipe_about(recipe));
        spk_recipe_free(recipe);
    }
    fputs(help_tail, stdout);
    return spk_cli_finish(TOOL, SPK_EXIT_DONE);
}

enum {
    OPT_RECIPE = 256, OPT_SET, OPT_WEIGHTS, OPT_IMATRIX, OPT_CALIBRATION, OPT_THREADS, OPT_DRY_RUN, OPT_FORCE, OPT_JSON, OPT_REPORT,
    OPT_QUIET, OPT_EFFORT, OPT_RESUME, OPT_MAX_KL, OPT_MAX_TOKEN_BYTES, OPT_MAX_SIZE, OPT_TEXT, OPT_CTX, OPT_MAX_TOKENS,
    OPT_WRITE_RECIPE, OPT_DEVICE
};
static const struct option long_options[] = {
    { "recipe", required_argument, NULL, OPT_RECIPE },   { "set", required_argument, NULL, OPT_SET },
    { "source-weights", required_argument, NULL, OPT_WEIGHTS }, { "calibration", required_argument, NULL, OPT_CALIBRATION },
    { "imatrix", required_argument, NULL, OPT_IMATRIX }, { "threads", required_argument, NULL, OPT_THREADS },
    { "dry-run", no_argument, NULL, OPT_DRY_RUN },       { "force", no_argument, NULL, OPT_FORCE },
    { "resume", no_argument, NULL, OPT_RESUME },         { "device", required_argument, NULL, OPT_DEVICE },
    { "json", no_argument, NULL, OPT_JSON },             { "report", required_argument, NULL, OPT_REPORT },
    { "quiet", no_argument, NULL, OPT_QUIET },           { "effort", required_argument, NULL, OPT_EFFORT },
    { "max-kl", required_argument, NULL, OPT_MAX_KL },   { "max-size", required_argument, NULL, OPT_MAX_SIZE },
    { "max-bytes-per-token", required_argument, NULL, OPT_MAX_TOKEN_BYTES },
    { "text", required_argument, NULL, OPT_TEXT },       { "ctx", required_argument, NULL, OPT_CTX },
    { "max-tokens", required_argument, NULL, OPT_MAX_TOKENS },
    { "write-recipe", required_argument, NULL, OPT_WRITE_RECIPE },
    { "help", no_argument, NULL, 'h' },                  { "version", no_argument, NULL, 'V' },
    { NULL, 0, NULL, 0 },
};

enum { CHOICE_COUNT = 3 };               /* of efforts, and of devices */

/* The index of a name, or CHOICE_COUNT. */
static size_t find_name(const char *text, const char *const names[CHOICE_COUNT]) {
    size_t i = 0;
    while (i < CHOICE_COUNT && strcmp(text, names[i]) != 0) i++;
    return i;
}

static spk_status take_value(int option, arguments *a, spk_error *err) {
    const uint64_t largest = SPK_BUDGET_UNLIMITED - 1;
    switch (option) {
    case OPT_MAX_KL:          return spk_cli_double("--max-kl", optarg, 0, 1e6, &a->max_kl, err);
    case OPT_MAX_TOKEN_BYTES: return spk_cli_u64("--max-bytes-per-token", optarg, 1, largest, &a->max_token_bytes, err);
    case OPT_MAX_SIZE:        return spk_cli_u64("--max-size", optarg, 1, largest, &a->max_pack_bytes, err);
    case OPT_CTX:             return spk_cli_u64("--ctx", optarg, 1, SPK_CONTEXT_MAX, &a->ctx, err);
    case OPT_MAX_TOKENS:      return spk_cli_u64("--max-tokens", optarg, 3, SPK_COMPARE_POSITION_COUNT_MAX + 1, &a->max_tokens, err);
    case OPT_THREADS:         return spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &a->thread_count, err);
    case OPT_TEXT:            a->text_path = optarg; return SPK_OK;
    default:                  a->write_recipe_path = optarg; return SPK_OK;
    }
}

/* SPK_E_USAGE where options do not go together. */
static spk_status check_arguments(const arguments *a, spk_error *err) {
    if (a->is_dry_run && a->report_path != NULL)
        return spk_fail(err, SPK_E_USAGE, "--report shows errors, which a --dry-run does not know");
    if (a->imatrix_path != NULL && a->calibration_path != NULL)
        return spk_fail(err, SPK_E_USAGE, "--imatrix and --calibration: expected one of them");
    if (a->device == SPK_DEVICE_CUDA && a->calibration_path != NULL)
        return spk_fail(err, SPK_E_USAGE, "--device cuda: what --calibration is for is made on the CPU");
    if (has_budget(a) && a->calibration_path != NULL)
        return spk_fail(err, SPK_E_USAGE, "--calibration is not used while a budget is spent: expected the recipe that it wrote");
    if (has_budget(a) && a->text_path == NULL)
        return spk_fail(err, SPK_E_USAGE, "a budget is measured on a text: expected --text FILE");
    if (has_budget(a) && a->recipe_name != NULL)
        return spk_fail(err, SPK_E_USAGE, "--recipe %s: a budget chooses the recipe; --set keeps tensors out of the choice",
                        a->recipe_name);
    if (!has_budget(a) && (a->text_path != NULL || a->ctx != 0 || a->max_tokens != UINT64_MAX))
        return spk_fail(err, SPK_E_USAGE, "--text, --ctx and --max-tokens are of a budget: expected --max-kl, "
                        "--max-bytes-per-token or --max-size");
    return SPK_OK;
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, spk_outfile_remove_all);
    const char **sets = calloc((size_t)argc, sizeof *sets);
    if (sets == NULL) return spk_cli_fail(TOOL, &(spk_error){ SPK_E_MEMORY, "out of memory" });
    arguments args = { .sets = sets, .max_kl = -1, .max_token_bytes = SPK_BUDGET_UNLIMITED,
                       .max_pack_bytes = SPK_BUDGET_UNLIMITED, .max_tokens = UINT64_MAX };
    spk_error err;
    int option, exit_status = -1;
    while (exit_status < 0 && (option = spk_cli_option(argc, argv, ":hV", long_options, &err)) != -1) {
        switch (option) {
        case OPT_RECIPE:  args.recipe_name = optarg; break;
        case OPT_SET:     sets[args.set_count++] = optarg; break;
        case OPT_WEIGHTS: args.weights_path = optarg; break;
        case OPT_IMATRIX: args.imatrix_path = optarg; break;
        case OPT_CALIBRATION: args.calibration_path = optarg; break;
        case OPT_EFFORT:
            args.effort = (spk_quant_effort)find_name(optarg, effort_names);
            if ((size_t)args.effort == CHOICE_COUNT)
                exit_status = spk_cli_usage(TOOL, "--effort '%s': expected fast, normal or best", optarg);
            break;
        case OPT_DEVICE:
            args.device = (spk_convert_device)find_name(optarg, device_names);
            if ((size_t)args.device == CHOICE_COUNT)
                exit_status = spk_cli_usage(TOOL, "--device '%s': expected auto, cpu or cuda", optarg);
            break;
        case OPT_DRY_RUN: args.is_dry_run = true; break;
        case OPT_FORCE:   args.is_forced = true; break;
        case OPT_RESUME:  args.is_resuming = true; break;
        case OPT_JSON:    args.is_json = true; break;
        case OPT_REPORT:  args.report_path = optarg; break;
        case OPT_QUIET:   args.is_quiet = true; break;
        case 'h':         exit_status = print_help(); break;
        case 'V':         puts(TOOL " " SPK_VERSION_TEXT); exit_status = spk_cli_finish(TOOL, SPK_EXIT_DONE); break;
        default:
            if (option == '?' || take_value(option, &args, &err) != SPK_OK)
                exit_status = spk_cli_usage(TOOL, "%s", err.text);
            break;
        }
    }
    int path_count = argc - optind;
    if (exit_status < 0 && (path_count > 2 || path_count < (args.is_dry_run ? 1 : 2)))
        exit_status = spk_cli_usage(TOOL, "expected IN.gguf and OUT.spk, found %d path%s", path_count,
                                    path_count == 1 ? "" : "s");
    if (exit_status < 0 && check_arguments(&args, &err) != SPK_OK) exit_status = spk_cli_usage(TOOL, "%s", err.text);
    if (exit_status < 0) {
        args.in_path = argv[optind];
        args.out_path = path_count == 2 ? argv[optind + 1] : NULL;
        exit_status = run(&args);
    }
    free(sets);
    return exit_status;
}
