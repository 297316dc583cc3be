/* requant/pack_main.c - spk-pack: GGUF to pack. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "formats/census.h"
#include "formats/chart.h"
#include "formats/cli.h"
#include "formats/outfile.h"
#include "formats/pack_page.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "requant/convert.h"
#include "requant/recipes_builtin.h"
#include "runtime/tokenizer_internal.h"
#include "runtime/tool.h"

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
    "  --threads N         worker threads; never changes the output [all CPUs]\n"
    "  --dry-run           print the plan and the size; write nothing; OUT.spk may be left out\n"
    "  --force             replace OUT.spk if it exists\n"
    "  --json              the result as JSON on stdout\n"
    "  --report FILE       and a page to look at (HTML): error of each layer and class, sizes, provenance\n"
    "  --quiet             no progress and no notes on stderr\n"
    "  -h, --help          this text\n"
    "  -V, --version       program version\n"
    "\n"
    "recipes (packs/README.md):\n";
static const char help_tail[] =
    "\n"
    "exit status: 0 done; 1 failed, and no pack is written (only a --report that cannot be leaves one); 2 wrong usage\n"
    "example: spk-pack --recipe ffn Qwen3.6-35B-A3B-UD-Q4_K_M.gguf qwen3.6.spk\n";

static const char *const effort_names[] = {
    [SPK_EFFORT_NORMAL] = "normal", [SPK_EFFORT_FAST] = "fast", [SPK_EFFORT_BEST] = "best",
};

typedef struct {
    const char  *in_path, *out_path;     /* out_path NULL: none given */
    const char  *recipe_name, *imatrix_path, *weights_path, *report_path;
    const char **sets;
    size_t       set_count;
    spk_quant_effort effort;
    uint64_t     thread_count;
    bool         is_dry_run, is_forced, is_json, is_quiet;
} arguments;

typedef struct {
    const arguments     *args;
    spk_gguf            *source;
    spk_gguf            *weights;        /* of --source-weights, or NULL */
    spk_imatrix         *imatrix;
    spk_recipe          *recipe;
    bool                 is_default;     /* the recipe was not asked for, but names this model as its own */
    spk_error            misfit;         /* why the model's default was not taken; else status SPK_OK */
    spk_convert_options  options;
    spk_convert_plan     plan;
    spk_census           census;         /* of the plan */
    spk_cli_progress     progress;
    spk_outfile         *report_file;    /* NULL if none was asked for, or it is done */
    spk_model_config     config;
    char                 fingerprint[SPK_FINGERPRINT_SIZE];
    uint64_t             source_bytes, pack_bytes;
    double               seconds;
} conversion;

/* ---- Sizes ---- */

/* A tensor as it is in the source, in the place that it has in the pack. */
static spk_tensor in_source(const spk_tensor *tensor) {
    spk_tensor source = *tensor;
    source.type = tensor->source_type;
    return source;
}

typedef struct { uint64_t source_bytes, bytes; } size_change;

static size_change weight_bytes(const spk_convert_plan *plan) {
    size_change sum = { 0, 0 };
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        spk_tensor source = in_source(&plan->tensors[i]);
        sum.source_bytes += spk_tensor_bytes(&source);
        sum.bytes += spk_tensor_bytes(&plan->tensors[i]);
    }
    return sum;
}

static size_change token_bytes(const spk_convert_plan *plan) {
    size_change sum = { 0, 0 };
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        spk_tensor source = in_source(&plan->tensors[i]);
        sum.source_bytes += spk_tensor_bytes_per_token(&plan->config, &source);
        sum.bytes += spk_tensor_bytes_per_token(&plan->config, &plan->tensors[i]);
    }
    return sum;
}

static uint64_t data_bytes(const spk_convert_plan *plan) {
    uint64_t sum = 0;
    for (int s = 0; s < SPK_PLACE_COUNT; s++) sum += plan->section_bytes[s];
    return sum;
}

/* ---- Text ---- */

