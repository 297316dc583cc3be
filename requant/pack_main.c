/* requant/pack_main.c - spk-pack: GGUF to pack. */
#include <cjson/cJSON.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "formats/cli.h"
#include "formats/outfile.h"
#include "formats/version.h"
#include "requant/convert.h"
#include "requant/recipes_builtin.h"

#define TOOL "spk-pack"
enum { THREAD_COUNT_MAX = 1024 };

static const char help_head[] =
    "usage: spk-pack [options] IN.gguf OUT.spk\n"
    "\n"
    "Turn a GGUF model into a pack: weights as decode reads them, requantized where the recipe says so, with\n"
    "checksums and provenance.  Of a split model give any part.  The same input, recipe and version give the same\n"
    "bytes.\n"
    "\n"
    "  --recipe NAME|FILE  which tensor gets which type [the default of the model; native for a model without one]\n"
    "  --set REGEX=TYPE    a rule before all others: tensors whose whole name matches become TYPE; may be repeated\n"
    "  --imatrix FILE      importance matrix of llama.cpp (.gguf or .dat) for what is requantized\n"
    "  --threads N         worker threads; never changes the output [all CPUs]\n"
    "  --dry-run           print the plan and the size; write nothing; OUT.spk may be left out\n"
    "  --force             replace OUT.spk if it exists\n"
    "  --json              the result as JSON on stdout\n"
    "  --quiet             no progress and no notes on stderr\n"
    "  -h, --help          this text\n"
    "  -V, --version       program version\n"
    "\n"
    "recipes (packs/README.md):\n";
static const char help_tail[] =
    "\n"
    "exit status: 0 done; 1 failed, nothing written; 2 wrong usage\n"
    "example: spk-pack --recipe ffn Qwen3.6-35B-A3B-UD-Q4_K_M.gguf qwen3.6.spk\n";

typedef struct {
    const char  *in_path, *out_path;     /* out_path NULL: none given */
    const char  *recipe_name, *imatrix_path;
    const char **sets;
    size_t       set_count;
    uint64_t     thread_count;
    bool         is_dry_run, is_forced, is_json, is_quiet;
} arguments;

typedef struct {
    const arguments     *args;
    spk_gguf            *source;
    spk_imatrix         *imatrix;
    spk_recipe          *recipe;
    bool                 is_default;     /* the recipe is the model's default, not asked for */
    spk_convert_options  options;
    spk_convert_plan     plan;
    spk_cli_progress     progress;
    char                 fingerprint[SPK_FINGERPRINT_SIZE];
    uint64_t             source_bytes, pack_bytes;
    double               seconds;
} conversion;

/* ---- Sizes ---- */

static uint64_t bytes_of(const spk_tensor *tensor, uint32_t type) {
    return spk_layout_unit_bytes(SPK_LAYOUT_ROWS, type, tensor->dims[0]) * tensor->dims[1] *
           spk_tensor_matrix_count(tensor);
}

/* Weight bytes that one token reads: all of STATIC, the experts that it uses, one row of the embedding. */
static uint64_t token_bytes(const spk_convert_plan *plan, bool is_source) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i];
        uint64_t bytes = bytes_of(t, is_source ? t->source_type : t->type);
        if (t->section == SPK_PLACE_STATIC) sum += bytes;
        if (t->section == SPK_PLACE_EXPERTS) sum += bytes / plan->config.expert_count * plan->config.expert_used_count;
        if (t->section == SPK_PLACE_EMBEDDING) sum += bytes / t->dims[1];
    }
    return sum;
}

static uint64_t weight_bytes(const spk_convert_plan *plan, bool is_source) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++)
        sum += bytes_of(&plan->tensors[i], is_source ? plan->tensors[i].source_type : plan->tensors[i].type);
    return sum;
}

static uint64_t data_bytes(const spk_convert_plan *plan) {
    uint64_t sum = 0;
    for (int s = 0; s < SPK_PLACE_COUNT; s++) sum += plan->section_bytes[s];
    return sum;
}

static bool is_requantized(const spk_tensor *tensor) { return tensor->type != tensor->source_type; }

typedef struct { uint64_t tensor_count, byte_count; } type_total;

/* Copied tensors by type. */
static void copied_totals(const spk_convert_plan *plan, type_total totals[SPK_TYPE_LIMIT]) {
    memset(totals, 0, SPK_TYPE_LIMIT * sizeof *totals);
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i];
        if (is_requantized(t)) continue;
        totals[t->type].tensor_count++;
        totals[t->type].byte_count += bytes_of(t, t->type);
    }
}