static void print_change(const char *what, size_change change) {
    char before_text[24], after_text[24];
    double before = (double)change.source_bytes;
    double percent = before > 0 ? 100.0 * ((double)change.bytes - before) / before : 0;
    printf("%-10s %s -> %s (%" PRIu64 " -> %" PRIu64 " bytes, %+.1f %%)\n", what,
           spk_cli_bytes_text(change.source_bytes, before_text), spk_cli_bytes_text(change.bytes, after_text),
           change.source_bytes, change.bytes, percent);
}

static void print_requantized(const spk_convert_plan *plan, uint64_t index, bool has_errors) {
    const spk_tensor *t = &plan->tensors[index], source = in_source(t);
    printf("  %-34s %s -> %s %12" PRIu64 " -> %12" PRIu64 " bytes", t->name, spk_type_name(t->source_type),
           spk_type_name(t->type), spk_tensor_bytes(&source), spk_tensor_bytes(t));
    if (has_errors)
        printf("  rel. RMSE %.6f  max %.3e  cosine %.7f", t->relative_rmse, t->max_abs_error, t->cosine);
    putchar('\n');
}

/* Requantized tensors under the rule that chose them, rules in the order of their first tensor. */
static void print_rules(const spk_convert_plan *plan, bool has_errors) {
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        if (!spk_tensor_is_requantized(&plan->tensors[i])) continue;
        const char *rule = plan->choices[i].rule;
        bool is_printed = false;
        for (uint64_t j = 0; j < i; j++)
            if (spk_tensor_is_requantized(&plan->tensors[j]) && plan->choices[j].rule == rule) is_printed = true;
        if (is_printed) continue;
        printf("rule %s\n", rule);
        for (uint64_t j = i; j < plan->tensor_count; j++)
            if (spk_tensor_is_requantized(&plan->tensors[j]) && plan->choices[j].rule == rule)
                print_requantized(plan, j, has_errors);
    }
}

static void print_text(const conversion *c) {
    const arguments *args = c->args;
    const spk_convert_plan *plan = &c->plan;
    char text[24], rate[24];
    printf("source     %s (%s, %" PRIu64 " tensors, %" PRIu32 " file%s)\n", args->in_path,
           spk_cli_bytes_text(c->source_bytes, text), plan->tensor_count, spk_gguf_part_count(c->source),
           spk_gguf_part_count(c->source) == 1 ? "" : "s");
    printf("model      %s\n", c->fingerprint);
    printf("recipe     %s%s: %s\n", spk_recipe_name(c->recipe), c->is_default ? " (default)" : "",
           spk_recipe_about(c->recipe));
    if (plan->fitted_count > 0)
        printf("fitted     %" PRIu64 " of %" PRIu64 " requantized tensors from %s\n", plan->fitted_count,
               c->census.requantized_count, args->weights_path);
    print_rules(plan, !args->is_dry_run);
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++)
        if (c->census.of[type][type].tensor_count > 0)
            printf("copied     %-5s %5" PRIu64 " tensors %15" PRIu64 " bytes\n", spk_type_name(type),
                   c->census.of[type][type].tensor_count, c->census.of[type][type].byte_count);
    print_change("weights", weight_bytes(plan));
    print_change("per token", token_bytes(plan));
    if (args->is_dry_run) {
        printf("pack       %" PRIu64 " bytes of data and the metadata; dry run: nothing was written\n",
               data_bytes(plan));
        return;
    }
    printf("pack       %s (%s, %" PRIu64 " bytes)\n", args->out_path, spk_cli_bytes_text(c->pack_bytes, text),
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
        const spk_tensor *t = &plan->tensors[i], source = in_source(t);
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
    size_change weights = weight_bytes(plan), per_token = token_bytes(plan);
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
    add_tensors(root, c, is_written);
    add_bytes(root, "weight_bytes_before", weights.source_bytes);
    add_bytes(root, "weight_bytes_after", weights.bytes);
    add_bytes(root, "token_bytes_before", per_token.source_bytes);
    add_bytes(root, "token_bytes_after", per_token.bytes);
    add_bytes(root, "data_bytes", data_bytes(plan));
    (void)cJSON_AddBoolToObject(root, "dry_run", c->args->is_dry_run);
    if (is_written) {
        (void)cJSON_AddItemToObject(root, "pack", spk_cli_json_string(c->args->out_path));
        add_bytes(root, "pack_bytes", c->pack_bytes);
        (void)cJSON_AddNumberToObject(root, "seconds", c->seconds);
    }
    return root;
}

/* False when out of memory. */
static bool print_json(const cJSON *root) {
    char *text = cJSON_Print(root);
    if (text != NULL) puts(text);
    bool is_printed = text != NULL;
    free(text);
    return is_printed;
}

/* ---- The page ---- */

enum { REPORT_TENSORS_MAX = 1000 };      /* of the list below the pictures */

static void add_sizes(spk_html *page, const conversion *c) {
    static const char *const series[] = { "source", "pack" };
    size_change weights = weight_bytes(&c->plan), per_token = token_bytes(&c->plan);
    const spk_chart_bar bars[] = { { "all weights", { weights.source_bytes, weights.bytes } },
                                   { "the file", { c->source_bytes, c->pack_bytes } } };
    const spk_chart_bar token_bars[] = { { "read per token", { per_token.source_bytes, per_token.bytes } } };
    const spk_chart_text text = { .title = "Size", .about = "Weights without padding and metadata; the file with both." };
    const spk_chart_text token_text = { .title = "Read per token",
        .about = "Bytes of weights that one decode step reads; of experts the used ones." };
    spk_html_addf(page, "<div class=\"grid\">\n");
    spk_chart_bars(page, &text, bars, 2, series, 2);
    spk_chart_bars(page, &token_text, token_bars, 1, series, 2);
    spk_html_addf(page, "</div>\n");
}

static void add_page(spk_html *page, const conversion *c, const spk_pack *pack, const cJSON *figures) {
    spk_html_begin(page, "What became of the weights");
    spk_html_addf(page, "<p>");
    spk_html_string(page, c->args->in_path);
    spk_html_addf(page, " &rarr; ");
    spk_html_string(page, c->args->out_path);
    spk_html_addf(page, "</p>\n<p class=\"soft\">%s; recipe ", c->fingerprint);
    spk_html_string(page, spk_recipe_name(c->recipe));
    spk_html_addf(page, ": ");
    spk_html_string(page, spk_recipe_about(c->recipe));
    spk_html_addf(page, "</p>\n");
    spk_pack_page_errors(page, pack);
    add_sizes(page, c);
    spk_html_addf(page, "<h2>Provenance</h2>\n<div class=\"card\">\n");
    spk_pack_page_provenance(page, pack);
    spk_html_addf(page, "</div>\n<h2>All figures</h2>\n<details class=\"card\"><summary>As --json has them</summary>\n");
    spk_html_json(page, figures);
    spk_html_addf(page, "<h3>requantized</h3>\n");
    spk_html_json_list(page, cJSON_GetObjectItemCaseSensitive(figures, "requantized"), false, REPORT_TENSORS_MAX);
    spk_html_addf(page, "<h3>copied</h3>\n");
    spk_html_json_list(page, cJSON_GetObjectItemCaseSensitive(figures, "copied"), false, REPORT_TENSORS_MAX);
    spk_html_addf(page, "</details>\n");
}

/* What the page says of the pack it reads from the pack. */
static spk_status write_report(conversion *c, const cJSON *figures, spk_error *err) {
    if (c->report_file == NULL) return SPK_OK;
    if (spk_same_file(c->args->report_path, c->args->out_path))
        return spk_fail(err, SPK_E_EXISTS, "--report %s: that is the pack", c->args->report_path);
    spk_pack *pack = NULL;
    spk_html page = { 0 };
    SPK_TRY(spk_pack_open(c->args->out_path, &pack, err));
    add_page(&page, c, pack, figures);
    spk_pack_close(pack);
    spk_status status = spk_html_commit(&page, c->report_file, err);
    c->report_file = NULL;
    return status;
}