/* ---- Text ---- */

static void print_change(const char *what, uint64_t before, uint64_t after) {
    char before_text[24], after_text[24];
    double percent = before == 0 ? 0 : 100.0 * ((double)after - (double)before) / (double)before;
    printf("%-10s %s -> %s (%" PRIu64 " -> %" PRIu64 " bytes, %+.1f %%)\n", what,
           spk_cli_bytes_text(before, before_text), spk_cli_bytes_text(after, after_text), before, after, percent);
}

static void print_requantized(const spk_convert_plan *plan, uint64_t index, bool has_errors) {
    const spk_tensor *t = &plan->tensors[index];
    printf("  %-34s %s -> %s %12" PRIu64 " -> %12" PRIu64 " bytes", t->name, spk_type_name(t->source_type),
           spk_type_name(t->type), bytes_of(t, t->source_type), bytes_of(t, t->type));
    if (has_errors)
        printf("  rel. RMSE %.6f  max %.3e  cosine %.7f", t->relative_rmse, t->max_abs_error, t->cosine);
    putchar('\n');
}

/* Requantized tensors under the rule that chose them, rules in the order of their first tensor. */
static void print_rules(const spk_convert_plan *plan, bool has_errors) {
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        if (!is_requantized(&plan->tensors[i])) continue;
        const char *rule = plan->choices[i].rule;
        bool is_printed = false;
        for (uint64_t j = 0; j < i; j++)
            if (is_requantized(&plan->tensors[j]) && plan->choices[j].rule == rule) is_printed = true;
        if (is_printed) continue;
        printf("rule %s\n", rule);
        for (uint64_t j = i; j < plan->tensor_count; j++)
            if (is_requantized(&plan->tensors[j]) && plan->choices[j].rule == rule)
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
    print_rules(plan, !args->is_dry_run);
    type_total totals[SPK_TYPE_LIMIT];
    copied_totals(plan, totals);
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++)
        if (totals[type].tensor_count > 0)
            printf("copied     %-5s %5" PRIu64 " tensors %15" PRIu64 " bytes\n", spk_type_name(type),
                   totals[type].tensor_count, totals[type].byte_count);
    print_change("weights", weight_bytes(plan, true), weight_bytes(plan, false));
    print_change("per token", token_bytes(plan, true), token_bytes(plan, false));
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

static void add_tensors(cJSON *root, const spk_convert_plan *plan, bool has_errors) {
    cJSON *list = cJSON_AddArrayToObject(root, "requantized");
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i];
        if (!is_requantized(t)) continue;
        cJSON *item = cJSON_CreateObject();
        (void)cJSON_AddStringToObject(item, "name", t->name);
        (void)cJSON_AddStringToObject(item, "rule", plan->choices[i].rule);
        (void)cJSON_AddStringToObject(item, "from", spk_type_name(t->source_type));
        (void)cJSON_AddStringToObject(item, "to", spk_type_name(t->type));
        add_bytes(item, "bytes_before", bytes_of(t, t->source_type));
        add_bytes(item, "bytes_after", bytes_of(t, t->type));
        if (has_errors) {
            (void)cJSON_AddNumberToObject(item, "relative_rmse", t->relative_rmse);
            (void)cJSON_AddNumberToObject(item, "max_abs_error", t->max_abs_error);
            (void)cJSON_AddNumberToObject(item, "cosine", t->cosine);
        }
        (void)cJSON_AddItemToArray(list, item);
    }
    type_total totals[SPK_TYPE_LIMIT];
    copied_totals(plan, totals);
    list = cJSON_AddArrayToObject(root, "copied");
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        if (totals[type].tensor_count == 0) continue;
        cJSON *item = cJSON_CreateObject();
        (void)cJSON_AddStringToObject(item, "type", spk_type_name(type));
        add_bytes(item, "tensors", totals[type].tensor_count);
        add_bytes(item, "bytes", totals[type].byte_count);
        (void)cJSON_AddItemToArray(list, item);
    }
}