/* Begun before the work, so that a bad path costs no time. */
static spk_status begin_report(conversion *c, spk_error *err) {
    const arguments *args = c->args;
    const char *path = args->report_path, *inputs[] = { args->imatrix_path, args->recipe_name, args->out_path };
    if (path == NULL) return SPK_OK;
    if (strcmp(path, args->out_path) == 0) return spk_fail(err, SPK_E_USAGE, "--report %s: that is the pack", path);
    for (uint32_t part = 0; part < spk_gguf_part_count(c->source); part++)
        if (spk_same_file(path, spk_gguf_part_path(c->source, part)))
            return spk_fail(err, SPK_E_USAGE, "--report %s: that is the input %s", path, spk_gguf_part_path(c->source, part));
    return spk_tool_output_begin("--report", path, inputs, sizeof inputs / sizeof *inputs, 0, &c->report_file, err);
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
    if (status != SPK_E_MISMATCH || !c->is_default || c->imatrix != NULL || c->weights != NULL) return status;
    c->misfit = *err;
    SPK_TRY(load_recipe(c, "native", err));
    return spk_convert_plan_make(&c->options, &c->plan, err);
}

static spk_status open_inputs(conversion *c, spk_error *err) {
    const arguments *args = c->args;
    SPK_TRY(spk_gguf_open(args->in_path, &c->source, err));
    for (uint32_t part = 0; part < spk_gguf_part_count(c->source); part++)
        c->source_bytes += spk_gguf_part_bytes(c->source, part);
    const char *inputs[] = { args->imatrix_path, args->recipe_name };
    for (size_t i = 0; i < 2; i++)
        if (inputs[i] != NULL && args->out_path != NULL && spk_same_file(inputs[i], args->out_path))
            return spk_fail(err, SPK_E_EXISTS, "%s: is an input, expected another path for the output", args->out_path);
    if (args->weights_path != NULL) SPK_TRY(spk_gguf_open(args->weights_path, &c->weights, err));
    if (args->imatrix_path != NULL) SPK_TRY(spk_imatrix_open(args->imatrix_path, &c->imatrix, err));
    SPK_TRY(spk_convert_config(c->source, &c->config, err));
    (void)spk_model_fingerprint(&c->config, c->fingerprint, sizeof c->fingerprint);
    const char *slash = args->imatrix_path == NULL ? NULL : strrchr(args->imatrix_path, '/');
    c->options = (spk_convert_options){ .source = c->source, .weights = c->weights, .out_path = args->out_path,
                                        .replace = args->is_forced, .imatrix = c->imatrix,
                                        .imatrix_name = slash == NULL ? args->imatrix_path : slash + 1,
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
    else if (c->args->recipe_name == NULL && !c->is_default)
        fprintf(stderr, TOOL ": no recipe is the default of this model (%s): using '%s', %s\n", c->fingerprint,
                spk_recipe_name(c->recipe), spk_recipe_about(c->recipe));
    print_tokenizer_note(c);
    if (c->imatrix != NULL && c->census.requantized_count == 0)
        fprintf(stderr, TOOL ": nothing is requantized, so %s is not used\n", c->args->imatrix_path);
    if (c->weights != NULL && c->census.requantized_count == 0)
        fprintf(stderr, TOOL ": nothing is requantized, so %s is not used\n", c->args->weights_path);
    for (uint64_t i = 0; i < c->plan.importance_fallback_count; i++)
        fprintf(stderr, TOOL ": importance not used for %s\n", c->plan.importance_fallbacks[i]);
}

static spk_status convert(conversion *c, spk_error *err) {
    double start_s = spk_cli_now_s();
    spk_outfile_remove_on_signals();
    SPK_TRY(open_inputs(c, err));
    SPK_TRY(begin_report(c, err));
    SPK_TRY(make_plan(c, err));
    spk_census_take(c->plan.tensors, c->plan.tensor_count, &c->census);
    if (!c->args->is_quiet) print_notes(c);
    if (c->args->is_dry_run) return SPK_OK;
    spk_status status = spk_convert_run(&c->options, &c->plan, err);
    spk_cli_progress_end(&c->progress);
    if (status != SPK_OK) return status;
    struct stat info;
    if (stat(c->args->out_path, &info) != 0)
        return spk_fail(err, SPK_E_IO, "%s: was written, but cannot be found", c->args->out_path);
    c->pack_bytes = (uint64_t)info.st_size;
    c->seconds = spk_cli_now_s() - start_s;
    return SPK_OK;
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
    spk_outfile_abort(c.report_file);
    spk_convert_plan_free(&c.plan);
    spk_recipe_free(c.recipe);
    spk_imatrix_close(c.imatrix);
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
    OPT_RECIPE = 256, OPT_SET, OPT_WEIGHTS, OPT_IMATRIX, OPT_THREADS, OPT_DRY_RUN, OPT_FORCE, OPT_JSON, OPT_REPORT,
    OPT_QUIET, OPT_EFFORT
};
static const struct option long_options[] = {
    { "recipe", required_argument, NULL, OPT_RECIPE },   { "set", required_argument, NULL, OPT_SET },
    { "source-weights", required_argument, NULL, OPT_WEIGHTS },
    { "imatrix", required_argument, NULL, OPT_IMATRIX }, { "threads", required_argument, NULL, OPT_THREADS },
    { "dry-run", no_argument, NULL, OPT_DRY_RUN },       { "force", no_argument, NULL, OPT_FORCE },
    { "json", no_argument, NULL, OPT_JSON },             { "report", required_argument, NULL, OPT_REPORT },
    { "quiet", no_argument, NULL, OPT_QUIET },           { "effort", required_argument, NULL, OPT_EFFORT },
    { "help", no_argument, NULL, 'h' },                  { "version", no_argument, NULL, 'V' },
    { NULL, 0, NULL, 0 },
};

static bool parse_effort(const char *text, spk_quant_effort *out) {
    for (size_t i = 0; i < sizeof effort_names / sizeof *effort_names; i++)
        if (strcmp(text, effort_names[i]) == 0) {
            *out = (spk_quant_effort)i;
            return true;
        }
    return false;
}

int main(int argc, char **argv) {
    const char **sets = calloc((size_t)argc, sizeof *sets);
    if (sets == NULL) return spk_cli_fail(TOOL, &(spk_error){ SPK_E_MEMORY, "out of memory" });
    arguments args = { .sets = sets };
    spk_error err;
    int option, exit_status = -1;
    while (exit_status < 0 && (option = spk_cli_option(argc, argv, ":hV", long_options, &err)) != -1) {
        switch (option) {
        case OPT_RECIPE:  args.recipe_name = optarg; break;
        case OPT_SET:     sets[args.set_count++] = optarg; break;
        case OPT_WEIGHTS: args.weights_path = optarg; break;
        case OPT_IMATRIX: args.imatrix_path = optarg; break;
        case OPT_EFFORT:
            if (!parse_effort(optarg, &args.effort))
                exit_status = spk_cli_usage(TOOL, "--effort '%s': expected fast, normal or best", optarg);
            break;
        case OPT_THREADS:
            if (spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &args.thread_count, &err) != SPK_OK)
                exit_status = spk_cli_usage(TOOL, "%s", err.text);
            break;
        case OPT_DRY_RUN: args.is_dry_run = true; break;
        case OPT_FORCE:   args.is_forced = true; break;
        case OPT_JSON:    args.is_json = true; break;
        case OPT_REPORT:  args.report_path = optarg; break;
        case OPT_QUIET:   args.is_quiet = true; break;
        case 'h':         exit_status = print_help(); break;
        case 'V':         puts(TOOL " " SPK_VERSION_TEXT); exit_status = spk_cli_finish(TOOL, SPK_EXIT_DONE); break;
        default:          exit_status = spk_cli_usage(TOOL, "%s", err.text); break;
        }
    }
    int path_count = argc - optind;
    if (exit_status < 0 && (path_count > 2 || path_count < (args.is_dry_run ? 1 : 2)))
        exit_status = spk_cli_usage(TOOL, "expected IN.gguf and OUT.spk, found %d path%s", path_count,
                                    path_count == 1 ? "" : "s");
    if (exit_status < 0 && args.is_dry_run && args.report_path != NULL)
        exit_status = spk_cli_usage(TOOL, "--report shows errors, which a --dry-run does not know");
    if (exit_status < 0) {
        args.in_path = argv[optind];
        args.out_path = path_count == 2 ? argv[optind + 1] : NULL;
        exit_status = run(&args);
    }
    free(sets);
    return exit_status;
}