/* False when out of memory. */
static bool print_json(const conversion *c) {
    const spk_convert_plan *plan = &c->plan;
    bool is_written = !c->args->is_dry_run;
    cJSON *root = cJSON_CreateObject();
    (void)cJSON_AddStringToObject(root, "source", c->args->in_path);
    add_bytes(root, "source_bytes", c->source_bytes);
    add_bytes(root, "source_parts", spk_gguf_part_count(c->source));
    (void)cJSON_AddStringToObject(root, "model", c->fingerprint);
    (void)cJSON_AddStringToObject(root, "recipe", spk_recipe_name(c->recipe));
    (void)cJSON_AddBoolToObject(root, "recipe_is_default", c->is_default);
    (void)cJSON_AddStringToObject(root, "recipe_text", spk_recipe_text(c->recipe));
    cJSON *fallbacks = cJSON_AddArrayToObject(root, "imatrix_fallbacks");
    for (uint64_t i = 0; i < plan->importance_fallback_count; i++)
        (void)cJSON_AddItemToArray(fallbacks, cJSON_CreateString(plan->importance_fallbacks[i]));
    add_tensors(root, plan, is_written);
    add_bytes(root, "weight_bytes_before", weight_bytes(plan, true));
    add_bytes(root, "weight_bytes_after", weight_bytes(plan, false));
    add_bytes(root, "token_bytes_before", token_bytes(plan, true));
    add_bytes(root, "token_bytes_after", token_bytes(plan, false));
    add_bytes(root, "data_bytes", data_bytes(plan));
    (void)cJSON_AddBoolToObject(root, "dry_run", c->args->is_dry_run);
    if (is_written) {
        (void)cJSON_AddStringToObject(root, "pack", c->args->out_path);
        add_bytes(root, "pack_bytes", c->pack_bytes);
        (void)cJSON_AddNumberToObject(root, "seconds", c->seconds);
    }
    char *text = cJSON_Print(root);
    cJSON_Delete(root);
    if (text != NULL) puts(text);
    bool is_printed = text != NULL;
    free(text);
    return is_printed;
}

/* ---- Work ---- */

/* The recipe that was asked for, or else the model's default. */
static spk_status load_recipe(conversion *c, const char *name, spk_error *err) {
    bool is_named = false;
    spk_recipe_free(c->recipe);
    c->recipe = NULL;
    if (name != NULL)
        SPK_TRY(spk_recipe_load(name, c->fingerprint, &c->recipe, err));
    else
        SPK_TRY(spk_recipe_default(c->fingerprint, &c->recipe, &is_named, err));
    if (name == NULL && !is_named && !c->args->is_quiet)
        fprintf(stderr, TOOL ": no recipe is the default of this model (%s): using '%s', %s\n", c->fingerprint,
                spk_recipe_name(c->recipe), spk_recipe_about(c->recipe));
    c->is_default = name == NULL;
    for (size_t i = 0; i < c->args->set_count; i++) SPK_TRY(spk_recipe_set(c->recipe, c->args->sets[i], err));
    c->options.recipe = c->recipe;
    return SPK_OK;
}

/* A default is meant for one mix of types: a file of the same model in another mix is packed as it is, said aloud. */
static spk_status make_plan(conversion *c, spk_error *err) {
    SPK_TRY(load_recipe(c, c->args->recipe_name, err));
    spk_status status = spk_convert_plan_make(&c->options, &c->plan, err);
    if (status != SPK_E_MISMATCH || !c->is_default || c->imatrix != NULL) return status;
    if (!c->args->is_quiet)
        fprintf(stderr, TOOL ": the model's default does not fit this file: %s: using 'native'\n", err->text);
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
    if (args->imatrix_path != NULL) SPK_TRY(spk_imatrix_open(args->imatrix_path, &c->imatrix, err));
    spk_model_config config;
    SPK_TRY(spk_convert_config(c->source, &config, err));
    (void)spk_model_fingerprint(&config, c->fingerprint, sizeof c->fingerprint);
    const char *slash = args->imatrix_path == NULL ? NULL : strrchr(args->imatrix_path, '/');
    c->options = (spk_convert_options){ .source = c->source, .out_path = args->out_path, .replace = args->is_forced,
                                        .imatrix = c->imatrix,
                                        .imatrix_name = slash == NULL ? args->imatrix_path : slash + 1,
                                        .thread_count = (uint32_t)args->thread_count,
                                        .progress = args->is_quiet ? NULL : spk_cli_progress_show,
                                        .progress_context = &c->progress };
    return SPK_OK;
}

static void print_notes(const conversion *c) {
    uint64_t requantized_count = 0;
    for (uint64_t i = 0; i < c->plan.tensor_count; i++)
        if (is_requantized(&c->plan.tensors[i])) requantized_count++;
    if (c->imatrix != NULL && requantized_count == 0)
        fprintf(stderr, TOOL ": nothing is requantized, so %s is not used\n", c->args->imatrix_path);
    for (uint64_t i = 0; i < c->plan.importance_fallback_count; i++)
        fprintf(stderr, TOOL ": importance not used for %s\n", c->plan.importance_fallbacks[i]);
}

static spk_status convert(conversion *c, spk_error *err) {
    double start_s = spk_cli_now_s();
    SPK_TRY(open_inputs(c, err));
    SPK_TRY(make_plan(c, err));
    if (!c->args->is_quiet) print_notes(c);
    if (c->args->is_dry_run) return SPK_OK;
    spk_outfile_remove_on_signals();
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
    } else if (!args->is_json) {
        print_text(&c);
    } else if (!print_json(&c)) {
        fprintf(stderr, TOOL ": out of memory\n");
        exit_status = SPK_EXIT_FAILED;
    }
    spk_convert_plan_free(&c.plan);
    spk_recipe_free(c.recipe);
    spk_imatrix_close(c.imatrix);
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

enum { OPT_RECIPE = 256, OPT_SET, OPT_IMATRIX, OPT_THREADS, OPT_DRY_RUN, OPT_FORCE, OPT_JSON, OPT_QUIET };
static const struct option long_options[] = {
    { "recipe", required_argument, NULL, OPT_RECIPE },   { "set", required_argument, NULL, OPT_SET },
    { "imatrix", required_argument, NULL, OPT_IMATRIX }, { "threads", required_argument, NULL, OPT_THREADS },
    { "dry-run", no_argument, NULL, OPT_DRY_RUN },       { "force", no_argument, NULL, OPT_FORCE },
    { "json", no_argument, NULL, OPT_JSON },             { "quiet", no_argument, NULL, OPT_QUIET },
    { "help", no_argument, NULL, 'h' },                  { "version", no_argument, NULL, 'V' },
    { NULL, 0, NULL, 0 },
};

int main(int argc, char **argv) {
    const char **sets = calloc((size_t)argc, sizeof *sets);
    if (sets == NULL) return spk_cli_fail(TOOL, &(spk_error){ SPK_E_MEMORY, "out of memory" });
    arguments args = { .sets = sets };
    spk_error err;
    int option, exit_status = -1;
    opterr = 0;
    while (exit_status < 0 && (option = getopt_long(argc, argv, ":hV", long_options, NULL)) != -1) {
        switch (option) {
        case OPT_RECIPE:  args.recipe_name = optarg; break;
        case OPT_SET:     sets[args.set_count++] = optarg; break;
        case OPT_IMATRIX: args.imatrix_path = optarg; break;
        case OPT_THREADS:
            if (spk_cli_u64("--threads", optarg, 1, THREAD_COUNT_MAX, &args.thread_count, &err) != SPK_OK)
                exit_status = spk_cli_usage(TOOL, "%s", err.text);
            break;
        case OPT_DRY_RUN: args.is_dry_run = true; break;
        case OPT_FORCE:   args.is_forced = true; break;
        case OPT_JSON:    args.is_json = true; break;
        case OPT_QUIET:   args.is_quiet = true; break;
        case 'h':         exit_status = print_help(); break;
        case 'V':         puts(TOOL " " SPK_VERSION_TEXT); exit_status = spk_cli_finish(TOOL, SPK_EXIT_DONE); break;
        case ':':         exit_status = spk_cli_usage(TOOL, "%s needs a value", argv[optind - 1]); break;
        default:
            exit_status = optopt > 0 && optopt < OPT_RECIPE
                ? spk_cli_usage(TOOL, "unknown option '-%c'", optopt)
                : spk_cli_usage(TOOL, "unknown option '%s'", argv[optind - 1]);
            break;
        }
    }
    int path_count = argc - optind;
    if (exit_status < 0 && (path_count > 2 || path_count < (args.is_dry_run ? 1 : 2)))
        exit_status = spk_cli_usage(TOOL, "expected IN.gguf and OUT.spk, found %d path%s", path_count,
                                    path_count == 1 ? "" : "s");
    if (exit_status < 0) {
        args.in_path = argv[optind];
        args.out_path = path_count == 2 ? argv[optind + 1] : NULL;
        exit_status = run(&args);
    }
    free(sets);
    return exit_status;
}
